"""Words of the protocol and odd things to put in their place: what cases are made of. How is the others'."""

from __future__ import annotations

import json
import random
from typing import Any

JOB, FILE, PUT_LINK, GET_LINK = b"@job@", b"@file@", b"@put-link@", b"@get-link@"
KEY = b"@key-%s@"
KEYS = (b"admin",) * 12 + (b"operator", b"tenant", b"viewer", b"worker", b"wrong", b"none")

GRAPH = {
    "1": {"class_type": "KSampler", "inputs": {"seed": 7}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
}
LEASE = {"job_id": "@job@", "round": 1, "number": 1, "epoch": 1, "token": "t"}
WORDS: dict[str, Any] = {
    "payload": {"workflow": GRAPH},
    "jobs": [{"payload": GRAPH}],
    "worker_id": "gpu-1",
    "job_id": "@job@",
    "poll_id": "1",
    "wait_s": 0,
    "capabilities": {"services": ["comfyui"]},
    "lease": LEASE,
    "leases": [LEASE],
    "failure": {"kind": "transient", "message": "x"},
    "reports": [{"lease": LEASE, "kind": "progress"}],
    "files": [{"size": 3, "sha256": "0" * 64}],
    "role": "viewer",
    "token": "cfe_0_0",
    "priority": 3,
    "progress": 50,
}
"""What a body may ask for, so that it gets past the first look."""

ODD_TEXTS = (
    b"",
    b"\x00",
    b"..",
    b"../../../../etc/passwd",
    b"..\\..\\windows",
    b"%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    b"%00",
    b"%",
    b"%zz",
    b"%ff%fe",
    b"%c0%ae%c0%ae/",
    b"%ed%a0%80",
    "日本語".encode(),
    "\u202egnp.exe".encode(),
    "a\u0301\U0001f600".encode(),
    b"f_" + b"0" * 32,
    b"f_../../x",
    b"a" * 300,
    b"x" * 5000,
    b"'; DROP TABLE jobs; --",
    b"${jndi:ldap://x}",
    b"<script>",
    b"null",
    b"-1",
    b"0",
    b"1e400",
    b"NaN",
    b"true",
    b"\xff\xfe\xfd",
    b"{job_id}",
    b"*",
    b"{fleet}:x",
)
_ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    2**31,
    2**53 + 1,
    -(2**63),
    2**64 - 1,
    2**64,
    10**30,
    1e308,
    -0.0,
    "",
    "x",
    "\x00",
    "\ud800",
    "日本語" * 50,
    "x" * 300,
    "x" * 70_000,
    "@job@",
    "../../etc/passwd",
    [],
    {},
    [[]],
    {"": ""},
    {"a": {"b": {"c": [1, 2, {"d": None}]}}},
    [None] * 100,
    "2026-02-30T00:00:00Z",
    "9999-12-31T23:59:59Z",
)
HEADERS: dict[bytes, tuple[bytes, ...]] = {
    b"Range": (
        b"bytes=0-",
        b"bytes=1-2",
        b"bytes=-1",
        b"bytes=5-1",
        b"bytes=99999999999999999999-",
        b"bytes=0-0,1-1,2-2",
        b"bytes=" + b",".join(b"%d-%d" % (n, n) for n in range(500)),
        b"bytes=a-b",
        b"bytes",
        b"bytes=",
        b"bytes=-",
        b"items=0-5",
        b"bytes=0-0\xff",
        b"bytes=\xc2\xb2-",
        b"bytes=--5",
        b"bytes= 1 - 2 ",
    ),
    b"If-Range": (b"x", b'"abc"', b"Thu, 01 Jan 1970 00:00:00 GMT", b"\xff"),
    b"Accept": (
        b"*/*",
        b"text/event-stream",
        b"application/json",
        b"text/html",
        b"\xff",
        b"application/json;q=x,,;",
    ),
    b"Accept-Encoding": (b"gzip", b"gzip;q=0", b"br", b"\xff", b"," * 1000),
    b"Last-Event-ID": (b"0", b"-1", b"1", b"99999999999999999999", b"abc", "²".encode(), b"\xff", b"1e3"),
    b"Idempotency-Key": (b"k", b"", b"a" * 300, "é".encode(), b"\xff", b"idempotency-key:x", b"a b"),
    b"X-Request-Id": (b"r", b"", b"a" * 500, b"\xff", b"../x", b"a\tb"),
    b"Content-Type": (
        b"application/json",
        b"text/plain",
        b"multipart/form-data",
        b"application/json; charset=utf-16",
        b"\xff",
    ),
    b"Content-Encoding": (b"identity", b"gzip", b"deflate", b"br", b"gzip, gzip", b"\xff", b""),
    b"Host": (b"evil.example", b"", b"\xff", b"127.0.0.1:1", b"a" * 300),
    b"Origin": (b"null", b"http://evil.example", b"\xff"),
    b"Expect": (b"100-continue", b"x"),
    b"Connection": (b"close", b"keep-alive", b"upgrade", b"\xff"),
    b"Upgrade": (b"h2c", b"websocket", b"x"),
    b"X-Forwarded-For": (b"127.0.0.1", b"\xff"),
    b"Cookie": (b"a=b", b"\xff" * 100),
    b"Transfer-Encoding": (b"identity", b"gzip", b"chunked, gzip"),
    b"Authorization": (
        b"Bearer",
        b"Bearer ",
        b"Bearer cfk_",
        b"Bearer cfk_0_0",
        b"Basic YTpi",
        b"Bearer \xff",
        b"Bearer " + b"x" * 5000,
        b"bearer cfk_\xc3\xa9_0",
        b"Bearer a b",
    ),
}


def value(chance: random.Random, depth: int = 0) -> Any:
    roll = chance.random()
    if depth < 3 and roll < 0.2:
        return [value(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    if depth < 3 and roll < 0.4:
        return {
            chance.choice((*WORDS, "x", "")): value(chance, depth + 1) for _ in range(chance.randint(0, 3))
        }
    if roll < 0.6:
        return chance.choice(list(WORDS.values()))
    return chance.choice(_ODD_VALUES)


def encoded(given: Any) -> bytes:
    return json.dumps(given, ensure_ascii=False).encode("utf-8", "surrogatepass")


def bent(chance: random.Random, raw: bytes) -> bytes:
    """A few bytes changed, left out, doubled or put in."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(raw))
        until = min(len(raw), at + chance.randint(0, 8))
        raw = raw[:at] + chance.choice((b"", raw[at:until] * 2, chance.randbytes(3), b"\x00")) + raw[until:]
    return raw
