"""Throws requests and frames at a real hub process, and looks at what comes back, at its log and at its memory.

What is thrown is `fuzz_cases.py`'s; a case that failed is thrown again by its number: `python -m chaos.fuzz 7 1234`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from chaos.fuzz_cases import Case, case
from chaos.fuzz_frames import frame
from chaos.fuzz_words import FILE, GET_LINK, GRAPH, JOB, KEY, PUT_LINK
from chaos.kill_loop import Teller
from chaos.programs import HubProgram, settings_of

_LINES = 8
"""Cases under way at a time."""
_ANSWER_S = 15.0
_SILENCE_S = 0.25
"""How long something that may have no answer is listened to."""
_READ_BYTES = 256 * 1024
_DOCUMENTED = (b'"code":"queue_full"', b'"code":"unavailable"', b'"status":"stopping"', b'"status":"failing"')
# A connection that was closed because of a defect of its server (1011).
_DEFECT = re.compile(rb"\x88[\x02-\x7d]\x03\xf3")
_ENTRY = re.compile(r"^(?=\d{4}-\d\d-\d\d )", re.MULTILINE)
MEMORY_SHARE = 0.25
MEMORY_MB = 32.0
"""The hub may have so much more at the end than when a fifth was over: a quarter and 32 MB."""

_LIMITS = {
    # Nobody is sent away for asking too often, and whoever parks is answered soon.
    "requests_per_s": 1_000_000,
    "burst": 1_000_000,
    "refusals_per_s": 1_000_000,
    "refusals_burst": 1_000_000,
    "max_wait_s": 0.01,
    # Small, so that what is too large is also quick to send.
    "max_body_bytes": 2**20,
    "max_unpacked_bytes": 4 * 2**20,
    "max_frame_bytes": 2**20,
}


class Size(msgspec.Struct, frozen=True):
    requests: int
    """Requests and frames together."""
    max_waiting: int = 2_000


class Thrown(msgspec.Struct, frozen=True):
    requests: int
    frames: int
    statuses: dict[str, int]
    memory_mb: tuple[float, float]
    """When a fifth was over, and at the end."""
    wrong: tuple[str, ...]


def run(size: Size, seed: int, tell: Teller) -> Thrown:
    folder = Path(tempfile.mkdtemp(prefix="chaos-fuzz-"))
    rules = {"max_waiting": size.max_waiting}
    hub = HubProgram(folder / "data", settings_of("limits", _LIMITS) | settings_of("rules", rules))
    try:
        hub.start()
        thrown = asyncio.run(_throw_all(hub, size, seed, tell))
        if thrown.wrong:
            kept = shutil.copytree(
                hub.folder, tempfile.mkdtemp(prefix="chaos-fuzz-kept-"), dirs_exist_ok=True
            )
            print(f"not clean: the hub's log and store are kept in {kept}", file=sys.stderr)
        return thrown
    finally:
        hub.kill()
        shutil.rmtree(folder, ignore_errors=True)


async def _throw_all(hub: HubProgram, size: Size, seed: int, tell: Teller) -> Thrown:
    async with aiohttp.ClientSession(hub.url) as session:
        thrower = Thrower(hub, session)
        await thrower.prepare()
        cases = _cases(size.requests, seed)
        early_mb = 0.0
        for share, text in ((0.2, "a fifth"), (1.0, "all")):
            async with asyncio.TaskGroup() as group:
                for _ in range(_LINES):
                    group.create_task(thrower.throw_some(cases, size.requests * share, tell))
            if text == "a fifth":
                early_mb = hub.memory_mb()
        late_mb = hub.memory_mb()
        thrower.check(seed)
        if late_mb > early_mb * (1 + MEMORY_SHARE) + MEMORY_MB:
            thrower.wrong.append(f"memory grew from {early_mb:.0f} to {late_mb:.0f} MB")
        try:
            await _honest_job(session, thrower.keys["admin"])
        except (AssertionError, aiohttp.ClientError, TimeoutError, KeyError) as error:
            thrower.wrong.append(f"afterwards an honest job was not done: {error!r}")
    return Thrown(
        thrower.requests,
        thrower.frames,
        dict(sorted(thrower.statuses.items())),
        (round(early_mb, 1), round(late_mb, 1)),
        tuple(thrower.wrong[:20]),
    )


def _cases(requests: int, seed: int) -> Iterator[Case]:
    made = 0
    for number in itertools.count():
        if made >= requests:
            return
        each = case(seed, number)
        made += each.size
        yield each


class Thrower:
    def __init__(self, hub: HubProgram, session: aiohttp.ClientSession) -> None:
        self._hub = hub
        self._session = session
        self.keys: dict[str, str] = {"wrong": "cfk_0_0"}
        self._there: dict[bytes, bytes] = {}
        self.requests = 0
        self.frames = 0
        self.statuses: dict[str, int] = {}
        self.wrong: list[str] = []

    async def prepare(self) -> None:
        """Something for the cases to speak of: a key of each role, a job, a file."""
        self.keys["admin"] = self._hub.key
        for role in ("operator", "tenant", "viewer", "worker"):
            body = {"role": role} | ({"tenant": "acme"} if role == "tenant" else {})
            self.keys[role] = (await self._post("/api/keys", body))["key"]
        await self._renew()

    async def _renew(self) -> None:
        with contextlib.suppress(KeyError):
            self._there[JOB] = (await self._post("/api/jobs", {"payload": GRAPH}))["id"].encode()
        file = await self._post("/api/files", {"name": "x"})
        self._there[PUT_LINK] = file["link"]["url"].encode()
        file = await self._post("/api/files", {"name": "y"})
        async with self._session.put(file["link"]["url"], data=b"0123456789") as response:
            assert response.status == 200, await response.text()
        made = await self._post(f"/api/files/{file['id']}/complete")
        self._there[FILE] = made["id"].encode()
        self._there[GET_LINK] = made["link"]["url"].encode()

    async def _post(self, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {self.keys['admin']}"}
        async with self._session.post(path, json=body or {}, headers=headers) as response:
            return await response.json(content_type=None)

    async def throw_some(self, cases: Iterator[Case], until: float, tell: Teller) -> None:
        while self.requests + self.frames < until:
            each = next(cases, None)
            if each is None:
                return
            self._hub.check_alive()
            await self.throw(each)
            if (self.requests + self.frames) % 50 == 0:
                tell(f"{self.requests} requests, {self.frames} frames, {len(self.wrong)} wrong")
            if self.requests % 500 == 499:
                await self._renew()

    async def throw(self, each: Case) -> None:
        if each.door == "socket":
            self.frames += each.size
        else:
            self.requests += 1
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await (self._speak(each) if each.door == "socket" else self._ask(each))
        except TimeoutError:
            answer = b""
        except OSError as error:
            answer = b"" if each.is_broken else f"connection: {error!r}".encode()
        self._judge(each, answer)

    def _filled(self, part: bytes) -> bytes:
        for role, key in self.keys.items():
            part = part.replace(KEY % role.encode(), key.encode())
        for mark, value in self._there.items():
            if mark in part:
                part = part.replace(mark, value)
        return part

    # requests

    async def _ask(self, each: Case) -> bytes:
        async with self._connected() as (reader, writer):
            for part in each.parts:
                # A length that a mark has changed is put right, or the body would never be whole.
                writer.write(_with_length(part, self._filled(part), each.is_broken))
                with contextlib.suppress(OSError):
                    await writer.drain()
            return await _read_answer(reader, each.is_broken)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._hub.port, limit=2**20)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    # frames

    async def _speak(self, each: Case) -> bytes:
        async with self._connected() as (reader, writer):
            key = self.keys["admin" if each.number % 4 else "worker"]
            writer.write(
                b"GET /hub HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                b"Authorization: Bearer " + key.encode() + b"\r\n\r\n"
            )
            if b" 101 " not in (head := await reader.readuntil(b"\r\n\r\n")):
                return head
            for part in each.parts:
                writer.write(_unmasked_fill(part, self._filled))
            if not each.is_broken:
                # Messages are answered in order: whoever hears this has heard what was said to all of them.
                writer.write(frame(b'{"type": "ping", "request_id": "the last"}'))
            with contextlib.suppress(OSError):
                await writer.drain()
            return await _listen(reader, each.is_broken)

    # verdicts

    def _judge(self, each: Case, answer: bytes) -> None:
        said = ""
        if each.door == "socket":
            status = "frames" if answer else "silence"
            if b'"code":"internal"' in answer or _DEFECT.search(answer):
                said = "the connection met a defect"
            elif answer.startswith(b"HTTP/1.1 5"):
                said = "no connection"
            elif not each.is_broken and b"the last" not in answer:
                said = "not every message was answered"
        else:
            found = answer.split(b"\r\n", 1)[0].split(b" ")
            status = (
                found[1].decode("latin-1") if answer.startswith(b"HTTP/1.") and len(found) > 1 else "silence"
            )
            if status.startswith("5") and not (
                status == "503" and any(code in answer for code in _DOCUMENTED)
            ):
                said = "a failure of the hub's own"
            elif status == "silence" and not each.is_broken:
                said = "no answer"
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if said:
            self.wrong.append(f"case {each.number} ({each.kind}): {said}: {answer[:300]!r} to {_shown(each)}")

    def check(self, seed: int) -> None:
        """What no answer shows: the process lives, and its log has no trace of a defect."""
        self._hub.check_alive()
        for entry in _ENTRY.split(self._hub.told()):
            marks = ("Traceback", "incident", "never retrieved", "never awaited")
            if any(mark in entry for mark in marks):
                self.wrong.append(f"seed {seed}: the hub's log has {entry[:200]!r} … {entry[-1500:]!r}")


def _shown(each: Case) -> str:
    return " | ".join(repr(part[:400]) for part in each.parts)


def _with_length(given: bytes, filled: bytes, is_broken: bool) -> bytes:
    if is_broken or len(given) == len(filled):
        return filled
    head, mark, body = filled.partition(b"\r\n\r\n")
    lines = [
        b"Content-Length: %d" % len(body) if line.startswith(b"Content-Length:") else line
        for line in head.split(b"\r\n")
    ]
    return b"\r\n".join(lines) + mark + body


def _unmasked_fill(part: bytes, fill: Any) -> bytes:
    """Messages are masked as they are made: the mark of a job stands in their plain text, so they are made anew."""
    plain = _plain(part)
    return part if plain is None or (filled := fill(plain)) == plain else frame(filled)


def _plain(part: bytes) -> bytes | None:
    """The text of a single whole frame; None: it is not one."""
    size, at = (part[1] & 0x7F, 2) if len(part) > 1 and part[0] == 0x81 and part[1] & 0x80 else (0, 0)
    if size == 126:
        size, at = int.from_bytes(part[2:4]), 4
    elif size == 127:
        return None
    if not at or len(part) != at + 4 + size:
        return None
    mask = part[at : at + 4]
    return bytes(byte ^ mask[place % 4] for place, byte in enumerate(part[at + 4 :]))


async def _read_answer(reader: asyncio.StreamReader, is_broken: bool) -> bytes:
    """Its head and what follows at once: a stream has no end that could be waited for."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        # Half a request may be waited for by the hub as long as it likes.
        wait_s = _SILENCE_S if is_broken else _ANSWER_S
        try:
            async with asyncio.timeout(wait_s):
                piece = await reader.read(_READ_BYTES)
        except TimeoutError:
            return answer
        if not piece:
            return answer
        answer += piece
    if answer.startswith(b"HTTP/1.1 5"):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SILENCE_S):
                answer += await reader.read(_READ_BYTES)
    return answer


async def _listen(reader: asyncio.StreamReader, is_broken: bool) -> bytes:
    heard = b""
    while b"the last" not in heard:
        try:
            async with asyncio.timeout(_SILENCE_S if is_broken else _ANSWER_S):
                piece = await reader.read(_READ_BYTES)
        except TimeoutError:
            break
        if not piece:
            break
        heard = heard[-_READ_BYTES:] + piece
    return heard


async def _honest_job(session: aiohttp.ClientSession, key: str) -> None:
    """Whatever was thrown at it: room is made, a worker comes, a job is submitted, leased, completed and read."""
    headers = {"authorization": f"Bearer {key}"}

    async def ask(method: str, path: str, body: Any = None) -> Any:
        async with session.request(method, path, json=body, headers=headers) as response:
            assert response.status < 300, (path, response.status, await response.text())
            return await response.json(content_type=None) if response.status != 204 else None

    await ask("POST", "/api/queue/resume")
    cursor = ""
    while True:
        page = await ask("GET", f"/api/jobs?status=queued&limit=1000{cursor}")
        for waiting in page["jobs"]:
            async with session.post(f"/api/jobs/{waiting['id']}/cancel", headers=headers) as response:
                assert response.status == 200, await response.text()
        if not page["cursor"]:
            break
        cursor = f"&cursor={page['cursor']}"
    services = {"services": ["honest"]}
    await ask("POST", "/api/worker/register", {"worker_id": "honest", "capabilities": services})
    made = await ask("POST", "/api/jobs", {"payload": GRAPH, "service": "honest"})
    for attempt in range(200):
        given = await ask("POST", "/api/worker/poll", {"worker_id": "honest", "poll_id": f"p{attempt}"})
        if given is not None:
            break
    assert given is not None and given["job"]["id"] == made["id"], given
    await ask("POST", "/api/worker/heartbeat", {"worker_id": "honest", "leases": [given["lease"]]})
    result = {"outputs": {"2": {"text": ["honest"]}}}
    await ask("POST", "/api/worker/complete", {"lease": given["lease"], "result": result})
    read = await ask("GET", f"/api/jobs/{made['id']}/result")
    assert (read["status"], read["result"]["outputs"]) == ("completed", result["outputs"]), read


def main() -> None:
    """`python -m chaos.fuzz SEED NUMBER …`: throws these cases, and shows what was sent and what came back."""
    seed, *numbers = map(int, sys.argv[1:])
    folder = Path(tempfile.mkdtemp(prefix="chaos-fuzz-"))
    hub = HubProgram(folder / "data", settings_of("limits", _LIMITS))
    hub.start()

    async def throw() -> None:
        async with aiohttp.ClientSession(hub.url) as session:
            thrower = Thrower(hub, session)
            await thrower.prepare()
            for number in numbers:
                each = case(seed, number)
                print(number, each.kind, _shown(each))
                await thrower.throw(each)
                print(" ", thrower.wrong or dict(thrower.statuses))

    try:
        asyncio.run(throw())
        print(hub.told())
    finally:
        hub.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
