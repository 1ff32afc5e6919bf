"""The bounds at the door: how large a body may be, packed and unpacked, how deep, how big its numbers, how often.

What a job may ask for is policy's to bound; here is what anybody may make the hub read.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.wire.socket import AGENT_MESSAGE_BYTES

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_MAX_BUCKETS = 10_000


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_body_bytes: int = 32 * 1024 * 1024
    """As received."""
    max_unpacked_bytes: int = 128 * 1024 * 1024
    max_depth: int = 80
    requests_per_s: float = 2_000.0
    """For one key, or one address where there is no key …"""
    burst: int = 4_000
    """… after so many at once."""
    refusals_per_s: float = 5.0
    """Wrong keys from one address …"""
    refusals_burst: int = 50
    max_wait_s: float = 60.0
    """The longest a request is parked, whatever it asks for."""
    max_frame_bytes: Annotated[int, Meta(ge=AGENT_MESSAGE_BYTES)] = 16 * 1024 * 1024
    """One message over the WebSocket."""
    max_connections: int = 30_000
    max_connections_per_address: int = 15_000
    """Before anybody is known by a key; the address may be a proxy's."""
    max_head_bytes: int = 64 * 1024
    """The first line and the headers of a request."""
    request_s: Annotated[float, Meta(ge=0.1)] = 30.0
    """A request arrives whole in this time …"""
    min_bytes_per_s: Annotated[int, Meta(ge=1)] = 1_024
    """… and a second more for each so many bytes."""
    stalled_s: float = 120.0
    """Whoever takes nothing of an answer for so long is let go."""
    max_streams: int = 10_000
    max_sockets: int = 10_000
    max_parked: int = 20_000
    """Polls and calls for commands that wait."""
    max_held_per_key: int = 5_000
    """Streams, sockets and parked requests together …"""
    max_held_per_address: int = 10_000
    """… and as many from one address, which may be a proxy's."""
    beat_s: float = 15.0
    """How often a stream that has nothing to say says that it lives, and whoever stays is asked for its key."""
    max_in_flight: int = 20_000
    """Requests that are being answered, parked polls among them."""
    max_tenant_file_bytes: Annotated[int, Meta(ge=1)] | None = None
    """What all files of one tenant may take together, uploads and what runs left. None: as much as there is."""
    max_pending_deliveries: Annotated[int, Meta(ge=1)] = 100_000
    """Of one tenant, that wait to be sent: beyond them no job of it that adds to them is taken."""


async def read_body(receive: Receive, encoding: str, limits: Limits) -> bytes:
    """The whole body, unpacked. Reading ends at the first byte too many."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HungUp
        part = message.get("body", b"")
        size += len(part)
        if size > limits.max_body_bytes:
            raise Refusal(
                RefusalCode.TOO_LARGE,
                f"a body has at most {limits.max_body_bytes} bytes: send less at a time",
                max_bytes=limits.max_body_bytes,
            )
        parts.append(part)
        if not message.get("more_body", False):
            break
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    return body if encoding in ("", "identity") else _unpack(body, encoding, limits.max_unpacked_bytes)


class HungUp(Exception):
    """Whoever asked is gone; nobody reads an answer."""


def _unpack(body: bytes, encoding: str, max_bytes: int) -> bytes:
    window = {"gzip": 31, "x-gzip": 31, "deflate": 15}.get(encoding)
    if window is None:
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"the encoding {encoding!r} is not known: use gzip, deflate or none"
        )
    if encoding == "deflate" and body[:1] and body[0] & 0x0F != 8:
        # Some leave out the header that the name promises.
        window = -15
    unpacker = zlib.decompressobj(window)
    try:
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the body is not valid {encoding}: {error}") from error
    if len(unpacked) > max_bytes:
        raise Refusal(
            RefusalCode.TOO_LARGE,
            f"a body unpacks to at most {max_bytes} bytes: send less at a time",
            max_bytes=max_bytes,
        )
    if not unpacker.eof or unpacker.unused_data:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the body is not one whole {encoding} stream")
    return unpacked


_ESCAPES = re.compile(rb"\\.", re.DOTALL)
_STRINGS = re.compile(rb'"[^"]*"')
_INTEGERS = re.compile(rb"(?<![0-9.eE+])-?[0-9]{19,}(?![0-9.eE])")
_ONE_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_DIGITS = b"0" * 19
_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")
_NEITHER_BRACKET_NOR_QUOTE = bytes(each for each in range(256) if each not in b'[]{}"')


def check_json(body: bytes, max_depth: int) -> None:
    """Depth and size of numbers, seen from the bytes alone and at the speed of a search; the rest is the decoder's."""
    is_flat = body.count(b"{") + body.count(b"[") <= max_depth
    has_long_digits = _LONG_DIGITS in body.translate(_ONE_DIGIT)
    if is_flat and not has_long_digits:
        return
    unescaped = _ESCAPES.sub(b"", body) if b"\\" in body else body
    if not is_flat:
        _check_depth(unescaped, max_depth)
    if has_long_digits:
        for digits in _INTEGERS.findall(_STRINGS.sub(b'""', unescaped)):
            if len(digits) > 20 or not -(1 << 63) <= int(digits) < (1 << 64):
                raise Refusal(
                    RefusalCode.INVALID_REQUEST, "an integer has more than 64 bits: send it as a string"
                )


def _check_depth(unescaped: bytes, max_depth: int) -> None:
    brackets = unescaped.translate(_ONE_BRACKET, _NEITHER_BRACKET_NOR_QUOTE)
    # Two quotes side by side leave whatever else there is inside or outside a string, as it was.
    brackets = brackets.replace(b'""', b"")
    if b'"' in brackets:
        brackets = _STRINGS.sub(b"", brackets)
    depth = 0
    while brackets:
        # Each turn takes away the innermost level. What is left when none is innermost is not JSON.
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            break
        depth += 1
        if depth > max_depth:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"the body is nested deeper than {max_depth} levels: flatten it"
            )
        brackets = inner


class Rate:
    """A bucket of tokens for each name, filled at one rate. Names that have been quiet are forgotten."""

    def __init__(self, per_s: float, burst: int, now: Callable[[], float], of: str = "requests") -> None:
        """`of`: what is counted, as whoever is refused reads it."""
        self._of = of
        self._per_s = per_s
        self._burst = float(burst)
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> None:
        """Refuses when the bucket is empty, and says when it will not be."""
        now = self._now()
        left = self._left(name, now)
        self._check(left)
        self._keep(name, left - 1.0, now)

    def check(self, name: str) -> None:
        """Refuses as `take` does, and takes nothing."""
        if name in self._buckets:
            self._check(self._left(name, self._now()))

    def spend(self, name: str) -> None:
        """Takes one without asking: for what has happened already."""
        now = self._now()
        self._keep(name, max(0.0, self._left(name, now) - 1.0), now)

    def _check(self, left: float) -> None:
        if left < 1.0:
            wait_s = (1.0 - left) / self._per_s
            raise Refusal(
                RefusalCode.RATE_LIMITED,
                f"more than {self._per_s:g} {self._of} a second; try again in {wait_s:.1f} s",
                retry_after_s=round(wait_s, 3),
            )

    def _left(self, name: str, now: float) -> float:
        left, at = self._buckets.get(name, (self._burst, now))
        return min(self._burst, left + (now - at) * self._per_s)

    def _keep(self, name: str, left: float, now: float) -> None:
        self._buckets.pop(name, None)
        self._buckets[name] = (left, now)
        if len(self._buckets) > _MAX_BUCKETS:
            # The longest quiet one is the fullest.
            del self._buckets[next(iter(self._buckets))]
