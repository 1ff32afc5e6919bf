"""Goal 9: a thousand watchers of one hub process, all of one job or each of a job of its own.

Progress is reported over HTTP, as a worker does it, by a clock that waits for nobody; each report carries the moment it
was due. How old it is when a watcher has it is what counts, so whatever the hub puts off is in the figure.
"""

from __future__ import annotations

import select
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

import msgspec

from bench._measure import Case, Entry, Plan, entry, in_turn, rounded
from bench.answering import register, submit_all
from bench.http_load import connect, request, run
from bench.hub_process import Answering, answering
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.wire.worker import LeaseAnswer

_WATCHERS = 1_000
_REPORTERS = 8
_BATCHES_A_SECOND = 100
# Where all of them hear the same, one of so many watchers is read for what it hears; the others only take it.
_ONE_IN = 10
_WARM_UP_S = 1.0
# What has not come so long after the last report is missed.
_LATE_S = 2.0
_DUE = b'"message":"'


class Told:
    """What the watchers of one run have heard of the reports that were due between two moments, whenever it came."""

    def __init__(self, begins: float, ends: float) -> None:
        self._begins = begins
        self._ends = ends
        self.ages_ms: list[float] = []

    def hear(self, text: bytes, now: float) -> None:
        for frame in text.split(_DUE)[1:]:
            due = float(frame[: frame.index(b'"')])
            if self._begins <= due < self._ends:
                self.ages_ms.append((now - due) * 1000)

    def rate(self, timed: int, watchers: int) -> float:
        """Deliveries a second to all of them, where only some were read for it."""
        return len(self.ages_ms) * (watchers / timed) / (self._ends - self._begins)

    def age_ms(self, share: float) -> float:
        ordered = sorted(self.ages_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class _Watcher:
    __slots__ = ("is_timed", "rest", "socket")

    def __init__(self, port: int, key: str, job_id: str, is_timed: bool) -> None:
        self.socket = connect(port)
        self.is_timed = is_timed
        self.rest = b""
        self.socket.sendall(
            f"GET /api/jobs/{job_id}/progress HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
            "accept: text/event-stream\r\n\r\n".encode()
        )

    def receive(self, told: Told) -> None:
        part = self.socket.recv(65_536)
        if not part:
            raise SystemExit("the hub ended a stream that should go on")
        if self.is_timed:
            now = time.time()
            whole, end, rest = (self.rest + part).rpartition(b"\n\n")
            self.rest = rest
            told.hear(whole + end, now)


class _Reporter:
    """Sends on whichever connection has its turn, answered or not."""

    def __init__(self, port: int, key: str, leases: list[LeaseRef], at_once: int) -> None:
        self.sockets = [connect(port) for _ in range(_REPORTERS)]
        self._key = key
        self._heads = [
            b'{"lease":%b,"kind":"progress","data":{"value":1,"max":2,"message":"'
            % msgspec.json.encode(lease)
            for lease in leases
        ] * 2
        """Twice, so that a group may go over the end."""
        self._leases = len(leases)
        self._at_once = at_once
        self._sent = 0

    def send(self, due: float) -> None:
        begin = self._sent * self._at_once % self._leases
        tail = b'%.6f"}}' % due
        reports = b",".join(head + tail for head in self._heads[begin : begin + self._at_once])
        self._sent += 1
        body = b'{"reports":[%b]}' % reports
        self.sockets[self._sent % _REPORTERS].sendall(request("/api/worker/progress", self._key, body))


def _listen(watchers: list[_Watcher], reporter: _Reporter, seconds: float, per_second: float) -> Told:
    by_number: dict[int, Callable[[Told], None]] = {each.socket.fileno(): each.receive for each in watchers}
    for answered in reporter.sockets:
        by_number[answered.fileno()] = partial(_drop, answered)
    waiting = select.epoll()
    for number in by_number:
        waiting.register(number, select.EPOLLIN)
    began = time.time()
    ends = began + _WARM_UP_S + seconds
    told = Told(began + _WARM_UP_S, ends)
    sent = 0
    while (now := time.time()) < ends + _LATE_S:
        due = began + sent / per_second
        if due <= now and due < ends:
            reporter.send(due)
            sent += 1
            continue
        for number, _ in waiting.poll((due if due < ends else ends + _LATE_S) - now):
            by_number[number](told)
    waiting.close()
    return told


def _drop(answered: socket.socket, _: Told) -> None:
    if b" 200 OK" not in (answer := answered.recv(65_536))[:16] and answer.startswith(b"HTTP/1.1"):
        raise SystemExit(f"a report was refused: {answer[:400]!r}")


async def _told(plan: Plan, *, jobs: int, per_second: float, cpu: list[float]) -> Told:
    watchers = plan.size(_WATCHERS)
    jobs = min(jobs, watchers)
    async with answering("hub") as hub:
        register(hub, slots=1_000)
        submit_all(hub, jobs)
        leases = _lease(hub, jobs)
        opened = [
            _Watcher(hub.port, hub.key, leases[number % jobs].job_id, jobs > 1 or number % _ONE_IN == 0)
            for number in range(watchers)
        ]
        at_once = max(1, round(per_second / _BATCHES_A_SECOND))
        reporter = _Reporter(hub.port, hub.key, leases, at_once)
        seconds, before = plan.seconds(5.0), hub.cpu_s()
        told = _listen(opened, reporter, seconds, per_second / at_once)
        cpu.append((hub.cpu_s() - before) / (seconds + _WARM_UP_S))
        for connection in (*(each.socket for each in opened), *reporter.sockets):
            connection.close()
    return told


def _lease(hub: Answering, jobs: int) -> list[LeaseRef]:
    polls = [
        request("/api/worker/poll", hub.key, {"worker_id": "bench", "poll_id": str(number), "wait_s": 5})
        for number in range(jobs)
    ]
    _, answers = run(hub.port, 20, polls, keep=True)
    return [msgspec.json.decode(answer, type=LeaseAnswer).lease for answer in answers]


async def watching(plan: Plan, kind: str) -> list[Entry]:
    found: dict[str, list[Told]] = {"one": [], "own": []}
    cpu: dict[str, list[float]] = {"one": [], "own": []}

    def case(name: str, jobs: int, per_second: float) -> Case:
        async def measure() -> float:
            told = await _told(plan, jobs=jobs, per_second=per_second, cpu=cpu[name])
            found[name].append(told)
            return told.age_ms(0.99)

        return measure

    # One in a hundred more than the goal, so that the edges of the window cannot decide.
    cases = {"one": case("one", 1, 101), "own": case("own", _WATCHERS, 10_100)}
    p99 = await in_turn(cases, plan.rounds)

    def both(letters: str, name: str, case: str, rate_bound: str, age_bound: str) -> tuple[Entry, Entry]:
        watchers = plan.size(_WATCHERS)
        details = {
            "p50_ms": rounded(statistics.median(told.age_ms(0.5) for told in found[case])),
            "p99_range_ms": [rounded(min(p99[case])), rounded(max(p99[case]))],
            "cpu_share": rounded(statistics.median(cpu[case])),
            "watchers": watchers,
        }
        timed = watchers if case == "own" else watchers // _ONE_IN
        rates = statistics.median(told.rate(timed, watchers) for told in found[case])
        age = statistics.median(p99[case])
        return (
            entry(f"9{letters[0]}", kind, f"{name}: deliveries", rates, rate_bound, "a second", **details),
            entry(f"9{letters[1]}", kind, f"{name}: age, p99", age, age_bound, "ms", **details),
        )

    return [
        *both("ab", "SSE, 1,000 watchers of one job", "one", ">= 100000", "<= 50"),
        *both("cd", "SSE, 1,000 watchers, each of its own job", "own", ">= 10000", "<= 10"),
    ]
