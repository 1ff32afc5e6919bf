"""A store as somebody else would write one, outside the package; and the same with one rule broken each.

Copied beside the example of docs/stores.md and run there, so it imports nothing of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from comfyfleet.model.dispatch import Dispatch, HeldBy, LeaseOffer, LeaseRef, Phase, Write, WriteResult
from comfyfleet.model.fact import Fact
from comfyfleet.model.ids import JobId
from comfyfleet.ports import LeaseState
from comfyfleet.stores.memory import MemoryStore


class MyStore(MemoryStore):
    """Keeps a list of what it was asked to write."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.journal: list[Write] = []

    async def write(self, write: Write) -> WriteResult | None:
        self.journal.append(write)
        return await super().write(write)


class ShortensLeases(MyStore):
    async def heartbeat(self, refs: Sequence[LeaseRef], ttl_s: float) -> list[LeaseState]:
        states = await super().heartbeat(refs, ttl_s)
        for state in states:
            entry = self._state.entries.get(state.ref.job_id)
            if state.is_alive and entry is not None and entry.dispatch.lease is not None:
                short = msgspec.structs.replace(entry.dispatch.lease, expires_at=self._clock.now() + ttl_s)
                entry.dispatch = msgspec.structs.replace(entry.dispatch, lease=short)
        return states


class BelievesAnyToken(MyStore):
    async def write(self, write: Write) -> WriteResult | None:
        found = await self.load(write.job_id)
        if isinstance(write.guard, HeldBy) and found is not None and found.lease is not None:
            true = msgspec.structs.replace(write.guard.ref, token=found.lease.token)
            write = msgspec.structs.replace(write, guard=HeldBy(true))
        return await super().write(write)


class LeasesWhilePaused(MyStore):
    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        was_paused, self._state.is_paused = self._state.is_paused, False
        try:
            return await super().lease(job_id, offer)
        finally:
            self._state.is_paused = was_paused


class CountsFactsFromZero(MyStore):
    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]:
        facts = await super().facts(job_id, after)
        return [msgspec.structs.replace(fact, number=fact.number - 1) for fact in facts]


class ForgetsPolls(MyStore):
    async def leased_by_poll(self, poll_id: object) -> Dispatch | None:
        return None


class PurgesWhatNobodySettled(MyStore):
    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        for dispatch in await self.unsettled(limit):
            self._forget(self._state.entries[dispatch.job_id])
        return await super().purge(phase, before, limit)
