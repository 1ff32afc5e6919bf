"""The port on PostgreSQL: each method is one transaction.

It applies writes under their guards; `lanes.py` finds jobs, `rows.py` changes rows. Time is the server's,
except in tests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import psycopg

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.calls import Command
from comfyfleet.model.dispatch import (
    Attempt,
    Candidate,
    Dispatch,
    LeaseOffer,
    LeaseRef,
    Phase,
    Write,
    WriteResult,
)
from comfyfleet.model.errors import Fault
from comfyfleet.model.fact import FactDraft
from comfyfleet.model.ids import JobId, PollId, ProfileKey, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.ports import Clock, Counts, LeaseState, Peek
from comfyfleet.stores.guards import extended, holds, is_leased_as
from comfyfleet.stores.postgres import blocks, codec, eligibility, fair_share, lane_counts, lanes, rows
from comfyfleet.stores.postgres.connections import ConnectionPool, Later, SqlStep, Values
from comfyfleet.stores.postgres.documents import PostgresDocumentStore
from comfyfleet.stores.postgres.job_import import PostgresJobTransfer
from comfyfleet.stores.postgres.notifications import TABLE, Notifications
from comfyfleet.stores.postgres.records import PostgresRecords
from comfyfleet.stores.postgres.schema import check_server, known_migrations, migrate

_P = ParamSpec("_P")
_Answer = TypeVar("_Answer")
_Method = Callable[Concatenate["PostgresStore", _P], Coroutine[Any, Any, _Answer]]

_LOAD = """
SELECT envelope FROM comfyfleet.dispatches WHERE job_id = %(job_id)s
UNION ALL SELECT envelope FROM comfyfleet.ended WHERE job_id = %(job_id)s
"""

_LOAD_MANY = """
SELECT job_id, envelope FROM comfyfleet.dispatches WHERE job_id = ANY (%(jobs)s)
UNION ALL SELECT job_id, envelope FROM comfyfleet.ended WHERE job_id = ANY (%(jobs)s)
"""

# Skips a job that another transaction has locked: it is being leased or changed. Requires the matched profile,
# because the worker may have registered anew since, perhaps with other tenants.
_TAKE = (
    lanes.GATE
    + f"""
SELECT d.envelope, d.fact_count, d.job_phase, d.lane_id, gate.now, gate.is_fair
FROM gate, comfyfleet.dispatches d
JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
JOIN comfyfleet.profile_classes p ON p.class_key = l.class_key AND p.profile = %(profile)s
WHERE d.job_id = %(job_id)s AND d.job_id <> ALL (gate.blocked) AND {lanes.IS_FREE} AND NOT EXISTS (
    SELECT FROM comfyfleet.workers w WHERE w.worker_id = %(worker_id)s AND w.profile <> %(profile)s)
FOR UPDATE OF d SKIP LOCKED
"""
)

_BY_POLL = """
SELECT envelope FROM comfyfleet.dispatches WHERE poll_id = %s ORDER BY lease_order DESC LIMIT 1
"""

_LEASES_OF = "SELECT envelope FROM comfyfleet.dispatches WHERE worker_id = ANY (%s) ORDER BY lease_order"

# Locked in one order, so that two heartbeats never deadlock.
_HOLD_LEASES = """
SELECT envelope FROM comfyfleet.dispatches WHERE job_id = ANY (%s) ORDER BY job_id FOR UPDATE
"""

_DUE = """
(SELECT envelope, due_at, job_id FROM comfyfleet.dispatches
    WHERE due_at <= %(now)s AND (due_at, job_id) > (%(at)s::float8, %(after)s) ORDER BY due_at, job_id LIMIT %(limit)s)
UNION ALL
(SELECT envelope, due_at, job_id FROM comfyfleet.ended
    WHERE due_at <= %(now)s AND (due_at, job_id) > (%(at)s::float8, %(after)s) ORDER BY due_at, job_id LIMIT %(limit)s)
ORDER BY due_at, job_id LIMIT %(limit)s
"""

_NEXT_DUE = """
SELECT least((SELECT min(due_at) FROM comfyfleet.dispatches), (SELECT min(due_at) FROM comfyfleet.ended))
"""

_COUNTS = """
SELECT sum(in_lane)::bigint, sum(delayed)::bigint, sum(paused)::bigint, sum(queued)::bigint, sum(leased)::bigint,
    sum(completed)::bigint, sum(failed)::bigint, sum(cancelled)::bigint, sum(payload_bytes)::bigint
FROM comfyfleet.tallies
"""

_POSITION = """
SELECT (SELECT count(*) FROM comfyfleet.lanes l JOIN comfyfleet.dispatches d ON d.lane_id = l.lane_id
    WHERE l.priority > mine.priority OR (l.priority = mine.priority AND d.sequence < me.sequence))
FROM comfyfleet.dispatches me JOIN comfyfleet.lanes mine ON mine.lane_id = me.lane_id WHERE me.job_id = %s
"""

_DEAD_LETTER = """
SELECT envelope FROM comfyfleet.ended WHERE phase = 'failed' AND (%(after)s::text IS NULL OR job_id > %(after)s)
ORDER BY job_id LIMIT %(limit)s
"""

_UNSETTLED = """
SELECT envelope FROM comfyfleet.ended WHERE is_unsettled AND job_id > %s ORDER BY job_id LIMIT %s
"""


_KNOWN_JOB = """
SELECT job_id FROM comfyfleet.jobs WHERE job_id = %(job_id)s
UNION ALL SELECT job_id FROM comfyfleet.jobs WHERE tenant = %(tenant)s AND reference = %(reference)s
"""


def _reading(work: Callable[Concatenate[SqlStep, _P], Awaitable[_Answer]]) -> _Method[_P, _Answer]:
    async def method(self: PostgresStore, /, *args: _P.args, **named: _P.kwargs) -> _Answer:
        return await self._pool.read(lambda step: work(step, *args, **named))

    return method


def _writing(work: Callable[Concatenate[SqlStep, _P], Awaitable[_Answer]]) -> _Method[_P, _Answer]:
    async def method(self: PostgresStore, /, *args: _P.args, **named: _P.kwargs) -> _Answer:
        return await self._pool.transact(lambda step: work(step, *args, **named))

    return method


class PostgresStore:
    is_shared = True
    direct_workers = None
    peer_channel = None

    # the methods that are one function over SQL

    table = _reading(eligibility.read)
    put_profile = _writing(eligibility.put_profile)
    drop_profiles = _writing(eligibility.drop_profiles)
    put_worker = _writing(blocks.put_worker)
    add_worker = _writing(blocks.add_worker)
    replace_worker = _writing(blocks.replace_worker)
    apply_worker_delta = _writing(blocks.apply_worker_delta)
    get_block = _reading(blocks.get_block)
    next_block_end = _reading(blocks.next_end)
    get_workflow_stats = _reading(blocks.get_workflow_stats)
    put_workflow_stats = _writing(blocks.put_workflow_stats)
    add_workflow_stats = _writing(blocks.add_workflow_stats)
    facts = _reading(rows.read_facts)
    mark_late = _writing(rows.mark_late)

    def __init__(self, url: str, *, connections: int = 8, clock_for_tests: Clock | None = None) -> None:
        self._pool = ConnectionPool(url, connections)
        self._hints = Notifications(self._pool)
        self._test_clock = clock_for_tests
        self._epoch = 1
        self._is_fair = False
        """Whether tenants have terms, as far as this process knows."""
        self.records = PostgresRecords(self._pool)
        self.documents = PostgresDocumentStore(self._pool)
        self.job_transfer = PostgresJobTransfer(self._pool, lambda: self._test_now, self._hints.notify)
        self.fair_share = fair_share.PostgresFairShare(self._pool, lambda: self._test_now, self._hints)

    @property
    def epoch(self) -> int:
        return self._epoch

    async def open(self) -> None:
        connection = await self._pool.connect()
        try:
            async with connection:
                await check_server(connection, self._pool.address)
                await migrate(connection, known_migrations())
                cursor = await connection.execute("SELECT epoch, is_fair FROM comfyfleet.state")
                row = await cursor.fetchone()
                assert row is not None, "the first migration inserts it"
                self._epoch, self._is_fair = row
                await lane_counts.recount_if_wrong(connection)
        except psycopg.Error as error:
            raise Fault(
                f"PostgreSQL at {self._pool.address} closed the connection while the store was opened: "
                f"{' '.join(str(error).split())}; try again when it runs"
            ) from error
        self._hints.open()

    def listen(
        self,
        wake: Callable[[], None],
        on_command: Callable[[WorkerId, Command], None] | None = None,
        on_new_class: Callable[[], None] | None = None,
    ) -> None:
        self._hints.listen(wake, on_command, on_new_class)

    async def send_command(self, worker_id: WorkerId, command: Command) -> None:
        await self._hints.notify_worker(worker_id, command)

    async def close(self) -> None:
        await self._hints.close()
        await self._pool.close()

    @property
    def _test_now(self) -> float | None:
        """None: the server's time."""
        return None if self._test_clock is None else self._test_clock.now()

    async def now(self) -> float:
        return float((await self._pool.fetch(*rows.moment(self._test_now)))[0][0])

    async def _transact(self, work: Callable[..., Awaitable[_Answer]], *values: Any) -> _Answer:
        return await self._pool.transact(lambda step: work(step, *values))

    async def _share(self, work: Callable[..., Awaitable[_Answer]], *values: Any) -> _Answer:
        """A transaction in which a lease may begin or end."""
        while True:
            try:
                return await self._transact(work, *values, self._is_fair)
            except fair_share.FairShareBegan:
                self._is_fair = True

    async def _dispatches(self, query: str, values: Values) -> list[Dispatch]:
        return [codec.decode_dispatch(row[0]) for row in await self._pool.fetch(query, values)]

    # eligibility matrix

    async def put_class(self, cls: RequirementClass, fits: Collection[ProfileKey], *, version: int) -> bool:
        is_put = await self._transact(eligibility.put_class, cls, fits, version)
        if is_put:
            self._hints.notify(TABLE)
        return is_put

    # workers

    async def get_worker(self, worker_id: WorkerId) -> WorkerRecord | None:
        found = await self._pool.fetch(
            "SELECT body FROM comfyfleet.workers WHERE worker_id = %s", (worker_id,)
        )
        return codec.decode_worker(found[0][0]) if found else None

    async def workers(self) -> list[WorkerRecord]:
        found = await self._pool.fetch("SELECT body FROM comfyfleet.workers ORDER BY number")
        return [codec.decode_worker(row[0]) for row in found]

    async def remove_worker(self, worker_id: WorkerId) -> None:
        await self._pool.execute(
            ("DELETE FROM comfyfleet.workers WHERE worker_id = %s", (worker_id,)),
            ("DELETE FROM comfyfleet.blocks WHERE worker_id = %s", (worker_id,)),
        )

    # dispatches

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        written = await self._transact(self._enqueue, dispatch, job, facts)
        if written is not None and written.dispatch.stands_in_lane:
            self._hints.notify()
        return written

    async def _enqueue(
        self, step: SqlStep, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]
    ) -> WriteResult | None:
        classes = sorted(set(rows.classes_of(dispatch)))
        names = {"job_id": dispatch.job_id, "tenant": job.tenant, "reference": job.reference}
        held, known, ((now,),), ((is_fair,),), ((ahead,),) = await step.ask(
            (rows.HOLD_CLASSES, (classes,)),
            (_KNOWN_JOB, names),
            rows.moment(self._test_now),
            (fair_share.IS_FAIR, ()),
            (lane_counts.AHEAD, (dispatch.priority,)),
        )
        has_classes = len(held) == len(classes)
        while True:
            # The same job needs no class: it may have ended, and its class may be gone.
            is_answer = bool(known) and (has_classes or known[0][0] == dispatch.job_id)
            if is_answer and (found := await self._known(step, known[0][0])) is not None:
                return found
            if not has_classes:
                return None
            sequence = await rows.insert_record(step, job)
            if sequence is not None:
                if is_fair and dispatch.stands_in_lane:
                    await fair_share.begin_to_wait(step, dispatch.tenant)
                place = dispatch.place + ahead
                placed = msgspec.structs.replace(dispatch, sequence=sequence, place=place)
                return await rows.insert(step, placed, job, facts, now)
            # Another transaction inserted the same id or reference first.
            known = await step.rows(_KNOWN_JOB, names)

    async def _known(self, step: SqlStep, job_id: JobId) -> WriteResult | None:
        """None: it was purged meanwhile."""
        row = await step.row(_LOAD, {"job_id": job_id})
        return None if row is None else WriteResult(codec.decode_dispatch(row[0]), ())

    async def load(self, job_id: JobId) -> Dispatch | None:
        found = await self._dispatches(_LOAD, {"job_id": job_id})
        return found[0] if found else None

    async def load_many(self, job_ids: Sequence[JobId]) -> list[Dispatch | None]:
        found = await self._pool.fetch(_LOAD_MANY, {"jobs": list(job_ids)})
        known = {job_id: codec.decode_dispatch(envelope) for job_id, envelope in found}
        return [known.get(job_id) for job_id in job_ids]

    async def peek(self, query: Peek) -> list[Candidate]:
        found, untidy = await self._pool.read(lambda step: lanes.window(step, query, self._test_now))
        if untidy:
            await self._transact(lanes.clean_up, untidy)
        return found

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        return await self._share(self._lease, job_id, offer)

    async def _lease(
        self, step: SqlStep, job_id: JobId, offer: LeaseOffer, is_fair: bool
    ) -> WriteResult | None:
        values = {"worker_id": offer.worker_id, "test_now": self._test_now, "profile": offer.profile}
        row = await step.row(_TAKE, {**values, "job_id": job_id})
        if row is None:
            return None
        *found, now, is_charged = row
        held, charge = rows.held(found), None
        if is_charged:
            if not is_fair:
                raise fair_share.FairShareBegan
            # The job is locked already, and the holder of the lock waits for no job.
            charged = await fair_share.lease(step, held.dispatch.tenant, offer, self._test_now)
            if charged is None:
                return None
            now, charge = charged
        return rows.grant(step, held, offer, charge, self._epoch, now)

    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None:
        found = await self._dispatches(_BY_POLL, (poll_id,))
        return found[0] if found else None

    async def write(self, write: Write) -> WriteResult | None:
        written, freed = await self._share(self._write, write)
        await self.fair_share.notify_of(written, freed)
        return written

    async def _write(
        self, step: SqlStep, write: Write, is_fair: bool
    ) -> tuple[WriteResult | None, Later | None]:
        """Also returns whether its tenant is readmitted."""
        opened = await rows.open_for_write(step, write.job_id, self._test_now)
        if opened is None or not holds(opened.held.dispatch, write):
            return None, None
        if opened.is_fair and not is_fair:
            raise fair_share.FairShareBegan
        before, freed = opened.held.dispatch, None
        after = write.change.apply(before)
        # The table keeps the classes of an open job.
        added = [key for key in rows.classes_of(after) if key not in rows.classes_of(before)]
        if added and not await rows.has_classes(step, added):
            return None, None
        if before.lease is not None and after.lease is None:
            assert write.attempt_end is not None, "a write that ends a lease has an attempt_end"
            rows.end_attempt(step, opened, write.attempt_end)
            if is_fair:
                freed = fair_share.end(step, opened, write.attempt_end)
        elif is_fair and after.stands_in_lane and not before.stands_in_lane:
            await fair_share.begin_to_wait(step, after.tenant)
        job_phase = opened.held.job_phase
        if write.job is not None:
            job_phase = rows.change_record(step, opened, write.job)
        for block in write.blocks:
            blocks.put_block(step, block)
        blocks.lift_unseen(step, write.lifted)
        return await rows.change(step, opened.held, after, write.facts, opened.now, job_phase), freed

    async def heartbeat(self, refs: Sequence[LeaseRef], ttl_s: float) -> list[LeaseState]:
        return await self._transact(self._heartbeat, refs, ttl_s)

    async def _heartbeat(self, step: SqlStep, refs: Sequence[LeaseRef], ttl_s: float) -> list[LeaseState]:
        envelopes, ((now,),) = await step.ask(
            (_HOLD_LEASES, ([ref.job_id for ref in refs],)), rows.moment(self._test_now)
        )
        found = [codec.decode_dispatch(row[0]) for row in envelopes]
        known = {dispatch.job_id: dispatch for dispatch in found}
        answers = []
        for ref in refs:
            dispatch = known.get(ref.job_id)
            if dispatch is None or not is_leased_as(dispatch, ref):
                answers.append(LeaseState(ref, is_alive=False))
                continue
            known[ref.job_id] = extended(dispatch, now, ttl_s)
            answers.append(LeaseState(ref, True, dispatch.stop is not None))
        for dispatch in found:
            if (after := known[dispatch.job_id]) is not dispatch:
                rows.extend(step, after)
        return answers

    async def leases_of(self, *worker_ids: WorkerId) -> list[Dispatch]:
        return await self._dispatches(_LEASES_OF, (list(worker_ids),))

    async def due(self, limit: int, after: Dispatch | None = None) -> list[Dispatch]:
        at, job_id = (float("-inf"), "") if after is None else (after.due_at, after.job_id)
        return await self._dispatches(
            _DUE, {"now": await self.now(), "limit": limit, "at": at, "after": job_id}
        )

    async def next_due(self) -> float | None:
        ((at,),) = await self._pool.fetch(_NEXT_DUE)
        return None if at is None else float(at)

    async def counts(self) -> Counts:
        ((waiting, delayed, paused, *by_phase, payload_bytes),) = await self._pool.fetch(_COUNTS)
        return Counts(waiting, delayed, paused, dict(zip(Phase, by_phase, strict=True)), payload_bytes)

    async def position(self, job_id: JobId) -> int | None:
        found = await self._pool.fetch(_POSITION, (job_id,))
        return int(found[0][0]) if found else None

    async def dead_letter(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        return await self._dispatches(_DEAD_LETTER, {"after": after, "limit": limit})

    async def unsettled(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        return await self._dispatches(_UNSETTLED, (after or "", limit))

    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        return await self._transact(rows.purge, phase, before, limit, self._test_now)

    async def pause_queue(self, is_paused: bool) -> None:
        await self._pool.execute(("UPDATE comfyfleet.state SET is_paused = %s", (is_paused,)))
        self._hints.notify()

    async def is_queue_paused(self) -> bool:
        return bool((await self._pool.fetch("SELECT is_paused FROM comfyfleet.state"))[0][0])

    # facts and attempts

    async def attempts(self, job_id: JobId) -> list[Attempt]:
        query = "SELECT body FROM comfyfleet.attempts WHERE job_id = %s ORDER BY lease_number"
        return [codec.decode_attempt(row[0]) for row in await self._pool.fetch(query, (job_id,))]

    # blocks and workflow statistics

    async def blocks(self, worker_id: WorkerId | None = None) -> list[Block]:
        return await self._pool.read(lambda step: blocks.list_blocks(step, worker_id))

    async def put_block(self, block: Block) -> None:
        async def put(step: SqlStep) -> None:
            blocks.put_block(step, block)

        await self._pool.transact(put)

    async def lift(self, pairs: Sequence[Pair]) -> list[Block]:
        lifted = await self._transact(blocks.lift, pairs)
        if lifted:
            self._hints.notify()
        return lifted

    async def expired_blocks(self) -> list[Block]:
        expired = await self._transact(blocks.take_expired, await self.now())
        if expired:
            self._hints.notify()
        return expired
