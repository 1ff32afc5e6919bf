"""What is thrown at a hub: requests and WebSocket frames, each made from the seed and its number alone.

A case is bytes; where it speaks of something that is there (a job, a file, a lease, a key) the bytes have a mark that
the thrower fills in. Nothing here knows what an answer should be.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import re
import zlib
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote_from_bytes

import msgspec

from chaos.fuzz_frames import RULE_BREAKERS, framed, is_text, message
from chaos.fuzz_words import (
    FILE,
    GET_LINK,
    GRAPH,
    HEADERS,
    JOB,
    KEY,
    KEYS,
    ODD_TEXTS,
    PUT_LINK,
    WORDS,
    bent,
    encoded,
    value,
)
from comfyfleet.wire.route import Route
from comfyfleet.wire.routes import ROUTES

Door = Literal["http", "socket"]

# Whoever rotates its own key or ends a key in use has locked itself out, and would fuzz a closed door from then on.
_LEFT_OUT = {"worker_rotate"}
_ROUTES = [(route, path) for route in ROUTES if route.name not in _LEFT_OUT for path in route.paths]


class Case(msgspec.Struct, frozen=True):
    number: int
    kind: str
    door: Door
    parts: tuple[bytes, ...]
    """What is sent over one connection: of a request its pieces, of a WebSocket its frames."""
    is_broken: bool = False
    """It is not what HTTP or a WebSocket would be, or ends too soon: having no answer is an answer."""

    @property
    def size(self) -> int:
        """What it counts as: one request, or so many frames."""
        return len(self.parts) if self.door == "socket" else 1


def case(seed: int, number: int) -> Case:
    chance = random.Random(f"{seed}/{number}")
    kinds, weights = zip(*_KINDS, strict=True)
    make: Callable[[random.Random, int], Case] = chance.choices(kinds, weights)[0]
    return make(chance, number)


# requests


def _asked(chance: random.Random, number: int) -> Case:
    """Any route under any of its names, with ids, queries, headers and bodies that are right, nearly right or odd."""
    route, path = chance.choice(_ROUTES)
    head, body = _request(chance, route, path)
    return Case(number, "request", "http", (head + body,), is_broken=_is_unreadable(head))


def _is_unreadable(head: bytes) -> bool:
    return any(name in head for name in (b"Transfer-Encoding", b"Upgrade", b"Expect", b"Connection: upgrade"))


def _request(
    chance: random.Random, route: Route, path: str, body: bytes | None = None, headers: bytes = b""
) -> tuple[bytes, bytes]:
    target = re.sub(rb"\{\w+\}", lambda found: _identity(chance, found[0]), path.encode())
    if chance.random() < 0.3:
        target += b"?" + b"&".join(_parameter(chance, route) for _ in range(chance.randint(0, 4)))
    if route.name in ("put_content", "get_content") and chance.random() < 0.8:
        target = PUT_LINK if route.name == "put_content" else GET_LINK
        if chance.random() < 0.3:
            target += chance.choice((b"x", b"&expires=1", b"&signature=%ff", b"%00", b"&x=1"))
    if body is None:
        body = _body(chance, route)
    key = chance.choice(KEYS)
    lines = [b"%s %s HTTP/1.1" % (route.method.encode(), target), b"Host: 127.0.0.1"]
    if key != b"none":
        lines.append(b"Authorization: Bearer " + KEY % key)
    if body or route.method in ("POST", "PATCH", "PUT"):
        lines.append(b"Content-Length: %d" % len(body))
    for name in chance.sample(list(HEADERS), chance.choice((0, 0, 0, 1, 1, 2, 4))):
        # A body that says it is packed and is not would be read no further.
        lines.append(name + b": " + chance.choice(HEADERS[name]))
    return b"\r\n".join(lines) + b"\r\n" + headers + b"\r\n", body


def _identity(chance: random.Random, name: bytes) -> bytes:
    if chance.random() < 0.4:
        return {b"{job_id}": JOB, b"{file_id}": FILE}.get(name, b"gpu-%d" % chance.randint(1, 50))
    text = chance.choice(ODD_TEXTS)
    if chance.random() < 0.6:
        text = quote_from_bytes(text, safe=b"").encode()
    # What stands in a request line cannot have these; with them a request is of another kind.
    return re.sub(rb"[\x00-\x20\x7f]", b"%00", text) or b"%20"


def _parameter(chance: random.Random, route: Route) -> bytes:
    known = [] if route.query is None else [name.encode() for name in route.query.__struct_fields__]
    name = chance.choice([*known, b"limit", b"cursor", b"token", b"metadata[x]", b"metadata[", b"%ff", b""])
    return name + chance.choice((b"=", b"", b"==")) + _identity(chance, b"")


def _body(chance: random.Random, route: Route) -> bytes:
    if route.takes_bytes:
        return chance.randbytes(chance.choice((0, 3, 3, 3, 5000)))
    if route.decodes is None:
        return chance.choice((b"", b"", b"", b"{}", b"x"))
    known = list(route.decodes.__struct_fields__)
    body = {name: WORDS[name] for name in known if name in WORDS}
    if "worker_id" in body:
        body["worker_id"] = f"gpu-{chance.randint(1, 50)}"
    for name in chance.sample(known, min(chance.choice((0, 0, 0, 1, 1, 2, 3)), len(known))):
        body[name] = value(chance)
    if chance.random() < 0.1:
        body[chance.choice(("x", "", "日本語", "__class__"))] = value(chance)
    raw = encoded(body)
    return bent(chance, raw) if chance.random() < 0.2 else raw


def _misspelled(chance: random.Random, number: int) -> Case:
    """Bodies that are not JSON, or more of it than anybody should have to read."""
    route, path = chance.choice([each for each in _ROUTES if each[0].decodes is not None])
    depth = chance.choice((50, 79, 80, 81, 200, 5_000, 100_000))
    raw = chance.choice(
        (
            lambda: b"[" * depth,
            lambda: b"[" * depth + b"]" * depth,
            lambda: b'{"a":' * depth + b"1" + b"}" * depth,
            lambda: b'{"payload":' + b'{"x":' * depth + b"1" + b"}" * depth + b"}",
            lambda: b'{"payload": {"workflow": {"1": ' + b'{"a":' * depth + b"0" + b"}" * depth + b"}}}",
            lambda: b"NaN",
            lambda: b"Infinity",
            lambda: b'{"priority": -Infinity, "payload": {}}',
            lambda: b'{"payload": {}, "payload": {}}',
            lambda: b'{"priority": ' + b"9" * 5000 + b', "payload": {}}',
            lambda: b'{"priority": 1e999999999, "payload": {}}',
            lambda: b'{"priority": 0.' + b"0" * 50_000 + b"1}",
            lambda: b"\xef\xbb\xbf" + encoded(WORDS["payload"]),
            lambda: json.dumps({"payload": GRAPH}).encode("utf-16"),
            lambda: json.dumps({"payload": GRAPH}).encode("utf-32"),
            lambda: b'{"payload": {"workflow": {"1": {"class_type": "\xff\xfe", "inputs": {}}}}}',
            lambda: b'{"payload": {"workflow": {"1": {"class_type": "\\ud800", "inputs": {}}}}}',
            lambda: (
                b'{"payload": {"workflow": {"\\u0000": {"class_type": "\\u0000", "inputs": {"\\u0000": "\\u0000"}}}}}'
            ),
            lambda: b'{"payload": ' + encoded({"workflow": _wide(chance)}) + b"}",
            lambda: b'{"payload": ' + encoded({"workflow": _tangled(chance)}) + b"}",
            lambda: b'"' + b"x" * 500_000 + b'"',
            lambda: b"[" + b"0," * 200_000 + b"0]",
            lambda: b"{" + b",".join(b'"%d":0' % each for each in range(20_000)) + b"}",
            lambda: chance.randbytes(chance.randint(1, 2_000)),
            lambda: b"",
            lambda: b" " * 100_000,
            lambda: b"\x00" * 1000,
            lambda: b"/* x */ {}",
            lambda: b"{'payload': {}}",
        )
    )()
    head, body = _request(chance, route, path, raw)
    return Case(number, "json", "http", (head + body,), is_broken=_is_unreadable(head))


def _wide(chance: random.Random) -> dict[str, Any]:
    count = chance.choice((10, 500, 12_000))
    return {str(each): {"class_type": f"Node{each % 7}", "inputs": {}} for each in range(count)}


def _tangled(chance: random.Random) -> dict[str, Any]:
    """Links in circles, to nowhere, to itself, and of the wrong form."""
    nodes = [str(each) for each in range(chance.randint(1, 30))]

    def link() -> Any:
        return chance.choice(
            ([chance.choice(nodes), 0], ["nobody", 0], [chance.choice(nodes), -1], [0, "0"], [[], {}], None)
        )

    return {
        node: {"class_type": chance.choice(("A", "B", "", None, 5)), "inputs": {"a": link(), "b": link()}}
        for node in nodes
    }


def _packed(chance: random.Random, number: int) -> Case:
    """Packed bodies: right, broken, cut, of the wrong name, and bombs."""
    route, path = chance.choice([each for each in _ROUTES if each[0].decodes is not None])
    plain = chance.choice((encoded({"payload": GRAPH}), b"{}", _BOMB_OF_ZEROS, _BOMB_OF_BRACKETS))
    raw = _pack(plain, chance.choice(("gzip", "deflate", "bare")))
    match chance.randint(0, 4):
        case 0:
            raw = raw[: chance.randint(0, len(raw))]
        case 1:
            raw = bent(chance, raw)
        case 2:
            raw = gzip.compress(raw, 1, mtime=0)
        case _:
            pass
    encoding = chance.choice((b"gzip", b"x-gzip", b"deflate", b"GZIP ", b"br", b"gzip, gzip"))
    head, body = _request(chance, route, path, raw, b"Content-Encoding: " + encoding + b"\r\n")
    return Case(number, "packed", "http", (head + body,), is_broken=_is_unreadable(head))


@functools.cache
def _pack(plain: bytes, how: str) -> bytes:
    if how == "gzip":
        # Without the time of day: the same seed makes the same bytes.
        return gzip.compress(plain, 1, mtime=0)
    packed = zlib.compress(plain, 1)
    return packed if how == "deflate" else packed[2:-4]


_BOMB_OF_ZEROS = b"0" * 8_000_000
_BOMB_OF_BRACKETS = b"[" * 8_000_000


def _broken(chance: random.Random, number: int) -> Case:
    """What is not HTTP, or not any more."""
    route, path = chance.choice(_ROUTES)
    head, body = _request(chance, route, path)
    whole = head + body
    raw = chance.choice(
        (
            lambda: bent(chance, whole),
            lambda: whole[: chance.randint(0, len(whole))],
            lambda: whole.replace(b"\r\n", b"\n"),
            lambda: whole.replace(
                b"HTTP/1.1", chance.choice((b"HTTP/0.9", b"HTTP/1.0", b"HTTP/9.9", b"HTTP", b""))
            ),
            lambda: whole.replace(b"Host: 127.0.0.1\r\n", b""),
            lambda: whole.replace(
                b"\r\n", b"\r\nX: " + b"a" * chance.choice((1_000, 70_000, 300_000)) + b"\r\n", 1
            ),
            lambda: whole.replace(b"\r\n", b"\r\n" + b"X: a\r\n" * 5_000, 1),
            lambda: whole.replace(
                b"Content-Length: ", chance.choice((b"Content-Length: -", b"Content-Length: 9"))
            ),
            lambda: whole.replace(b"Content-Length: ", b"Content-Length: 5\r\nContent-Length: "),
            lambda: head.replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX: ") + _chunks(chance),
            lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),
            lambda: b"GET " + b"/" * chance.choice((10, 5_000, 100_000)) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            lambda: b"GET http://evil.example/api/jobs HTTP/1.1\r\nHost: x\r\n\r\n",
            lambda: b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
            lambda: b"CONNECT evil.example:80 HTTP/1.1\r\nHost: x\r\n\r\n",
            lambda: (
                b"%s /api/jobs HTTP/1.1\r\nHost: x\r\n\r\n"
                % chance.choice((b"TRACE", b"HEAD", b"FOO", b"get", b"A" * 500, b"\xff", b"PROPFIND"))
            ),
            lambda: b"GET /api/jobs\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
            lambda: b"GET \xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
            lambda: b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % chance.choice(ODD_TEXTS),
            lambda: chance.randbytes(chance.randint(1, 500)),
            lambda: whole * 3,
            lambda: b"\r\n" * 50 + whole,
        )
    )()
    at = chance.randint(0, len(raw))
    parts = (raw[:at], raw[at:]) if chance.random() < 0.3 else (raw,)
    return Case(number, "broken", "http", parts, is_broken=True)


def _chunks(chance: random.Random) -> bytes:
    return chance.choice(
        (
            b"zz\r\nabc\r\n0\r\n\r\n",
            b"-1\r\n\r\n",
            b"ffffffffffffffffff\r\nabc",
            b"3\r\nabcdef\r\n0\r\n\r\n",
            b"2;ext=\xff\r\n{}\r\n0\r\n\r\n",
            b"2\r\n{}\r\n0\r\nTrailer: \xff\r\n\r\n",
            b"1\r\n{\r\n" * 200,
            b"0\r\n\r\n",
        )
    )


# frames


def _spoken(chance: random.Random, number: int) -> Case:
    """A WebSocket with a few messages: every type, with fields that are right, wrong or missing; then perhaps frames
    that break the rules."""
    messages = [message(chance) for _ in range(chance.randint(1, 6))]
    frames = [framed(chance, said) for said in messages]
    if chance.random() < 0.4:
        frames.append(chance.choice(RULE_BREAKERS)(chance))
        return Case(number, "frames", "socket", tuple(frames), is_broken=True)
    # Text that is no UTF-8 ends a WebSocket.
    return Case(number, "messages", "socket", tuple(frames), is_broken=not all(map(is_text, messages)))


_KINDS: tuple[tuple[Callable[[random.Random, int], Case], int], ...] = (
    (_asked, 45),
    (_misspelled, 10),
    (_packed, 6),
    (_broken, 15),
    (_spoken, 12),
)
