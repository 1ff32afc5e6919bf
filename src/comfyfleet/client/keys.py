"""The part of `FleetClient` that is about keys, enrolment and the audit log."""

from __future__ import annotations

from typing import Literal

from comfyfleet.client.link import Link
from comfyfleet.model.access import Role
from comfyfleet.wire import keys as wire
from comfyfleet.wire import worker as worker_bodies


class KeyCalls:
    _link: Link

    async def create_key(
        self,
        role: Role | str,
        *,
        name: str = "",
        tenant: str | None = None,
        worker_id: str | None = None,
        expires_in_s: float | None = None,
    ) -> wire.KeyMade:
        """The only time that the key is told."""
        body = wire.KeyBody(Role(role), name, tenant, worker_id, expires_in_s)
        return await self._link.ask("create_key", wire.KeyMade, body=body)

    async def keys(self, cursor: str | None = None, limit: int = 100) -> wire.KeyList:
        return await self._link.ask("list_keys", wire.KeyList, query={"cursor": cursor, "limit": limit})

    async def audit(
        self,
        kind: Literal["operations", "jobs"] = "operations",
        *,
        since: float | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.AuditPage:
        query = {"kind": kind, "since": since, "cursor": cursor, "limit": limit}
        return await self._link.ask("list_audit", wire.AuditPage, query=query)

    async def rotate_key(self, key_id: str, overlap_s: float = 0.0) -> wire.KeyMade:
        body = wire.RotateBody(overlap_s)
        return await self._link.ask("rotate_key", wire.KeyMade, body=body, key_id=key_id)

    async def revoke_key(self, key_id: str) -> wire.KeyView:
        return await self._link.ask("revoke_key", wire.KeyView, key_id=key_id)

    async def invite(
        self,
        *,
        uses: int = 1,
        expires_in_s: float = 3600.0,
        worker_prefix: str = "",
        replace: bool = False,
    ) -> wire.EnrolmentMade:
        """A token with which so many workers fetch keys of their own. `replace`: also those that have one, which then
        ends."""
        body = wire.EnrolmentBody(uses, expires_in_s, worker_prefix, replace)
        return await self._link.ask("create_enrolment", wire.EnrolmentMade, body=body)

    async def invites(self, cursor: str | None = None, limit: int = 100) -> wire.EnrolmentList:
        """Enrolment tokens, without their secrets."""
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_enrolments", wire.EnrolmentList, query=query)

    async def uninvite(self, token_id: str) -> None:
        """The token is good for nobody any more; keys that it gave stay."""
        await self._link.ask("revoke_enrolment", type(None), token_id=token_id)

    async def enrol(self, token: str, worker_id: str) -> wire.KeyMade:
        """One use of the token for a key that is good for this worker alone."""
        body = worker_bodies.EnrolBody(token, worker_id)
        return await self._link.ask("worker_enrol", wire.KeyMade, body=body)
