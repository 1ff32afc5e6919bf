"""Encodes a dispatch as the function library keeps it: a fixed head, then a MessagePack map.

The library changes the head with each lease and leaves the map alone.
"""

from __future__ import annotations

import struct
from binascii import a2b_base64, b2a_base64
from hashlib import sha256
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from comfyfleet.model.dispatch import Dispatch, Lease, Phase, Readiness
from comfyfleet.model.ids import LeaseToken, PollId, WorkerId

_PHASES = (Phase.QUEUED, Phase.LEASED, Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED)
_READINESS = (Readiness.IN_LANE, Readiness.DELAYED, Readiness.PAUSED)
_PHASE_CODES = {phase: code for code, phase in enumerate(_PHASES)}
_READINESS_CODES = {standing: code for code, standing in enumerate(_READINESS)}

# Like HEAD in jobs.lua, which names the fields. The library sets the first three for a new dispatch.
_PLACE = struct.Struct("<dII")
_STATE = struct.Struct("<6B6I5d")
_HEAD = struct.Struct("<dII6B6I5d")
_LENGTH = struct.Struct("<I")
_NO_TIME = -1.0


_IN_HEAD = (
    *("class_key", "relaxed_class", "sequence", "round", "revision", "phase", "standing", "wake_at"),
    *("cancel_requested_at", "lease", "lease_number", "attempts"),
    # Not in the head, but converted: the library packs text only, so it is in Base64.
    "payload_sha256",
    # Before the other fields of the rest, in a fixed form.
    "place",
)
# The tenant is always written: the library reads it.
_OUTSIDE = sorted(
    (each for each in msgspec.structs.fields(Dispatch) if each.name not in _IN_HEAD),
    key=lambda each: not each.required and each.name != "tenant",
)
_Rest = msgspec.defstruct(
    "_Rest",
    [
        (each.name, each.type)
        if each.required or each.name == "tenant"
        else (each.name, each.type, msgspec.field(default=each.default, name=each.encode_name))
        for each in _OUTSIDE
    ]
    # The last is the digest of the stored payload text, in Base64, for direct workers.
    + [(name, str | None, None) for name in ("reference", "payload_sha256", "record_sha256")]
    + [("place", int, 0), ("run_s", float, 0.0), ("load_s", float, 0.0)],
    frozen=True,
    omit_defaults=True,
    gc=False,
)
# Tuples instead of keywords: every call to the library encodes or decodes a dispatch.
_outside = attrgetter(*(each.name for each in _OUTSIDE))
_READ = (*_IN_HEAD, *(each.name for each in _OUTSIDE))
_in_order = itemgetter(*(_READ.index(name) for name in Dispatch.__struct_fields__))

# The first three fields of the rest: see jobs.lua.
_FIXED = struct.Struct(">BH7sI7sd8sd")
_KEYS = (b"\xa5place\xce", b"\xa5run_s\xcb", b"\xa6load_s\xcb")
_PLACE_AT = 10
"""Where the place begins in the rest."""
_LONG_MAP = 0xDE

_pack = msgspec.msgpack.encode
_rests = msgspec.msgpack.Decoder(_Rest)


class StoredDispatch(msgspec.Struct, frozen=True, gc=False):
    """The fields beside a dispatch in its text."""

    dispatch: Dispatch
    facts: int
    ended_at: float
    is_unnoted: bool
    """The job's log lacks its current lease."""


def decode_dispatch(value: object) -> Dispatch:
    return decode_kept(as_bytes(value), 0).dispatch


def decode_kept(data: bytes, start: int) -> StoredDispatch:
    head = _HEAD.unpack_from(data, start)
    sequence, _, facts, phase, standing, _, is_acknowledged, _, is_noted, number_of_round = head[:10]
    revision, lease_number, attempts, epoch, _, wake_at, cancel_requested_at, ended_at = head[10:18]
    leased_at, expires_at = head[18:]
    (class_key, relaxed_class, worker_id, poll_id, token), at = _texts(data, start)
    at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
    rest: Any = _rests.decode(data[at + _LENGTH.size :])
    lease = None
    if epoch:
        lease = Lease(
            WorkerId(worker_id.decode()),
            lease_number,
            epoch,
            LeaseToken(token.decode()),
            PollId(poll_id.decode()),
            leased_at,
            expires_at,
            bool(is_acknowledged),
            rest.run_s,
            rest.load_s,
        )
    in_head = (
        class_key.decode(),
        relaxed_class.decode() if relaxed_class else None,
        int(sequence),
        number_of_round,
        revision,
        _PHASES[phase],
        _READINESS[standing],
        None if wake_at < 0 else wake_at,
        None if cancel_requested_at < 0 else cancel_requested_at,
        lease,
        lease_number,
        attempts,
        None if rest.payload_sha256 is None else a2b_base64(rest.payload_sha256),
        rest.place,
    )
    dispatch = Dispatch(*_in_order((*in_head, *_outside(rest))))
    return StoredDispatch(dispatch, facts, ended_at, lease is not None and not is_noted)


def _texts(data: bytes, start: int) -> tuple[list[bytes], int]:
    """Class, relaxed class, worker, poll, token, and the offset of the record."""
    at, texts = start + _HEAD.size, []
    for _ in range(5):
        end = at + 2 + data[at] + 256 * data[at + 1]
        texts.append(data[at + 2 : end])
        at = end
    return texts, at


def decode_record(value: object) -> tuple[Phase, bytes]:
    """The phase of the job's record, and its other small parts (a MessagePack map, or empty)."""
    data = as_bytes(value)
    at = _texts(data, 0)[1]
    start = at + _LENGTH.size
    return _PHASES[data[_PLACE.size + 2]], data[start : start + _LENGTH.unpack_from(data, at)[0]]


def encode_place(facts: int) -> bytes:
    """The head of an imported dispatch whose log has so many facts; the library fills in the rest."""
    return _PLACE.pack(0, 0, facts)


def text_of_digest(digest: bytes | None) -> str | None:
    return None if digest is None else b2a_base64(digest, newline=False).decode()


def sha256_of(text: bytes) -> str:
    return b2a_base64(sha256(text).digest(), newline=False).decode()


def encode_dispatch(
    dispatch: Dispatch, record_phase: Phase, record: bytes, reference: str | None, payload: bytes
) -> bytes:
    """Of a new dispatch, without its sequence, which the library assigns. `payload`: the stored text."""
    lease, wake_at, cancel_requested_at = dispatch.lease, dispatch.wake_at, dispatch.cancel_requested_at
    state = _STATE.pack(
        _PHASE_CODES[dispatch.phase],
        _READINESS_CODES[dispatch.standing],
        _PHASE_CODES[record_phase],
        lease is not None and lease.is_acknowledged,
        0,
        0,
        dispatch.round,
        dispatch.revision,
        dispatch.lease_number,
        dispatch.attempts,
        0 if lease is None else lease.epoch,
        0,
        _NO_TIME if wake_at is None else wake_at,
        _NO_TIME if cancel_requested_at is None else cancel_requested_at,
        _NO_TIME,
        _NO_TIME if lease is None else lease.leased_at,
        _NO_TIME if lease is None else lease.expires_at,
    )
    class_key, relaxed_class = dispatch.class_key.encode(), (dispatch.relaxed_class or "").encode()
    parts = [state, _sized(class_key), _sized(relaxed_class)]
    if lease is None:
        parts.append(_NO_HOLDER)
    else:
        parts += [_sized(text.encode()) for text in (lease.worker_id, lease.poll_id, lease.token)]
    parts += (_LENGTH.pack(len(record)), record)
    digests = (text_of_digest(dispatch.payload_sha256), sha256_of(payload))
    rest = _Rest(*_outside(dispatch), reference, *digests)
    packed = _with_fixed(_pack(rest), dispatch)
    parts += (_LENGTH.pack(len(packed)), packed)
    return b"".join(parts)


def _with_fixed(packed: bytes, dispatch: Dispatch) -> bytes:
    """The map with the three fields of fixed form before the others."""
    size, start = (packed[0] & 0x0F, 1) if packed[0] != _LONG_MAP else (int.from_bytes(packed[1:3], "big"), 3)
    lease, (place, run, load) = dispatch.lease, _KEYS
    run_s, load_s = (0.0, 0.0) if lease is None else (lease.run_s, lease.load_s)
    fixed = _FIXED.pack(_LONG_MAP, size + 3, place, dispatch.place, run, run_s, load, load_s)
    return fixed + packed[start:]


def place_at(text: bytes) -> int:
    """The offset of the place in a text of `encode_dispatch`."""
    at = _STATE.size
    for _ in range(5):
        at += 2 + text[at] + 256 * text[at + 1]
    at += _LENGTH.size + _LENGTH.unpack_from(text, at)[0]
    return int(at) + _LENGTH.size + _PLACE_AT


_NO_HOLDER = bytes(6)


def _sized(text: bytes) -> bytes:
    return len(text).to_bytes(2, "little") + text


def as_bytes(value: object) -> bytes:
    assert isinstance(value, bytes), f"the library answered {type(value).__name__} instead of text"
    return value
