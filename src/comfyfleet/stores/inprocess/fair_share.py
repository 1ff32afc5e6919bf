"""Tenants' shares in an in-process store: terms, charges, and who is excluded.

Counting and charging start when the first tenant gets terms, and never stop: a virtual time that stood still
would act as a priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.tenant import TenantShare, TenantTerms, start_among
from comfyfleet.stores.inprocess.lane_index import LaneIndex


class FairShareState:
    def __init__(self, index: LaneIndex) -> None:
        self.is_fair = False
        """Whether any tenant has, or has had, terms."""
        self.terms: dict[TenantId, TenantTerms] = {}
        self.credits: dict[TenantId, float] = {}
        self.behind: set[TenantId] = set()
        self.charges: dict[JobId, float] = {}
        """The virtual time that each lease was charged."""
        self.changed: dict[TenantId, None] = {}
        """Tenants whose share changed since it was last written."""
        self.on_freed: Callable[[], None] = lambda: None
        """Called when a waiting job may be leased again."""
        self._index = index
        self._waiting: Counter[TenantId] = Counter()
        self._leased: Counter[TenantId] = Counter()
        self._hold_end = float("inf")

    # terms

    def put_terms(self, terms: TenantTerms, now: float, jobs: Iterable[Dispatch]) -> None:
        if not self.is_fair:
            self.is_fair = True
            for dispatch in jobs:
                self.count_waiting(dispatch.tenant, int(dispatch.stands_in_lane))
                _add(self._leased, dispatch.tenant, int(dispatch.lease is not None))
        self.terms[terms.tenant] = terms
        self.resume(now)

    def remove_terms(self, tenant: TenantId, now: float) -> None:
        if self.terms.pop(tenant, None) is not None:
            self._update_exclusion(tenant, now)

    def end_holds(self, now: float) -> None:
        """Called before each look: an expired hold excludes nobody."""
        if now >= self._hold_end:
            self.resume(now)

    def next_hold_end(self, now: float) -> float | None:
        ends = (terms.held_until for terms in self.terms.values())
        return min((end for end in ends if end is not None and end > now), default=None)

    def get(self, tenant: TenantId) -> TenantShare:
        return TenantShare(
            tenant,
            self._index.virtual_time(tenant),
            self.credits.get(tenant, 0.0),
            self._waiting[tenant],
            self._leased[tenant],
            tenant in self.behind,
            self.terms.get(tenant),
        )

    def weight(self, tenant: TenantId) -> float:
        """As shown by a candidate."""
        if not self.is_fair:
            return 0.0
        terms = self.terms.get(tenant)
        return 1.0 if terms is None else terms.weight

    def import_share(self, share: TenantShare) -> None:
        """Takes a share from elsewhere; its jobs are counted when they arrive."""
        self._index.advance(share.tenant, share.virtual_time)
        self.credits[share.tenant] = share.credit
        if share.is_behind:
            self.behind.add(share.tenant)

    def resume(self, now: float) -> None:
        """Excludes or readmits each tenant, after all jobs were counted."""
        for tenant in self.terms:
            self._update_exclusion(tenant, now)
        self._hold_end = self.next_hold_end(now) or float("inf")

    # jobs

    def is_open(self, tenant: TenantId) -> bool:
        return tenant in self._waiting or tenant in self._leased

    def begin_to_wait(self, tenant: TenantId) -> None:
        """For a tenant that had no open jobs."""
        self._set_share(self.get(tenant).started(self._start(tenant)))

    def count_waiting(self, tenant: TenantId, by: int) -> None:
        _add(self._waiting, tenant, by)

    def count_leased(self, tenant: TenantId, by: int, now: float) -> None:
        _add(self._leased, tenant, by)
        if tenant in self.terms:
            self._update_exclusion(tenant, now)

    def charge(self, job_id: JobId, tenant: TenantId, seconds: float) -> None:
        """At the start of a lease, before it is counted."""
        share = self.get(tenant)
        if share.is_behind:
            self.behind.discard(tenant)
            share = share.started(self._start(tenant))
        by = self.charges[job_id] = seconds / share.weight
        self._set_share(share.charged(by))

    def settle(self, job_id: JobId, tenant: TenantId, used_s: float | None) -> None:
        """At the end of a lease: corrects the charge by the time used."""
        charged = self.charges.pop(job_id, None)
        if charged is not None and used_s is not None:
            share = self.get(tenant)
            self._set_share(share.charged(used_s / share.weight - charged))

    def advance(self, tenant: TenantId, seconds: float) -> None:
        """Adds virtual time by hand."""
        self._index.charge(tenant, seconds)
        self.changed[tenant] = None

    def _start(self, tenant: TenantId) -> float:
        others = {*self._waiting, *self._leased} - {tenant}
        return start_among(map(self.get, others), self._index.greatest_virtual_time())

    def _set_share(self, share: TenantShare) -> None:
        self._index.advance(share.tenant, share.virtual_time)
        self.credits[share.tenant] = share.credit
        self.changed[share.tenant] = None

    def _update_exclusion(self, tenant: TenantId, now: float) -> None:
        """Excludes or readmits the tenant according to its terms and leases."""
        if self.get(tenant).is_excluded(now):
            self._index.hide_tenant(tenant)
            self.behind.add(tenant)
            self.changed[tenant] = None
        elif self._index.is_hidden(tenant):
            self._index.unhide_tenant(tenant)
            if tenant in self._waiting:
                self.on_freed()


def _add(counter: Counter[TenantId], tenant: TenantId, by: int) -> None:
    """Removes a count of zero."""
    counter[tenant] += by
    if not counter[tenant]:
        del counter[tenant]


class MemoryFairShare:
    def __init__(
        self, state: FairShareState, now: Callable[[], float], jobs: Callable[[], Iterable[Dispatch]]
    ) -> None:
        self._shares = state
        self._now = now
        self._jobs = jobs

    async def put_terms(self, terms: TenantTerms) -> None:
        self._shares.put_terms(terms, self._now(), self._jobs())

    async def remove_terms(self, tenant: TenantId) -> None:
        self._shares.remove_terms(tenant, self._now())

    async def terms(self) -> list[TenantTerms]:
        return sorted(self._shares.terms.values(), key=lambda each: each.tenant)

    async def charge(self, tenant: TenantId, seconds: float) -> None:
        self._shares.advance(tenant, seconds)

    async def get(self, tenant: TenantId) -> TenantShare:
        return self._shares.get(tenant)

    async def next_hold_end(self) -> float | None:
        return self._shares.next_hold_end(self._now())
