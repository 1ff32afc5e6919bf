"""How deep a JSON text is, how large its integers are and how much memory it would take, found from its bytes alone.

A scanner is fed with a text piece by piece and refuses at the first piece that goes beyond a bound, so nothing needs to
have arrived whole, and nothing is decoded. Whether the text is JSON at all is for the decoder to say.
"""

from __future__ import annotations

import re
from itertools import accumulate

from comfyfleet.model.errors import Refusal, RefusalCode

PIECE_BYTES = 64 * 1024
"""A text is scanned, and unpacked, in pieces of this size. Scanning one takes about a millisecond at worst."""

_FREE_COST = 256 * 1024
"""Small texts are not weighed."""

_VALUE_COST = 100
"""What a value or a container takes once decoded, beside its text: an object with one member takes about 230 bytes."""
_ESCAPE_COST = 8
"""Escapes are slow to read and to write: 16 million of them would take a tenth of a second in one call."""

_MAX_NUMBER = 1_024
"""Characters."""

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
    """`max_bytes`: of the text. Decoded, the value may take about twice as much memory."""

    def __init__(self, max_depth: int, max_bytes: int, value_cost: int = _VALUE_COST) -> None:
        self._max_depth = max_depth
        self._left = 2 * max_bytes + _FREE_COST
        self._max_bytes = max_bytes
        self._value_cost = value_cost
        self._depth = 0
        self._is_in_string = False
        self._half_escape = b""
        self._number = b""
        """The end of the last piece, where that may be the beginning of a number."""
        self._string_bytes = 0
        self._string_width = 1
        """Of the string that the last piece ended in. One wide character widens all of a string."""

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
        """The text is over: what may have been the beginning of a number was all of it."""
        self._check_integers(self._number)

    def _without_strings(self, unescaped: bytes) -> bytes:
        parts = unescaped.split(b'"')
        outside = parts[1::2] if self._is_in_string else parts[::2]
        if len(parts) % 2 == 0:
            self._is_in_string = not self._is_in_string
        # A quote stays for each string, so that what stood on both sides of it does not become one.
        return b'"'.join(outside)

    def _weigh(self, piece: bytes, escapes: int, plain: bytes) -> None:
        width = _width(piece)
        if width > 1 and self._string_bytes:
            # Of the string that the last piece ended in, what came before becomes as wide as what comes now.
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
    """Bytes for each character of a string that this is part of."""
    if (piece.isascii() and b"\\u" not in piece) or not _MIDDLE.search(piece):
        return 1
    return 4 if _WIDE.search(piece) else 2


def check_json(body: bytes | memoryview, max_depth: int, max_bytes: int | None = None) -> None:
    """The same for a text that is there whole. Most are small and flat, and are settled by three searches."""
    if isinstance(body, bytes) and len(body) <= PIECE_BYTES:
        is_flat = body.count(b"{") + body.count(b"[") <= max_depth
        if is_flat and _LONG_DIGITS not in body.translate(_ONE_DIGIT):
            return
    scanner = JsonScanner(max_depth, len(body) if max_bytes is None else max_bytes)
    for start in range(0, len(body), PIECE_BYTES):
        scanner.feed(bytes(body[start : start + PIECE_BYTES]))
    scanner.end()
