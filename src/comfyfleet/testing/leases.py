"""Leases as an engine does for one idle slot: a look at the queue, then a lease of the first job that it shows."""

from __future__ import annotations

from comfyfleet.model.dispatch import LeaseOffer, WriteResult
from comfyfleet.model.ids import JobId
from comfyfleet.ports import Peek, Store


async def lease_next(store: Store, offer: LeaseOffer) -> WriteResult | None:
    """Leases the first job that the worker may take. Other callers may take a job between the look and the lease;
    then this one goes on to the next. None: nothing waits that it has not tried."""
    tried: set[JobId] = set()
    while True:
        seen = await store.peek(Peek(offer.profile, offer.worker_id, len(tried) + 1, 0, 0.0))
        untried = [each.job_id for each in seen if each.job_id not in tried]
        if not untried:
            return None
        for job_id in untried:
            if (leased := await store.lease(job_id, offer)) is not None:
                return leased
            tried.add(job_id)
