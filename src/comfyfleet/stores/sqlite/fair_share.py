"""Tenants' shares and terms in the file. A share is written with the lease, end or job that changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.tenant import TenantShare, TenantTerms
from comfyfleet.stores.inprocess.fair_share import FairShareState
from comfyfleet.stores.inprocess.store import Area
from comfyfleet.stores.sqlite.writer import Batch

if TYPE_CHECKING:
    from comfyfleet.stores.sqlite.reader import DatabaseReader
    from comfyfleet.stores.sqlite.store import SqliteStore

_decode_terms = msgspec.msgpack.Decoder(TenantTerms).decode


class SqliteFairShare:
    """Uses the store's private members."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    @property
    def _shares(self) -> FairShareState:
        return self._store._state.fair_share

    async def put_terms(self, terms: TenantTerms) -> None:
        store = self._store
        blob = store._check(terms)
        jobs = [entry.dispatch for entry in store._state.entries.values()]
        self._shares.put_terms(terms, store._clock.now(), jobs)
        batch = store._writer.batch()
        batch.touch(Area.TENANTS, "UPDATE meta SET value = 1 WHERE name = 'is_fair'")
        batch.touch(Area.TENANTS, "INSERT OR REPLACE INTO terms VALUES (?, ?)", terms.tenant, blob)
        self.save_changes(batch)
        await store._writer.written(batch)

    async def remove_terms(self, tenant: TenantId) -> None:
        store = self._store
        store._check(tenant)
        self._shares.remove_terms(tenant, store._clock.now())
        batch = store._writer.batch()
        batch.touch(Area.TENANTS, "DELETE FROM terms WHERE tenant = ?", tenant)
        self.save_changes(batch)
        await store._writer.written(batch)

    async def terms(self) -> list[TenantTerms]:
        await self._store._wait(Area.TENANTS)
        return sorted(self._shares.terms.values(), key=lambda each: each.tenant)

    async def charge(self, tenant: TenantId, seconds: float) -> None:
        self._store._check(tenant)
        self._shares.advance(tenant, seconds)
        await self._store._commit(self.save_changes)

    async def get(self, tenant: TenantId) -> TenantShare:
        await self._store._wait(Area.TENANTS)
        return self._shares.get(tenant)

    async def next_hold_end(self) -> float | None:
        return self._shares.next_hold_end(self._store._clock.now())

    def save_changes(self, batch: Batch, job_id: JobId | None = None) -> None:
        """Writes the changed shares, and the charge of this job's lease."""
        state = self._shares
        changed, state.changed = state.changed, {}
        for tenant in changed:
            _note_share(batch, state.get(tenant))
        if not state.is_fair:
            return
        if job_id in state.charges:
            batch.touch(job_id, "INSERT OR REPLACE INTO charges VALUES (?, ?)", job_id, state.charges[job_id])
        elif job_id is not None:
            batch.touch(job_id, "DELETE FROM charges WHERE job_id = ?", job_id)


def _note_share(batch: Batch, share: TenantShare) -> None:
    batch.touch(
        Area.TENANTS,
        "INSERT OR REPLACE INTO tenants (tenant, virtual_time, credit, is_behind) VALUES (?, ?, ?, ?)",
        share.tenant,
        share.virtual_time,
        share.credit,
        int(share.is_behind),
    )


def load(state: FairShareState, disk: DatabaseReader, is_fair: bool) -> None:
    """Loads shares before jobs, which are counted as they are loaded."""
    state.is_fair = is_fair
    for tenant, virtual_time, credit, is_behind in disk.shares():
        state.import_share(TenantShare(TenantId(tenant), virtual_time, credit, is_behind=bool(is_behind)))
    state.terms = {terms.tenant: terms for terms in map(_decode_terms, disk.terms())}
    state.charges = disk.charges()
