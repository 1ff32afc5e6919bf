"""SQL of jobs and their rounds: opened with a hold, sent, ended with a settlement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.ledger import HoldId, Price, RunEntry
from comfyfleet.ports import RecordQuery
from comfyfleet.stores.documents import pack
from comfyfleet.tenancy.database import ledger, tenant_rows
from comfyfleet.tenancy.database.executor import MAX_PAGE, Row, Work, page, row, rows, rows_in
from comfyfleet.tenancy.database.values import (
    AccountFrozen,
    OpenRound,
    OutboxEntry,
    PostingResult,
    RoundEnd,
    RoundEnded,
    RoundStart,
    RoundStarted,
)

_NO_PAYLOAD = Submission({})
_jobs = msgspec.msgpack.Decoder(Job)
_payloads = msgspec.msgpack.Decoder(Submission)
_results = msgspec.msgpack.Decoder(JobResult)
_dispatches = msgspec.msgpack.Decoder(Dispatch)
_prices: msgspec.json.Decoder[Price] = msgspec.json.Decoder(Price)

_INSERT_JOB = """
INSERT INTO @jobs (job_id, tenant, reference, round, phase, record, payload, result)
VALUES (:job_id, :tenant, :reference, :round, :phase, :record, :payload, NULL)
ON CONFLICT DO NOTHING RETURNING job_id
"""
# A new round can only follow one that failed or was cancelled.
_REOPEN_JOB = """
UPDATE @jobs SET round = :round, phase = :phase, record = :record, result = NULL, ended_at = NULL
WHERE job_id = :job_id AND tenant = :tenant AND round = :round - 1 AND phase IN ('failed', 'cancelled') RETURNING job_id
"""
_INSERT_ROUND = """
INSERT INTO @rounds (job_id, round, tenant, phase, outbox, envelope, opened_at, price)
VALUES (:job_id, :round, :tenant, 'open', 'unsent', :envelope, :opened_at, :price)
"""
_SELECT_JOB = "SELECT job_id, tenant, reference, round, phase, record, payload, result FROM @jobs"
_END_ROUND = """
UPDATE @rounds SET phase = :phase, outbox = 'closed', envelope = NULL, ended_at = :ended_at
WHERE job_id = :job_id AND round = :round
"""
_END_JOB = """
UPDATE @jobs SET phase = :phase, record = :record, result = :result, ended_at = :ended_at
WHERE job_id = :job_id AND round = :round
"""
_OUTBOX = """
SELECT job_id, round, tenant, envelope FROM @rounds
WHERE outbox = :outbox AND (job_id > :job_id OR (job_id = :job_id AND round > :round))
ORDER BY job_id, round LIMIT :limit
"""
_COUNT_OPEN = """
SELECT count(*) FROM (SELECT 1 FROM @rounds WHERE tenant = :tenant AND phase = 'open' LIMIT :most) AS found
"""
_SET_OUTBOX = """
UPDATE @rounds SET outbox = :outbox WHERE job_id = :job_id AND round = :round AND outbox <> 'closed'
AND NOT EXISTS (SELECT 1 FROM @accounts a WHERE a.tenant = rounds.tenant AND a.fence IS NOT NULL) RETURNING outbox
"""
_OPEN = """
FROM @rounds r JOIN @jobs j ON j.job_id = r.job_id AND j.round = r.round
JOIN @holds h ON h.job_id = r.job_id AND h.round = r.round
WHERE r.job_id = :job_id AND r.round = :round AND r.phase = 'open'
AND NOT EXISTS (SELECT 1 FROM @settlements s WHERE s.job_id = r.job_id AND s.round = r.round)
"""
_OPEN_JOB = f"SELECT j.job_id, j.tenant, j.reference, j.round, j.phase, j.record, j.payload, j.result {_OPEN}"
_PRICE = "SELECT price FROM @rounds WHERE job_id = :job_id AND round = :round"
_TENANT = "SELECT tenant FROM @rounds WHERE job_id = :job_id AND round = :round"
_PUT_PAYLOAD = """
UPDATE @jobs SET payload = :payload WHERE job_id = :job_id AND round = :round
AND EXISTS (SELECT 1 FROM @rounds r WHERE r.job_id = :job_id AND r.round = :round AND r.phase = 'open') RETURNING job_id
"""
_STAGE = """
INSERT INTO @staged (job_id, round, attempt_id, result, at)
SELECT job_id, round, :attempt_id, :result, :at FROM @rounds
WHERE job_id = :job_id AND round = :round AND phase = 'open'
ON CONFLICT (job_id, round, attempt_id) DO UPDATE SET result = excluded.result, at = excluded.at RETURNING job_id
"""
_STAGED = "SELECT result FROM @staged WHERE job_id = :job_id AND round = :round AND attempt_id = :attempt_id"
_PHASES = "SELECT job_id, round, phase FROM @rounds WHERE (job_id, round) IN (VALUES {})"
_RUN = """
INSERT INTO @runs (number, job_id, round, tenant, workflow_hash, service, phase, at, worker_id, outputs,
    gpu_milliseconds, consumed, cost_micros, verified_by)
VALUES ((SELECT coalesce(max(number), 0) + 1 FROM @runs WHERE tenant = :tenant),
    :job_id, :round, :tenant, :workflow_hash, :service, :phase, :at, :worker_id, :outputs, :gpu_milliseconds,
    :consumed, :cost_micros, :verified_by)
"""
_RUNS = """
SELECT job_id, round, tenant, workflow_hash, service, phase, at, worker_id, outputs, gpu_milliseconds, consumed,
    cost_micros, verified_by, number FROM @runs WHERE tenant = :tenant AND number > :after ORDER BY number LIMIT :limit
"""
_FORGET = """
DELETE FROM @inbox WHERE event_id IN (SELECT event_id FROM @inbox WHERE at < :before ORDER BY at LIMIT :limit)
RETURNING event_id
"""
_ENDED = """
SELECT job_id FROM @jobs WHERE phase = :phase AND ended_at IS NOT NULL AND ended_at < :before
ORDER BY ended_at LIMIT :limit
"""
# Checks again: the job may have a new round by now.
_FORGET_JOB = """
DELETE FROM @jobs WHERE job_id = :job_id AND ended_at IS NOT NULL AND ended_at < :before RETURNING job_id
"""


def open_round(opening: RoundStart) -> Work[RoundStarted]:
    job, hold = opening.job, opening.hold
    assert hold.hold_id == HoldId(job.job_id, job.round), "each round has its hold"
    assert job.tenant == hold.tenant == opening.posting.tenant, "a tenant pays for its own jobs"
    assert (opening.posting.balance, opening.posting.held) == (0, hold.amount), "the posting holds the amount"
    values = {
        "job_id": job.job_id,
        "tenant": job.tenant,
        "round": job.round,
        "phase": job.phase.value,
        "record": pack(_record(job)),
    }
    if job.round == 1:
        payload = pack(job.payload)
        found = yield from row(_INSERT_JOB, **values, reference=job.reference, payload=payload)
    else:
        found = yield from row(_REOPEN_JOB, **values)
    if found is None:
        known = yield from _known(job)
        is_known = known is not None and (known.job_id != job.job_id or known.round >= job.round)
        account = yield from ledger.account(job.tenant)
        return RoundStarted(PostingResult.KNOWN if is_known else PostingResult.REFUSED, account, known)
    yield from ledger.post(opening.posting)
    yield from ledger.insert_hold(hold)
    yield from rows(
        _INSERT_ROUND,
        job_id=job.job_id,
        round=job.round,
        tenant=job.tenant,
        envelope=pack(opening.dispatch),
        opened_at=hold.at,
        price=None if opening.price is None else msgspec.json.encode(opening.price).decode(),
    )
    return RoundStarted(PostingResult.DONE, (yield from ledger.account(job.tenant)), job)


def _known(job: Job) -> Work[Job | None]:
    """By its id or its reference, if it is the same tenant's."""
    known = yield from get(job.job_id)
    if known is None and job.reference is not None:
        known = yield from by_reference(job.tenant, job.reference)
    return known if known is not None and known.tenant == job.tenant else None


def end_round(ending: RoundEnd) -> Work[RoundEnded]:
    settlement, hold_id = ending.settlement, ending.settlement.hold_id
    is_new = yield from row(
        "INSERT INTO @inbox (event_id, at) VALUES (:event_id, :at) ON CONFLICT DO NOTHING RETURNING event_id",
        event_id=ending.event_id,
        at=settlement.at,
    )
    hold = yield from ledger.hold(hold_id)
    if hold is None:
        # Roll back the inbox entry too: the job may come back from a backup.
        raise ledger.RolledBack(PostingResult.REFUSED)
    posting = ending.posting
    assert posting.tenant == hold.tenant, "a tenant pays for its own jobs"
    assert (posting.balance, posting.held) == (-settlement.consumed, -hold.amount), (
        "the posting releases the whole hold"
    )
    if is_new is None or not (yield from ledger.insert_settlement(settlement, hold, ending.phase)):
        return RoundEnded(PostingResult.KNOWN, (yield from ledger.settlement(hold_id)))
    yield from ledger.post(posting)
    named = {**hold_id._asdict(), "phase": ending.phase.value}
    yield from rows(_END_ROUND, **named, ended_at=settlement.at)
    job = yield from get(hold_id.job_id)
    if job is not None and job.round == hold_id.round:
        changed = msgspec.structs.replace(job, **{**ending.changes, "phase": ending.phase})
        result = None if changed.result is None else pack(changed.result)
        yield from rows(
            _END_JOB, **named, record=pack(_record(changed)), result=result, ended_at=settlement.at
        )
        if "payload" in ending.changes:
            yield from rows(
                "UPDATE @jobs SET payload = :payload WHERE job_id = :job_id",
                job_id=hold_id.job_id,
                payload=pack(changed.payload),
            )
    yield from rows("DELETE FROM @staged WHERE job_id = :job_id AND round = :round", **hold_id._asdict())
    if ending.run is not None:
        # After the posting, which locks the account: so these numbers are in commit order too.
        yield from rows(_RUN, **_run_values(ending.run))
    return RoundEnded(PostingResult.DONE, settlement)


def _run_values(run: RunEntry) -> dict[str, object]:
    values = msgspec.structs.asdict(run)
    del values["number"], values["hold_id"]
    return {**values, **run.hold_id._asdict()}


def outbox(is_sent: bool, after: HoldId | None, limit: int) -> Work[list[OutboxEntry]]:
    """Open rounds by id: the relay reads the unsent ones, the reconciler the sent ones."""
    last = after or HoldId(JobId(""), 0)
    found = yield from rows(
        _OUTBOX,
        outbox="sent" if is_sent else "unsent",
        job_id=last.job_id,
        round=last.round,
        limit=page(limit),
    )
    return [
        OutboxEntry(HoldId(JobId(job_id), number), TenantId(tenant), _dispatches.decode(envelope))
        for job_id, number, tenant, envelope in found
    ]


def count_open(tenant: TenantId, most: int) -> Work[int]:
    """Counts a tenant's open rounds, up to `most`."""
    found = yield from row(_COUNT_OPEN, tenant=tenant, most=most)
    return 0 if found is None else int(found[0])


def mark_sent(hold_id: HoldId) -> Work[bool]:
    """S3. False: the round is unknown or has ended, or the account is frozen."""
    return (yield from row(_SET_OUTBOX, outbox="sent", **hold_id._asdict())) is not None


def send_again(hold_id: HoldId) -> Work[bool]:
    """Puts a round that the central store has lost back into the outbox. False: it is not open."""
    return (yield from row(_SET_OUTBOX, outbox="unsent", **hold_id._asdict())) is not None


def leasable(hold_id: HoldId) -> Work[Job | None]:
    """L2: the job with its payload, if this round is open and not settled."""
    found = yield from row(_OPEN_JOB, **hold_id._asdict())
    return None if found is None else _job(found)


def put_payload(hold_id: HoldId, payload: Submission) -> Work[bool]:
    """Replaces the payload. False: the round is not open."""
    yield from check_open(hold_id)
    return (yield from row(_PUT_PAYLOAD, **hold_id._asdict(), payload=pack(payload))) is not None


def stage(hold_id: HoldId, attempt_id: str, result: JobResult, at: float) -> Work[bool]:
    """Before K: saves a result that counts if the round ends with this attempt. False: the round is not open."""
    yield from check_open(hold_id)
    values = {**hold_id._asdict(), "attempt_id": attempt_id, "result": pack(result), "at": at}
    return (yield from row(_STAGE, **values)) is not None


def check_open(hold_id: HoldId) -> Work[None]:
    found = yield from row(_TENANT, **hold_id._asdict())
    if found is not None:
        yield from tenant_rows.check_open(TenantId(found[0]))


def open_round_of(hold_id: HoldId, attempt_id: str | None) -> Work[OpenRound | None]:
    """Before T1. None: the round has ended or is unknown."""
    named = hold_id._asdict()
    job = yield from leasable(hold_id)
    hold = yield from ledger.hold(hold_id)
    price = yield from row(_PRICE, **named)
    if job is None or hold is None or price is None:
        return None
    staged = None if attempt_id is None else (yield from row(_STAGED, **named, attempt_id=attempt_id))
    return OpenRound(
        hold,
        None if price[0] is None else _prices.decode(price[0]),
        job,
        None if staged is None else _results.decode(staged[0]),
    )


def phases(hold_ids: Sequence[HoldId]) -> Work[dict[HoldId, Phase | None]]:
    """How rounds ended; None: it is open. Leaves out unknown rounds."""
    assert len(hold_ids) <= MAX_PAGE, "at most one page"
    if not hold_ids:
        return {}
    places = ", ".join(f"(:job_{place}, :round_{place})" for place in range(len(hold_ids)))
    values: dict[str, object] = {}
    for place, each in enumerate(hold_ids):
        values[f"job_{place}"], values[f"round_{place}"] = each
    found = yield from rows(_PHASES.format(places), **values)
    return {
        HoldId(JobId(job_id), number): None if phase == "open" else Phase(phase)
        for job_id, number, phase in found
    }


def forget_events(before: float, limit: int) -> Work[int]:
    """Deletes old inbox entries. Settlements stay, so a very late repeat still changes nothing."""
    return len((yield from rows(_FORGET, before=before, limit=page(limit))))


def ended_jobs(phase: Phase, before: float, limit: int) -> Work[list[JobId]]:
    """The oldest first."""
    found = yield from rows(_ENDED, phase=phase.value, before=before, limit=page(limit))
    return [JobId(job_id) for (job_id,) in found]


def forget_jobs(job_ids: Sequence[JobId], before: float) -> Work[int]:
    """Deletes jobs that ended before `before`, unless the account is frozen. Ledger and rounds stay."""
    assert len(job_ids) <= MAX_PAGE, "at most one page"
    forgotten, is_frozen = 0, dict[str, bool]()
    for job_id in job_ids:
        found = yield from row("SELECT tenant FROM @jobs WHERE job_id = :job_id", job_id=job_id)
        if found is None:
            continue
        (tenant,) = found
        if tenant not in is_frozen:
            try:
                yield from tenant_rows.check_open(tenant)
                is_frozen[tenant] = False
            except AccountFrozen:
                # Its rows are being moved and must not change now.
                is_frozen[tenant] = True
        if not is_frozen[tenant]:
            gone = len((yield from rows(_FORGET_JOB, job_id=job_id, before=before)))
            if gone:
                yield from rows("DELETE FROM @failures WHERE job_id = :job_id", job_id=job_id)
            forgotten += gone
    return forgotten


# records


def get(job_id: JobId) -> Work[Job | None]:
    found = yield from row(f"{_SELECT_JOB} WHERE job_id = :job_id", job_id=job_id)
    return None if found is None else _job(found)


def get_many(job_ids: Sequence[JobId]) -> Work[Mapping[JobId, Job]]:
    found = yield from rows_in(_SELECT_JOB, "job_id", job_ids)
    return {job.job_id: job for job in map(_job, found)}


def by_reference(tenant: TenantId, reference: str) -> Work[Job | None]:
    found = yield from row(
        f"{_SELECT_JOB} WHERE tenant = :tenant AND reference = :reference", tenant=tenant, reference=reference
    )
    return None if found is None else _job(found)


def listing(query: RecordQuery) -> Work[list[Job]]:
    """Job ids are in order of submission."""
    beyond, order = ("<", "DESC") if query.newest_first else (">", "ASC")
    conditions = ["1 = 1"]
    values: dict[str, object] = {"limit": page(query.limit)}
    for column, comparison, value in (
        ("tenant", "=", query.tenant),
        ("phase", "=", query.phase),
        ("job_id", beyond, query.after),
    ):
        if value is not None:
            conditions.append(f"{column} {comparison} :{column}")
            values[column] = str(value)
    found = yield from rows(
        f"{_SELECT_JOB} WHERE {' AND '.join(conditions)} ORDER BY job_id {order} LIMIT :limit", **values
    )
    return [_job(each) for each in found]


def runs(tenant: TenantId, after: int, limit: int) -> Work[list[RunEntry]]:
    """What ended rounds used, after that number."""
    found = yield from rows(_RUNS, tenant=tenant, after=after, limit=page(limit))
    return [RunEntry(HoldId(JobId(job_id), number), *rest) for job_id, number, *rest in found]


def _record(job: Job) -> Job:
    """Without payload and result, which have their own columns."""
    return msgspec.structs.replace(job, payload=_NO_PAYLOAD, result=None)


def _job(found: Row) -> Job:
    _, _, _, number, phase, record, payload, result = found
    return msgspec.structs.replace(
        _jobs.decode(record),
        round=number,
        phase=Phase(phase),
        payload=_payloads.decode(payload),
        result=None if result is None else _results.decode(result),
    )
