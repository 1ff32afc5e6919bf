"""One value sealed and opened: AES-256-GCM under a key of the job's own, bound to the place where the value belongs.

A sealed value is its format, the id of the data key, a nonce, and the ciphertext with its tag. The job's key follows
from the data key and the job's id, so no key ever seals more than the few values of one job and nonces may be random.
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
    """Where a value belongs. Moved to any other place it does not open."""

    tenant: TenantId
    job_id: JobId
    kind: Kind


class DataKey(msgspec.Struct, frozen=True):
    """A tenant's key, unwrapped: in memory alone."""

    key_id: str
    """32 hexadecimal digits; a later key has a greater one."""
    secret: bytes
    made_at: float

    def __repr__(self) -> str:
        return f"DataKey({self.key_id})"


class DecryptionFailed(Exception):
    """Why, for people."""


def new_key_id(now: float) -> str:
    return f"{int(now * 1000):012x}{secrets.token_hex(_ID_BYTES - 6)}"


def encrypt(key: DataKey, place: ValueContext, plain: bytes) -> bytes:
    head = _FORMAT + bytes.fromhex(key.key_id)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return head + nonce + _cipher(key, place).encrypt(nonce, plain, _bound(head, place))


def key_id_of(encrypted: bytes) -> str:
    """Which data key opens it."""
    if encrypted[: len(_FORMAT)] != _FORMAT or len(encrypted) < _HEAD_BYTES + _NONCE_BYTES + _TAG_BYTES:
        raise DecryptionFailed("it is sealed in a form that this version does not know, or was damaged")
    return encrypted[len(_FORMAT) : _HEAD_BYTES].hex()


def open_value(key: DataKey, place: ValueContext, encrypted: bytes) -> bytes:
    head, nonce = encrypted[:_HEAD_BYTES], encrypted[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES]
    try:
        return _cipher(key, place).decrypt(
            nonce, encrypted[_HEAD_BYTES + _NONCE_BYTES :], _bound(head, place)
        )
    except InvalidTag:
        raise DecryptionFailed(
            f"its {place.kind} was changed, or moved here from another job: it does not fit its seal"
        ) from None


def _cipher(key: DataKey, place: ValueContext) -> AESGCM:
    return AESGCM(hmac.digest(key.secret, _FOR_JOBS + place.job_id.encode(), hashlib.sha256))


def _bound(head: bytes, place: ValueContext) -> bytes:
    # Packed, not joined: no two places give the same bytes.
    return msgspec.msgpack.encode((head, *place))


def wrap(master: bytes, secret: bytes, *names: str) -> bytes:
    """A key, or any small secret, under a master key; `names` say what it is for."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + AESGCM(master).encrypt(nonce, secret, msgspec.msgpack.encode((_FOR_DATA_KEYS, *names)))


def unwrap(master: bytes, wrapped: bytes, *names: str) -> bytes | None:
    """None: not with this master key, or not for this."""
    nonce, rest = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
    try:
        return AESGCM(master).decrypt(nonce, rest, msgspec.msgpack.encode((_FOR_DATA_KEYS, *names)))
    except (InvalidTag, ValueError):
        return None
