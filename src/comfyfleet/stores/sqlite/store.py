"""A store in one SQLite file, owned by one process. It loses nothing that was acknowledged.

Open jobs are in memory (`inprocess/queue_state.py`); only the file holds ended jobs. A change applies to
memory at once, is written in a batch (`writer.py`), and is answered after its commit. Until then it is
*reserved*: nobody else gets the job, and readers and refusals that depend on it wait. If the commit fails,
the store reloads the touched jobs from the file, and each waiting caller gets a fault.

`peek`, `position`, `counts`, `next_due` and the table include reserved changes. Lists wait for the changes
that were reserved when they were called.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import merge
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.dispatch import Attempt, Dispatch, LeaseOffer, LeaseRef, Phase, Write, WriteResult
from comfyfleet.model.fact import Fact, FactDraft
from comfyfleet.model.ids import ClassKey, JobId, PollId, ProfileKey, TenantId, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.ports import Clock, LeaseState
from comfyfleet.stores.documents import pack
from comfyfleet.stores.guards import settled_cutoff
from comfyfleet.stores.inprocess.store import Area, InProcessStore, Key
from comfyfleet.stores.sqlite import codec
from comfyfleet.stores.sqlite.codec import SqliteEntry
from comfyfleet.stores.sqlite.database import Ownership, connect, migrate
from comfyfleet.stores.sqlite.documents import SqliteDocumentStore
from comfyfleet.stores.sqlite.fair_share import SqliteFairShare
from comfyfleet.stores.sqlite.job_import import SqliteJobTransfer
from comfyfleet.stores.sqlite.reader import DatabaseReader, RecentRecords, SqliteRecords
from comfyfleet.stores.sqlite.writer import Batch, Writer

_P = ParamSpec("_P")
_LEASED: dict[str, Any] = {"phase": Phase.LEASED}


class SqliteStore(InProcessStore[SqliteEntry]):
    def __init__(self, path: str | Path, clock: Clock) -> None:
        self.path = Path(path)
        super().__init__(clock, epoch=1)
        self._ownership: Ownership | None = None
        self._disk = DatabaseReader()
        self._recent = RecentRecords()
        self.records = SqliteRecords(self._disk, self._find, self._wait, self._at_hand)
        self.job_transfer = SqliteJobTransfer(self)
        self.fair_share = SqliteFairShare(self)
        self._writer = Writer(committed=self._committed, restore=self._restore)
        self.documents = SqliteDocumentStore(self._disk, self._writer)

    async def open(self) -> None:
        ownership = Ownership(self.path)
        database = await ownership.opened(self._connect, undo=self._let_go)
        self._ownership = ownership
        self._writer.start(database)

    def _connect(self) -> sqlite3.Connection:
        database = connect(self.path)
        try:
            migrate(database, self.path)
            self._disk.open(connect(self.path))
            self.records.open(connect(self.path))
            self._load()
        except BaseException:
            self.records.close()
            database.close()
            raise
        return database

    def _let_go(self) -> None:
        self.records.close()
        self._disk.close()

    def _load(self) -> None:
        self._state = self._disk.load(self._clock, self.epoch)
        self._state.fair_share.on_freed = self._wake

    async def close(self) -> None:
        ownership, self._ownership = self._ownership, None
        if ownership is not None:
            # Finish even if the caller is cancelled: nobody else can release the file.
            await asyncio.shield(asyncio.create_task(self._close(ownership)))

    async def _close(self, ownership: Ownership) -> None:
        await self._writer.stop()
        await asyncio.to_thread(self._let_go)
        ownership.release()

    # eligibility matrix

    async def put_class(self, cls: RequirementClass, fits: Collection[ProfileKey], *, version: int) -> bool:
        self._check(cls)
        is_new = not self._state.index.has_class(cls.key)
        dropped = self._state.put_class(cls, fits, version=version)
        if dropped is None:
            return False
        known = self._state.index.profiles()
        fitting = [each for each in fits if is_new and each in known]
        await self._commit(codec.put_class, cls, fitting, dropped, self._state.table_version)
        return True

    async def put_profile(self, profile: ProfileKey, fits: Collection[ClassKey], *, version: int) -> bool:
        self._check(profile)
        is_new = profile not in self._state.index.profiles()
        if not self._state.put_profile(profile, fits, version=version):
            return False
        await self._commit(codec.put_profile, profile, fits if is_new else (), self._state.table_version)
        return True

    async def drop_profiles(self, unused: Collection[ProfileKey]) -> None:
        self._check(list(unused))
        if unused:
            batch = self._writer.batch()
            for profile in unused:
                self._state.index.drop_profile(profile)
                codec.drop_profile(batch, profile)
            await self._writer.written(batch)

    # workers

    async def _save_worker(self, worker: WorkerRecord) -> None:
        blob = self._check(worker)
        self._state.workers[worker.worker_id] = worker
        await self._commit(codec.put_worker, worker.worker_id, blob)

    async def remove_worker(self, worker_id: WorkerId) -> None:
        self._check(worker_id)
        self._state.workers.pop(worker_id, None)
        self._state.blocks.forget_worker(worker_id)
        await self._commit(codec.remove_worker, worker_id)

    # dispatches

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        record = self._check(job)
        self._check((dispatch, facts))
        while True:
            known = dispatch.job_id if self._has(dispatch.job_id) else None
            if known is None:
                if not self._state.has_classes(dispatch):
                    # The commit of its class may just have failed.
                    return None
                known = None if job.reference is None else self._find(job.tenant, job.reference)
            if known is None:
                break
            if await self._is_settled(known) and (found := await self.load(known)) is not None:
                return WriteResult(found, ())
        entry = SqliteEntry(dispatch=dispatch, reference=job.reference)
        written = self._state.enqueue(entry, facts)
        assert written is not None, "its classes were checked in this step"
        batch = self._writer.batch()
        codec.insert(batch, entry, record, written.facts)
        self._recent.put(dispatch.job_id, record)
        self.fair_share.save_changes(batch)
        await self._writer.written(batch)
        return written

    async def load(self, job_id: JobId) -> Dispatch | None:
        await self._wait(job_id)
        entry = self._state.entries.get(job_id)
        if entry is not None:
            return entry.dispatch
        state = self._disk.state(job_id)
        return None if state is None else state.dispatch

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        self._check(offer)
        while (written := self._state.lease(job_id, offer)) is None:
            if await self._is_settled(job_id):
                return None
        await self._commit(self._granted, written)
        return written

    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None:
        while (found := self._state.leased_by_poll(poll_id)) is not None:
            if (waiter := self._writer.settling(found.job_id)) is None:
                break
            await waiter
        return found

    async def write(self, write: Write) -> WriteResult | None:
        written = await self._write(write)
        if written is not None:
            await self._commit(self._changed, write, written)
        return written

    async def heartbeat(self, refs: Sequence[LeaseRef], ttl_s: float) -> list[LeaseState]:
        # Repeat until none is reserved: while one is awaited, another may change, and its commit may fail.
        while waiting := [
            waiter for ref in refs if (waiter := self._writer.settling(ref.job_id)) is not None
        ]:
            for waiter in waiting:
                await waiter
        self._writer.check()
        answers = [self._state.heartbeat(ref, ttl_s) for ref in refs]
        if any(answer.is_alive for answer in answers):
            batch = self._writer.batch()
            for answer in answers:
                if answer.is_alive:
                    codec.update(batch, self._state.entries[answer.ref.job_id])
            codec.save_ttl(batch, self._state)
            await self._writer.written(batch)
        return answers

    async def leases_of(self, *worker_ids: WorkerId) -> list[Dispatch]:
        return await self._settled(lambda: self._state.leases_of(worker_ids))

    async def due(self, limit: int, after: Dispatch | None = None) -> list[Dispatch]:
        return await self._settled(lambda: self._state.due(limit, after))

    async def dead_letter(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        await self._wait(None)
        return self._disk.failed(limit, after)

    async def unsettled(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        await self._wait(None)
        return self._disk.unsettled(limit, after)

    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        await self._wait(None)
        self._writer.check()
        settled_before = settled_cutoff(before, self._clock.now())
        # Two queues: young jobs in one must not delay the other.
        plain = takewhile(lambda row: row.ended_at < before, self._disk.ended(phase, limit, False))
        settled = takewhile(lambda row: row.ended_at < settled_before, self._disk.ended(phase, limit, True))
        # A job with a pending write may be retried.
        gone = [
            row for row in islice(merge(plain, settled), limit) if not self._writer.is_pending(row.job_id)
        ]
        if gone:
            batch = self._writer.batch()
            for row in gone:
                codec.purge(batch, row.job_id, row.sequence)
                self._state.by_phase[phase] -= 1
            codec.save_sequence(batch, self._state.sequence)
            await self._writer.written(batch)
        return len(gone)

    async def pause_queue(self, is_paused: bool) -> None:
        self._writer.check()
        self._state.is_paused = is_paused
        await self._commit(codec.pause, is_paused)

    # facts and attempts

    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]:
        await self._wait(job_id)
        state = self._disk.state(job_id)
        return [] if state is None else state.job_facts()[after:]

    async def attempts(self, job_id: JobId) -> list[Attempt]:
        await self._wait(job_id)
        entry = self._state.entries.get(job_id)
        known = self._disk.state(job_id) if entry is None else entry
        return [] if known is None else list(known.attempts)

    async def mark_late(self, ref: LeaseRef) -> None:
        await self._wait(ref.job_id)
        self._writer.check()
        self._load_ended(ref.job_id)
        if self._state.mark_late(ref):
            await self._commit(codec.update, self._state.entries[ref.job_id])
        else:
            self._unload_ended(ref.job_id)

    # blocks and workflow statistics

    async def put_block(self, block: Block) -> None:
        self._check(block)
        forgotten = self._state.blocks.put(block)
        await self._commit(codec.put_blocks, (block,), () if forgotten is None else (forgotten,))

    async def lift(self, pairs: Sequence[Pair]) -> list[Block]:
        self._check(list(pairs))
        lifted = [block for pair in pairs if (block := self._state.blocks.lift(pair)) is not None]
        return await self._lifted(lifted)

    async def expired_blocks(self) -> list[Block]:
        self._writer.check()
        return await self._lifted(self._state.blocks.take_expired(self._clock.now()))

    async def _save_workflow_stats(self, stats: WorkflowStats) -> None:
        blob = self._check(stats)
        await self._commit(
            codec.put_workflow_stats, stats.workflow_hash, blob, self._state.workflow_stats.put(stats)
        )

    # reserving

    def _check(self, value: object) -> bytes:
        """Checks, before any change, that the value can be encoded and the writer works."""
        self._writer.check()
        return pack(value)

    async def _commit(
        self, change: Callable[Concatenate[Batch, _P], None], *values: _P.args, **named: _P.kwargs
    ) -> None:
        """Adds the change to the open batch and waits for its commit."""
        batch = self._writer.batch()
        change(batch, *values, **named)
        await self._writer.written(batch)

    async def _write(self, write: Write) -> WriteResult | None:
        self._check(write)
        while True:
            self._load_ended(write.job_id)
            written = self._state.write(write)
            if written is not None:
                return written
            if await self._is_settled(write.job_id):
                self._unload_ended(write.job_id)
                return None

    def _changed(self, batch: Batch, write: Write, written: WriteResult) -> None:
        entry = self._state.entries[write.job_id]
        codec.change_record(batch, entry, write.job)
        codec.update(batch, entry, written.facts)
        if entry.ending is None:
            batch.reopened.append((entry.dispatch.sequence,))
        if write.blocks:
            codec.put_blocks(batch, write.blocks, self._state.forgotten)
        if write.lifted:
            codec.lift(batch, write.lifted)
        self.fair_share.save_changes(batch, write.job_id)

    def _granted(self, batch: Batch, written: WriteResult) -> None:
        entry = self._state.entries[written.dispatch.job_id]
        codec.change_record(batch, entry, _LEASED)
        codec.update(batch, entry, written.facts)
        self.fair_share.save_changes(batch, written.dispatch.job_id)
        codec.save_ttl(batch, self._state)

    async def _lifted(self, blocks: list[Block]) -> list[Block]:
        if blocks:
            await self._commit(codec.lift, [block.pair for block in blocks])
        return blocks

    async def _is_settled(self, key: Key) -> bool:
        """Waits for the key's pending commit. False: it failed, so look again."""
        watcher = self._writer.settling(key)
        if watcher is None or await watcher:
            return True
        # The writer may have stopped.
        self._writer.check()
        return False

    async def _wait(self, key: Key | None) -> None:
        """Waits until changes under the key (None: all) are on the disk."""
        while (watcher := self._writer.settling(key)) is not None:
            await watcher
            if key is None or isinstance(key, Area):
                # A busy store always has changes; those from before the call are written now.
                return

    async def _settled(self, ask: Callable[[], list[Dispatch]]) -> list[Dispatch]:
        for dispatch in ask():
            await self._wait(dispatch.job_id)
        return ask()

    def _has(self, job_id: JobId) -> bool:
        queue = self._state
        return job_id in queue.entries or (job_id <= queue.highest_id and self._disk.has(job_id))

    def _at_hand(self, job_id: JobId) -> Job | None:
        entry, record = self._state.entries.get(job_id), self._recent.get(job_id)
        # In a later round it may have, or have had, a result.
        if entry is None or record is None or entry.ending is not None or entry.dispatch.round > 1:
            return None
        return codec.decode_open_job(record, entry.changes)

    def _find(self, tenant: TenantId, reference: str) -> JobId | None:
        return self._state.references.get((tenant, reference)) or self._disk.by_reference(tenant, reference)

    def _restore(self, keys: Iterable[Key]) -> None:
        """Makes memory match the file. The index cannot undo additions, so it is rebuilt."""
        touched = list(keys)
        self.documents.forget()
        if Area.TABLE in touched or Area.TENANTS in touched:
            self._load()
        else:
            for key in touched:
                if not isinstance(key, Area):
                    self._restore_job(key)
            self._disk.load_small(self._state)
        self._wake()

    # ended jobs: only the file holds them, and a write loads one into memory until its commit

    def _load_ended(self, job_id: JobId) -> None:
        if job_id not in self._state.entries and not self._writer.is_pending(job_id):
            entry = self._disk.entry(job_id)
            if entry is not None:
                self._state.load_ended(entry)

    def _unload_ended(self, job_id: JobId) -> None:
        entry = self._state.entries.get(job_id)
        if entry is not None and entry.dispatch.phase.is_final and not self._writer.is_pending(job_id):
            self._state.unload_ended(entry)

    def _restore_job(self, job_id: JobId) -> None:
        """Reloads a job from the file, open or ended."""
        queue = self._state
        if (entry := queue.entries.get(job_id)) is not None:
            queue.forget(entry)
        if (entry := self._disk.entry(job_id)) is not None:
            queue.load(entry)
            if entry.dispatch.phase.is_final:
                queue.unload_ended(entry)

    def _committed(self, batch: Batch) -> None:
        for job_id in batch.ended():
            self._unload_ended(job_id)
