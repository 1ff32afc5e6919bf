"""Playing a recorded conversation with LangFlow against the fake.

Does what the recorded client did, in the recorded order and at the recorded (simulated) times, and compares what comes
back. Ids that servers choose are translated; times and long texts are not compared.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from comfyfleet.testing.fake_langflow import FakeLangFlow, FakeLangFlowSettings, HandClock

TRACES = Path(__file__).parents[1] / "data" / "langflow_traces"

# The two are one conversation: the second begins with the jobs of the first.
CONTINUED = {"14-queued-job-after-restart": "13-server-killed-mid-run"}

# The recorded machine was slow: jobs started up to a second after their submit. So time goes slower there.
SPEED = {"10-workflows-v2-concurrency": 0.7}

_PATIENCE_S = 20.0
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[_T]\d\d[-:]\d\d[-:]\d\d[^_\"]*(?=_|$)")
_NOT_COMPARED = frozenset(
    {
        "timestamp", "created_timestamp", "created_at", "updated_at", "create_at", "last_login_at", "timedelta",
        "duration", "build_duration", "params", "message", "artifacts",
    }
)  # fmt: skip
"""Times, and texts that only people read. `message` and `artifacts` repeat what `outputs` and `results` say."""
_LONG = frozenset({"stackTrace", "traceback", "repr"})


def read_trace(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text().splitlines()]


def trace_names() -> list[str]:
    return sorted(path.stem for path in TRACES.glob("*.jsonl"))


def settings_for(name: str) -> FakeLangFlowSettings:
    """A server like the recorded one."""
    known = FakeLangFlowSettings()
    count = 1 if name.startswith("01") else 3
    unclear_s = 2.0 if name.startswith("09") else 0.0
    return msgspec.structs.replace(
        known, flows=known.flows[:count], is_fake=False, unclear_s=unclear_s, key="sk-recorded"
    )


class LangFlowReplay:
    def __init__(
        self, name: str, server: FakeLangFlow, clock: HandClock, session: aiohttp.ClientSession
    ) -> None:
        self.differences: list[str] = []
        self.compared = 0
        self._name = name
        self._server = server
        self._clock = clock
        self._session = session
        self._offset = 0.0
        self._ids: dict[str, str] = {}
        self._files: dict[str, str] = {}
        self._request: asyncio.Task[tuple[int, Any]] | None = None
        self._events: AsyncIterator[tuple[str | None, Any]] | None = None
        self._stream: aiohttp.ClientResponse | None = None

    async def play(self) -> list[str]:
        try:
            if self._name in CONTINUED:
                await self._play(CONTINUED[self._name])
                self._offset = self._clock.now() + 1
                self.compared, self.differences = 0, []
            await self._play(self._name)
        finally:
            await self._leave()
        return self.differences

    async def _play(self, name: str) -> None:
        speed = SPEED.get(name, 1.0)
        for event in read_trace(name):
            moment = self._offset + speed * event["t"]
            if event["dir"] == "note":
                await self._heed(event["text"])
                await self._clock.advance_to(moment)
                continue
            await self._clock.advance_to(moment)
            if event["dir"] == "send":
                await self._leave()
                self._request = asyncio.create_task(self._send(event))
                # It reaches the server before time goes on.
                await asyncio.wait({self._request}, timeout=0.05)
            elif event["dir"] == "error":
                continue
            elif event["channel"] == "sse":
                await self._expect_event(event)
            else:
                await self._expect_answer(event)

    async def _heed(self, note: str) -> None:
        if note.startswith("SIGKILL"):
            await self._leave()
            await self._server.kill()
            await self._server.start()
        elif "processes were gone" in note:
            await self._server.terminate()
            limited = msgspec.structs.replace(self._server.settings, job_timeout_s=4.0)
            self._server.settings = self._server.jobs._settings = limited
            await self._server.start()
        elif "client closes the stream" in note:
            await self._leave()
        elif "server ended the stream" in note and self._events is not None:
            async with asyncio.timeout(_PATIENCE_S):
                rest = await anext(self._events, None)
            if rest is not None:
                self.differences.append(f"{self._name}: the stream goes on with {rest}")

    async def _send(self, event: dict[str, Any]) -> tuple[int, Any]:
        headers = {
            name: "sk-recorded" if value == "<api key>" else value
            for name, value in (event.get("headers") or {}).items()
        }
        url = self._server.url + self._translated(event["path"])
        body = event.get("body")
        content: dict[str, Any] = {}
        if isinstance(body, str) and body.startswith("<multipart"):
            found = re.search(r"file=([^,>]+)", body)
            name = found[1] if found is not None else "in put.png"
            content["data"] = aiohttp.FormData(quote_fields=False)
            content["data"].add_field("file", b"x" * 70, filename=name)
        elif isinstance(body, str):
            content["data"] = body
        elif body is not None:
            content["json"] = json.loads(self._translated(json.dumps(body)))
        response = await self._session.request(event["method"], url, headers=headers, **content)
        if response.content_type == "text/event-stream":
            self._stream = response
            self._events = _events_of(response)
            return response.status, None
        data = await response.read()
        return response.status, json.loads(data) if response.content_type == "application/json" else data

    async def _expect_answer(self, event: dict[str, Any]) -> None:
        assert self._request is not None
        async with asyncio.timeout(_PATIENCE_S):
            status, body = await self._request
        where = f"{self._name} at {event['t']}: {event.get('for')}"
        self.compared += 1
        if status != event["status"]:
            self.differences.append(f"{where}: status {status}, recorded {event['status']}")
            return
        if "body" in event:
            self._learn(event["body"], body)
            self._compare(where, event["body"], body)
        elif "body_length" in event and len(body) != event["body_length"]:
            self.differences.append(f"{where}: {len(body)} bytes, recorded {event['body_length']}")

    async def _expect_event(self, event: dict[str, Any]) -> None:
        where = f"{self._name} at {event['t']}: event {event['json'].get('event') or event['json']}"
        if self._events is None:
            self.differences.append(f"{where}: there is no stream")
            return
        async with asyncio.timeout(_PATIENCE_S):
            found = await anext(self._events, None)
        self.compared += 1
        if found is None:
            self.differences.append(f"{where}: the stream has ended")
            return
        if found[0] != event.get("id"):
            self.differences.append(f"{where}: id {found[0]}, recorded {event.get('id')}")
        self._compare(where, event["json"], found[1])

    async def _leave(self) -> None:
        stream, self._stream, self._events = self._stream, None, None
        if stream is not None:
            stream.close()

    # ids

    def _learn(self, recorded: Any, found: Any) -> None:
        """The ids of jobs and files that the answer names, for later requests."""
        if isinstance(recorded, dict) and isinstance(found, dict):
            for name in ("job_id", "id"):
                if isinstance(recorded.get(name), str) and isinstance(found.get(name), str):
                    self._ids[recorded[name]] = found[name]
            if "file_path" in recorded and "file_path" in found:
                old, new = (each["file_path"].rpartition("/")[2] for each in (recorded, found))
                self._files[old] = new

    def _translated(self, text: str) -> str:
        for old, new in (self._ids | self._files).items():
            text = text.replace(old, new)
        return text

    def _compare(self, where: str, recorded: Any, found: Any) -> None:
        old, new = self._plain(recorded), self._plain(found)
        for difference in _differences(old, new, ""):
            self.differences.append(f"{where}: {difference}")

    def _plain(self, value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            is_error = "code" in value or "detail" in value or "job_id" in value
            return {
                key: self._plain(each, key)
                for key, each in value.items()
                if key not in _LONG
                and (is_error or key not in _NOT_COMPARED or not isinstance(each, dict | str | float | int))
            }
        if isinstance(value, list):
            plain = [self._plain(each) for each in value]
            return sorted(plain) if name == "to_run" else plain
        if isinstance(value, str):
            if name in ("timestamp", "created_timestamp"):
                return "<time>"
            flows = {flow.flow_id for flow in self._server.settings.flows}
            text = _UUID.sub(lambda found: found[0] if found[0] in flows else "<id>", value)
            return _TIMESTAMP.sub("<time>", text)
        return value


async def _events_of(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str | None, Any]]:
    """Of both forms: with `data:` and `id:`, or an object and an empty line."""
    event_id, data = None, ""
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text.startswith("data: "):
            data = text[6:]
        elif text.startswith("id: "):
            event_id = text[4:]
        elif text:
            data = text
        elif data:
            yield event_id, json.loads(data)
            event_id, data = None, ""


def _differences(old: Any, new: Any, path: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = [f"{path}.{name} is missing" for name in old.keys() - new.keys()]
        found += [f"{path}.{name} was not recorded" for name in new.keys() - old.keys()]
        for name in old.keys() & new.keys():
            found += _differences(old[name], new[name], f"{path}.{name}")
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            each
            for index, pair in enumerate(zip(old, new, strict=True))
            for each in _differences(*pair, f"{path}[{index}]")
        ]
    return [] if old == new else [f"{path}: {new!r}, recorded {old!r}"]
