"""Imports and discards jobs for a move between stores. One call is one batch, written as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.ids import JobId
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.stores.inprocess.store import Area, is_as_read, place
from comfyfleet.stores.sqlite import codec
from comfyfleet.stores.sqlite.codec import SqliteEntry

if TYPE_CHECKING:
    from comfyfleet.stores.sqlite.store import SqliteStore


class SqliteJobTransfer:
    """Uses the store's private members."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def import_jobs(self, jobs: Sequence[JobSnapshot]) -> list[Dispatch] | None:
        store = self._store
        # The result has its own table.
        records = [store._check(msgspec.structs.replace(each.job, result=None)) for each in jobs]
        for each in jobs:
            store._check((each.dispatch, each.facts, each.attempts, each.job.result))
        known = await self._settled([self._known(each) for each in jobs], jobs)
        if not all(store._state.has_classes(each.dispatch) for each in jobs):
            return None
        # Read in the same step: the job may be purged later.
        answers = [None if name is None else self._load(name) for name in known]
        batch = store._writer.batch()
        for at, (each, record) in enumerate(zip(jobs, records, strict=True)):
            if answers[at] is None:
                entry = SqliteEntry(dispatch=each.dispatch, reference=each.job.reference)
                place(store._state, entry, each, store._clock.now())
                if each.job.result is not None:
                    codec.change_record(batch, entry, {"result": each.job.result})
                codec.insert(batch, entry, record, each.facts)
                answers[at] = entry.dispatch
        if None in known:
            await store._writer.written(batch)
        return [answer for answer in answers if answer is not None]

    async def _settled(self, known: list[JobId | None], jobs: Sequence[JobSnapshot]) -> list[JobId | None]:
        """The known ids of the jobs, once their pending writes are done."""
        writer = self._store._writer
        while pending := [waiter for name in known if name and (waiter := writer.settling(name)) is not None]:
            for waiter in pending:
                await waiter
            known = [self._known(each) for each in jobs]
        writer.check()
        return known

    def _known(self, snapshot: JobSnapshot) -> JobId | None:
        store, job = self._store, snapshot.job
        if store._has(job.job_id):
            return job.job_id
        return None if job.reference is None else store._find(job.tenant, job.reference)

    def _load(self, job_id: JobId) -> Dispatch:
        found = self._store._state.entries.get(job_id) or self._store._disk.state(job_id)
        assert found is not None, "a settled job is in memory or on the disk"
        return found.dispatch

    async def discard(self, jobs: Sequence[Dispatch]) -> list[bool]:
        store = self._store
        for read in jobs:
            await store._wait(read.job_id)
        store._writer.check()
        answers = []
        batch = store._writer.batch()
        for read in jobs:
            entry = store._state.entries.get(read.job_id)
            known = store._disk.state(read.job_id) if entry is None else entry
            found = None if known is None else known.dispatch
            answers.append(is_as_read(found, read) and not store._writer.is_pending(read.job_id))
            if found is None or not answers[-1]:
                continue
            if entry is not None:
                store._state.forget(entry)
            else:
                store._state.by_phase[found.phase] -= 1
            codec.purge(batch, found.job_id, found.sequence, is_open=entry is not None)
        if any(answers):
            codec.save_sequence(batch, store._state.sequence)
            await store._writer.written(batch)
        return answers

    async def workflow_stats(self) -> list[WorkflowStats]:
        await self._store._wait(Area.WORKFLOW_STATS)
        return self._store._state.workflow_stats.listing()
