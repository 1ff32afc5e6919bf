"""Our side of goals 3 and 7: a worker that works directly on the Redis store, in a process of its own.

    python -m bench.redis_direct throughput|latency <url> <jobs> <slots>

It leases and completes with the library's functions for direct workers. Facts are written with every change, and the
lease brings the payload, as a peer hands it over. Prints one line of JSON, as the peers do.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from typing import Any, cast

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
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.policy.lifecycle import completed
from comfyfleet.stores.redis.client import Argument
from comfyfleet.stores.redis.codec import as_list
from comfyfleet.stores.redis.dispatches import as_bytes
from comfyfleet.stores.redis.store import RedisStore

_PROFILE = ProfileKey("profile")
_WORKFLOW = WorkflowHash("workflow")
_CLASS = RequirementClass(Requirements(node_classes=("class",)))
_QUEUED = (FactDraft(FactKind.QUEUED),)
_COMPLETED = (FactDraft(FactKind.COMPLETED),)
_WARM_UPS = 5
_jobs = msgspec.json.Decoder(Job)
# Calls under way together while the queue is filled; the client sends them in one write.
_AT_ONCE = 1000


def _payload(job_id: JobId) -> Submission:
    """Each job's own, so that whoever runs it sees whether it got another's."""
    return Submission({"text": f"{job_id:x>256}"})


def _worker(slot: int) -> WorkerId:
    return WorkerId(f"worker-{slot}")


class Direct:
    def __init__(self, url: str) -> None:
        self.store = RedisStore(url)
        self._numbers = itertools.count(1)

    async def open(self, slots: int = 0) -> None:
        """A slot is a worker of its own, as a ComfyUI server is."""
        await self.store.open()
        table = await self.store.table()
        if not table.profiles:
            assert await self.store.put_profile(_PROFILE, [], version=table.version)
            version = (await self.store.table()).version
            assert await self.store.put_class(_CLASS, [_PROFILE], version=version)
        service = Capabilities((Service("comfyui"),))
        for slot in range(slots):
            await self.store.add_worker(WorkerRecord(_worker(slot), service, _PROFILE, 1, 1.0, 2.0))

    async def enqueue(self) -> JobId:
        now = time.time()
        job_id = JobId(f"01900000-0000-7000-8000-{next(self._numbers):012x}")
        dispatch = Dispatch(job_id, _CLASS.key, _WORKFLOW, 0, queued_at=now)
        assert await self.store.enqueue(
            dispatch, Job(job_id, DEFAULT_TENANT, _WORKFLOW, now, _payload(job_id)), _QUEUED
        )
        return job_id

    def offer(self, slot: int = 0) -> LeaseOffer:
        number = next(self._numbers)
        poll_id, token = PollId(f"poll-{number}"), LeaseToken(f"token-{number:026x}")
        return LeaseOffer(_worker(slot), _PROFILE, poll_id, token, 60, 10)

    async def lease(self, slot: int) -> tuple[JobId, list[Argument]] | None:
        """The job and its lease."""
        offer = self.offer(slot)
        given = (offer.worker_id, offer.poll_id, offer.token, 10)
        answer = await self.store._do("worker_lease_next", *given)
        if answer is None:
            return None
        *lease, _, payload, _ = as_list(answer)
        job_id = JobId(as_bytes(lease[0]).decode())
        assert _jobs.decode(as_bytes(payload)).payload == _payload(job_id), "its own payload"
        return job_id, cast("list[Argument]", lease)

    async def complete(self, lease: list[Argument]) -> None:
        assert await self.store._do("worker_complete", *lease, "{}") == 1

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


async def throughput(url: str, jobs: int, slots: int) -> dict[str, Any]:
    direct = Direct(url)
    await direct.open(slots)
    began = time.perf_counter()
    for first in range(0, jobs, _AT_ONCE):
        await asyncio.gather(*(direct.enqueue() for _ in range(min(_AT_ONCE, jobs - first))))
    enqueue_s = time.perf_counter() - began
    done = 0

    async def slot(number: int) -> None:
        nonlocal done
        while (held := await direct.lease(number)) is not None:
            await direct.complete(held[1])
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*map(slot, range(slots)))
    process_s = time.perf_counter() - began
    assert done == jobs, f"{done} of {jobs} jobs were done"
    await direct.store.close()
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
    await direct.open(slots=1)
    # The first hint says that the subscription stands.
    await hint.wait()
    print("ready", flush=True)
    started: dict[str, float] = {}
    while len(started) < jobs:
        await hint.wait()
        hint.clear()
        while (held := await direct.lease(0)) is not None:
            job_id, lease = held
            started[job_id] = time.time()
            await direct.complete(lease)
    await direct.store.close()
    return started


async def main() -> None:
    mode, url, jobs, slots = sys.argv[1:]
    match mode:
        case "throughput":
            answer = await throughput(url, int(jobs), int(slots))
        case "latency":
            answer = await latency(url, int(jobs))
        case _:
            answer = await park(url, int(jobs))
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    asyncio.run(main())
