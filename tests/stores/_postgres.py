"""Jobs by the dozen for the PostgreSQL store's own tests, and what they share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from comfyfleet.model.dispatch import Dispatch, LeaseOffer
from comfyfleet.model.ids import JobId, LeaseToken, PollId, ProfileKey, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.ports import Store
from comfyfleet.testing.contract.store_bench import FAST, FOR_BOTH, FOR_FAST, HASH, QUEUED, SLOW, A


class Jobs:
    """Made, queued and leased under ids that never repeat."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def make(self, workflow_hash: str = HASH, **fields: Any) -> tuple[Dispatch, Job]:
        job_id = JobId(f"job-{next(self._numbers):06d}")
        values: dict[str, Any] = {"class_key": FOR_BOTH.key, "priority": 0, "queued_at": 1.0, **fields}
        text = WorkflowHash(workflow_hash)
        dispatch = Dispatch(job_id=job_id, workflow_hash=text, **values)
        return dispatch, Job(job_id, dispatch.tenant, text, 1.0, Submission({"1": {"class_type": "X"}}))

    async def enqueue(self, store: Store, workflow_hash: str = HASH, **fields: Any) -> Dispatch:
        dispatch, job = self.make(workflow_hash, **fields)
        written = await store.enqueue(dispatch, job, QUEUED)
        assert written is not None
        return written.dispatch

    def offer(self, worker: WorkerId = A, profile: ProfileKey = FAST) -> LeaseOffer:
        number = next(self._numbers)
        return LeaseOffer(
            worker, profile, PollId(f"poll-{number}"), LeaseToken(f"token-{number}"), 60.0, 10.0
        )


async def fill_table(store: Store) -> None:
    for profile in (FAST, SLOW):
        assert await store.put_profile(profile, [], version=(await store.table()).version)
    for cls, fits in ((FOR_FAST, [FAST]), (FOR_BOTH, [FAST, SLOW])):
        assert await store.put_class(cls, fits, version=(await store.table()).version)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)
