"""Reads the body of a request while it arrives: bounds it, decompresses it, scans it and decodes it.

Small bodies are handled on the event loop. Larger ones go piece by piece through one thread that all requests
share, under a common memory budget. The scanner finds nesting, large integers and memory cost from the bytes
alone and refuses at the first piece beyond a bound; the decoder decides whether the text is valid JSON.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import msgspec

from comfyfleet.hub.http.limits import ByteBudget, ClientDisconnected, HubLimits
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.wire.route import LARGE_BYTES, Route

PIECE_BYTES = 64 * 1024
"""Size of a piece to scan or decompress. Scanning one takes a millisecond at most."""

_FREE_COST = 256 * 1024
"""Small texts have no cost."""

_VALUE_COST = 100
"""Bytes of a decoded value or container, beside its text: an object with one member takes about 230."""
_ESCAPE_COST = 8
"""Escapes are slow: 16 million of them would take a tenth of a second in one call."""

_MAX_NUMBER = 1_024
"""In characters."""

_ESCAPES = re.compile(rb"\\.", re.DOTALL)
_INTEGERS = re.compile(rb"(?<![0-9.eE+])-?[0-9]{19,}(?![0-9.eE])")
_NUMBER_AT_END = re.compile(rb"[-+.0-9eE]+\Z")
_LONG_NUMBER = re.compile(rb"[-+.0-9eE]{%d}" % (_MAX_NUMBER + 1))
_ONE_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_DIGITS = b"0" * 19
_STEPS = bytes.maketrans(b"[{]}", b"\1\1\0\0")
_NO_BRACKETS = bytes(each for each in range(256) if each not in b"[]{}")
_TO_QUOTE = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_WIDE = re.compile(rb"[\xf0-\xff]|\\u[dD][89a-fA-F]")
_MIDDLE = re.compile(rb"[\xc4-\xff]|\\u(?!00)")


class JsonScanner:
    """`max_bytes` bounds the text. The decoded value may take about twice as much memory."""

    def __init__(self, max_depth: int, max_bytes: int, value_cost: int = _VALUE_COST) -> None:
        self._max_depth = max_depth
        self._left = 2 * max_bytes + _FREE_COST
        self._max_bytes = max_bytes
        self._value_cost = value_cost
        self._depth = 0
        self._is_in_string = False
        self._half_escape = b""
        self._number = b""
        """The end of the last piece if it may be the start of a number."""
        self._string_bytes = 0
        self._string_width = 1
        """Of the string in which the last piece ended. One wide character widens the whole string."""

    def feed(self, piece: bytes) -> None:
        if self._half_escape:
            piece, self._half_escape = self._half_escape + piece, b""
        escapes = 0
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece, self._half_escape = piece[:-1], b"\\"
            unescaped = _ESCAPES.sub(b"", piece)
            escapes = (len(piece) - len(unescaped)) // 2
        else:
            unescaped = piece
        plain = self._without_strings(unescaped)
        self._check_depth(plain)
        self._check_numbers(plain)
        self._weigh(piece, escapes, plain)

    def end(self) -> None:
        """Call it after the last piece: a number may end the text."""
        self._check_integers(self._number)

    def _without_strings(self, unescaped: bytes) -> bytes:
        parts = unescaped.split(b'"')
        outside = parts[1::2] if self._is_in_string else parts[::2]
        if len(parts) % 2 == 0:
            self._is_in_string = not self._is_in_string
        # One quote stays for each string, so that the text on its two sides does not merge.
        return b'"'.join(outside)

    def _weigh(self, piece: bytes, escapes: int, plain: bytes) -> None:
        width = _width(piece)
        if width > 1 and self._string_bytes:
            # The string began in an earlier piece; that part becomes as wide as this one.
            ending = _TO_QUOTE.match(piece)
            widened = max(_width(piece if ending is None else ending.group()), self._string_width)
            self._left -= self._string_bytes * (widened - self._string_width)
            self._string_width = widened
        width = max(width, self._string_width)
        cost = len(piece) * width
        if not self._is_in_string:
            self._string_bytes, self._string_width = 0, 1
        elif b'"' in piece:
            self._string_bytes, self._string_width = len(piece), width
        else:
            self._string_bytes, self._string_width = self._string_bytes + len(piece), width
        values = plain.count(b",") + plain.count(b"[") + plain.count(b"{")
        self._left -= cost + values * self._value_cost + escapes * _ESCAPE_COST
        if self._left < 0:
            raise Refusal(
                RefusalCode.TOO_LARGE,
                f"the body holds too many values, or too much text beyond ASCII, for its bound of {self._max_bytes} "
                "bytes: send less at a time, and files as files",
                max_bytes=self._max_bytes,
            )

    def _check_depth(self, plain: bytes) -> None:
        opened = plain.count(b"[") + plain.count(b"{")
        closed = plain.count(b"]") + plain.count(b"}")
        if self._depth + opened > self._max_depth:
            steps = plain.translate(_STEPS, _NO_BRACKETS)
            deepest = max(accumulate((1 if step else -1 for step in steps), initial=self._depth))
            if deepest > self._max_depth:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"the body is nested deeper than {self._max_depth} levels: flatten it",
                )
        self._depth += opened - closed

    def _check_numbers(self, plain: bytes) -> None:
        if self._number:
            plain, self._number = self._number + plain, b""
        if not self._is_in_string and (begun := _NUMBER_AT_END.search(plain, max(0, len(plain) - 4096))):
            self._number = begun.group()
            plain = plain[: begun.start()]
        if len(self._number) > _MAX_NUMBER or _LONG_NUMBER.search(plain):
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"a number has more than {_MAX_NUMBER} characters: shorten it"
            )
        self._check_integers(plain)

    def _check_integers(self, plain: bytes) -> None:
        if _LONG_DIGITS not in plain.translate(_ONE_DIGIT):
            return
        for digits in _INTEGERS.findall(plain):
            if len(digits) > 20 or not -(1 << 63) <= int(digits) < (1 << 64):
                raise Refusal(
                    RefusalCode.INVALID_REQUEST, "an integer has more than 64 bits: send it as a string"
                )


def _width(piece: bytes) -> int:
    """Bytes for each character of a string that contains this piece."""
    if (piece.isascii() and b"\\u" not in piece) or not _MIDDLE.search(piece):
        return 1
    return 4 if _WIDE.search(piece) else 2


def check_json(body: bytes | memoryview, max_depth: int, max_bytes: int | None = None) -> None:
    """Scans a complete text. Most are small and flat, and three searches decide."""
    if isinstance(body, bytes) and len(body) <= PIECE_BYTES:
        is_flat = body.count(b"{") + body.count(b"[") <= max_depth
        if is_flat and _LONG_DIGITS not in body.translate(_ONE_DIGIT):
            return
    scanner = JsonScanner(max_depth, len(body) if max_bytes is None else max_bytes)
    for start in range(0, len(body), PIECE_BYTES):
        scanner.feed(bytes(body[start : start + PIECE_BYTES]))
    scanner.end()


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
T = TypeVar("T")

_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class JsonDecoder(Protocol):
    def decode(self, buf: bytes | bytearray, /) -> Any: ...


class BodyLimit(NamedTuple):
    sent: int
    unpacked: int
    depth: int
    in_parts: bool

    @classmethod
    def of(cls, route: Route, limits: HubLimits) -> BodyLimit:
        """Settings can lower every bound; only the bound of large bodies can be raised."""
        sent, unpacked = limits.max_body_bytes, limits.max_unpacked_bytes
        if route.max_bytes < LARGE_BYTES:
            sent, unpacked = min(sent, route.max_bytes), min(unpacked, route.max_bytes)
        return cls(sent, unpacked, limits.max_depth, route.in_parts)

    def scanner(self) -> JsonScanner:
        # A body decoded in parts holds its values as text until then.
        return JsonScanner(self.depth, self.unpacked, 8 if self.in_parts else 100)


class LargeBodies:
    """All large bodies in progress at this hub."""

    def __init__(self, limits: HubLimits) -> None:
        self.budget = ByteBudget(limits.max_bodies_bytes, "large bodies", "key")
        self._thread = ThreadPoolExecutor(1, "hub-bodies")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class BodyReader:
    """One body, from its first byte to the answer. Leaving the context releases its memory budget."""

    def __init__(self, bodies: LargeBodies, bound: BodyLimit, key_id: str) -> None:
        self._bodies = bodies
        self._bound = bound
        self._key_id = key_id
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._held:
            self._bodies.budget.release(self._key_id, self._held)
            self._held = 0

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> bytes | bytearray:
        """The whole body, decompressed and scanned. Reading stops at the first byte beyond the bound."""
        unpacker = _unpacker(headers.get("content-encoding", "").strip().lower())
        announced = headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > self._bound.sent:
            raise _too_large("has", self._bound.sent)
        first, more = await read_piece(receive)
        while more and len(first) < PIECE_BYTES:
            piece, more = await read_piece(receive)
            first += piece
        self._check_sent(len(first))
        if not more and unpacker is None and len(first) <= PIECE_BYTES:
            check_json(first, self._bound.depth, self._bound.unpacked)
            return first
        received = _ReceivedBody(unpacker, self._bound)
        size = len(first)
        # One step here is cheap, and enough for a body that decompresses to little.
        rest = received.begin(first) if unpacker is not None and size <= PIECE_BYTES else first
        while True:
            if rest or received.has_output:
                await self._bodies.run_in_thread(partial(received.add, rest))
            self._hold(len(received.body))
            if not more:
                break
            rest, more = await read_piece(receive)
            size += len(rest)
            self._check_sent(size)
        received.end()
        return received.body

    async def decode(self, decoder: JsonDecoder, body: bytes | bytearray) -> Any:
        if len(body) <= PIECE_BYTES:
            return parse(decoder, body)
        return await self._bodies.run_in_thread(lambda: parse(decoder, body))

    async def checked(self, decoder: JsonDecoder, body: bytes) -> Any:
        """Scans and decodes a complete body, such as a WebSocket message."""
        if len(body) > self._bound.unpacked:
            raise _too_large("has", self._bound.unpacked)
        if len(body) <= PIECE_BYTES:
            check_json(body, self._bound.depth, self._bound.unpacked)
            return parse(decoder, body)
        self._hold(len(body))
        return await self._bodies.run_in_thread(lambda: _check_and_parse(decoder, body, self._bound))

    def _hold(self, size: int) -> None:
        if size > PIECE_BYTES and size > self._held:
            self._bodies.budget.take(self._key_id, size - self._held)
            self._held = size

    def _check_sent(self, size: int) -> None:
        if size > self._bound.sent:
            raise _too_large("has", self._bound.sent)


class _ReceivedBody:
    def __init__(self, unpacker: _Unpacker | None, bound: BodyLimit) -> None:
        self.body = bytearray()
        self._unpacker = unpacker
        self._bound = bound
        self._scanner = bound.scanner()

    def begin(self, piece: bytes) -> bytes:
        """Decompresses one step and returns the unused rest of the piece."""
        assert self._unpacker is not None
        unpacked, rest = self._unpacker.unpack(piece)
        self._keep(unpacked)
        return rest

    @property
    def has_output(self) -> bool:
        return self._unpacker is not None and self._unpacker.is_full

    def add(self, piece: bytes) -> None:
        if self._unpacker is None:
            for start in range(0, len(piece), PIECE_BYTES):
                self._keep(piece[start : start + PIECE_BYTES])
            return
        while piece or self._unpacker.is_full:
            unpacked, piece = self._unpacker.unpack(piece)
            self._keep(unpacked)

    def end(self) -> None:
        if self._unpacker is not None:
            self._unpacker.check_is_whole()
        self._scanner.end()

    def _keep(self, piece: bytes) -> None:
        if len(self.body) + len(piece) > self._bound.unpacked:
            raise _too_large("has" if self._unpacker is None else "unpacks to", self._bound.unpacked)
        self._scanner.feed(piece)
        self.body += piece


class _Unpacker:
    """Decompresses one gzip or deflate stream piece by piece."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream: Any = None
        self.is_full = False

    def unpack(self, piece: bytes) -> tuple[bytes, bytes]:
        """At most `PIECE_BYTES` of output, and the unused rest of the piece."""
        if self._stream is None:
            # Some clients omit the zlib header that `deflate` requires.
            is_bare = self._encoding == "deflate" and piece[:1] and piece[0] & 0x0F != 8
            self._stream = zlib.decompressobj(-15 if is_bare else _WINDOWS[self._encoding])
        try:
            unpacked: bytes = self._stream.decompress(piece, PIECE_BYTES)
        except zlib.error as error:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"the body is not valid {self._encoding}: {error}"
            ) from error
        if self._stream.unused_data:
            self._refuse()
        # The stream may have consumed the whole piece and still hold output.
        self.is_full = len(unpacked) == PIECE_BYTES and not self._stream.eof
        return unpacked, self._stream.unconsumed_tail

    def check_is_whole(self) -> None:
        if self._stream is None or not self._stream.eof:
            self._refuse()

    def _refuse(self) -> None:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the body is not one whole {self._encoding} stream")


def _unpacker(encoding: str) -> _Unpacker | None:
    if encoding in ("", "identity"):
        return None
    if encoding not in _WINDOWS:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"the content encoding {encoding!r:.40} is not supported: use gzip, deflate or none",
        )
    return _Unpacker(encoding)


async def read_piece(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return message.get("body", b""), message.get("more_body", False)


def parse(decoder: JsonDecoder, body: bytes | bytearray) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the body is not valid: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        why = error if body else "it is empty"
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the body is not JSON: {why}") from error


def _check_and_parse(decoder: JsonDecoder, body: bytes, bound: BodyLimit) -> Any:
    scanner = bound.scanner()
    for start in range(0, len(body), PIECE_BYTES):
        scanner.feed(body[start : start + PIECE_BYTES])
    scanner.end()
    return parse(decoder, body)


def _too_large(what: str, most: int) -> Refusal:
    return Refusal(
        RefusalCode.TOO_LARGE, f"a body {what} at most {most} bytes here: send less at a time", max_bytes=most
    )
