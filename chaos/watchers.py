"""Callers and watchers of a hub as processes of their own, with plain HTTP, Server-Sent Events and a WebSocket.

A caller submits under idempotency keys and watches each of its jobs to the end; a watcher watches the same jobs. What
they were told is written down as it comes; whether anything is missing is for the checker.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from tests.acceptance._process import picture_workflow
from yarl import URL

from chaos.logs import Line, Log
from chaos.made import graph_in, made_from
from chaos.setting import Setting, play

_RETRY_S = 0.05
_POLL_S = 0.02
_AT_ONCE = 32
_SILENT_S = 20.0
"""A stream says at least so often that it lives; one that does not is begun anew."""
FINAL = ("completed", "failed", "cancelled")
ENDS = tuple(f"job_{kind}" for kind in FINAL)
_LOST = (aiohttp.ClientError, TimeoutError, OSError)


class Address(msgspec.Struct, frozen=True):
    url: str
    key: str


def caller_process(
    setting: Setting, who: str, address: Address, seed: int, jobs: int, window: int, workers: list[str]
) -> None:
    """So many jobs, and when they are done one more for each of the workers that it alone may run."""
    play(setting, who, _call(setting, who, address, seed, jobs, window, workers))


def stream_process(setting: Setting, who: str, address: Address, caller: str, jobs: int) -> None:
    """Watches every job of that caller over Server-Sent Events."""
    play(setting, who, _watch_all(setting, who, address, caller, jobs))


def socket_process(setting: Setting, who: str, address: Address, caller: str, jobs: int) -> None:
    """The same over one WebSocket, as those who came before do."""
    play(setting, who, _listen(setting, who, address, caller, jobs))


def reader_process(setting: Setting, who: str, address: Address, jobs: list[str]) -> None:
    """When all is quiet: every job read once more, and its stream from the beginning."""
    play(setting, who, _read_again(setting, who, address, jobs))


class _Hub:
    def __init__(self, session: aiohttp.ClientSession, log: Log) -> None:
        self._session = session
        self._log = log

    async def submit(self, reference: str, body: dict[str, Any]) -> str:
        """Asked again until there is an answer: the key makes it safe."""
        headers = {"idempotency-key": reference}
        while True:
            try:
                async with self._session.post("/api/jobs", json=body, headers=headers) as response:
                    if response.status in (200, 201):
                        return str((await response.json())["id"])
                    assert response.status == 503, await response.text()
            except _LOST:
                pass
            await asyncio.sleep(_RETRY_S)

    async def watch(self, job: str) -> None:
        """To the job's end, however often the stream is lost: it goes on after the last fact that was heard."""
        last = 0
        while True:
            try:
                async with self._session.get(
                    f"/api/jobs/{job}/progress",
                    headers={"last-event-id": str(last), "accept": "text/event-stream"},
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_SILENT_S),
                ) as response:
                    if response.status == 204:
                        return
                    if response.status == 200:
                        async for number, kind in _facts(response):
                            self._log.write("fact", job=job, number=number, value=kind)
                            last = number
                            if kind in FINAL:
                                return
                    elif response.status != 503:
                        # A job that was acknowledged and is not there is what this is all about.
                        self._log.write("fact", job=job, number=-1, value=f"refused: {response.status}")
                        return
            except _LOST:
                pass
            self._log.write("came_back", job=job, number=last)
            await asyncio.sleep(_RETRY_S)

    async def read(self, job: str) -> tuple[str, str | None]:
        """The attempt that completed it; or, in words that are no attempt's, what became of the job instead. And what
        its result was made from."""
        details = await self._get(f"/api/jobs/{job}")
        if isinstance(details, int):
            return f"refused: {details}", None
        return _attempt_of(msgspec.json.decode(details)), await self._made(job)

    async def _made(self, job: str) -> str | None:
        """By what a worker gave back, or by the graph in the picture that it left, as it is downloaded."""
        found = await self._get(f"/api/jobs/{job}/result")
        result = None if isinstance(found, int) else msgspec.json.decode(found)["result"]
        if result is None:
            return None
        if given := result.get("outputs", {}).get("9", {}).get("made_from"):
            return picture_of(given[0])
        made = set()
        for file in result.get("files", ()):
            content = await self._get(URL(file["url"]).raw_path_qs)
            made.add(picture_of(graph_in(content)) if isinstance(content, bytes) else str(content))
        return " and ".join(sorted(made)) or None

    async def _get(self, path: str) -> bytes | int:
        """What is there, or how it was refused. Asked again while the hub is away."""
        while True:
            try:
                async with self._session.get(URL(path, encoded=True)) as response:
                    if response.status == 200:
                        return await response.read()
                    if response.status != 503:
                        return response.status
            except _LOST:
                pass
            await asyncio.sleep(_RETRY_S)


def picture_of(graph: Mapping[str, Any]) -> str:
    """What a picture is made of: a hub draws seeds, and a worker names files in its own way."""
    try:
        return made_from({"text": graph["6"]["inputs"]["text"], "steps": graph["3"]["inputs"]["steps"]})
    except (KeyError, TypeError):
        return "no picture of ours"


def _attempt_of(details: dict[str, Any]) -> str:
    done = [attempt["id"] for attempt in details["history"] if attempt["outcome"] == "completed"]
    if details["status"] != "completed" or len(done) != 1:
        return f"not completed: {details['status']}, by {done}"
    return str(done[0])


async def _facts(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[int, str]]:
    """What has an id; read by hand, so that our own reader cannot be what is wrong."""
    fields: dict[str, str] = {}
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
            continue
        if "id" in fields:
            data = msgspec.json.decode(fields["data"])
            assert (data["number"], data["kind"]) == (int(fields["id"]), fields["event"]), fields
            yield data["number"], data["kind"]
        fields = {}


@asynccontextmanager
async def _connected(setting: Setting, who: str, address: Address) -> AsyncIterator[tuple[_Hub, Log]]:
    log = Log(setting.logs, who)
    async with aiohttp.ClientSession(
        address.url,
        headers={"authorization": f"Bearer {address.key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=10.0),
    ) as session:
        log.write("ready", role="caller")
        yield _Hub(session, log), log
    log.write("over")


async def _call(
    setting: Setting, who: str, address: Address, seed: int, jobs: int, window: int, workers: list[str]
) -> None:
    chance = random.Random(seed)
    async with _connected(setting, who, address) as (hub, log):
        numbers = iter(range(jobs))
        async with asyncio.TaskGroup() as group:
            for _ in range(window):
                group.create_task(_one_after_the_other(hub, log, who, chance, numbers))
        async with asyncio.TaskGroup() as group:
            for number, worker in enumerate(workers, jobs):
                body = _submission(chance, number) | {"requirements": {"workers": [worker]}}
                group.create_task(_one(hub, log, f"{who}/{number}", body))


async def _one_after_the_other(
    hub: _Hub, log: Log, who: str, chance: random.Random, numbers: Iterator[int]
) -> None:
    for number in numbers:
        await _one(hub, log, f"{who}/{number}", _submission(chance, number))


def _submission(chance: random.Random, number: int) -> dict[str, Any]:
    # The nonce makes each picture its job's own.
    text = f"picture {number} {chance.getrandbits(64):016x}"
    workflow = picture_workflow(text, steps=chance.choice((1, 2, 4)))
    return {"payload": {"workflow": workflow}, "priority": chance.choice((-1, 0, 0, 0, 1))}


async def _one(hub: _Hub, log: Log, reference: str, body: dict[str, Any]) -> None:
    log.write("submitting", reference=reference, made=picture_of(body["payload"]["workflow"]))
    job = await hub.submit(reference, body)
    log.write("acknowledged", reference=reference, job=job)
    await hub.watch(job)
    value, made = await hub.read(job)
    log.write("seen", reference=reference, job=job, value=value, made=made)


async def _jobs_of(setting: Setting, caller: str, jobs: int) -> AsyncIterator[str]:
    """Each job as its caller writes that it was acknowledged."""
    decoder = msgspec.json.Decoder(Line)
    offset = found = 0
    path = setting.logs / f"{caller}.jsonl"
    while found < jobs:
        await asyncio.sleep(_POLL_S)
        if not path.exists():
            continue
        with path.open("rb") as file:
            file.seek(offset)
            whole, mark, _ = file.read().rpartition(b"\n")
        offset += len(whole) + len(mark)
        for text in whole.splitlines():
            line = decoder.decode(text)
            if line.what == "acknowledged" and line.job is not None:
                found += 1
                yield line.job


async def _watch_all(setting: Setting, who: str, address: Address, caller: str, jobs: int) -> None:
    async with _connected(setting, who, address) as (hub, _), asyncio.TaskGroup() as group:
        async for job in _jobs_of(setting, caller, jobs):
            group.create_task(hub.watch(job))


async def _read_again(setting: Setting, who: str, address: Address, jobs: list[str]) -> None:
    async with _connected(setting, who, address) as (hub, log):
        for at in range(0, len(jobs), _AT_ONCE):
            some = jobs[at : at + _AT_ONCE]
            await asyncio.gather(*map(hub.watch, some))
            for job in some:
                value, made = await hub.read(job)
                log.write("read_again", job=job, value=value, made=made)


# over the WebSocket


async def _listen(setting: Setting, who: str, address: Address, caller: str, jobs: int) -> None:
    log = Log(setting.logs, who)
    open_jobs: dict[str, None] = {}
    line: list[aiohttp.ClientWebSocketResponse] = []

    async def find() -> None:
        async for job in _jobs_of(setting, caller, jobs):
            open_jobs[job] = None
            for socket in line:
                await _subscribe(socket, job)

    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {address.key}"}) as session:
        log.write("ready", role="caller")
        finding = asyncio.ensure_future(find())
        while not finding.done() or open_jobs:
            try:
                async with session.ws_connect(f"{address.url}/hub", heartbeat=5.0) as socket:
                    for job in list(open_jobs):
                        await _subscribe(socket, job)
                    line[:] = [socket]
                    await _hear(socket, log, open_jobs, finding)
            except _LOST:
                pass
            line.clear()
            await asyncio.sleep(_RETRY_S)
        await finding
    log.write("over")


async def _subscribe(socket: aiohttp.ClientWebSocketResponse, job: str) -> None:
    try:
        await socket.send_json({"type": "subscribe_progress", "job_id": job})
    except _LOST:
        # Whoever connects anew subscribes to all that are open.
        return


async def _hear(
    socket: aiohttp.ClientWebSocketResponse,
    log: Log,
    open_jobs: dict[str, None],
    finding: asyncio.Future[None],
) -> None:
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.TEXT:
            return
        told = msgspec.json.decode(message.data)
        if told["type"] in (*ENDS, "error"):
            log.write("told", job=told.get("job_id"), value=told["type"])
            open_jobs.pop(told.get("job_id"), None)
        if finding.done() and not open_jobs:
            return
