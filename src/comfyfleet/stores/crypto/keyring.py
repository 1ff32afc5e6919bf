"""Tenants' data keys: created, wrapped by a master key, kept as documents, renewed, destroyed. Reads the
operator's master keys, too.

One document holds one data key, named by tenant and key id, so keys of two stores can be merged. A destroyed
key leaves its document, so that its values are reported as destroyed. Unwrapped keys are cached for 30
seconds; so long another process may still use a key that is destroyed here.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.recent import RecentDict
from comfyfleet.paginator import documents_in
from comfyfleet.ports import Clock, Document, DocumentStore
from comfyfleet.stores.crypto.value_cipher import (
    KEY_BYTES,
    DataKey,
    DecryptionFailed,
    new_key_id,
    unwrap,
    wrap,
)
from comfyfleet.stores.factory import DATA_KEYS, MASTER_KEYS

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class MasterKeys(msgspec.Struct, frozen=True):
    keys: dict[str, bytes] = {}
    current: str | None = None
    """Wraps new data keys. None: values are decrypted, and nothing is encrypted."""

    def __repr__(self) -> str:
        # Never print the keys.
        return f"MasterKeys({', '.join(self.keys)}; current {self.current})"


def read_master_keys(lines: Iterable[str], current: str = "") -> MasterKeys:
    """Lines of `ID=KEY`; `current`: an id, `none`, or empty for the first. ValueError quotes no key."""
    keys: dict[str, bytes] = {}
    for line in lines:
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key_id, _, text = line.partition("=")
        key_id = key_id.strip()
        if not _ID.fullmatch(key_id) or not text:
            raise ValueError("a key is written as ID=KEY; an id has letters, digits, '.', '_' and '-'")
        if key_id in keys:
            raise ValueError(f"there are two keys with the id {key_id!r}")
        keys[key_id] = _secret(key_id, text.strip())
    if not keys:
        raise ValueError("there is no key: `comfyfleet encryption new-key` makes one")
    if current == "none":
        return MasterKeys(keys)
    if current and current not in keys:
        raise ValueError(f"the current key is to be {current!r}, but the keys are {', '.join(sorted(keys))}")
    return MasterKeys(keys, current or next(iter(keys)))


def _secret(key_id: str, text: str) -> bytes:
    try:
        secret = bytes.fromhex(text) if len(text) == 2 * KEY_BYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ValueError(f"the key {key_id!r} is not {KEY_BYTES} bytes in base64 or hexadecimal digits")
    return secret


_LOG = logging.getLogger(__name__)

KEEP_S = 30.0
RENEW_S = 365 * 86400.0
_REWRAP_EVERY_S = 3600.0
"""Another process may have wrapped a key with an old master key since."""
_PAGE = 100
_MOST_IN_MEMORY = 10_000
_CHECK = b"comfyfleet"
_FOR_CHECKS = "check"


class WrappedKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A data key as stored."""

    made_at: float
    master: str = ""
    wrapped: bytes = b""
    destroyed_at: float | None = None


class KeyCounts(msgspec.Struct, frozen=True):
    """Counts of documents by master key."""

    masters: dict[str, int]
    tenants: int
    destroyed: int


_documents = msgspec.json.Decoder(WrappedKey)


class Keyring:
    """`masters` is called repeatedly: a key added to its file works without a restart."""

    def __init__(
        self,
        documents: DocumentStore,
        clock: Clock,
        masters: Callable[[], MasterKeys],
        *,
        renew_s: float = RENEW_S,
    ) -> None:
        self._documents = documents
        self._clock = clock
        self._read = masters
        self._masters = masters()
        self._renew_s = renew_s
        self._rewrapped_with: MasterKeys | None = None
        self._rewrapped_at = 0.0
        self._current: RecentDict[TenantId, tuple[DataKey, float]] = RecentDict(_MOST_IN_MEMORY)
        self._known: RecentDict[tuple[TenantId, str], tuple[DataKey, float]] = RecentDict(_MOST_IN_MEMORY)

    async def open(self) -> None:
        """Refuses master keys that do not match this store."""
        for document in await self._documents.listing(MASTER_KEYS, limit=_PAGE):
            master = self._masters.keys.get(document.name)
            if master is None:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"this store is encrypted with the master key {document.name!r}, which is not among the keys of "
                    f"[encryption] ({', '.join(sorted(self._masters.keys))}): add it, or wrap its data keys anew "
                    "with `comfyfleet encryption rotate` where both keys are known",
                )
            if unwrap(master, document.body, _FOR_CHECKS, document.name) != _CHECK:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"the master key {document.name!r} of [encryption] is not the one that encrypts this "
                    "store: another key has its id. Nothing was changed; give the right one",
                )

    @property
    def encrypts(self) -> bool:
        return self._masters.current is not None

    async def refresh(self) -> int:
        """Reads the master keys again and wraps data keys with the current one. Returns how many changed."""
        try:
            self._masters = self._read()
        except (OSError, ValueError) as error:
            _LOG.error("the master keys cannot be read again, so the known ones stay in use: %s", error)
        now = self._clock.now()
        if self._masters == self._rewrapped_with and now < self._rewrapped_at + _REWRAP_EVERY_S:
            return 0
        moved = await self.rewrap()
        self._rewrapped_with, self._rewrapped_at = self._masters, now
        return moved

    # encrypting and decrypting

    async def to_encrypt(self, tenant: TenantId) -> DataKey | None:
        """None: nothing is encrypted."""
        if self._masters.current is None:
            return None
        now = self._clock.now()
        kept = self._current.get(tenant)
        if kept is not None and now < kept[1] + KEEP_S and now < kept[0].made_at + self._renew_s:
            return kept[0]
        newest = None
        async for document in self._of(tenant):
            if _documents.decode(document.body).destroyed_at is None:
                newest = document
        if newest is None or now >= _documents.decode(newest.body).made_at + self._renew_s:
            return await self.renew(tenant)
        key = self._unwrapped(tenant, newest)
        self._current[tenant] = (key, now)
        return key

    async def to_decrypt(self, tenant: TenantId, key_id: str) -> DataKey:
        now = self._clock.now()
        kept = self._known.get((tenant, key_id))
        if kept is not None and now < kept[1] + KEEP_S:
            return kept[0]
        document = await self._documents.get(DATA_KEYS, _name(tenant, key_id))
        if document is None:
            raise DecryptionFailed(
                f"it is encrypted with the data key {key_id}, which this store does not have"
            )
        destroyed_at = _documents.decode(document.body).destroyed_at
        if destroyed_at is not None:
            raise DecryptionFailed(f"the data key of tenant {tenant!r} that encrypts it was destroyed")
        key = self._unwrapped(tenant, document)
        self._known[tenant, key_id] = (key, now)
        return key

    # keys

    async def renew(self, tenant: TenantId) -> DataKey:
        """A new data key for new values; existing values keep theirs."""
        current = self._masters.current
        if current is None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, "there is no current master key to wrap a new key with"
            )
        now = self._clock.now()
        key = DataKey(new_key_id(now), secrets.token_bytes(KEY_BYTES), now)
        name = _name(tenant, key.key_id)
        await self._store_check()
        body = self._wrapped(current, key.secret, name, now)
        if not await self._documents.put(DATA_KEYS, name, body, version=0):
            raise Fault("a new data key's id is taken already; try again")
        self._current[tenant] = (key, now)
        return key

    async def rewrap(self) -> int:
        """Wraps all data keys with the current master key; values stay. Returns how many changed."""
        current, moved, left = self._masters.current, 0, set[str]()
        async for document in self._all():
            wrapped = _documents.decode(document.body)
            if wrapped.destroyed_at is not None:
                continue
            if current is None or wrapped.master == current:
                left.add(wrapped.master)
                continue
            try:
                secret = self._unwrapped(_tenant_of(document.name), document).secret
            except Fault as fault:
                # One tenant's broken key must not keep the others under an old master key.
                _LOG.error("a data key cannot be wrapped anew: %s", fault)
                left.add(wrapped.master)
                continue
            body = self._wrapped(current, secret, document.name, wrapped.made_at)
            # If another process rewrapped or destroyed it meanwhile, its version stays.
            if await self._documents.put(DATA_KEYS, document.name, body, version=document.version):
                moved += 1
            else:
                left.add(wrapped.master)
        if current is not None and (moved or left):
            await self._store_check()
            for document in await self._documents.listing(MASTER_KEYS, limit=_PAGE):
                if document.name != current and document.name not in left:
                    await self._documents.remove(MASTER_KEYS, document.name)
        return moved

    async def crypto_shred(self, tenant: TenantId) -> int:
        """Destroys the tenant's data keys: this store can no longer decrypt values under them. Backups still can."""
        now, destroyed = self._clock.now(), 0
        async for document in self._of(tenant):
            wrapped = _documents.decode(document.body)
            if wrapped.destroyed_at is not None:
                continue
            body = msgspec.json.encode(WrappedKey(wrapped.made_at, destroyed_at=now))
            await self._documents.put(DATA_KEYS, document.name, body, version=None)
            destroyed += 1
        self._current.pop(tenant, None)
        for known in [each for each in self._known if each[0] == tenant]:
            del self._known[known]
        return destroyed

    async def count_keys(self) -> KeyCounts:
        masters: dict[str, int] = {}
        tenants, destroyed = set[TenantId](), 0
        async for document in self._all():
            wrapped = _documents.decode(document.body)
            if wrapped.destroyed_at is not None:
                destroyed += 1
                continue
            masters[wrapped.master] = masters.get(wrapped.master, 0) + 1
            tenants.add(_tenant_of(document.name))
        return KeyCounts(masters, len(tenants), destroyed)

    async def tenants(self) -> list[TenantId]:
        """Tenants with a key that is not destroyed."""
        found = dict[TenantId, None]()
        async for document in self._all():
            if _documents.decode(document.body).destroyed_at is None:
                found[_tenant_of(document.name)] = None
        return list(found)

    # documents

    async def _store_check(self) -> None:
        """Stores a text wrapped by the current master key, which exposes a wrong key at the start."""
        current = self._masters.current
        if current is not None and await self._documents.get(MASTER_KEYS, current) is None:
            body = wrap(self._masters.keys[current], _CHECK, _FOR_CHECKS, current)
            await self._documents.put(MASTER_KEYS, current, body, version=0)

    def _wrapped(self, master: str, secret: bytes, name: str, made_at: float) -> bytes:
        wrapped = wrap(self._masters.keys[master], secret, name, master)
        return msgspec.json.encode(WrappedKey(made_at, master, wrapped))

    def _unwrapped(self, tenant: TenantId, document: Document) -> DataKey:
        wrapped = _documents.decode(document.body)
        master = self._masters.keys.get(wrapped.master)
        if master is None:
            raise Fault(
                f"a data key of tenant {tenant!r} is wrapped by the master key {wrapped.master!r}, which this process "
                "does not have: add it to the keys of [encryption]"
            )
        secret = unwrap(master, wrapped.wrapped, document.name, wrapped.master)
        if secret is None:
            raise Fault(
                f"a data key of tenant {tenant!r} does not open with the master key {wrapped.master!r}: it was "
                "changed, or another master key has this id. Give the right one, or restore the document"
            )
        return DataKey(document.name.rpartition("/")[2], secret, wrapped.made_at)

    async def _of(self, tenant: TenantId) -> AsyncIterator[Document]:
        """Ordered by id, which is by time."""
        async for document in documents_in(self._documents, DATA_KEYS, f"{tenant}/", _PAGE):
            # Another tenant's name may begin with this one's and a slash.
            if _tenant_of(document.name) == tenant:
                yield document

    def _all(self) -> AsyncIterator[Document]:
        return documents_in(self._documents, DATA_KEYS, size=_PAGE)


def _name(tenant: TenantId, key_id: str) -> str:
    return f"{tenant}/{key_id}"


def _tenant_of(name: str) -> TenantId:
    return TenantId(name.rpartition("/")[0])
