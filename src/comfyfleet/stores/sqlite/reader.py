"""Reads the file: open jobs at the start; ended jobs, records and facts on request. Reads see only committed
data.

Reads by key and short pages run in the event loop; lists of whole jobs run in a thread. `RecentRecords`
caches the records of the newest jobs, because most jobs are leased soon after they are submitted.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import ClassKey, JobId, ProfileKey, TenantId
from comfyfleet.model.job import Job
from comfyfleet.ports import Clock, Document, RecordQuery
from comfyfleet.stores.inprocess.blocks import BlockTable, WorkflowStatsTable
from comfyfleet.stores.inprocess.queue_state import QueueState
from comfyfleet.stores.sqlite import codec, fair_share
from comfyfleet.stores.sqlite.codec import SqliteEntry

_PAGE = 2000
_USUAL_TTL_MS = 60_000
"""For files from before the longest lease was stored."""
_STATES = "LEFT JOIN open_jobs USING (sequence) LEFT JOIN ended_jobs USING (sequence)"
_STATE = "coalesce(open_jobs.state, ended_jobs.state)"
_JOB = f"SELECT job, {_STATE}, result FROM jobs {_STATES} LEFT JOIN results USING (sequence)"
_OPEN_PHASES = (Phase.QUEUED, Phase.LEASED)


class EndedRow(NamedTuple):
    ending: int
    job_id: JobId
    sequence: int
    ended_at: float


def closed() -> Fault:
    return Fault("the store is closed; open it first")


class DatabaseReader:
    def __init__(self) -> None:
        self._database: sqlite3.Connection | None = None
        self._names: dict[str, str] = {}

    def open(self, database: sqlite3.Connection) -> None:
        self._database = database

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _all(self, sql: str, *values: Any) -> list[Any]:
        if self._database is None:
            raise closed()
        # Fetch all rows: an unfinished statement blocks the checkpoint.
        try:
            return self._database.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise Fault(f"the store could not read: {error}. Check its disk and try again") from error

    # one job

    def has(self, job_id: JobId) -> bool:
        return bool(self._all("SELECT 1 FROM jobs WHERE job_id = ?", job_id))

    def entry(self, job_id: JobId) -> SqliteEntry | None:
        row = self._row(job_id)
        return None if row is None else codec.entry_of(*row, {})

    def state(self, job_id: JobId) -> codec.RowState | None:
        row = self._row(job_id)
        return None if row is None else codec.decode_state(row[0])

    def _row(self, job_id: JobId) -> tuple[bytes, int | None, float | None] | None:
        rows = self._all(f"SELECT {_STATE}, ending, ended_at FROM jobs {_STATES} WHERE job_id = ?", job_id)
        return rows[0] if rows else None

    def job(self, job_id: JobId) -> Job | None:
        rows = self._all(f"{_JOB} WHERE job_id = ?", job_id)
        return codec.decode_job(*rows[0]) if rows else None

    def by_reference(self, tenant: TenantId, reference: str) -> JobId | None:
        rows = self._all("SELECT job_id FROM jobs WHERE tenant = ? AND reference = ?", tenant, reference)
        return JobId(rows[0][0]) if rows else None

    # several

    def listing(self, query: RecordQuery) -> list[Job]:
        tenant, phase, after = query.tenant, query.phase, query.after
        beyond, order = ("<", "DESC") if query.newest_first else (">", "ASC")
        conditions: list[str] = []
        values: list[Any] = []
        if after is not None:
            known = self._all("SELECT sequence FROM jobs WHERE job_id = ?", after)
            # The last job of the previous page may be gone; its id still gives its time.
            conditions.append(f"{'jobs.sequence' if known else 'job_id'} {beyond} ?")
            values.append(known[0][0] if known else after)
        if tenant is not None:
            conditions.append("tenant = ?")
            values.append(tenant)
        if phase is not None:
            # The table of the phase limits the search.
            table = "open_jobs" if phase in _OPEN_PHASES else "ended_jobs"
            conditions.append(f"{table}.phase = ?")
            values.append(phase.value)
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        rows = self._all(f"{_JOB} {where} ORDER BY jobs.sequence {order} LIMIT ?", *values, query.limit)
        return [codec.decode_job(*row) for row in rows]

    def failed(self, limit: int, after: JobId | None) -> list[Dispatch]:
        rows = self._all(
            "SELECT state FROM ended_jobs CROSS JOIN jobs USING (sequence) WHERE phase = ? AND job_id > ? "
            "ORDER BY job_id LIMIT ?",
            Phase.FAILED.value,
            after or "",
            limit,
        )
        return [codec.decode_state(blob).dispatch for (blob,) in rows]

    def unsettled(self, limit: int, after: JobId | None) -> list[Dispatch]:
        # The first condition repeats the words of the partial index, so SQLite uses it.
        rows = self._all(
            "SELECT state FROM ended_jobs WHERE apart > '' AND apart > ? ORDER BY apart LIMIT ?",
            after or "",
            limit,
        )
        return [codec.decode_state(blob).dispatch for (blob,) in rows]

    def ended(self, phase: Phase, limit: int, has_tenant_database: bool) -> list[EndedRow]:
        """Ordered by end, or by settlement."""
        which = "apart = ''" if has_tenant_database else "apart IS NULL"
        rows = self._all(
            "SELECT ending, job_id, sequence, ended_at FROM ended_jobs CROSS JOIN jobs USING (sequence) "
            f"WHERE phase = ? AND {which} ORDER BY ending LIMIT ?",
            phase.value,
            limit,
        )
        return [EndedRow(*row) for row in rows]

    # documents

    def document(self, collection: str, name: str) -> Document | None:
        rows = self._all(
            "SELECT name, body, version FROM documents WHERE drawer = ? AND name = ?", collection, name
        )
        return Document(*rows[0]) if rows else None

    def documents(self, collection: str, after: str, limit: int) -> list[Document]:
        rows = self._all(
            "SELECT name, body, version FROM documents WHERE drawer = ? AND name > ? ORDER BY name LIMIT ?",
            collection,
            after,
            limit,
        )
        return [Document(*row) for row in rows]

    def collections(self) -> list[str]:
        return [name for (name,) in self._all("SELECT DISTINCT drawer FROM documents ORDER BY drawer")]

    # tenants

    def shares(self) -> list[tuple[str, float, float, int]]:
        return self._all("SELECT tenant, virtual_time, credit, is_behind FROM tenants")

    def terms(self) -> list[bytes]:
        return [terms for (terms,) in self._all("SELECT terms FROM terms")]

    def charges(self) -> dict[JobId, float]:
        return dict(self._all("SELECT job_id, charge FROM charges"))

    # open jobs

    def load(self, clock: Clock, epoch: int) -> QueueState[SqliteEntry]:
        try:
            return self._load(clock, epoch)
        except (LookupError, ValueError, TypeError, msgspec.MsgspecError) as error:
            raise Fault(
                f"the store's file is damaged ({type(error).__name__}: {error}). `comfyfleet store check` says where; "
                "restore a backup"
            ) from error

    def _load(self, clock: Clock, epoch: int) -> QueueState[SqliteEntry]:
        queue: QueueState[SqliteEntry] = QueueState(clock, epoch)
        meta = dict(self._all("SELECT name, value FROM meta"))
        queue.table_version = meta["table_version"]
        ((ending,),) = self._all("SELECT coalesce(max(ending), 0) FROM ended_jobs")
        queue.endings = ending
        ((queue.highest_id,),) = self._all("SELECT coalesce(max(job_id), '') FROM jobs")
        self.load_small(queue, meta)
        fair_share.load(queue.fair_share, self, bool(meta["is_fair"]))
        entries = list(self._open_entries())
        pinned = self._load_table(queue, entries)
        # Leases last, in the order they were given.
        entries.sort(key=lambda entry: (entry.dispatch.lease is not None, _leased_at(entry)))
        for entry in entries:
            queue.load(entry)
        for class_key in pinned:
            queue.index.unpin(class_key)
        for phase, count in self._all("SELECT phase, count(*) FROM ended_jobs GROUP BY phase"):
            queue.by_phase[Phase(phase)] = count
        queue.fair_share.resume(clock.now())
        queue.longest_ttl_s = meta.get(codec.LEASE_TTL, _USUAL_TTL_MS) / 1000
        # A lease given while the clock was ahead would last too long after it is set back.
        queue.end_leases_within(queue.longest_ttl_s)
        now = clock.now()
        for worker_id, worker in queue.workers.items():
            if worker.last_seen_at > now:
                queue.workers[worker_id] = msgspec.structs.replace(worker, last_seen_at=now)
        return queue

    def load_small(self, queue: QueueState[SqliteEntry], meta: dict[str, int] | None = None) -> None:
        """Workers, blocks, statistics and single values."""
        if meta is None:
            meta = dict(self._all("SELECT name, value FROM meta"))
        ((last,),) = self._all("SELECT coalesce(max(sequence), 0) FROM jobs")
        queue.sequence, queue.is_paused = max(last, meta["sequence"]), bool(meta["is_paused"])
        records = [
            codec.decode_worker(blob) for (blob,) in self._all("SELECT record FROM workers ORDER BY rowid")
        ]
        queue.workers = {record.worker_id: record for record in records}
        queue.blocks, queue.workflow_stats = BlockTable(), WorkflowStatsTable()
        for (blob,) in self._all("SELECT block FROM blocks ORDER BY rowid"):
            queue.blocks.put(codec.decode_block(blob))
        for (blob,) in self._all("SELECT lesson FROM lessons ORDER BY rowid"):
            queue.workflow_stats.put(codec.decode_workflow_stats(blob))

    def _open_entries(self) -> Iterator[SqliteEntry]:
        # In pages: reading all rows at once would keep that memory.
        last = 0
        while rows := self._all(
            "SELECT sequence, state FROM open_jobs WHERE sequence > ? ORDER BY sequence LIMIT ?", last, _PAGE
        ):
            for _, state in rows:
                yield codec.entry_of(state, None, None, self._names)
            last = rows[-1][0]

    def _load_table(self, queue: QueueState[SqliteEntry], entries: Iterable[SqliteEntry]) -> list[ClassKey]:
        """Loads and pins classes of open jobs first, because idle ones may be evicted. Returns the pinned."""
        for (profile,) in self._all("SELECT profile_key FROM profiles ORDER BY rowid"):
            queue.index.add_profile(ProfileKey(profile), [])
        fits: dict[str, list[ProfileKey]] = {}
        for class_key, profile in self._all("SELECT class_key, profile_key FROM fits"):
            fits.setdefault(class_key, []).append(ProfileKey(profile))
        used = {entry.dispatch.class_key for entry in entries}
        used.update(key for entry in entries if (key := entry.dispatch.relaxed_class) is not None)
        pinned: list[ClassKey] = []
        rows = self._all("SELECT class_key, definition FROM classes ORDER BY rowid")
        for class_key, definition in sorted(rows, key=lambda row: row[0] not in used):
            queue.classes[class_key] = codec.decode_class(definition)
            for dropped in queue.index.add_class(class_key, fits.get(class_key, ())):
                del queue.classes[dropped]
            if class_key in used:
                queue.index.pin(class_key)
                pinned.append(class_key)
        return pinned


def _leased_at(entry: SqliteEntry) -> float:
    return 0.0 if entry.dispatch.lease is None else entry.dispatch.lease.leased_at


class SqliteRecords:
    def __init__(
        self,
        disk: DatabaseReader,
        find: Callable[[TenantId, str], JobId | None],
        wait: Callable[[JobId | None], Awaitable[None]],
        at_hand: Callable[[JobId], Job | None],
    ) -> None:
        self._disk = disk
        self._find = find
        self._wait = wait
        """Waits until pending writes of a job (None: of all) are on the disk."""
        self._at_hand = at_hand
        """A job that need not be read from the file."""
        self._lists = DatabaseReader()
        """Used in a thread: a page of whole jobs is large."""
        self._thread: ThreadPoolExecutor | None = None

    def open(self, database: sqlite3.Connection) -> None:
        self._lists.open(database)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lists")

    def close(self) -> None:
        """Waits for running reads."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        self._lists.close()

    async def get(self, job_id: JobId) -> Job | None:
        await self._wait(job_id)
        return self._at_hand(job_id) or self._disk.job(job_id)

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        job_id = self._find(tenant, reference)
        return None if job_id is None else await self.get(job_id)

    async def listing(self, query: RecordQuery) -> list[Job]:
        await self._wait(None)
        if self._thread is None:
            raise closed()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._lists.listing, query)


_MAX_BYTES = 8 * 1024 * 1024


class RecentRecords:
    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        # A dict would search past all removed keys for its first.
        self._records: OrderedDict[JobId, bytes] = OrderedDict()

    def put(self, job_id: JobId, record: bytes) -> None:
        """Evicts the oldest. Does not keep a record larger than the cache."""
        if len(record) > self._max_bytes:
            return
        self._records[job_id] = record
        self._bytes += len(record)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._records.popitem(last=False)[1])

    def get(self, job_id: JobId) -> bytes | None:
        return self._records.get(job_id)
