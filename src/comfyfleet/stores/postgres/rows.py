"""The rows of one job and how they change together: dispatch (open or ended), facts, attempts, record,
counters.

Each function runs in a transaction that has locked the dispatch's row, after the guard was checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import (
    Attempt,
    AttemptEnd,
    AttemptOutcome,
    Dispatch,
    LeaseOffer,
    LeaseRef,
    Phase,
    WriteResult,
)
from comfyfleet.model.fact import Fact, FactDraft
from comfyfleet.model.ids import ClassKey, JobId
from comfyfleet.model.job import Job
from comfyfleet.stores.guards import granted, settled_cutoff
from comfyfleet.stores.postgres import codec, lane_counts, lanes
from comfyfleet.stores.postgres.connections import SqlStep, Values

_LOCK_OPEN = """
SELECT envelope, fact_count, job_phase, lane_id, charge, (SELECT is_fair FROM comfyfleet.state)
FROM comfyfleet.dispatches WHERE job_id = %s FOR UPDATE
"""

_LOCK_ENDED = """
SELECT envelope, fact_count, job_phase, NULL::bigint, NULL::float8, (SELECT is_fair FROM comfyfleet.state)
FROM comfyfleet.ended WHERE job_id = %s FOR UPDATE
"""

HOLD_CLASSES = """
SELECT class_key FROM comfyfleet.classes WHERE class_key = ANY (%s) ORDER BY class_key FOR KEY SHARE
"""

_INSERT_OPEN = """
INSERT INTO comfyfleet.dispatches (sequence, lane_id, phase, due_at, queued_at, class_key, relaxed_class, worker_id,
    poll_id, lease_order, fact_count, job_phase, envelope, job_id)
VALUES (%(sequence)s, %(lane_id)s, %(phase)s, %(due_at)s, %(queued_at)s, %(class_key)s, %(relaxed_class)s,
    %(worker_id)s, %(poll_id)s, NULL, %(fact_count)s, %(job_phase)s, %(envelope)s, %(job_id)s)
"""

_UPDATE_OPEN = """
UPDATE comfyfleet.dispatches SET lane_id = %(lane_id)s, phase = %(phase)s, due_at = %(due_at)s,
    class_key = %(class_key)s, relaxed_class = %(relaxed_class)s, worker_id = %(worker_id)s, poll_id = %(poll_id)s,
    fact_count = %(fact_count)s, job_phase = %(job_phase)s, envelope = %(envelope)s,
    lease_order = CASE WHEN %(is_new_lease)s THEN nextval('comfyfleet.lease_order') ELSE lease_order END,
    charge = CASE WHEN %(is_leased)s THEN charge END
WHERE job_id = %(job_id)s
"""

_PUT_ENDED = """
INSERT INTO comfyfleet.ended (job_id, sequence, phase, ended_at, due_at, fact_count, job_phase, envelope, is_apart,
    is_unsettled)
VALUES (%(job_id)s, %(sequence)s, %(phase)s, %(now)s, %(due_at)s, %(fact_count)s, %(job_phase)s, %(envelope)s,
    %(is_apart)s, %(is_unsettled)s)
ON CONFLICT (job_id) DO UPDATE SET phase = excluded.phase, ended_at = excluded.ended_at, due_at = excluded.due_at,
    fact_count = excluded.fact_count, job_phase = excluded.job_phase, envelope = excluded.envelope,
    is_apart = excluded.is_apart, is_unsettled = excluded.is_unsettled
"""

_TALLY = """
UPDATE comfyfleet.tallies SET in_lane = in_lane + %(in_lane)s, delayed = delayed + %(delayed)s,
    paused = paused + %(paused)s, queued = queued + %(queued)s, leased = leased + %(leased)s,
    completed = completed + %(completed)s, failed = failed + %(failed)s, cancelled = cancelled + %(cancelled)s,
    payload_bytes = payload_bytes + %(payload_bytes)s
WHERE shard = pg_backend_pid() %% 32
"""

_COUNTERS = (
    *("in_lane", "delayed", "paused", "queued", "leased", "completed", "failed", "cancelled"),
    "payload_bytes",
)

_INSERT_FACTS = "INSERT INTO comfyfleet.facts (job_id, number, kind, at, round, data) VALUES"

_INSERT_ATTEMPTS = "INSERT INTO comfyfleet.attempts (job_id, lease_number, attempt_id, outcome, body) VALUES"

_LEASE = """
UPDATE comfyfleet.dispatches SET lane_id = NULL, phase = 'leased', job_phase = 'leased', due_at = %s, worker_id = %s,
    poll_id = %s, fact_count = %s, envelope = %s, charge = %s, lease_order = nextval('comfyfleet.lease_order')
WHERE job_id = %s
"""

_RECORD = "SELECT record FROM comfyfleet.jobs WHERE job_id = %s"

_LAST_ATTEMPT = """
SELECT body FROM comfyfleet.attempts WHERE job_id = %s ORDER BY lease_number DESC LIMIT 1
"""

_INSERT_JOB = """
INSERT INTO comfyfleet.jobs (job_id, sequence, tenant, reference, record, payload, result)
VALUES (%s, nextval('comfyfleet.job_sequence'), %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING RETURNING sequence
"""

# Two queues, each in index order: young jobs in one must not delay the other. The conditions are checked
# again on the locked row, because the job may have been opened again.
_PURGE = """
WITH line AS (
    (SELECT job_id, ended_at FROM comfyfleet.ended WHERE phase = %(phase)s AND NOT is_apart AND NOT is_unsettled
        AND ended_at < %(before)s ORDER BY ended_at LIMIT %(limit)s)
    UNION ALL
    (SELECT job_id, ended_at FROM comfyfleet.ended WHERE phase = %(phase)s AND is_apart AND NOT is_unsettled
        AND ended_at < %(settled_before)s ORDER BY ended_at LIMIT %(limit)s)
), old AS (
    SELECT e.job_id FROM comfyfleet.ended e JOIN line ON line.job_id = e.job_id
    WHERE e.phase = %(phase)s AND NOT e.is_unsettled AND e.ended_at = line.ended_at
    ORDER BY line.ended_at LIMIT %(limit)s FOR UPDATE OF e SKIP LOCKED
)
DELETE FROM comfyfleet.ended USING old WHERE ended.job_id = old.job_id RETURNING ended.job_id
"""


class LockedDispatch(msgspec.Struct, frozen=True):
    """A dispatch whose row this transaction has locked."""

    dispatch: Dispatch
    fact_count: int
    job_phase: Phase
    lane_id: int | None


def held(row: Sequence[Any]) -> LockedDispatch:
    envelope, fact_count, job_phase, lane_id = row
    return LockedDispatch(codec.decode_dispatch(envelope), fact_count, Phase(job_phase), lane_id)


class LockedJob(msgspec.Struct, frozen=True):
    """All parts of a job that a write may change, read under its lock, and the time."""

    held: LockedDispatch
    now: float
    record: str
    attempt: str | None
    charge: float | None
    """The virtual time that its lease was charged."""
    is_fair: bool
    """Tenants have terms, and leases are charged."""


def moment(test_now: float | None) -> tuple[str, Values]:
    return "SELECT coalesce(%s::float8, extract(epoch FROM clock_timestamp())::float8)", (test_now,)


async def open_for_write(step: SqlStep, job_id: JobId, test_now: float | None) -> LockedJob | None:
    """Looks among open jobs first. A job that moves in between was written, so no guard on it would hold."""
    for lock in (_LOCK_OPEN, _LOCK_ENDED):
        # In sequence: the statements after the lock see what its previous holder wrote.
        found, ((now,),), record, attempt = await step.ask(
            (lock, (job_id,)), moment(test_now), (_RECORD, (job_id,)), (_LAST_ATTEMPT, (job_id,))
        )
        if found:
            *row, charge, is_fair = found[0]
            return LockedJob(
                held(row), now, record[0][0], attempt[0][0] if attempt else None, charge, is_fair
            )
    return None


async def has_classes(step: SqlStep, keys: Sequence[ClassKey]) -> bool:
    """Also keeps them in the table until this transaction ends."""
    wanted = sorted(set(keys))
    found = await step.rows(HOLD_CLASSES, (wanted,))
    return len(found) == len(wanted)


def classes_of(dispatch: Dispatch) -> list[ClassKey]:
    """The classes that an open dispatch keeps in the table."""
    if dispatch.phase.is_final:
        return []
    relaxed = dispatch.relaxed_class
    return [dispatch.class_key] if relaxed is None else [dispatch.class_key, relaxed]


async def insert_record(step: SqlStep, job: Job) -> int | None:
    """Returns the sequence number. None: the id or the reference is taken."""
    record, payload = codec.encode_record(job), codec.encode(job.payload)
    values = (job.job_id, job.tenant, job.reference, record, payload, codec.encode_or_none(job.result))
    inserted = await step.row(_INSERT_JOB, values)
    return None if inserted is None else int(inserted[0])


async def insert(
    step: SqlStep, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft], now: float
) -> WriteResult:
    drafted = number_facts(dispatch, 0, facts, now)
    await _save(step, None, dispatch, len(drafted), job.phase, now)
    _insert_facts(step, drafted)
    return WriteResult(dispatch, drafted)


async def change(
    step: SqlStep,
    before: LockedDispatch,
    after: Dispatch,
    facts: Sequence[FactDraft],
    now: float,
    job_phase: Phase | None = None,
) -> WriteResult:
    drafted = number_facts(after, before.fact_count, facts, now)
    count = before.fact_count + len(drafted)
    await _save(step, before, after, count, job_phase or before.job_phase, now)
    _insert_facts(step, drafted)
    return WriteResult(after, drafted)


def grant(
    step: SqlStep, before: LockedDispatch, offer: LeaseOffer, charge: float | None, epoch: int, now: float
) -> WriteResult:
    """Leases the job. `charge` is in virtual time."""
    after, lease, attempt, fact = granted(before.dispatch, offer, epoch, now, before.fact_count)
    step.add_rows(_INSERT_ATTEMPTS, [_attempt_row(after.job_id, attempt)])
    envelope = codec.encode(after)
    step.add(
        _LEASE, (after.due_at, lease.worker_id, lease.poll_id, fact.number, envelope, charge, after.job_id)
    )
    _insert_facts(step, (fact,))
    update_counters(step, {"in_lane": -1, "queued": -1, "leased": 1})
    lane_counts.move(step, (before.lane_id, before.dispatch.priority, -1))
    return WriteResult(after, (fact,))


def _attempt_row(job_id: JobId, attempt: Attempt) -> tuple[object, ...]:
    return job_id, attempt.lease_number, attempt.attempt_id, attempt.outcome.value, codec.encode(attempt)


def extend(step: SqlStep, dispatch: Dispatch) -> None:
    """A heartbeat moves only the end of the lease."""
    step.add(
        "UPDATE comfyfleet.dispatches SET due_at = %s, envelope = %s WHERE job_id = %s",
        (dispatch.due_at, codec.encode(dispatch), dispatch.job_id),
    )


def end_attempt(step: SqlStep, opened: LockedJob, end: AttemptEnd) -> None:
    assert opened.attempt is not None, "every lease is recorded as an attempt"
    ended = msgspec.structs.replace(
        codec.decode_attempt(opened.attempt),
        outcome=end.outcome,
        ended_at=opened.now,
        charged_to=end.charged_to,
        failure=end.failure,
    )
    step.add(
        "UPDATE comfyfleet.attempts SET outcome = %s, body = %s WHERE job_id = %s AND lease_number = %s",
        (ended.outcome.value, codec.encode(ended), opened.held.dispatch.job_id, ended.lease_number),
    )


def change_record(step: SqlStep, opened: LockedJob, values: dict[str, Any]) -> Phase:
    """Writes the changes of a job's record and returns its phase, which is kept with the dispatch."""
    held = opened.held
    job = msgspec.structs.replace(codec.decode_record(held.dispatch, opened.record, held.job_phase), **values)
    columns: dict[str, str | None] = {}
    if (record := codec.encode_record(job)) != opened.record:
        columns["record"] = record
    # Large parts are written only when they change.
    for name in ("payload", "result"):
        if name in values:
            columns[name] = codec.encode_or_none(values[name])
    if columns:
        sets = ", ".join(f"{name} = %s" for name in columns)
        step.add(
            f"UPDATE comfyfleet.jobs SET {sets} WHERE job_id = %s", (*columns.values(), held.dispatch.job_id)
        )
    return job.phase


async def read_facts(step: SqlStep, job_id: JobId, after: int = 0) -> list[Fact]:
    found = await step.rows(
        "SELECT job_id, number, kind, at, round, data FROM comfyfleet.facts WHERE job_id = %s AND number > %s "
        "ORDER BY number",
        (job_id, after),
    )
    return [codec.decode_fact(row) for row in found]


async def mark_late(step: SqlStep, ref: LeaseRef) -> None:
    """An attempt that still runs is not late."""
    row = await step.row(
        "SELECT body FROM comfyfleet.attempts WHERE job_id = %s AND lease_number = %s AND attempt_id = %s "
        "AND outcome <> %s FOR UPDATE",
        (ref.job_id, ref.number, ref.attempt_id, AttemptOutcome.RUNNING.value),
    )
    if row is not None:
        late = msgspec.structs.replace(codec.decode_attempt(row[0]), reported_late=True)
        step.add(
            "UPDATE comfyfleet.attempts SET body = %s WHERE job_id = %s AND lease_number = %s",
            (codec.encode(late), ref.job_id, ref.number),
        )


async def purge(step: SqlStep, phase: Phase, before: float, limit: int, test_now: float | None) -> int:
    """Removes jobs that ended before, with all their rows. Skips jobs that are being opened again."""
    ((now,),) = await step.rows(*moment(test_now))
    values = {
        "phase": phase.value,
        "before": before,
        "settled_before": settled_cutoff(before, now),
        "limit": limit,
    }
    gone = [row[0] for row in await step.rows(_PURGE, values)]
    if gone:
        step.add("DELETE FROM comfyfleet.facts WHERE job_id = ANY (%s)", (gone,))
        step.add("DELETE FROM comfyfleet.attempts WHERE job_id = ANY (%s)", (gone,))
        step.add("DELETE FROM comfyfleet.jobs WHERE job_id = ANY (%s)", (gone,))
    await lanes.remove_empty_lanes(step, limit)
    update_counters(step, {phase.value: -len(gone)})
    lane_counts.add_up(step)
    return len(gone)


async def import_jobs(step: SqlStep, whole: JobSnapshot, sequence: int, now: float) -> Dispatch:
    """The rows of an imported job, except its record, which exists already."""
    placed = msgspec.structs.replace(whole.dispatch, sequence=sequence)
    await _save(step, None, placed, len(whole.facts), whole.job.phase, now)
    _insert_facts(step, whole.facts)
    if whole.attempts:
        step.add_rows(_INSERT_ATTEMPTS, [_attempt_row(placed.job_id, each) for each in whole.attempts])
    return placed


async def discard(step: SqlStep, job_id: JobId, revision: int) -> bool:
    for lock in (_LOCK_OPEN, _LOCK_ENDED):
        row = await step.row(lock, (job_id,))
        if row is None:
            continue
        locked = held(row[:4])
        found = locked.dispatch
        if found.revision != revision or found.lease is not None:
            return False
        for table in ("dispatches", "ended", "facts", "attempts", "jobs"):
            step.add(f"DELETE FROM comfyfleet.{table} WHERE job_id = %s", (job_id,))
        deltas = dict.fromkeys(_COUNTERS, 0)
        _count(deltas, found, -1)
        update_counters(step, deltas)
        lane_counts.move(step, (locked.lane_id, found.priority, -1))
        return True
    return False


def update_counters(step: SqlStep, deltas: dict[str, int]) -> None:
    """One of the last statements of a transaction, so that the counters' row is locked briefly."""
    if any(deltas.values()):
        step.add_last(_TALLY, {name: deltas.get(name, 0) for name in _COUNTERS})


async def _save(
    step: SqlStep,
    before: LockedDispatch | None,
    after: Dispatch,
    fact_count: int,
    job_phase: Phase,
    now: float,
) -> None:
    was = None if before is None else before.dispatch
    lane_id = None
    if after.stands_in_lane:
        if before is not None and before.lane_id is not None and before.dispatch.lane == after.lane:
            lane_id = before.lane_id
        else:
            lane_id = await lanes.place(step, after.lane, after.sequence)
    lease = after.lease
    values = {
        "job_id": after.job_id,
        "sequence": after.sequence,
        "lane_id": lane_id,
        "phase": after.phase.value,
        "due_at": after.due_at,
        "queued_at": after.queued_at,
        "class_key": after.class_key,
        "relaxed_class": after.relaxed_class,
        "worker_id": None if lease is None else lease.worker_id,
        "poll_id": None if lease is None else lease.poll_id,
        "fact_count": fact_count,
        "job_phase": job_phase.value,
        "envelope": codec.encode(after),
        "is_apart": after.has_tenant_database,
        "is_unsettled": after.is_unsettled,
        "is_leased": lease is not None,
        "is_new_lease": lease is not None and (was is None or was.lease is None),
        "now": now,
    }
    if after.phase.is_final:
        if was is not None and not was.phase.is_final:
            step.add("DELETE FROM comfyfleet.dispatches WHERE job_id = %s", (after.job_id,))
        step.add(_PUT_ENDED, values)
    elif was is None or was.phase.is_final:
        if was is not None:
            step.add("DELETE FROM comfyfleet.ended WHERE job_id = %s", (after.job_id,))
        step.add(_INSERT_OPEN, values)
    else:
        step.add(_UPDATE_OPEN, values)
    deltas = dict.fromkeys(_COUNTERS, 0)
    if was is not None:
        _count(deltas, was, -1)
    _count(deltas, after, 1)
    update_counters(step, deltas)
    left = () if before is None else ((before.lane_id, before.dispatch.priority, -1),)
    lane_counts.move(step, *left, (lane_id, after.priority, 1))


def _count(deltas: dict[str, int], dispatch: Dispatch, sign: int) -> None:
    deltas[dispatch.phase.value] += sign
    if dispatch.phase is Phase.QUEUED:
        deltas[dispatch.standing.value] += sign
    if not dispatch.phase.is_final:
        deltas["payload_bytes"] += sign * dispatch.payload_bytes


def number_facts(dispatch: Dispatch, count: int, drafts: Sequence[FactDraft], now: float) -> tuple[Fact, ...]:
    return tuple(
        Fact(dispatch.job_id, count + place, draft.kind, now, dispatch.round, draft.data)
        for place, draft in enumerate(drafts, start=1)
    )


def _insert_facts(step: SqlStep, facts: Sequence[Fact]) -> None:
    if facts:
        step.add_rows(_INSERT_FACTS, [codec.fact_row(fact) for fact in facts])
