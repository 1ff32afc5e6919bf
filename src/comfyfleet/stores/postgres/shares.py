"""Tenants' shares in PostgreSQL: their terms, what they are charged, who is out, who begins to wait.

Whoever leases, ends a lease or sets terms does so under one lock (`HOLD`), the first that its transaction takes: caps
are exact, and two who charge two tenants never wait for each other. A transaction that finds out too late that tenants
have terms by now raises `NowFair` and is run again with the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from comfyfleet.model.dispatch import AttemptEnd, Dispatch, LeaseOffer
from comfyfleet.model.ids import TenantId
from comfyfleet.model.terms import Share, TenantTerms, start_among
from comfyfleet.stores.postgres import rows
from comfyfleet.stores.postgres.hints import Hints
from comfyfleet.stores.postgres.pool import Pool, Step

HOLD = "SELECT pg_advisory_xact_lock(7238261)"

IS_FAIR = "SELECT is_fair FROM comfyfleet.state"

# How many wait is asked of the lanes: a counter would make all enqueues of a tenant queue up for its row.
_WAITING = (
    "FROM comfyfleet.lanes l JOIN comfyfleet.dispatches d ON d.lane_id = l.lane_id WHERE l.tenant = t.tenant"
)

_SHARE = """
SELECT t.tenant, t.virtual_time, t.credit, t.leased, t.is_behind, t.has_terms, t.weight, t.max_leased, t.held_until
"""

_ALL = f"{_SHARE}, EXISTS (SELECT {_WAITING})::integer FROM comfyfleet.tenants t"

_ONE = f"{_SHARE}, EXISTS (SELECT {_WAITING})::integer FROM comfyfleet.tenants t WHERE t.tenant = %s FOR UPDATE OF t"

_COUNTED = (
    f"{_SHARE}, (SELECT count(*) {_WAITING}), state.is_fair FROM comfyfleet.tenants t, comfyfleet.state"
)

_IS_OPEN = f"""
SELECT EXISTS (SELECT {_WAITING})
    OR EXISTS (SELECT FROM comfyfleet.tenants s WHERE s.tenant = t.tenant AND s.leased > 0)
FROM (VALUES (%s)) AS t (tenant)
"""

_SAVE = """
INSERT INTO comfyfleet.tenants (tenant, virtual_time, credit, leased, is_behind) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (tenant) DO UPDATE SET virtual_time = excluded.virtual_time, credit = excluded.credit,
    leased = excluded.leased, is_behind = excluded.is_behind
"""

_START = """
INSERT INTO comfyfleet.tenants AS t (tenant, virtual_time) VALUES (%s, %s)
ON CONFLICT (tenant) DO UPDATE SET virtual_time = greatest(t.virtual_time, excluded.virtual_time)
"""

_CHARGE = """
INSERT INTO comfyfleet.tenants AS t (tenant, virtual_time) VALUES (%s, %s)
ON CONFLICT (tenant) DO UPDATE SET virtual_time = t.virtual_time + excluded.virtual_time
"""

# Whoever is leasing now has not counted it: it is waited for, and what comes later sees that tenants have terms.
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


class NowFair(Exception):
    """Tenants have terms by now: leases are charged, which this transaction was not prepared for."""


def _share(row: Any) -> Share:
    tenant, virtual_time, credit, leased, is_behind, has_terms, weight, max_leased, held_until, waiting = row[
        :10
    ]
    terms = TenantTerms(tenant, weight, max_leased, held_until) if has_terms else None
    return Share(TenantId(tenant), virtual_time, credit, waiting, leased, is_behind, terms)


async def _one(step: Step, tenant: TenantId) -> Share:
    row = await step.row(_ONE, (tenant,))
    return Share(tenant) if row is None else _share(row)


async def _start(step: Step, tenant: TenantId) -> float:
    found = [_share(row) for row in await step.rows(_ALL)]
    greatest = max((share.virtual_time for share in found), default=0.0)
    return start_among((share for share in found if share.tenant != tenant), greatest)


def _save(step: Step, share: Share) -> None:
    step.add(_SAVE, (share.tenant, share.virtual_time, share.credit, share.leased, share.is_behind))


async def begin_to_wait(step: Step, tenant: TenantId) -> None:
    """Before a job enters its lane. Nothing happens to one that has others waiting or running."""
    row = await step.row(_IS_OPEN, (tenant,))
    if row is not None and not row[0]:
        step.add(_START, (tenant, await _start(step, tenant)))


async def lease(step: Step, dispatch: Dispatch, offer: LeaseOffer, now: float) -> bool:
    """Under the lock, before the lease is granted. False: its tenant may have nothing now."""
    share = await _one(step, dispatch.tenant)
    if share.is_out(now):
        return False
    if share.is_behind:
        share = share.started(await _start(step, dispatch.tenant))
    by = offer.charge_s / share.weight
    share = msgspec.structs.replace(share.charged(by), leased=share.leased + 1)
    _save(step, msgspec.structs.replace(share, is_behind=share.is_at_cap))
    step.add("UPDATE comfyfleet.dispatches SET charge = %s WHERE job_id = %s", (by, dispatch.job_id))
    return True


async def end(step: Step, dispatch: Dispatch, attempt_end: AttemptEnd, now: float) -> bool:
    """Under the lock, before the lease ends. True: of its tenant something waits that may be leased again."""
    row = await step.row("SELECT charge FROM comfyfleet.dispatches WHERE job_id = %s", (dispatch.job_id,))
    charge, used_s = None if row is None else row[0], attempt_end.used_s
    share = await _one(step, dispatch.tenant)
    was_at_cap = share.is_at_cap
    if charge is not None and used_s is not None:
        share = share.charged(used_s / share.weight - charge)
    share = msgspec.structs.replace(share, leased=share.leased - 1)
    is_out = share.is_out(now)
    _save(step, msgspec.structs.replace(share, is_behind=share.is_behind or is_out))
    step.add("UPDATE comfyfleet.dispatches SET charge = NULL WHERE job_id = %s", (dispatch.job_id,))
    return was_at_cap and not is_out and share.waiting > 0


class PostgresShares:
    def __init__(self, pool: Pool, now: Callable[[], float | None], hints: Hints) -> None:
        self._pool = pool
        self._now = now
        """None: time is the server's."""
        self._hints = hints

    async def put_terms(self, terms: TenantTerms) -> None:
        async def put(step: Step) -> None:
            _, ((is_fair,),) = await step.ask((HOLD, ()), (IS_FAIR, ()))
            if not is_fair:
                for statement in _BEGIN:
                    step.add(statement)
            values = (terms.tenant, terms.weight, terms.max_leased, terms.held_until)
            step.add(_PUT_TERMS, values)
            now = (await step.rows(*rows.moment(self._now())))[0][0]
            share = await _one(step, terms.tenant)
            if share.is_out(now):
                _save(step, msgspec.structs.replace(share, is_behind=True))

        await self._pool.transact(put)
        self._hints.tell_all()

    async def remove_terms(self, tenant: TenantId) -> None:
        async def remove(step: Step) -> None:
            step.add(HOLD)
            step.add(_REMOVE_TERMS, (tenant,))

        await self._pool.transact(remove)
        self._hints.tell_all()

    async def terms(self) -> list[TenantTerms]:
        async def read(step: Step) -> list[TenantTerms]:
            found = await step.rows(f"{_ALL} WHERE t.has_terms ORDER BY t.tenant")
            return [terms for row in found if (terms := _share(row).terms) is not None]

        return await self._pool.read(read)

    async def charge(self, tenant: TenantId, seconds: float) -> None:
        assert seconds >= 0, "virtual time never falls; an overcharge is deducted from the next charge"

        async def charge(step: Step) -> None:
            step.add(_CHARGE, (tenant, seconds))

        await self._pool.transact(charge)

    async def of(self, tenant: TenantId) -> Share:
        async def read(step: Step) -> Share:
            row = await step.row(f"{_COUNTED} WHERE t.tenant = %s", (tenant,))
            if row is None:
                return Share(tenant)
            return _share(row) if row[10] else Share(tenant, row[1])

        return await self._pool.read(read)

    async def next_hold_end(self) -> float | None:
        async def read(step: Step) -> float | None:
            (now,) = (await step.rows(*rows.moment(self._now())))[0]
            row = await step.row(
                "SELECT min(held_until) FROM comfyfleet.tenants WHERE held_until > %s", (now,)
            )
            return None if row is None else row[0]

        return await self._pool.read(read)
