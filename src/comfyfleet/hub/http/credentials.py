"""Authentication: a bearer key, a token in the query of a browser's stream, or an open hub on loopback. Pages
also accept the key as a Basic password; other routes do not, because a browser would send it from any site.

`tenancy/keys.py` checks keys. A valid key is cached for a few seconds: a key revoked at another hub stays
valid that long. `RevocationWatch` rechecks the keys of open connections. The last functions decide which
tenant owns a new job, and hide the jobs of other tenants without a request to their databases.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.job_operations import no_job
from comfyfleet.hub.http.limits import ConnectionLimits, HubLimits, RequestRate
from comfyfleet.model.access import Caller, Role
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId, WorkerId
from comfyfleet.model.recent import RecentDict
from comfyfleet.ports import Clock
from comfyfleet.tenancy.keys import Keys
from comfyfleet.tracing import BackgroundJob
from comfyfleet.wire.bodies import SubmitBody, named_tenant

_MAX_REMEMBERED = 10_000


class WorkersByKey:
    def __init__(self, engine: Engine, keys: Keys) -> None:
        self._engine = engine
        self._keys = keys
        self._last: RecentDict[WorkerId, str] = RecentDict(_MAX_REMEMBERED)

    def record_worker(self, caller: Caller, worker_id: WorkerId) -> None:
        if caller.role is Role.WORKER and self._last.get(worker_id) != caller.key_id:
            self._last[worker_id] = caller.key_id

    def keys(self) -> set[str]:
        return set(self._last.values())

    async def end(self, key_id: str, named: WorkerId | None = None) -> None:
        """Expels the workers of a key that ended. `named`: its worker, which only another hub may know."""
        gone = [worker_id for worker_id, used in self._last.items() if used == key_id]
        if named is not None and named not in self._last and not await self._keys.held_by(named):
            gone.append(named)
        for worker_id in gone:
            self._last.pop(worker_id, None)
            await self._engine.evict_worker(worker_id, "its key was revoked, or has expired")


_LOG = logging.getLogger(__name__)

_REMEMBER_S = 5.0

_OPEN = Caller(Role.ADMIN, "open")


class Authenticator:
    def __init__(self, keys: Keys, clock: Clock, limits: HubLimits, *, is_open: bool = False) -> None:
        self._keys = keys
        self._clock = clock
        self._is_open = is_open
        self._refusals = RequestRate(
            limits.refusals_per_s, limits.refusals_burst, clock.monotonic, "wrong keys from one address"
        )
        self._known: RecentDict[bytes, tuple[Caller, float]] = RecentDict(_MAX_REMEMBERED)
        self._wrong: RecentDict[bytes, float] = RecentDict(_MAX_REMEMBERED)
        """Keys that were just refused, and until when they are not looked up again."""

    async def caller(
        self, headers: Mapping[str, str], address: str, token: str | None = None, *, is_page: bool = False
    ) -> Caller:
        """Raises `unauthenticated` without a valid key. Wrong keys are rate-limited by address."""
        scheme, _, text = headers.get("authorization", "").partition(" ")
        if is_page and scheme.lower() == "basic":
            text = _password_in(text)
        elif scheme.lower() != "bearer":
            text = ""
        text = text.strip() or token or ""
        if not text and "authorization" not in headers:
            if self._is_open:
                _check_is_local(headers, address)
                return _OPEN
            raise Refusal(RefusalCode.UNAUTHENTICATED, "no key: send one as 'Authorization: Bearer cfk_…'")
        digest, now = hashlib.sha256(text.encode("utf-8", "replace")).digest(), self._clock.monotonic()
        known = self._known.get(digest)
        if known is not None and now < known[1]:
            return known[0]
        if now >= self._wrong.get(digest, now):
            # Looked up at any refusal rate: a valid key must not suffer from what others send.
            key = await self._keys.check(text)
        else:
            key = None
        if key is None:
            self._known.pop(digest, None)
            self._wrong[digest] = now + _REMEMBER_S
            # The same wrong key again costs no lookup; different ones are limited per second.
            self._refusals.check(address)
            self._refusals.take_token(address)
            raise Refusal(
                RefusalCode.UNAUTHENTICATED,
                "the key is not valid: it is unknown, revoked, expired or misspelled",
            )
        caller = Caller(key.role, key.key_id, key.tenant, key.worker_id)
        good_until = now + _REMEMBER_S
        for end in (key.expires_at, key.old_until):
            if end is not None:
                good_until = min(good_until, now + end - self._clock.now())
        self._known[digest] = (caller, good_until)
        return caller

    def evict(self, key_id: str) -> None:
        """Drops the key from the cache."""
        for digest in [digest for digest, (caller, _) in self._known.items() if caller.key_id == key_id]:
            del self._known[digest]


class RevocationWatch(BackgroundJob):
    """Ends connections and workers of keys that expired or were revoked at another hub, within `every_s`."""

    def __init__(
        self, keys: Keys, connection_limits: ConnectionLimits, workers: WorkersByKey, every_s: float
    ) -> None:
        super().__init__("key revocations")
        self._workers = workers
        self._keys = keys
        self._connection_limits = connection_limits
        self._every_s = every_s

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                for key_id in {*self._connection_limits.holders(), *self._workers.keys()}:
                    if key_id != _OPEN.key_id and await self._keys.is_over(key_id):
                        self._connection_limits.end(key_id)
                        await self._workers.end(key_id)
            except Fault as fault:
                _LOG.warning("cannot check the keys of open connections; will try again: %s", fault)


def _password_in(text: str) -> str:
    """The password of Basic credentials; "" if they are malformed."""
    try:
        return base64.b64decode(text, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_is_local(headers: Mapping[str, str], address: str) -> None:
    """An open hub trusts only this machine, and no page of another site in its browser."""
    host = headers.get("host", "")
    origin = headers.get("origin")
    if not is_loopback(address) or not is_loopback(_split(f"//{host}")[0]):
        raise Refusal(
            RefusalCode.UNAUTHENTICATED, "without a key, this hub answers its own machine only: send a key"
        )
    if origin is not None and _split(origin)[1] != host:
        raise Refusal(
            RefusalCode.UNAUTHENTICATED,
            f"without a key, this hub does not answer pages of {origin}: send a key",
        )


def _split(url: str) -> tuple[str, str]:
    """The host name and the network location; "" for an invalid URL."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.netloc
    except ValueError:
        return "", ""


def owner_of(body: SubmitBody, caller: Caller) -> TenantId:
    field, named = named_tenant(body) or ("tenant", None)
    return owner_for(caller, named, field)


def owner_for(caller: Caller, named: str | None, field: str = "tenant") -> TenantId:
    """`field`: its name in the body."""
    if named is None:
        return caller.owner
    if caller.role not in (Role.ADMIN, Role.OPERATOR) and named != caller.owner:
        raise Refusal(
            RefusalCode.NOT_ALLOWED,
            f"this key is for tenant {caller.owner!r} only: leave out {field!r}, or use an operator's key",
            field=field,
        )
    return TenantId(named)


async def check_sees(caller: Caller, engine: Engine, job_id: JobId) -> None:
    """Raises `not_found` unless the caller may see the job."""
    if caller.scope is not None:
        await visible_job(caller, engine, job_id)


async def visible_job(caller: Caller, engine: Engine, job_id: JobId) -> Dispatch:
    """The job, or `not_found` if the caller may not see it."""
    dispatch = await engine.reader.load(job_id)
    if dispatch is None or not caller.sees(dispatch.tenant):
        raise no_job(job_id)
    return dispatch
