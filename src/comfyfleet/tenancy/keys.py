"""API keys and enrolment tokens, kept as hashes in the document store that all hubs share.

Secrets are 256 random bits, so one SHA-256 protects them. The hub decides which routes a role may call.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

import msgspec

from comfyfleet.model.access import ApiKey, Enrolment, Role
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.ports import Clock, Document, DocumentStore

KEY_PREFIX = "cfk_"
ENROLMENT_PREFIX = "cfe_"

_KEYS = "keys"
_ENROLMENTS = "enrolments"
_TRIES = 20
_PAGE = 1_000


class Keys:
    def __init__(self, documents: DocumentStore, clock: Clock) -> None:
        self._documents = documents
        self._clock = clock
        self.on_rotated: Callable[[str, str], None] | None = None
        """Called with the id and the new text of a key that this process rotated."""

    # keys

    async def create(
        self,
        role: Role,
        *,
        name: str = "",
        tenant: TenantId | None = None,
        worker_id: WorkerId | None = None,
        expires_in_s: float | None = None,
    ) -> tuple[ApiKey, str]:
        """The stored key and its full text, which cannot be shown again."""
        if role is Role.TENANT and tenant is None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                "a key with the role tenant needs a tenant: give `tenant` (--tenant)",
            )
        if role is Role.WORKER and tenant is not None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                "a key with the role worker cannot have a tenant: leave `tenant` out",
            )
        if role is not Role.WORKER and worker_id is not None:
            raise Refusal(RefusalCode.INVALID_REQUEST, "only a key with the role worker can have a worker id")
        now = self._clock.now()
        key_id, secret = _new_id(now), secrets.token_hex(32)
        key = ApiKey(
            key_id,
            role,
            _digest(secret),
            now,
            name,
            tenant,
            worker_id,
            None if expires_in_s is None else now + expires_in_s,
        )
        if not await self._documents.put(_KEYS, key_id, msgspec.json.encode(key), version=0):
            raise Fault("the id of the new key is taken; try again")
        return key, f"{KEY_PREFIX}{key_id}_{secret}"

    async def check(self, text: str) -> ApiKey | None:
        """The key with this text, if it is valid now."""
        key_id, _, secret = text.removeprefix(KEY_PREFIX).partition("_")
        if not text.startswith(KEY_PREFIX) or not secret or not key_id.isalnum():
            return None
        document = await self._documents.get(_KEYS, key_id)
        if document is None:
            return None
        key, now, digest = _key(document), self._clock.now(), _digest(secret)
        is_valid = hmac.compare_digest(key.digest, digest)
        if key.old_digest is not None and key.old_until is not None and now < key.old_until:
            is_valid |= hmac.compare_digest(key.old_digest, digest)
        return key if is_valid and not _has_ended(key, now) else None

    async def is_over(self, key_id: str) -> bool:
        """Whether the key is unknown, revoked or expired."""
        document = await self._documents.get(_KEYS, key_id)
        return document is None or _has_ended(_key(document), self._clock.now())

    async def rotate(self, key_id: str, overlap_s: float = 0.0) -> tuple[ApiKey, str]:
        secret = secrets.token_hex(32)

        def renew(key: ApiKey) -> ApiKey:
            if key.revoked_at is not None:
                raise Refusal(RefusalCode.WRONG_PHASE, f"key {key_id!r} is revoked: create a new one")
            return msgspec.structs.replace(
                key,
                digest=_digest(secret),
                old_digest=key.digest if overlap_s > 0 else None,
                old_until=self._clock.now() + overlap_s if overlap_s > 0 else None,
            )

        key, text = await self._change(key_id, renew), f"{KEY_PREFIX}{key_id}_{secret}"
        if self.on_rotated is not None:
            self.on_rotated(key_id, text)
        return key, text

    async def revoke(self, key_id: str) -> ApiKey:
        now = self._clock.now()
        return await self._change(
            key_id,
            lambda key: key if key.revoked_at is not None else msgspec.structs.replace(key, revoked_at=now),
        )

    async def listing(self, after: str = "", limit: int = 100) -> list[ApiKey]:
        return [_key(document) for document in await self._documents.listing(_KEYS, after, limit)]

    async def _change(self, key_id: str, change: Callable[[ApiKey], ApiKey]) -> ApiKey:
        for _ in range(_TRIES):
            document = await self._documents.get(_KEYS, key_id)
            if document is None:
                raise Refusal(RefusalCode.NOT_FOUND, f"there is no key {key_id!r}")
            key = change(_key(document))
            if await self._documents.put(_KEYS, key_id, msgspec.json.encode(key), version=document.version):
                return key
        raise Fault(f"key {key_id!r} keeps changing at the same time; try again")

    # enrolment

    async def invite(
        self,
        *,
        uses: int = 1,
        expires_in_s: float = 3600.0,
        worker_prefix: str = "",
        replaces: bool = False,
    ) -> tuple[Enrolment, str]:
        """A token that workers exchange for a key. `replaces`: it revokes a worker's old keys."""
        now = self._clock.now()
        token_id, secret = _new_id(now), secrets.token_hex(32)
        enrolment = Enrolment(
            token_id, _digest(secret), now, now + expires_in_s, uses, worker_prefix, replaces
        )
        await self._documents.put(_ENROLMENTS, token_id, msgspec.json.encode(enrolment), version=0)
        return enrolment, f"{ENROLMENT_PREFIX}{token_id}_{secret}"

    async def invites(self, after: str = "", limit: int = 100) -> list[Enrolment]:
        page = await self._documents.listing(_ENROLMENTS, after, limit)
        return [msgspec.json.decode(document.body, type=Enrolment) for document in page]

    def now(self) -> float:
        return self._clock.now()

    async def uninvite(self, token_id: str) -> None:
        if not await self._documents.remove(_ENROLMENTS, token_id):
            raise Refusal(RefusalCode.NOT_FOUND, f"there is no enrolment token {token_id!r}")

    async def enrol(self, token: str, worker_id: WorkerId) -> tuple[ApiKey, str, list[str]]:
        """Uses the token once. The worker's new key, its text, and the ids of the keys it replaced."""
        token_id, _, secret = token.removeprefix(ENROLMENT_PREFIX).partition("_")
        for _ in range(_TRIES):
            document = None
            if token.startswith(ENROLMENT_PREFIX) and token_id.isalnum():
                document = await self._documents.get(_ENROLMENTS, token_id)
            enrolment = None if document is None else msgspec.json.decode(document.body, type=Enrolment)
            if (
                document is None
                or enrolment is None
                or not hmac.compare_digest(enrolment.digest, _digest(secret))
                or self._clock.now() >= enrolment.expires_at
                or enrolment.uses_left < 1
            ):
                raise Refusal(
                    RefusalCode.UNAUTHENTICATED,
                    "the enrolment token is not valid (unknown, expired or used up). On the hub's machine, "
                    "`comfyfleet key invite` makes a new one.",
                )
            if not worker_id.startswith(enrolment.worker_prefix):
                raise Refusal(
                    RefusalCode.NOT_ALLOWED,
                    f"this token enrols only workers whose id starts with {enrolment.worker_prefix!r}",
                )
            held = await self.held_by(worker_id)
            if held and not enrolment.replaces:
                raise _has_key(worker_id)
            used = msgspec.structs.replace(enrolment, uses_left=enrolment.uses_left - 1)
            if await self._documents.put(
                _ENROLMENTS, token_id, msgspec.json.encode(used), version=document.version
            ):
                return await self._create_enrolled_key(worker_id, token_id, enrolment.replaces)
        raise Fault("many workers use this enrolment token at once; try again")

    async def _create_enrolled_key(
        self, worker_id: WorkerId, token_id: str, replaces: bool
    ) -> tuple[ApiKey, str, list[str]]:
        key, text = await self.create(Role.WORKER, name=f"enrolled by {token_id}", worker_id=worker_id)
        others = [each.key_id for each in await self.held_by(worker_id) if each.key_id != key.key_id]
        if others and not replaces and min(others) < key.key_id:
            # Another process enrolled the same worker id at the same time and was first.
            await self.revoke(key.key_id)
            raise _has_key(worker_id)
        if replaces:
            for key_id in others:
                await self.revoke(key_id)
        return key, text, others if replaces else []

    async def held_by(self, worker_id: WorkerId) -> list[ApiKey]:
        """The valid keys of this worker."""
        found: list[ApiKey] = []
        after, now = "", self._clock.now()
        while page := await self.listing(after, _PAGE):
            found += (each for each in page if each.worker_id == worker_id and not _has_ended(each, now))
            after = page[-1].key_id
        return found


def _has_key(worker_id: WorkerId) -> Refusal:
    return Refusal(
        RefusalCode.NOT_ALLOWED,
        f"worker {worker_id!r} has a key already: choose another id, revoke that key (`comfyfleet key revoke`), or "
        "use a token that replaces keys (`comfyfleet key invite --replace`)",
    )


def _key(document: Document) -> ApiKey:
    return msgspec.json.decode(document.body, type=ApiKey)


def _has_ended(key: ApiKey, now: float) -> bool:
    return key.revoked_at is not None or (key.expires_at is not None and now >= key.expires_at)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _new_id(now: float) -> str:
    """Ids start with the time, so lists are in order of creation."""
    return f"{int(now * 1000):012x}{secrets.token_hex(6)}"
