"""Tenants' shares and terms as calls of the function library (`shares.lua`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import TenantShare, TenantTerms
from comfyfleet.stores.redis.client import Send
from comfyfleet.stores.redis.codec import as_list
from comfyfleet.stores.redis.dispatches import as_bytes


class _Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stored terms: JSON has no infinity."""

    tenant: TenantId
    weight: float = 1.0
    max_leased: int | None = None
    held_until: str | None = None


_kept = msgspec.json.Decoder(_Kept)


class RedisFairShare:
    def __init__(
        self,
        do: Callable[..., Awaitable[object]],
        send: Send,
        prefix: str,
        now: Callable[[], Awaitable[float]],
    ) -> None:
        self._do = do
        self._send = send
        self._prefix = prefix
        self._now = now

    async def put_terms(self, terms: TenantTerms) -> None:
        held = None if terms.held_until is None else repr(terms.held_until)
        kept = msgspec.json.encode(_Kept(terms.tenant, terms.weight, terms.max_leased, held))
        cap = "-" if terms.max_leased is None else terms.max_leased
        await self._do("put_terms", terms.tenant, kept, repr(terms.weight), cap, held or "-")

    async def remove_terms(self, tenant: TenantId) -> None:
        await self._do("put_terms", tenant)

    async def terms(self) -> list[TenantTerms]:
        found = as_list(await self._send("HVALS", f"{self._prefix}terms"))
        return sorted((_terms(text) for text in found), key=lambda each: each.tenant)

    async def charge(self, tenant: TenantId, seconds: float) -> None:
        await self._do("charge_tenant", tenant, repr(seconds))

    async def get(self, tenant: TenantId) -> TenantShare:
        kept = await self._send("HGET", f"{self._prefix}terms", tenant)
        text = await self._send("GET", f"{self._prefix}tenant:{tenant}")
        terms = None if kept is None else _terms(kept)
        if text is None:
            return TenantShare(tenant, terms=terms)
        virtual_time, *counted = as_bytes(text).split()
        if not counted:
            return TenantShare(tenant, float(virtual_time), terms=terms)
        credit, waiting, leased, is_behind = counted[:4]
        return TenantShare(
            tenant,
            float(virtual_time),
            float(credit),
            int(waiting),
            int(leased),
            is_behind == b"1",
            terms,
        )

    async def next_hold_end(self) -> float | None:
        now = await self._now()
        ends = [terms.held_until for terms in await self.terms()]
        return min((end for end in ends if end is not None and end > now), default=None)


def _terms(text: object) -> TenantTerms:
    kept = _kept.decode(as_bytes(text))
    held = None if kept.held_until is None else float(kept.held_until)
    return TenantTerms(kept.tenant, kept.weight, kept.max_leased, held)
