"""WebSocket frames by hand: messages of every type with right and wrong fields, and frames that break the rules."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

from chaos.fuzz_words import WORDS, bent, encoded, value
from comfyfleet.wire.websocket import ALIASES, KINDS


def message(chance: random.Random) -> bytes:
    kind = chance.choice([*KINDS, *ALIASES])
    body = KINDS[ALIASES.get(kind, kind)].body
    known = list(body.__struct_fields__)
    said = {"type": kind, **{name: WORDS[name] for name in known if name in WORDS}}
    if "worker_id" in said:
        said["worker_id"] = f"gpu-{chance.randint(1, 50)}"
    for name in chance.sample([*known, "request_id", "message_id", "type"], chance.choice((0, 0, 1, 1, 2))):
        said[name] = value(chance)
    if known and chance.random() < 0.1:
        said.pop(chance.choice(known), None)
    raw = encoded(said)
    if chance.random() < 0.15:
        return bent(chance, raw)
    if chance.random() < 0.05:
        return chance.choice((b"", b"[]", b"null", b'"x"', b"[" * 3_000, b'{"type": []}', b'{"type": "x"}'))
    return raw


def is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def frame(
    content: bytes, *, opcode: int = 1, first: int = 0x80, mask: bytes | None = b"\x11\x22\x33\x44"
) -> bytes:
    size = len(content)
    masked = 0x80 if mask is not None else 0
    if size < 126:
        length = bytes([masked | size])
    elif size < 65536:
        length = bytes([masked | 126]) + struct.pack(">H", size)
    else:
        length = bytes([masked | 127]) + struct.pack(">Q", size)
    if mask is not None and content:
        repeated = (mask * (size // 4 + 1))[:size]
        content = (int.from_bytes(content) ^ int.from_bytes(repeated)).to_bytes(size)
    return bytes([first | opcode]) + length + (mask or b"") + content


def framed(chance: random.Random, content: bytes) -> bytes:
    roll = chance.random()
    if roll < 0.1:
        return frame(content, opcode=2)
    if roll < 0.2:
        at = chance.randint(0, len(content))
        return frame(content[:at], first=0) + frame(b"?", opcode=9) + frame(content[at:], opcode=0)
    if roll < 0.25:
        pieces = [content[at : at + 1] for at in range(min(len(content), 200))]
        joined = b"".join(frame(piece, opcode=0 if at else 1, first=0) for at, piece in enumerate(pieces))
        return joined + frame(content[200:], opcode=0 if pieces else 1)
    return frame(content)


RULE_BREAKERS: Sequence[Callable[[random.Random], bytes]] = (
    lambda _: frame(b'{"type": "ping"}', mask=None),
    lambda _: frame(b"\xff\xfe\xfd"),
    lambda _: frame(b'{"type": "\xed\xa0\x80"}'),
    lambda _: frame(b"x" * 200, opcode=9),
    lambda chance: frame(b"x", opcode=chance.choice((3, 4, 7, 11, 15))),
    lambda chance: frame(b"x", first=0x80 | chance.choice((0x10, 0x20, 0x40, 0x70))),
    lambda _: frame(b"x", opcode=0),
    lambda _: frame(b"x", first=0) + frame(b"y", first=0),
    lambda chance: frame(struct.pack(">H", chance.choice((0, 999, 1005, 1006, 5000))), opcode=8),
    lambda _: frame(b"\x03", opcode=8),
    lambda _: frame(b"\x03\xe8\xff\xfe", opcode=8),
    lambda _: frame(b"", opcode=8),
    lambda chance: b"\x81\xff" + struct.pack(">Q", chance.choice((2**63, 2**40, 2_000_000))) + b"\x00" * 50,
    lambda _: frame(b"x" * 1_200_000),
    lambda _: b"".join(frame(b"x" * 60_000, opcode=0 if at else 1, first=0) for at in range(22)),
    lambda chance: frame(b'{"type": "ping"}')[: chance.randint(1, 10)],
    lambda chance: chance.randbytes(chance.randint(1, 300)),
    lambda _: frame(b"", opcode=10) * 50,
    lambda _: frame(b"", opcode=9) * 50,
    lambda _: frame(b"") * 20,
    lambda _: frame(b'{"type": "ping"}') * 300,
)
