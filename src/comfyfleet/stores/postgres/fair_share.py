"""Tenants' shares in PostgreSQL: terms, charges, and who is excluded.

Leasing and setting terms take one lock (`HOLD`), so leases follow exact virtual times and caps. Ending a
lease does not: it changes its tenant's row in one statement, and can only let the tenant have more. All take
locks in one order: the job, `HOLD`, tenants, lanes, counters. Under `HOLD`, locked jobs are skipped. A
transaction that finds too late that tenants have terms raises `FairShareBegan`, and runs again with the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from comfyfleet.model.dispatch import AttemptEnd, LeaseOffer, WriteResult
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import TenantShare, TenantTerms, start_among
from comfyfleet.stores.postgres import rows
from comfyfleet.stores.postgres.connections import ConnectionPool, Later, Row, SqlStep
from comfyfleet.stores.postgres.notifications import Notifications

HOLD = "SELECT pg_advisory_xact_lock(7238261)"

IS_FAIR = "SELECT is_fair FROM comfyfleet.state"

# Waiting jobs are counted in the lanes: a counter would serialize all enqueues of a tenant on its row.
_WAITING = (
    "FROM comfyfleet.lanes l JOIN comfyfleet.dispatches d ON d.lane_id = l.lane_id WHERE l.tenant = t.tenant"
)

_SHARE = """
SELECT t.tenant, t.virtual_time, t.credit, t.leased, t.is_behind, t.has_terms, t.weight, t.max_leased, t.held_until
"""

_ALL = f"{_SHARE}, EXISTS (SELECT {_WAITING})::integer FROM comfyfleet.tenants t"

_ONE = f"{_SHARE}, 1 FROM comfyfleet.tenants t WHERE t.tenant = %s"

_COUNTED = (
    f"{_SHARE}, (SELECT count(*) {_WAITING}), state.is_fair FROM comfyfleet.tenants t, comfyfleet.state"
)

_IS_OPEN = f"""
SELECT EXISTS (SELECT {_WAITING})
    OR EXISTS (SELECT FROM comfyfleet.tenants s WHERE s.tenant = t.tenant AND s.leased > 0)
FROM (VALUES (%s)) AS t (tenant)
"""

_WAITS = f"SELECT EXISTS (SELECT {_WAITING}) FROM (VALUES (%s)) AS t (tenant)"

# `TenantShare.started`, `charged` and `is_at_cap` in SQL: the row may have changed since it was read.
_LEASED = """
INSERT INTO comfyfleet.tenants AS t (tenant, virtual_time, leased) VALUES (%(tenant)s, %(by)s, 1)
ON CONFLICT (tenant) DO UPDATE SET
    virtual_time = greatest(t.virtual_time, %(start)s::float8) + greatest(0, %(by)s - t.credit),
    credit = greatest(0, t.credit - %(by)s), leased = t.leased + 1,
    is_behind = t.max_leased IS NOT NULL AND t.leased + 1 >= t.max_leased
"""

# The same for the end of a lease. Without estimate or time used, nothing is corrected.
_BY = "coalesce(%(used_s)s::float8 / t.weight - %(charge)s::float8, 0)"
_ENDED = f"""
UPDATE comfyfleet.tenants t SET virtual_time = t.virtual_time + greatest(0, {_BY} - t.credit),
    credit = greatest(0, t.credit - {_BY}), leased = t.leased - 1,
    is_behind = t.is_behind OR (t.max_leased IS NOT NULL AND t.leased - 1 >= t.max_leased)
        OR (t.held_until IS NOT NULL AND t.held_until > %(now)s)
WHERE t.tenant = %(tenant)s
RETURNING t.leased + 1 = t.max_leased AND (t.held_until IS NULL OR t.held_until <= %(now)s)
"""

_START = """
INSERT INTO comfyfleet.tenants AS t (tenant, virtual_time) VALUES (%s, %s)
ON CONFLICT (tenant) DO UPDATE SET virtual_time = greatest(t.virtual_time, excluded.virtual_time)
"""

_CHARGE = """
INSERT INTO comfyfleet.tenants AS t (tenant, virtual_time) VALUES (%s, %s)
ON CONFLICT (tenant) DO UPDATE SET virtual_time = t.virtual_time + excluded.virtual_time
"""

# Waits for leases in flight, which are not counted; later ones see that tenants have terms.
_BEGIN = (
    "LOCK TABLE comfyfleet.dispatches IN EXCLUSIVE MODE",
    "UPDATE comfyfleet.state SET is_fair = true",
    """
    INSERT INTO comfyfleet.tenants (tenant, virtual_time)
    SELECT DISTINCT j.tenant, 0::float8 FROM comfyfleet.dispatches d JOIN comfyfleet.jobs j USING (job_id)
    ON CONFLICT DO NOTHING
    """,
    """
    UPDATE comfyfleet.tenants t SET leased = (
        SELECT count(*) FROM comfyfleet.dispatches d JOIN comfyfleet.jobs j USING (job_id)
        WHERE d.phase = 'leased' AND j.tenant = t.tenant
    )
    """,
)

_PUT_TERMS = """
INSERT INTO comfyfleet.tenants (tenant, virtual_time, has_terms, weight, max_leased, held_until)
VALUES (%s, 0, true, %s, %s, %s)
ON CONFLICT (tenant) DO UPDATE SET has_terms = true, weight = excluded.weight, max_leased = excluded.max_leased,
    held_until = excluded.held_until
"""

_REMOVE_TERMS = """
UPDATE comfyfleet.tenants SET has_terms = false, weight = 1, max_leased = NULL, held_until = NULL WHERE tenant = %s
"""


class FairShareBegan(Exception):
    """Tenants have terms now: leases are charged, for which this transaction has no lock."""


def _share(row: Row) -> TenantShare:
    tenant, virtual_time, credit, leased, is_behind, has_terms, weight, max_leased, held_until, waiting = row[
        :10
    ]
    terms = TenantTerms(tenant, weight, max_leased, held_until) if has_terms else None
    return TenantShare(TenantId(tenant), virtual_time, credit, waiting, leased, is_behind, terms)


async def _everyone(step: SqlStep) -> dict[TenantId, TenantShare]:
    found = map(_share, await step.rows(_ALL))
    return {share.tenant: share for share in found}


def _start(everyone: Mapping[TenantId, TenantShare], tenant: TenantId) -> float:
    greatest = max((share.virtual_time for share in everyone.values()), default=0.0)
    return start_among((share for share in everyone.values() if share.tenant != tenant), greatest)


async def begin_to_wait(step: SqlStep, tenant: TenantId) -> None:
    """Called before a job enters its lane. Changes nothing for a tenant with open jobs."""
    row = await step.row(_IS_OPEN, (tenant,))
    if row is not None and not row[0]:
        step.add(_START, (tenant, _start(await _everyone(step), tenant)))


async def lease(
    step: SqlStep, tenant: TenantId, offer: LeaseOffer, test_now: float | None
) -> tuple[float, float] | None:
    """Takes the lock. Returns the time under it and the charge. None: the tenant is excluded now."""
    _, ((now,),), found = await step.ask((HOLD, ()), rows.moment(test_now), (_ONE, (tenant,)))
    share = _share(found[0]) if found else TenantShare(tenant, waiting=1)
    if share.is_excluded(now):
        return None
    # A tenant that was excluded starts again among those that wait.
    start = _start(await _everyone(step), tenant) if share.is_behind else None
    by = offer.charge_s / share.weight
    step.add(_LEASED, {"tenant": tenant, "by": by, "start": start})
    return now, by


def end(step: SqlStep, opened: rows.LockedJob, attempt_end: AttemptEnd) -> Later:
    """At the end of a lease. Locks only its tenant's row, so it waits for no other tenant. The answer is one
    row: true if the tenant was at its cap and is readmitted.
    """
    values = {
        "tenant": opened.held.dispatch.tenant,
        "used_s": attempt_end.used_s,
        "charge": opened.charge,
        "now": opened.now,
    }
    return step.add_question(_ENDED, values)


class PostgresFairShare:
    def __init__(self, pool: ConnectionPool, now: Callable[[], float | None], hints: Notifications) -> None:
        self._pool = pool
        self._now = now
        """None: the server's time."""
        self._hints = hints

    async def put_terms(self, terms: TenantTerms) -> None:
        async def put(step: SqlStep) -> None:
            _, ((is_fair,),) = await step.ask((HOLD, ()), (IS_FAIR, ()))
            if not is_fair:
                for statement in _BEGIN:
                    step.add(statement)
            values = (terms.tenant, terms.weight, terms.max_leased, terms.held_until)
            step.add(_PUT_TERMS, values)
            now = (await step.rows(*rows.moment(self._now())))[0][0]
            found = await step.rows(_ONE, (terms.tenant,))
            if _share(found[0]).is_excluded(now):
                step.add("UPDATE comfyfleet.tenants SET is_behind = true WHERE tenant = %s", (terms.tenant,))

        await self._pool.transact(put)
        self._hints.notify_all()

    async def remove_terms(self, tenant: TenantId) -> None:
        await self._pool.execute((HOLD, ()), (_REMOVE_TERMS, (tenant,)))
        self._hints.notify_all()

    async def terms(self) -> list[TenantTerms]:
        found = await self._pool.fetch(f"{_ALL} WHERE t.has_terms ORDER BY t.tenant")
        return [terms for row in found if (terms := _share(row).terms) is not None]

    async def charge(self, tenant: TenantId, seconds: float) -> None:
        assert seconds >= 0, "virtual time never falls; an overcharge is deducted from the next charge"
        await self._pool.execute((_CHARGE, (tenant, seconds)))

    async def get(self, tenant: TenantId) -> TenantShare:
        found = await self._pool.fetch(f"{_COUNTED} WHERE t.tenant = %s", (tenant,))
        if not found:
            return TenantShare(tenant)
        return _share(found[0]) if found[0][10] else TenantShare(tenant, found[0][1])

    async def notify_of(self, written: WriteResult | None, freed: Later | None) -> None:
        """After a commit: hints at jobs that may be leased now."""
        if written is None:
            return
        if freed is not None and await self._may_take_more(written.dispatch.tenant, freed):
            self._hints.notify_all()
        elif written.dispatch.stands_in_lane:
            self._hints.notify()

    async def _may_take_more(self, tenant: TenantId, freed: Later) -> bool:
        """Asks what waits now: a later enqueue sends its own hint."""
        if freed.rows != [(True,)]:
            return False
        try:
            found = await self._pool.fetch(_WAITS, (tenant,))
        except Fault:
            # The write stands. A needless hint costs one look.
            return True
        return bool(found[0][0])

    async def next_hold_end(self) -> float | None:
        async def read(step: SqlStep) -> float | None:
            (now,) = (await step.rows(*rows.moment(self._now())))[0]
            row = await step.row(
                "SELECT min(held_until) FROM comfyfleet.tenants WHERE held_until > %s", (now,)
            )
            return None if row is None else row[0]

        return await self._pool.read(read)
