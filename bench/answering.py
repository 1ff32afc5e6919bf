"""Goal 8: what a submit and a poll cost over HTTP, beside an empty route of the framework on the same server.

Hub and empty route each answer in a process of their own, the load comes from this one. Jobs are in an embedded SQLite
store, as `comfyfleet up` has it, and are on the disk when the answer comes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import msgspec

from bench._content import check_content
from bench._measure import Case, Entry, Plan, entry, in_turn, rate, ratio, ratio_range, rounded
from bench.http_load import request, run
from bench.hub_process import Answering, answering
from bench.pooling import twelve_nodes

CAPABILITIES = {"services": [{"name": "comfyui"}]}
_CONNECTIONS = 50
_REQUESTS = 4_000
_BATCH = 1_000
_BATCHES = 6
_BATCH_CONNECTIONS = 2


def register(hub: Answering, slots: int = 1) -> None:
    body = {"worker_id": "bench", "capabilities": CAPABILITIES, "slots": slots}
    run(hub.port, 1, [request("/api/worker/register", hub.key, body)])


def submit_all(hub: Answering, jobs: int) -> dict[str, int]:
    """The number in each, by the id that it got."""
    batches = [range(first, min(first + _BATCH, jobs)) for first in range(0, jobs, _BATCH)]
    _, answers = run(hub.port, 1, [_batch(hub, each) for each in batches], keep=True)
    return {
        item["job"]["id"]: number
        for numbers, answer in zip(batches, answers, strict=True)
        for number, item in zip(numbers, msgspec.json.decode(answer)["items"], strict=True)
    }


def _check_leases(asked: dict[str, int], answers: list[bytes]) -> None:
    leased = [msgspec.json.decode(answer)["job"] for answer in answers if answer]
    check_content(asked, [(job["id"], job["payload"]["workflow"]["5"]["inputs"]["seed"]) for job in leased])


def _job(number: int) -> dict[str, Any]:
    return {"payload": {"workflow": twelve_nodes(number)}}


def _submit(hub: Answering, number: int) -> bytes:
    return request("/api/jobs", hub.key, _job(number))


def _batch(hub: Answering, numbers: range) -> bytes:
    return request("/api/jobs/batch", hub.key, {"jobs": [_job(number) for number in numbers]})


def _whole_batch(hub: Answering, number: int) -> bytes:
    return _batch(hub, range(number * _BATCH, (number + 1) * _BATCH))


def _poll(hub: Answering, number: int) -> bytes:
    return request("/api/worker/poll", hub.key, {"worker_id": "bench", "poll_id": str(number), "wait_s": 0})


async def submit_and_poll(plan: Plan, kind: str) -> list[Entry]:
    count = plan.size(_REQUESTS)
    cpu: dict[str, list[float]] = {}

    def case(
        name: str,
        what: str,
        make: Callable[[Answering, int], bytes],
        requests: int = count,
        connections: int = _CONNECTIONS,
        jobs_waiting: int = 0,
    ) -> Case:
        async def measure() -> float:
            async with answering(what) as there:
                asked: dict[str, int] = {}
                if what == "hub":
                    register(there)
                    asked = submit_all(there, jobs_waiting)
                warm_up = max(1, requests // 10)
                run(there.port, connections, [make(there, number) for number in range(warm_up)])
                packed = [make(there, warm_up + number) for number in range(requests)]
                before = there.cpu_s()
                seconds, answers = run(there.port, connections, packed, keep=bool(jobs_waiting))
                if jobs_waiting:
                    _check_leases(asked, answers)
                cpu.setdefault(name, []).append((there.cpu_s() - before) / requests)
                return requests / seconds

        return measure

    cases = {
        "empty": case("empty", "empty", _submit),
        "submit": case("submit", "hub", _submit),
        "batch": case("batch", "hub", _whole_batch, plan.repeats(_BATCHES), _BATCH_CONNECTIONS),
        "empty_small": case("empty_small", "empty", _poll),
        "poll": case("poll", "hub", _poll, jobs_waiting=count + count // 10),
        "poll_idle": case("poll_idle", "hub", _poll),
    }
    rates = await in_turn(cases, plan.rounds)
    rates["batch"] = [each * _BATCH for each in rates["batch"]]
    cpu["batch"] = [each / _BATCH for each in cpu["batch"]]
    details = {
        "a_second": {name: rate(found) for name, found in rates.items()},
        "cpu_us": {name: rounded(statistics.median(found) * 1e6) for name, found in cpu.items()},
        "connections": _CONNECTIONS,
    }

    def add(letter: str, name: str, ours: str, other: str, bound: str | None) -> Entry:
        spread = ratio_range(rates[ours], rates[other])
        return entry(
            f"8{letter}",
            kind,
            name,
            ratio(rates[ours], rates[other]),
            bound,
            "ratio",
            range=spread,
            **details,
        )

    return [
        add("a", "submits/s / an empty route's", "submit", "empty", ">= 0.6"),
        add("b", "polls/s that get a job / an empty route's", "poll", "empty_small", ">= 0.5"),
        add("c", "jobs/s in batches of 1,000 / one by one", "batch", "submit", ">= 4"),
        add("d", "polls/s that find nothing / an empty route's", "poll_idle", "empty_small", None),
    ]
