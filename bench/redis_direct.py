"""Our side of goals 3 and 7: a worker that works directly on the Redis store, in a process of its own.

    python -m bench.redis_direct throughput|latency <url> <jobs> <slots> [bare]

Facts are written with every change, and a job has begun once its payload is in the worker's hands, as a peer hands it
over; `bare` leaves that reading out. Prints one line of JSON, as the peers do.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from typing import Any

import msgspec

from comfyfleet.model.dispatch import (
    AttemptEnd,
    AttemptOutcome,
    Dispatch,
    HeldBy,
    LeaseOffer,
    Phase,
    Write,
)
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import DEFAULT_TENANT, JobId, LeaseToken, PollId, ProfileKey, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.policy.lifecycle import completed
from comfyfleet.stores.redis.store import RedisStore

_PROFILE = ProfileKey("profile")
_WORKFLOW = WorkflowHash("workflow")
_CLASS = RequirementClass(Requirements(node_classes=("class",)))
_QUEUED = (FactDraft(FactKind.QUEUED),)
_COMPLETED = (FactDraft(FactKind.COMPLETED),)
_WARM_UPS = 5
# Calls under way together while the queue is filled; the client sends them in one write.
_AT_ONCE = 1000


def _payload(job_id: JobId) -> Submission:
    """Each job's own, so that whoever runs it sees whether it got another's."""
    return Submission({"text": f"{job_id:x>256}"})


class Direct:
    def __init__(self, url: str) -> None:
        self.store = RedisStore(url)
        self._numbers = itertools.count(1)

    async def open(self) -> None:
        await self.store.open()
        table = await self.store.table()
        if not table.profiles:
            assert await self.store.put_profile(_PROFILE, [], version=table.version)
            version = (await self.store.table()).version
            assert await self.store.put_class(_CLASS, [_PROFILE], version=version)

    async def enqueue(self) -> JobId:
        now = time.time()
        job_id = JobId(f"01900000-0000-7000-8000-{next(self._numbers):012x}")
        dispatch = Dispatch(job_id, _CLASS.key, _WORKFLOW, 0, queued_at=now)
        assert await self.store.enqueue(
            dispatch, Job(job_id, DEFAULT_TENANT, _WORKFLOW, now, _payload(job_id)), _QUEUED
        )
        return job_id

    def offer(self, slot: int = 0) -> LeaseOffer:
        """A slot is a worker of its own, as a ComfyUI server is."""
        number = next(self._numbers)
        poll_id, token = PollId(f"poll-{number}"), LeaseToken(f"token-{number:026x}")
        return LeaseOffer(WorkerId(f"worker-{slot}"), _PROFILE, poll_id, token, 60, 10)

    @staticmethod
    def completion(dispatch: Dispatch) -> Write:
        return Write(
            dispatch.job_id,
            HeldBy(dispatch.lease_ref()),
            completed(),
            AttemptEnd(AttemptOutcome.COMPLETED),
            _COMPLETED,
            job={"phase": Phase.COMPLETED, "result": JobResult(), "completed_at": time.time()},
        )


async def throughput(url: str, jobs: int, slots: int, *, is_bare: bool) -> dict[str, Any]:
    direct = Direct(url)
    await direct.open()
    store = direct.store
    began = time.perf_counter()
    for first in range(0, jobs, _AT_ONCE):
        await asyncio.gather(*(direct.enqueue() for _ in range(min(_AT_ONCE, jobs - first))))
    enqueue_s = time.perf_counter() - began
    done = 0

    async def slot(number: int) -> None:
        nonlocal done
        held = await store.lease_next(direct.offer(number))
        while held is not None:
            if not is_bare:
                job = await store.records.get(held.dispatch.job_id)
                assert job is not None and job.payload == _payload(held.dispatch.job_id), "its own payload"
            finished, held = await store.finish_and_lease_next(
                direct.completion(held.dispatch), direct.offer(number)
            )
            assert finished is not None
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*map(slot, range(slots)))
    process_s = time.perf_counter() - began
    assert done == jobs, f"{done} of {jobs} jobs were done"
    await store.close()
    return {"enqueue_s": enqueue_s, "process_s": process_s, "latencies_ms": []}


async def latency(url: str, jobs: int) -> dict[str, Any]:
    direct = Direct(url)
    await direct.open()
    command = [sys.executable, "-m", "bench.redis_direct", "park", url, str(jobs + _WARM_UPS), "1"]
    worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    await worker.stdout.readline()
    sent: dict[str, float] = {}
    for _ in range(jobs + _WARM_UPS):
        now = time.time()
        sent[await direct.enqueue()] = now
        await asyncio.sleep(random.uniform(0.02, 0.04))
    started = msgspec.json.decode((await worker.communicate())[0], type=dict[str, float])
    await direct.store.close()
    latencies = [(started[job_id] - at) * 1000 for job_id, at in sent.items()]
    return {"latencies_ms": latencies[_WARM_UPS:]}


async def park(url: str, jobs: int) -> dict[str, float]:
    """Idle until a hint comes, then takes what there is."""
    direct = Direct(url)
    hint = asyncio.Event()
    direct.store.listen(hint.set)
    await direct.open()
    # The first hint says that the subscription stands.
    await hint.wait()
    print("ready", flush=True)
    started: dict[str, float] = {}
    while len(started) < jobs:
        await hint.wait()
        hint.clear()
        held = await direct.store.lease_next(direct.offer())
        while held is not None:
            job = await direct.store.records.get(held.dispatch.job_id)
            assert job is not None and job.payload == _payload(held.dispatch.job_id), "its own payload"
            started[held.dispatch.job_id] = time.time()
            _, held = await direct.store.finish_and_lease_next(
                direct.completion(held.dispatch), direct.offer()
            )
    await direct.store.close()
    return started


async def main() -> None:
    mode, url, jobs, slots, *more = sys.argv[1:]
    match mode:
        case "throughput":
            answer = await throughput(url, int(jobs), int(slots), is_bare="bare" in more)
        case "latency":
            answer = await latency(url, int(jobs))
        case _:
            answer = await park(url, int(jobs))
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    asyncio.run(main())
