"""SQL of ledger reports (grants, receipts, usage) and of failure texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from comfyfleet.model.failure import FailureText
from comfyfleet.model.ids import JobId, TenantId, WorkerId
from comfyfleet.model.ledger import CreditGrant, HoldId, Outcome, Price, Receipt, UsageBy, UsageLine
from comfyfleet.stores.documents import pack
from comfyfleet.tenancy.database.executor import Row, Work, page, row, rows, rows_in
from comfyfleet.tenancy.database.ledger import GRANTS, read_grant
from comfyfleet.tenancy.database.rounds import check_open

_prices: msgspec.json.Decoder[Price] = msgspec.json.Decoder(Price)
_texts = msgspec.msgpack.Decoder(FailureText)

_RECEIPTS = """
SELECT r.job_id, r.round, r.phase, r.opened_at, h.amount, r.price, r.ended_at, s.outcome, s.consumed, s.note,
    u.worker_id, u.outputs, u.gpu_milliseconds, u.verified_by
FROM @rounds r JOIN @holds h ON h.job_id = r.job_id AND h.round = r.round
LEFT JOIN @settlements s ON s.job_id = r.job_id AND s.round = r.round
LEFT JOIN @runs u ON u.job_id = r.job_id AND u.round = r.round
WHERE r.job_id = :job_id AND r.tenant = :tenant ORDER BY r.round DESC LIMIT :limit
"""
_COLUMNS: dict[UsageBy, str] = {
    "tenant": "tenant",
    "workflow": "workflow_hash",
    "worker": "worker_id",
    # In whole milliseconds, because both databases divide integers alike.
    "day": "CAST(at * 1000 AS BIGINT) / 86400000",
}
_SUMS = """
count(*), sum(CASE WHEN phase = 'completed' THEN 1 ELSE 0 END), sum(outputs), sum(gpu_milliseconds), sum(consumed),
    sum(cost_micros)
"""


def grant_of(tenant: TenantId, grant_id: str) -> Work[CreditGrant | None]:
    found = yield from row(f"{GRANTS} AND grant_id = :grant_id", tenant=tenant, grant_id=grant_id)
    return None if found is None else read_grant(found)


def grants(tenant: TenantId, after: tuple[float, str] | None, limit: int) -> Work[list[CreditGrant]]:
    """Ordered by time and id."""
    at, grant_id = after or (-1.0, "")
    found = yield from rows(
        f"{GRANTS} AND (at > :at OR (at = :at AND grant_id > :grant_id)) ORDER BY at, grant_id LIMIT :limit",
        tenant=tenant,
        at=at,
        grant_id=grant_id,
        limit=page(limit),
    )
    return [read_grant(each) for each in found]


def receipts(tenant: TenantId, job_id: JobId, limit: int) -> Work[list[Receipt]]:
    """The newest rounds of a job, the oldest of them first."""
    found = yield from rows(_RECEIPTS, tenant=tenant, job_id=job_id, limit=page(limit))
    return [_receipt(each) for each in reversed(found)]


def usage(
    tenant: TenantId | None, since: float, until: float, by: Collection[UsageBy], limit: int
) -> Work[list[UsageLine]]:
    """Sums over the rounds that ended in that time; `tenant` None: of all tenants."""
    condition, values = "", dict[str, object](since=since, until=until, limit=limit)
    if tenant is not None:
        condition, values["tenant"] = " AND tenant = :tenant", tenant
    columns = [column if name in by else "NULL" for name, column in _COLUMNS.items()]
    places = [str(place) for place, name in enumerate(_COLUMNS, 1) if name in by]
    grouped = (
        f"GROUP BY {', '.join(places)} ORDER BY {', '.join(places)}" if places else "HAVING count(*) > 0"
    )
    found = yield from rows(
        f"SELECT {', '.join(columns)}, {_SUMS} FROM @runs WHERE at >= :since AND at < :until{condition} "
        f"{grouped} LIMIT :limit",
        **values,
    )
    return [_usage(each) for each in found]


def _usage(found: Row) -> UsageLine:
    tenant, workflow, worker, day, count, completed, outputs, milliseconds, consumed, micros = found
    return UsageLine(
        tenant,
        workflow,
        worker,
        day,
        count,
        int(completed),
        int(outputs),
        int(milliseconds),
        int(consumed),
        None if micros is None else int(micros),
    )


def _receipt(found: Row) -> Receipt:
    job_id, number, phase, opened_at, held, price, ended_at, outcome, consumed, note, worker_id, *used = found
    return Receipt(
        HoldId(JobId(job_id), number),
        phase,
        opened_at,
        held,
        None if price is None else _prices.decode(price),
        ended_at,
        None if outcome is None else Outcome(outcome),
        consumed or 0,
        note or "",
        None if worker_id is None else WorkerId(worker_id),
        used[0] or 0,
        used[1] or 0,
        used[2] or "",
    )


_KEEP = """
INSERT INTO @failures (job_id, round, attempt_id, failure, at)
SELECT job_id, round, :attempt_id, :failure, :at FROM @rounds
WHERE job_id = :job_id AND round = :round AND phase = 'open'
ON CONFLICT (job_id, round, attempt_id) DO UPDATE SET failure = excluded.failure, at = excluded.at RETURNING job_id
"""


def save_failure(hold_id: HoldId, attempt_id: str, text: FailureText, at: float) -> Work[bool]:
    """Call this before reporting the failure to the central store. False: the round is not open."""
    yield from check_open(hold_id)
    values = {**hold_id._asdict(), "attempt_id": attempt_id, "failure": pack(text), "at": at}
    return (yield from row(_KEEP, **values)) is not None


def failures_of(job_ids: Sequence[JobId]) -> Work[Mapping[str, FailureText]]:
    """By attempt id, of all rounds."""
    found = yield from rows_in("SELECT attempt_id, failure FROM @failures", "job_id", job_ids)
    return {attempt_id: _texts.decode(failure) for attempt_id, failure in found}
