"""Encrypts and decrypts one value: AES-256-GCM under a key per job, bound to the value's context.

An encrypted value is format, data key id, nonce, ciphertext and tag. The job's key is derived from the data
key and the job's id. It encrypts only the few values of one job, so nonces may be random.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal, NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from comfyfleet.model.ids import JobId, TenantId

Kind = Literal["payload", "result", "failure", "fact"]

KEY_BYTES = 32
_FORMAT = b"cfs1"
_ID_BYTES = 16
_NONCE_BYTES = 12
_HEAD_BYTES = len(_FORMAT) + _ID_BYTES
_TAG_BYTES = 16
_FOR_JOBS = b"comfyfleet key of a job 1\0"
_FOR_DATA_KEYS = "comfyfleet data key 1"


class ValueContext(NamedTuple):
    """A value decrypts only in its own context."""

    tenant: TenantId
    job_id: JobId
    kind: Kind


class DataKey(msgspec.Struct, frozen=True):
    """A tenant's unwrapped key, kept in memory only."""

    key_id: str
    """32 hexadecimal digits; later keys have greater ids."""
    secret: bytes
    made_at: float

    def __repr__(self) -> str:
        return f"DataKey({self.key_id})"


class DecryptionFailed(Exception):
    """The text is for people."""


def new_key_id(now: float) -> str:
    return f"{int(now * 1000):012x}{secrets.token_hex(_ID_BYTES - 6)}"


def encrypt(key: DataKey, place: ValueContext, plain: bytes) -> bytes:
    head = _FORMAT + bytes.fromhex(key.key_id)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return head + nonce + _cipher(key, place).encrypt(nonce, plain, _bound(head, place))


def key_id_of(encrypted: bytes) -> str:
    """The data key that decrypts it."""
    if encrypted[: len(_FORMAT)] != _FORMAT or len(encrypted) < _HEAD_BYTES + _NONCE_BYTES + _TAG_BYTES:
        raise DecryptionFailed("its encryption format is unknown to this version, or it is damaged")
    return encrypted[len(_FORMAT) : _HEAD_BYTES].hex()


def open_value(key: DataKey, place: ValueContext, encrypted: bytes) -> bytes:
    head, nonce = encrypted[:_HEAD_BYTES], encrypted[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES]
    try:
        return _cipher(key, place).decrypt(
            nonce, encrypted[_HEAD_BYTES + _NONCE_BYTES :], _bound(head, place)
        )
    except InvalidTag:
        raise DecryptionFailed(
            f"its {place.kind} was changed or comes from another job, so it cannot be decrypted"
        ) from None


def _cipher(key: DataKey, place: ValueContext) -> AESGCM:
    return AESGCM(hmac.digest(key.secret, _FOR_JOBS + place.job_id.encode(), hashlib.sha256))


def _bound(head: bytes, place: ValueContext) -> bytes:
    # Packed, not joined: two contexts never give the same bytes.
    return msgspec.msgpack.encode((head, *place))


def wrap(master: bytes, secret: bytes, *names: str) -> bytes:
    """Encrypts a key or small secret under a master key; `names` bind its purpose."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + AESGCM(master).encrypt(nonce, secret, msgspec.msgpack.encode((_FOR_DATA_KEYS, *names)))


def unwrap(master: bytes, wrapped: bytes, *names: str) -> bytes | None:
    """None: wrong master key or purpose."""
    nonce, rest = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
    try:
        return AESGCM(master).decrypt(nonce, rest, msgspec.msgpack.encode((_FOR_DATA_KEYS, *names)))
    except (InvalidTag, ValueError):
        return None
