"""Claims: one hub at a time works on a tenant that is being moved, deleted or reconciled.

A claim is a document with a time limit and a number that grows with each new owner. Tenant databases use the
number as a fencing token, so a hub whose claim has expired cannot write there any more.
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

    async def report_step(self, waits_for: str) -> None:
        """Renews the claim and publishes the current step."""
        self._waits_for = waits_for
        self._renew_at = float("-inf")
        await self.renew_if_due()

    async def renew_if_due(self) -> None:
        """Renews the claim when that is due. Raises `Fault` if another hub has taken it."""
        if self._clock.monotonic() >= self._renew_at:
            await self._put(self._clock.now() + CLAIM_S)
            self._renew_at = self._clock.monotonic() + CLAIM_S / 3

    async def release(self, waits_for: str = "") -> None:
        self._waits_for = waits_for
        await self._put(0.0)

    async def rest(self, seconds: float) -> None:
        """Marks the work as done: no hub claims it for this long."""
        await self._put(self._clock.now() + seconds)

    async def _put(self, until: float) -> None:
        body = msgspec.json.encode(_Claim(self.fence, until, self._waits_for))
        if not await self._documents.put(COLLECTION, self._tenant, body, version=self._version):
            raise lost(self._tenant)
        self._version += 1


async def claim(documents: DocumentStore, clock: Clock, tenant: TenantId) -> Claim | None:
    """None: another hub has the claim."""
    document, now = await documents.get(COLLECTION, tenant), clock.now()
    known = None if document is None else msgspec.json.decode(document.body, type=_Claim)
    if known is not None and now < known.until:
        return None
    # The fence includes the time, so it also grows if this document was removed and the tenant created again.
    fence = max(int(now * 1000), 0 if known is None else known.fence + 1)
    version = 0 if document is None else document.version
    body = msgspec.json.encode(_Claim(fence, now + CLAIM_S))
    if not await documents.put(COLLECTION, tenant, body, version=version):
        return None
    return Claim(documents, clock, tenant, fence, version + 1)


async def waits_for(documents: DocumentStore, tenant: TenantId) -> str | None:
    """The last step that the owner of the claim published."""
    document = await documents.get(COLLECTION, tenant)
    return None if document is None else msgspec.json.decode(document.body, type=_Claim).waits_for or None


def lost(tenant: TenantId) -> Fault:
    return Fault(f"another hub has taken over tenant {tenant!r}; this hub stops working on it")
