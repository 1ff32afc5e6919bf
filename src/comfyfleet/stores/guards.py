"""Guards, leases and lease extensions for stores that handle dispatches in Python: pure functions of values.

It also decides how long an ended dispatch with a tenant database is kept.
"""

from __future__ import annotations

import hmac
from typing import Any

import msgspec

from comfyfleet.model.dispatch import (
    TOMBSTONE_S,
    AtRevision,
    Attempt,
    Dispatch,
    Lease,
    LeaseOffer,
    LeaseRef,
    Phase,
    Write,
)
from comfyfleet.model.fact import Fact, FactKind

# Reading a module's name is several times faster than an enum lookup.
_LEASED, _FACT = Phase.LEASED, FactKind.LEASED


def holds(dispatch: Dispatch, write: Write) -> bool:
    guard = write.guard
    return (
        dispatch.revision == guard.revision
        if isinstance(guard, AtRevision)
        else is_leased_as(dispatch, guard.ref)
    )


def is_leased_as(dispatch: Dispatch, ref: LeaseRef) -> bool:
    """Whether the dispatch is leased under exactly this lease. The sweep, not this, compares `expires_at` with now."""
    lease = dispatch.lease
    return (
        lease is not None
        and dispatch.round == ref.round
        and lease.number == ref.number
        and lease.epoch == ref.epoch
        # As bytes: `compare_digest` rejects text beyond ASCII, and callers may send anything.
        and hmac.compare_digest(lease.token.encode(), ref.token.encode(errors="replace"))
    )


def granted(
    before: Dispatch, offer: LeaseOffer, epoch: int, now: float, fact_count: int
) -> tuple[Dispatch, Lease, Attempt, Fact]:
    """The dispatch under its new lease, the new attempt, and the fact about it."""
    number = before.lease_number + 1
    lease = Lease(
        offer.worker_id,
        number,
        epoch,
        offer.token,
        offer.poll_id,
        now,
        now + offer.acknowledge_s,
        run_s=offer.run_s,
        load_s=offer.load_s,
    )
    after = msgspec.structs.replace(
        before,
        phase=_LEASED,
        lease=lease,
        lease_number=number,
        attempts=before.attempts + 1,
        revision=before.revision + 1,
    )
    attempt = Attempt(after.lease_ref().attempt_id, offer.worker_id, number, after.round, now)
    data: dict[str, Any] = {"worker_id": offer.worker_id, "lease": number, "attempt": after.attempts}
    return after, lease, attempt, Fact(after.job_id, fact_count + 1, _FACT, now, after.round, data)


def extended(dispatch: Dispatch, now: float, ttl_s: float) -> Dispatch:
    """Never shortens a lease: two heartbeats can arrive in the wrong order."""
    assert dispatch.lease is not None, "only a lease that is held is extended"
    lease = msgspec.structs.replace(
        dispatch.lease, expires_at=max(dispatch.lease.expires_at, now + ttl_s), is_acknowledged=True
    )
    return msgspec.structs.replace(dispatch, lease=lease, revision=dispatch.revision + 1)


def settled_cutoff(before: float, now: float) -> float:
    """A dispatch with a tenant database may be purged if it was settled (its last write) before this."""
    return min(before, now - TOMBSTONE_S)


def may_purge(dispatch: Dispatch, ended_at: float, before: float, now: float) -> bool:
    if dispatch.has_tenant_database:
        return dispatch.settled_at is not None and ended_at < settled_cutoff(before, now)
    return ended_at < before
