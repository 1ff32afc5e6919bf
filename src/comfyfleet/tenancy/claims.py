"""Who sees to a tenant that is on its way: one hub at a time, for as long as it says that it does.

A claim is a document with a number that grows each time somebody takes it up. The number is the fence in tenants'
databases, so one whose time was over without its noticing changes nothing there any more.
"""

from __future__ import annotations

import msgspec

from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId
from comfyfleet.ports import Clock, DocumentStore

COLLECTION = "tenant_claims"
CLAIM_S = 30.0


class _Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    fence: int
    until: float
    waits_for: str = ""


class Claim:
    def __init__(
        self, documents: DocumentStore, clock: Clock, tenant: TenantId, fence: int, version: int
    ) -> None:
        self._documents = documents
        self._clock = clock
        self._tenant = tenant
        self._version = version
        self._renew_at = clock.monotonic() + CLAIM_S / 3
        self._waits_for = ""
        self.fence = fence

    async def say(self, waits_for: str) -> None:
        """What is being done, for whoever waits for it; and kept with that."""
        self._waits_for = waits_for
        self._renew_at = float("-inf")
        await self.keep()

    async def keep(self) -> None:
        """Said again and again by whoever has it. Raises `Fault` if another has taken it up."""
        if self._clock.monotonic() >= self._renew_at:
            await self._put(self._clock.now() + CLAIM_S)
            self._renew_at = self._clock.monotonic() + CLAIM_S / 3

    async def give_back(self, waits_for: str = "") -> None:
        self._waits_for = waits_for
        await self._put(0.0)

    async def rest(self, seconds: float) -> None:
        """It is done, and nobody need do it again for so long."""
        await self._put(self._clock.now() + seconds)

    async def _put(self, until: float) -> None:
        body = msgspec.json.encode(_Claim(self.fence, until, self._waits_for))
        if not await self._documents.put(COLLECTION, self._tenant, body, version=self._version):
            raise lost(self._tenant)
        self._version += 1


async def claim(documents: DocumentStore, clock: Clock, tenant: TenantId) -> Claim | None:
    """None: another has it."""
    document, now = await documents.get(COLLECTION, tenant), clock.now()
    known = None if document is None else msgspec.json.decode(document.body, type=_Claim)
    if known is not None and now < known.until:
        return None
    # With the time: a tenant of the same name, set up after this document was removed, comes with a newer one too.
    fence = max(int(now * 1000), 0 if known is None else known.fence + 1)
    version = 0 if document is None else document.version
    body = msgspec.json.encode(_Claim(fence, now + CLAIM_S))
    if not await documents.put(COLLECTION, tenant, body, version=version):
        return None
    return Claim(documents, clock, tenant, fence, version + 1)


async def waits_for(documents: DocumentStore, tenant: TenantId) -> str | None:
    """What whoever sees to it has said last."""
    document = await documents.get(COLLECTION, tenant)
    known = None if document is None else msgspec.json.decode(document.body, type=_Claim)
    return None if known is None or not known.waits_for else known.waits_for


def lost(tenant: TenantId) -> Fault:
    return Fault(f"another hub has taken up tenant {tenant!r}; this one leaves it alone")
