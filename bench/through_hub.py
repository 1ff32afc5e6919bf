"""Goal 7 through the hub: from a caller's POST to the job in the hands of a worker that long-polls over HTTP.

    python -m bench.through_hub <port> <key> <jobs>

is that worker, in a process of its own. Beside it, in the same rounds and on the same Redis, a direct worker and an
empty POST: a hub may cost two of those, one in and one out.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from typing import Any

import msgspec
from redis import Redis

from bench._content import check_content
from bench._measure import Case, Entry, Plan, entry, in_turn, rounded
from bench._peers import run
from bench._places import Place
from bench._report import ROOT
from bench.answering import register
from bench.http_load import Connection, request
from bench.hub_process import Answering, answering
from comfyfleet.wire.answers import SubmittedBody
from comfyfleet.wire.worker import LeaseAnswer

_WARM_UPS = 5


def _job(number: int) -> dict[str, Any]:
    inputs = {"text": f"{number:0256}"}
    return {"payload": {"workflow": {"1": {"class_type": "SaveText", "inputs": inputs}}}, "priority": 1}


def _ask(connection: Connection, packed: bytes) -> bytes:
    connection.requests.append(packed)
    connection.send()
    while not connection.receive():
        pass
    return connection.answer


async def _pause() -> None:
    await asyncio.sleep(random.uniform(0.02, 0.04))


async def _through_hub(hub: Answering, samples: int) -> list[float]:
    register(hub)
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.through_hub", str(hub.port), hub.key, str(samples + _WARM_UPS)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert worker.stdout is not None
    await worker.stdout.readline()
    caller = Connection(hub.port, [])
    sent: dict[str, float] = {}
    asked: dict[str, int] = {}
    for number in range(samples + _WARM_UPS):
        packed = request("/api/jobs", hub.key, _job(number))
        await _pause()
        now = time.time()
        job_id = msgspec.json.decode(_ask(caller, packed), type=SubmittedBody).id
        sent[job_id], asked[job_id] = now, number
    started = msgspec.json.decode((await worker.communicate())[0], type=dict[str, tuple[float, int]])
    check_content(asked, [(job_id, number) for job_id, (_, number) in started.items()])
    return [(started[job_id][0] - at) * 1000 for job_id, at in sent.items()][_WARM_UPS:]


async def _empty_posts(empty: Answering, samples: int) -> list[float]:
    caller, packed = Connection(empty.port, []), request("/api/jobs", empty.key, _job(0))
    times = []
    for _ in range(samples + _WARM_UPS):
        await _pause()
        now = time.time()
        _ask(caller, packed)
        times.append((time.time() - now) * 1000)
    return times[_WARM_UPS:]


async def through_hub(plan: Plan, kind: str) -> list[Entry]:
    samples = plan.repeats(100)
    async with Place(kind) as place:
        server = place.redis_server("everysec")

        def emptied() -> None:
            with Redis(port=server.port) as redis:
                redis.flushall()

        async def direct() -> float:
            emptied()
            return statistics.median((await run("ours", "latency", server.url, samples, 1)).latencies_ms)

        async def hub() -> float:
            emptied()
            async with answering("hub", server.url) as there:
                return statistics.median(await _through_hub(there, samples))

        async def empty() -> float:
            async with answering("empty") as there:
                return statistics.median(await _empty_posts(there, samples))

        cases: dict[str, Case] = {"direct": direct, "hub": hub, "empty_post": empty}
        p50 = await in_turn(cases, plan.rounds)
    allowed = [near + 2 * post for near, post in zip(p50["direct"], p50["empty_post"], strict=True)]
    ratios = [ours / most for ours, most in zip(p50["hub"], allowed, strict=True)]
    return [
        entry(
            "7m",
            kind,
            "idle to start through the hub, p50 / (direct + 2 empty POSTs)",
            statistics.median(ratios),
            "<= 1",
            "ratio",
            range=[rounded(min(ratios)), rounded(max(ratios))],
            p50_ms={name: rounded(statistics.median(found)) for name, found in p50.items()},
            samples=samples * plan.rounds,
        )
    ]


def work(port: int, key: str, jobs: int) -> dict[str, tuple[float, int]]:
    """A worker that takes one job after the other, and notes when it had each, and which number was in it."""
    polls, reports = Connection(port, []), Connection(port, [])
    print("ready", flush=True)
    started: dict[str, tuple[float, int]] = {}
    while len(started) < jobs:
        body = {"worker_id": "bench", "poll_id": f"{time.time_ns()}", "wait_s": 30}
        answer = _ask(polls, request("/api/worker/poll", key, body))
        if answer:
            leased = msgspec.json.decode(answer, type=LeaseAnswer)
            now, workflow = time.time(), leased.job.payload.workflow
            started[leased.job.id] = (now, int(workflow["1"]["inputs"]["text"]))
            _ask(reports, request("/api/worker/complete", key, {"lease": leased.lease}))
    return started


if __name__ == "__main__":
    print(msgspec.json.encode(work(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))).decode())
