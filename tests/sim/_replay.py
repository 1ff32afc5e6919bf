"""Playing a recorded conversation against the fake.

Does what the recorded client did, in the recorded order and at the recorded (simulated) times, and compares what comes
back. Time stands still between two recorded moments, so a replay takes the same course on any machine.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
from tests.sim._compare import Comparison, LeftOut, Message, read_binary
from yarl import URL

from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings, HandClock

TRACES = Path(__file__).parents[1] / "data" / "comfyui_traces"

LEFT_OUT_TRACES = {
    "24-comfy-api-v2": "recorded through the Comfy API v2 proxy, which is another product in front of ComfyUI",
    "26-refusals-that-depend-on-the-version": "answers of two releases without what was asked; test_versions holds "
    "the fakes to them",
}
_SUBMITTED_LATE = "0b0f3cb3-3b6e-4b3a-9a53-2e6b9b3c2500"
# Answers of which only these keys are compared, and why.
LEFT_OUT_BODIES: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("08-queue-and-priority", "GET /api/jobs?limit=3&sort_order=asc"): (
        "lists prompts of earlier recordings",
        ("jobs", "pagination"),
    ),
    ("23-newer-server-cancel-and-ids", "GET /api/jobs?status=cancelled&limit=1"): (
        "counts prompts of earlier recordings",
        ("jobs", "pagination"),
    ),
    ("25-submit-timeout-still-queued", f"GET /api/jobs/{_SUBMITTED_LATE}"): (
        "asked while the server was busy, answered somewhere between pending and completed",
        ("id", "status", "priority", "create_time", "outputs_count"),
    ),
}
# The queue number when the recording began, where no answer to a submission tells it.
FIRST_NUMBERS = {"25-submit-timeout-still-queued": 107}
# Recorded with 100 MB limits; replayed at a hundredth of the size.
SIZE_DIVISOR = {"20-limits": 100}
LIMIT = 104857600
# The recorder ended these servers itself, except this one, which has to die of its prompt.
DIES_BY_ITSELF = ("18c-unserialisable-ui-output",)
# Recorded as base64 in 13-uploads: the picture of 75 bytes that is uploaded there.
UPLOAD = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP8z4AdMOEQH6QSAM1BAQ/oQeJvAAAAAElFTkSuQmCC"
)
_CHANCE_S = 0.02


def read_trace(name: str) -> list[dict[str, Any]]:
    lines = (TRACES / f"{name}.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return _completed(events) if name.startswith("18d") else events


def _completed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A recording that names no websocket and left out plain GET requests, with what it left out."""
    completed: list[dict[str, Any]] = []
    asked = ""
    for event in events:
        if event["channel"] == "ws":
            event["conn"] = "A"
            if not completed:
                path = f"/ws?clientId={event['json']['data']['sid']}"
                completed.append({**event, "dir": "send", "event": "open", "path": path})
        elif event["dir"] == "send":
            asked = _label(event)
        elif "for" in event:
            method, path = event["for"].split(" ", 1)
            sent = {"t": event["t"], "dir": "send", "channel": "http", "method": method, "path": path}
            completed.append(sent)
        else:
            event["for"] = asked
        completed.append(event)
    return completed


def settings_for(name: str, events: list[dict[str, Any]]) -> FakeSettings:
    """A server like the recorded one: its version, no models, and its queue number when the recording began."""
    models: dict[str, dict[str, float]] = {}
    if name.startswith("07"):
        models = {"checkpoints": {"corrupt.safetensors": 1.0, "vanishing.safetensors": 1.0}}
    return FakeSettings(
        version="0.33.0" if name.startswith("23") else "0.7.0",
        device_type="cpu",
        models=models,
        first_number=FIRST_NUMBERS.get(name) or _first_number(events),
        max_upload_bytes=LIMIT // SIZE_DIVISOR.get(name, 1),
    )


def _first_number(events: list[dict[str, Any]]) -> int:
    numbered = 0
    explicit = False
    for event in events:
        if event["dir"] == "send" and event.get("method") == "POST" and event["path"] == "/prompt":
            body = event.get("body")
            explicit = isinstance(body, dict) and "number" in body
            numbered += 0 if explicit or body == "{not json" else 1
        elif event.get("for") == "POST /prompt" and event.get("status") == 200 and not explicit:
            return abs(int(event["body"]["number"])) - numbered + 1
    return 0


class Connection:
    """A websocket of the recorded client."""

    def __init__(self, name: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.name = name
        self.socket = socket
        self.expected: list[Message] = []
        self.actual: list[Message] = []
        self.is_given_up = False
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            if message.type == aiohttp.WSMsgType.TEXT:
                content = json.loads(message.data)
                self.actual.append({"json": content, "text": message.data, "length": len(message.data)})
            elif message.type == aiohttp.WSMsgType.BINARY:
                self.actual.append({"binary": read_binary(message.data)})


class Replay:
    """One conversation in progress."""

    def __init__(
        self,
        name: str,
        server: FakeComfyUI,
        clock: HandClock,
        session: aiohttp.ClientSession,
        patience_s: float = 60.0,
    ) -> None:
        self.name = name
        self.events = read_trace(name)
        self.server = server
        self.clock = clock
        self.session = session
        self.patience_s = patience_s
        self.comparison = Comparison()
        self.compared = 0
        self._left_out = LeftOut([event["text"] for event in self.events if event["dir"] == "note"])
        self._connections: dict[str, Connection] = {}
        self._requests: list[tuple[str, dict[str, Any], asyncio.Task[tuple[int, str, bytes]]]] = []
        self._ids: dict[str, str] = {}
        self._divisor = SIZE_DIVISOR.get(name, 1)
        self._lazy: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def play(self) -> list[str]:
        """Play to the end; gives back the differences."""
        try:
            for index, event in enumerate(self.events):
                await self._play_event(index, event)
            await self._catch_up(self.events[-1]["t"])
            for connection in list(self._connections.values()):
                await self._close(connection)
        finally:
            for connection in self._connections.values():
                connection.reader.cancel()
                await connection.socket.close()
            for _, _, request in self._requests:
                request.cancel()
            if self._lazy is not None:
                self._lazy[1].close()
        return self.comparison.differences

    async def _play_event(self, index: int, event: dict[str, Any]) -> None:
        direction, moment = event["dir"], event["t"]
        if direction == "recv" and event["channel"] == "ws" and "event" not in event:
            await self.clock.advance_to(moment)
            self._connections[event["conn"]].expected.append(self._translated(event))
            return
        await self._catch_up(moment)
        await self.clock.advance_to(moment)
        if direction == "note":
            await self._heed(event["text"])
        elif direction == "error":
            await self._expect_failure(event)
        elif event["channel"] == "http":
            await (self._request(index, event) if direction == "send" else self._expect_answer(event))
        elif direction == "send":
            await self._speak(event)
        elif event["close_code"] == 1006:
            await self._expect_death(self._connections[event["conn"]])

    def _translated(self, event: dict[str, Any]) -> dict[str, Any]:
        """The event with this replay's ids in place of the recorded ones, at this replay's size."""
        text = json.dumps(event)
        for recorded, new in self._ids.items():
            text = text.replace(recorded, new)
        text = text.replace(str(LIMIT), str(LIMIT // self._divisor))
        translated: dict[str, Any] = json.loads(text)
        if "json_truncated" in translated:
            megabytes = translated["json_truncated"]["length"] // 2**20
            overhead = translated["json_truncated"]["length"] % 2**20
            translated["json_truncated"]["length"] = megabytes * 2**20 // self._divisor + overhead
        return translated

    async def _catch_up(self, moment: float) -> None:
        """Wait until everything recorded so far has come."""
        for connection in self._connections.values():
            await self._wait_for(lambda connection=connection: self._is_complete(connection), moment)
            connection.is_given_up = not self._is_complete(connection)

    def _is_complete(self, connection: Connection) -> bool:
        actual, expected = self._left_out.apply(connection.actual), self._left_out.apply(connection.expected)
        return connection.is_given_up or len(actual) >= len(expected)

    async def _wait_for(self, is_so: Any, moment: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience_s
        chance = loop.time() + _CHANCE_S
        while not is_so() and loop.time() < deadline:
            await asyncio.sleep(0.001)
            next_wake = self.clock.next_wake()
            # A recorded message can be a little earlier than its turn in simulated time.
            if loop.time() > chance and next_wake is not None and next_wake <= moment + 1.0:
                await self.clock.advance_to(next_wake)
                chance = loop.time() + _CHANCE_S

    async def _request(self, index: int, event: dict[str, Any]) -> None:
        following = next((later for later in self.events[index:] if later.get("for") == _label(event)), None)
        if not self.server.is_up and (following is None or following["dir"] != "error"):
            await self.server.restart()
        event = self._translated(event)
        body = event.get("body")
        if isinstance(body, dict) and "prompt" in body:
            self.comparison.submitted.append(body["prompt"])
        arguments = self._payload(body) if "body" in event else {}
        request = asyncio.create_task(self._ask(event, arguments))
        self._requests.append((_label(event), event, request))

    async def _ask(self, event: dict[str, Any], arguments: dict[str, Any]) -> tuple[int, str, bytes]:
        url = URL(self.server.url + event["path"], encoded=True)
        headers = event.get("headers", {})
        async with self.session.request(event["method"], url, headers=headers, **arguments) as answer:
            return answer.status, answer.headers.get("Content-Type", ""), await answer.read()

    def _payload(self, body: Any) -> dict[str, Any]:
        if isinstance(body, dict) and "multipart" in body:
            return {"data": self._form(body["multipart"])}
        if isinstance(body, str):
            found = re.match(r"<a valid prompt with one (\d+) MB string>", body)
            if found is None:
                return {"data": body}
            text = "x" * (int(found[1]) * 2**20 // self._divisor)
            prompt = {"1": {"class_type": "PreviewAny", "inputs": {"source": text}}}
            content = json.dumps({"prompt": prompt, "prompt_id": f"mb{found[1]}", "client_id": "lim"})
            return {"data": io.BytesIO(content.encode())}
        return {"json": body}

    def _form(self, fields: dict[str, str]) -> aiohttp.FormData:
        form = aiohttp.FormData(default_to_multipart=True)
        for name, value in fields.items():
            small = re.match(r"<file (.+), (\d+) bytes>", value)
            big = re.match(r"<(\d+) MB file>", value)
            if small is not None:
                picture = (
                    UPLOAD.ljust(int(small[2]), b"\0") if small[1].endswith(".png") else b"x" * int(small[2])
                )
                form.add_field(name, picture, filename=small[1])
            elif big is not None:
                content = io.BytesIO(bytes(int(big[1]) * 2**20 // self._divisor))
                form.add_field(name, content, filename=f"big{big[1]}.bin")
            else:
                form.add_field(name, value)
        return form

    async def _expect_answer(self, event: dict[str, Any]) -> None:
        label, sent, request = self._take_request(event)
        await self._wait_for(request.done, event["t"])
        where = f"{event['t']} {label}"
        if not request.done() or request.exception() is not None:
            failure = request.exception() if request.done() else "no answer"
            self.comparison.differ(where, event["status"], failure)
            return
        status, content_type, content = request.result()
        self.compared += 1
        if status != event["status"]:
            self.comparison.differ(f"{where} status", event["status"], f"{status} {content[:200]!r}")
            return
        sent_body = sent.get("body")
        if (
            label == "POST /prompt"
            and status == 200
            and isinstance(sent_body, dict)
            and "prompt_id" not in sent_body
        ):
            self._ids[event["body"]["prompt_id"]] = json.loads(content)["prompt_id"]
        expected = self._translated(event)
        if "content_type" not in event:
            self._compare_body(where, expected, content)
        else:
            self.comparison.compare(f"{where} type", expected["content_type"], content_type)
            if "body" in expected:
                self.comparison.compare(f"{where} body", expected["body"], content.decode())
            elif bool(expected["body_length"]) != bool(content):
                self.comparison.differ(f"{where} length", expected["body_length"], len(content))
            elif expected.get("content_type") == "image/png" and "body_base64" in expected:
                self.comparison.compare(
                    f"{where} body", expected["body_base64"], base64.b64encode(content).decode()
                )
        if isinstance(sent_body, dict) and sent_body.get("prompt_id") == "e-vanish":
            self.server.faults.missing_models = ["vanishing.safetensors"]

    def _compare_body(self, where: str, expected: dict[str, Any], content: bytes) -> None:
        body = expected["body"]
        if isinstance(body, dict) and body.get("_truncated"):
            self.comparison.compare_start(where, body["start"], content.decode())
        elif (self.name, expected["for"]) in LEFT_OUT_BODIES:
            _, keys = LEFT_OUT_BODIES[self.name, expected["for"]]
            self.comparison.compare(where, sorted(keys), sorted(set(keys) & set(json.loads(content))))
        else:
            is_about_machine = "system_stats" in where
            self.comparison.compare(where, body, json.loads(content), is_about_machine)

    def _take_request(
        self, event: dict[str, Any]
    ) -> tuple[str, dict[str, Any], asyncio.Task[tuple[int, str, bytes]]]:
        label = self._translated(event)["for"]
        found = next(request for request in self._requests if request[0] == label)
        self._requests.remove(found)
        return found

    async def _expect_failure(self, event: dict[str, Any]) -> None:
        label, _, request = self._take_request(event)
        self.compared += 1
        if event["error"] == "TimeoutError":
            # The recorded client lost patience while the server was busy with this request.
            await self._wait_for(lambda: self.clock.next_wake() is not None, event["t"] - 1.0)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            return
        await self._wait_for(request.done, event["t"])
        if not request.done() or not isinstance(request.exception(), aiohttp.ClientError):
            self.comparison.differ(label, event["error"], request)

    async def _speak(self, event: dict[str, Any]) -> None:
        name = event["conn"]
        if event.get("event") == "open":
            if not self.server.is_up:
                await self.server.restart()
            socket = await self.session.ws_connect(self.server.url + event["path"], max_msg_size=0)
            self._connections[name] = Connection(name, socket)
        elif event.get("event") == "close":
            await self._close(self._connections.pop(name))
        elif "text" in event:
            await self._connections[name].socket.send_str(event["text"])
        else:
            await self._connections[name].socket.send_json(event["json"])

    async def _close(self, connection: Connection) -> None:
        # A message too many has this long to come in and be noticed.
        await asyncio.sleep(_CHANCE_S)
        await connection.socket.close()
        await asyncio.gather(connection.reader, return_exceptions=True)
        self._compare_messages(connection)

    async def _expect_death(self, connection: Connection) -> None:
        if self.name not in DIES_BY_ITSELF:
            await self.server.crash()
        await self._wait_for(connection.reader.done, 0.0)
        self.comparison.compare(f"{connection.name} close code", 1006, int(connection.socket.close_code or 0))
        await self._close(self._connections.pop(connection.name))

    def _compare_messages(self, connection: Connection) -> None:
        expected = self._left_out.apply(connection.expected)
        actual = self._left_out.apply(connection.actual)
        # A client that closes in the middle of a run may or may not have got the last progress.
        while len(actual) > len(expected) and actual[-1].get("json", {}).get("type") == "progress":
            actual.pop()
        self.compared += len(expected)
        if len(expected) != len(actual):
            kinds = [[_kind(message) for message in messages] for messages in (expected, actual)]
            self.comparison.differ(f"messages to {connection.name}", *kinds)
            return
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            where = f"{one['t']} message {index} to {connection.name} ({_kind(one)})"
            self.comparison.compare_message(where, one, other)

    async def _heed(self, note: str) -> None:
        """Do what the recorder did beside talking to the server."""
        if note == "server started again":
            return
        if note.startswith("a corrupt model file"):
            self.server.faults.corrupt_models = ["corrupt.safetensors"]
        elif note.startswith("the file is removed on the server"):
            (self.server.disk.base / "output" / "shared_00001_.png").unlink()
        elif note == "SIGKILL":
            await self.server.crash()
        elif note.startswith("S: a raw websocket client"):
            self._lazy = await self._open_lazy_client()
        elif note.startswith("4 s later: client A has heard nothing"):
            heard = self._left_out.apply(self._connections["A"].actual)
            self.comparison.compare("messages to A while S does not read", 1, len(heard))
        elif note == "S disconnects" and self._lazy is not None:
            self._lazy[1].transport.abort()

    async def _open_lazy_client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # With the smallest buffer the stream stops taking bytes from the socket almost at once.
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1)
        key = base64.b64encode(b"a websocket key!").decode()
        lines = (
            "GET /ws?clientId=lazy HTTP/1.1",
            f"Host: 127.0.0.1:{self.server.port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        )
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        await reader.read(1)
        return reader, writer


def _label(event: dict[str, Any]) -> str:
    return f"{event['method']} {event['path']}"


def _kind(message: Message) -> str:
    if "binary" in message:
        return f"binary {message['binary']['event_type']}"
    for form in ("json", "json_truncated"):
        if form in message:
            return str(message[form].get("type"))
    return "text"


def trace_names() -> list[str]:
    """Every recording that is replayed."""
    return sorted(path.stem for path in TRACES.glob("*.jsonl") if path.stem not in LEFT_OUT_TRACES)
