"""Hostile bodies, made from what a route of the table takes, and a client that sends them whatever the hub says."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import inspect

from comfyfleet.wire.route import Route

_MARK = "@hostile@"
_PIECE = 256 * 1024
_GZIP = MappingProxyType({"content-encoding": "gzip"})


class Hostile(NamedTuple):
    name: str
    body: Callable[[], bytes]
    headers: Mapping[str, str] = MappingProxyType({})
    is_endless: bool = False
    """Sent in chunks, over and over, until the hub has had enough."""


def _repeated(unit: bytes, size: int) -> bytes:
    return unit * max(1, size // len(unit))


@cache
def values(size: int) -> Mapping[str, Callable[[], bytes]]:
    """JSON values of about so many bytes, each dear in its own way."""
    return {name: cache(make) for name, make in _values(size)}


def _values(size: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    yield "nested arrays", lambda: b"[" * (size // 2) + b"]" * (size // 2)
    yield "nested objects", lambda: _repeated(b'{"a":', size // 6 * 5) + b"1" + b"}" * (size // 6)
    yield "60 levels", lambda: b"[" + b",".join([b"[" * 59 + b"]" * 59] * (size // 119)) + b"]"
    yield "small arrays", lambda: b"[" + _repeated(b"[],", size - 4) + b"1]"
    yield "small objects", lambda: b"[" + _repeated(b'{"a":1},', size - 4) + b"1]"
    yield "numbers", lambda: b"[" + _repeated(b"1.25,", size - 4) + b"1]"
    yield (
        "many keys",
        lambda: b"{" + b",".join(b'"%x":0' % number for number in range(max(1, size // 10))) + b"}",
    )
    yield "a long string", lambda: b'"' + b"a" * (size - 2) + b'"'
    yield "a long file name", lambda: b'"' + b"a" * (size - 14) + b'.safetensors"'
    yield (
        "file names",
        lambda: b"[" + b",".join(b'"%x.safetensors"' % number for number in range(max(1, size // 20))) + b"]",
    )
    yield "escapes", lambda: b'"' + _repeated(b"\\n", size - 2) + b'"'
    yield "a wide string", lambda: b'"' + "😀".encode() + b"a" * (size - 6) + b'"'
    yield "wide escapes", lambda: b'"' + _repeated(b"\\ud83d\\ude00", size - 14) + b'"'
    yield "a long integer", lambda: b"9" * size
    yield "a long fraction", lambda: b"0." + b"1" * (size - 2)


def few(limit: int) -> Iterator[Hostile]:
    """For whoever is refused whatever is sent."""
    return islice(_generic(limit), 3)


def bodies(route: Route, limit: int) -> Iterator[Hostile]:
    """What to send to this route, whose bodies may have `limit` bytes."""
    yield from _generic(limit)
    frames = [b"@"]
    if route.decodes is not None:
        frames += list(frames_of(route.decodes))
    for name, make in values(limit - 2_048 if limit > 8_192 else limit // 2).items():
        for number, frame in enumerate(frames):
            yield Hostile(f"{name} in place {number}", partial(_packed, frame, make), _GZIP)


def dearest(route: Route, limit: int) -> Iterator[Hostile]:
    """Those that pass the most doors, where a graph may stand."""
    assert route.decodes is not None
    graphs = [frame for frame in frames_of(route.decodes) if b'"x":@' in frame or b'__value__":@' in frame]
    made = dict(_values(limit - 2_048))
    for name in ("a long string", "a wide string", "small objects", "file names"):
        for number, frame in enumerate(graphs[-2:]):
            yield Hostile(f"{name} in graph {number}", partial(_packed, frame, made[name]), _GZIP)


def _packed(frame: bytes, make: Callable[[], bytes]) -> bytes:
    return gzip.compress(frame.replace(b"@", make()), 1)


def _generic(limit: int) -> Iterator[Hostile]:
    yield Hostile("bomb of blanks", lambda: gzip.compress(b" " * (limit * 16), 1), _GZIP)
    yield Hostile("bomb of brackets", lambda: gzip.compress(b"[" * (limit * 16), 1), _GZIP)
    yield Hostile("bomb in a bomb", lambda: gzip.compress(gzip.compress(b" " * limit, 1)), _GZIP)
    yield Hostile("no such packing", lambda: b"{}", {"content-encoding": "br, gzip, zstd"})
    yield Hostile("no text", lambda: b"\xff\xfe\x00" * (limit // 3))
    yield Hostile(
        "a form", lambda: b"--x\r\n\r\n" * (limit // 8), {"content-type": "multipart/form-data; boundary=x"}
    )
    yield Hostile("another type", lambda: b"<a>" * (limit // 3), {"content-type": "text/xml"})


def forms(size: int) -> Iterator[Hostile]:
    """Forms with a file of about so many bytes: most of them never come to their end."""
    for boundary in ("x", "-" * 70, "ab" * 35):
        headers = {"content-type": f'multipart/form-data; boundary="{boundary}"'}
        begun = f'--{boundary}\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n'.encode()
        file = begun % (b"file", b'; filename="a.png"')
        almost = f"\r\n--{boundary[:-1]}".encode()
        for name, body in (
            ("almost the boundary", file + _repeated(almost, size)),
            ("a line feed for each byte", file + _repeated(b"\r\n", size)),
            ("a whole file", file + b"x" * size + f"\r\n--{boundary}--".encode()),
            ("a field without an end", begun % (b"name", b"") + b"x" * size),
            ("thousands of parts", _repeated(begun % (b"n", b"") + b"v\r\n", size)),
            ("thousands of files", _repeated(file + b"v\r\n", size)),
            ("a header without an end", file[:-4] + _repeated(b';name="', size)),
            ("parameters", (begun % (b"n", _repeated(b'; filename="\\', 7_000))) + b"x" * size),
            ("blanks", (begun % (b"n", b";" + b" " * 7_000)) + b"x" * size),
            ("a preamble", b"x" * size),
        ):
            yield Hostile(f"{name}, boundary {boundary:.5}", partial(bytes, body), headers)


def frames_of(kind: type[msgspec.Struct]) -> Iterator[bytes]:
    """Bodies that fit but for one place, marked by `@`: each field in turn, and shapes that anything goes through."""
    shape = inspect.type_info(kind)
    assert isinstance(shape, inspect.StructType)
    for field in shape.fields:
        for hostile in _hostile(field.type):
            plain = {each.encode_name: _plain(each.type) for each in shape.fields if each.required}
            yield msgspec.json.encode({**plain, field.encode_name: hostile}).replace(
                b'"%s"' % _MARK.encode(), b"@"
            )


def _hostile(kind: inspect.Type, levels: int = 4) -> Iterator[Any]:
    """Values of the kind with a mark where anything at all may stand, so many levels down."""
    match kind:
        case _ if not levels:
            return
        case inspect.RawType():
            yield _MARK
            yield from ({"payload": graph} for graph in _graphs())
        case inspect.AnyType():
            yield _MARK
        case inspect.DictType():
            yield from ({"x": within} for within in _hostile(kind.value_type, levels - 1))
            if isinstance(kind.value_type, inspect.AnyType | inspect.RawType):
                yield from _graphs()
        case inspect.VarTupleType() | inspect.ListType():
            yield from ([within] for within in _hostile(kind.item_type, levels - 1))
        case inspect.StructType():
            for field in kind.fields:
                plain = {each.encode_name: _plain(each.type) for each in kind.fields if each.required}
                yield from (
                    {**plain, field.encode_name: within} for within in _hostile(field.type, levels - 1)
                )
        case inspect.UnionType():
            for each in kind.types:
                yield from _hostile(each, levels)


def _graphs() -> Iterator[Any]:
    yield {"1": {"class_type": "A", "inputs": {"x": _MARK}}}
    yield {"1": {"class_type": "A", "inputs": {}, "_meta": _MARK}}
    yield {"workflow": {"1": {"class_type": "A", "inputs": {"x": {"__value__": _MARK}}}}}
    yield {"workflow": {"nodes": _MARK, "links": _MARK}}
    yield {"nodes": [{"id": 1, "type": "A", "inputs": [], "widgets_values": _MARK}], "links": []}


def _plain(kind: inspect.Type) -> Any:
    match kind:
        case inspect.StrType():
            return "x" * max(1, kind.min_length or 0)
        case inspect.IntType() | inspect.FloatType():
            return kind.ge or 0
        case inspect.BoolType():
            return False
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StructType():
            return {field.encode_name: _plain(field.type) for field in kind.fields if field.required}
        case inspect.VarTupleType() | inspect.ListType():
            return [_plain(kind.item_type)] * (kind.min_length or 0)
        case inspect.UnionType():
            return _plain(kind.types[0])
        case inspect.NoneType():
            return None
    return {}


class Sent(NamedTuple):
    status: int
    """0: the hub hung up without a word."""
    content: bytes


async def send(url: str, route: Route, hostile: Hostile, body: bytes, key: str | None) -> Sent:
    """Goes on sending until the hub answers or hangs up."""
    where = urlsplit(url)
    path = route.path
    for name in route.parameters:
        path = path.replace(f"{{{name}}}", "x")
    head = [f"{route.method} {path} HTTP/1.1", f"host: {where.netloc}"]
    head += [f"{name}: {value}" for name, value in hostile.headers.items()]
    if key is not None:
        head.append(f"authorization: Bearer {key}")
    head.append("transfer-encoding: chunked" if hostile.is_endless else f"content-length: {len(body)}")
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    answer = asyncio.ensure_future(_answer(reader))
    try:
        writer.write("\r\n".join([*head, "", ""]).encode())
        chunk = b"%x\r\n%s\r\n" % (len(body), body)
        start = 0
        with contextlib.suppress(ConnectionError):
            while not answer.done() and (hostile.is_endless or start < len(body)):
                writer.write(chunk if hostile.is_endless else body[start : start + _PIECE])
                start += _PIECE
                done = asyncio.ensure_future(writer.drain())
                await asyncio.wait({done, answer}, return_when=asyncio.FIRST_COMPLETED)
                if not done.done():
                    done.cancel()
                else:
                    done.result()
        return await answer
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> Sent:
    got = b""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        async with asyncio.timeout(60):
            got = head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            if b"text/event-stream" not in fields.get(b"content-type", b""):
                got += await reader.readexactly(int(fields.get(b"content-length", b"0")))
    return Sent(int(got.split(b" ", 2)[1]) if got else 0, got)
