"""Handlers for administrators: API keys, enrolment tokens for workers, and the audit log."""

from __future__ import annotations

from comfyfleet.hub.audit.log import AuditLog
from comfyfleet.hub.http.credentials import Authenticator, WorkersByKey
from comfyfleet.hub.http.limits import ConnectionLimits
from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.tenancy.keys import Keys
from comfyfleet.wire import bodies, worker
from comfyfleet.wire import keys as wire


class KeyHandlers:
    def __init__(
        self,
        keys: Keys,
        credentials: Authenticator,
        connection_limits: ConnectionLimits,
        audit: AuditLog,
        workers: WorkersByKey,
    ) -> None:
        self._keys = keys
        self._audit = audit
        self._credentials = credentials
        self._connection_limits = connection_limits
        self._workers = workers

    async def list_keys(self, call: HubRequest[bodies.PageQuery]) -> Reply:
        found = await self._keys.listing(call.data.cursor or "", call.data.limit)
        cursor = found[-1].key_id if len(found) == call.data.limit else None
        return Reply(200, wire.KeyList(tuple(map(wire.view, found)), cursor))

    async def create_key(self, call: HubRequest[wire.KeyBody]) -> Reply:
        body = call.data
        key, secret = await self._keys.create(
            body.role,
            name=body.name,
            tenant=None if body.tenant is None else TenantId(body.tenant),
            worker_id=None if body.worker_id is None else WorkerId(body.worker_id),
            expires_in_s=body.expires_in_s,
        )
        return Reply(201, wire.made(key, secret), created_id=key.key_id)

    async def revoke_key(self, call: HubRequest[None]) -> Reply:
        key = await self._keys.revoke(call.parameters["key_id"])
        await self._end(key.key_id, key.worker_id)
        return Reply(200, wire.view(key))

    async def _end(self, key_id: str, worker_id: WorkerId | None) -> None:
        """Ends the connections first, so that a worker cannot register again over one of them."""
        self._credentials.evict(key_id)
        self._connection_limits.end(key_id)
        await self._workers.end(key_id, worker_id)

    async def worker_rotate(self, call: HubRequest[wire.RotateBody]) -> Reply:
        return await self._rotate(call.caller.key_id, call.data.overlap_s)

    async def rotate_key(self, call: HubRequest[wire.RotateBody]) -> Reply:
        return await self._rotate(call.parameters["key_id"], call.data.overlap_s)

    async def _rotate(self, key_id: str, overlap_s: float) -> Reply:
        key, secret = await self._keys.rotate(key_id, overlap_s)
        self._credentials.evict(key.key_id)
        return Reply(200, wire.made(key, secret))

    async def list_enrolments(self, call: HubRequest[bodies.PageQuery]) -> Reply:
        found, now = await self._keys.invites(call.data.cursor or "", call.data.limit), self._keys.now()
        cursor = found[-1].token_id if len(found) == call.data.limit else None
        views = tuple(wire.enrolment_view(each, now) for each in found)
        return Reply(200, wire.EnrolmentList(views, cursor))

    async def create_enrolment(self, call: HubRequest[wire.EnrolmentBody]) -> Reply:
        body = call.data
        enrolment, token = await self._keys.invite(
            uses=body.uses,
            expires_in_s=body.expires_in_s,
            worker_prefix=body.worker_prefix,
            replaces=body.replace,
        )
        uses = enrolment.uses_left
        made = wire.CreatedEnrolment(
            token, enrolment.expires_at, uses, enrolment.token_id, enrolment.created_at, uses
        )
        return Reply(201, made, created_id=enrolment.token_id)

    async def revoke_enrolment(self, call: HubRequest[None]) -> Reply:
        await self._keys.uninvite(call.parameters["token_id"])
        return Reply(204)

    async def worker_enrol(self, call: HubRequest[worker.EnrolBody]) -> Reply:
        key, secret, ended = await self._keys.enrol(call.data.token, WorkerId(call.data.worker_id))
        for key_id in ended:
            await self._end(key_id, key.worker_id)
        return Reply(201, wire.made(key, secret), created_id=key.key_id)

    async def list_audit(self, call: HubRequest[wire.AuditQuery]) -> Reply:
        asked = call.data
        since = bodies.seconds_of(asked.since)
        found, cursor = await self._audit.page(asked.kind, asked.cursor or "", asked.limit, since)
        views = (
            wire.entry_view(each.entry, each.id, each.number, each.previous, each.hash) for each in found
        )
        return Reply(200, wire.AuditList(tuple(views), cursor))
