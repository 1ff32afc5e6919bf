"""Plays a recorded conversation with an A1111 server against the fake, on a clock that the replay moves.

Times, picture sizes, memory and a part of `info` were pretended in the recordings, so they are compared by their form.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any

import aiohttp

from comfyfleet.testing.fake_a1111 import FakeA1111, FakeA1111Settings
from comfyfleet.testing.fake_comfyui import HandClock

TRACES = Path(__file__).parents[1] / "data" / "a1111_traces"

FORMS = {
    "eta": (float, int, type(None)),
    "eta_relative": (float, int),
    "ram": (dict,),
}
"""Compared by type: they are times, or the recorder's machine."""
TIMESTAMP = re.compile(r"0|\d{14}")
TASK = re.compile(r"task\(\w+-[A-Z0-9]{7}\)")
MANY = "70 requests at once"
_PATIENCE_S = 30.0


def read_trace(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text().splitlines()]


def trace_names() -> list[str]:
    return sorted(path.stem for path in TRACES.glob("*.jsonl"))


def settings_for(name: str) -> FakeA1111Settings:
    """A server as the recorder started it."""
    if name.startswith("06"):
        return FakeA1111Settings(has_web_ui=False, user="user", password="secret")
    # The GPU of the recorder had no driver; only the first recording has the first load.
    return FakeA1111Settings(gpu_gb=None, samplers=("Euler",), starts_loaded=not name.startswith("01"))


class A1111Replay:
    def __init__(
        self, name: str, server: FakeA1111, clock: HandClock, session: aiohttp.ClientSession
    ) -> None:
        self.name = name
        self.events = read_trace(name)
        self.compared = 0
        self.differences: list[str] = []
        self._server = server
        self._clock = clock
        self._session = session
        self._open: list[tuple[str, dict[str, Any], asyncio.Task[tuple[int, Any]]]] = []
        self._crowd: list[asyncio.Task[tuple[int, Any]]] = []
        self._sent = 0

    async def play(self) -> list[str]:
        if self.name.startswith("03"):
            # Left by the runs of the recording before it, on the same server.
            self._server.process.flags.sampling_steps = 20
        try:
            for event in self.events:
                await self._clock.advance_to(event["t"])
                if event["dir"] == "send":
                    await self._send(event)
                elif event["dir"] == "recv":
                    await self._expect(event)
                elif event["dir"] == "error":
                    # The recorded client gave up.
                    _, _, request = self._take(event["for"])
                    request.cancel()
                    await asyncio.wait({request})
                elif MANY in event["text"]:
                    for _ in range(70):
                        body = {"prompt": "many", "steps": 2}
                        sent = {"method": "POST", "path": "/sdapi/v1/txt2img", "body": body}
                        self._crowd.append(asyncio.create_task(self._ask(sent)))
                    await self._arrived(70)
        finally:
            for request in [*self._crowd, *(each for _, _, each in self._open)]:
                request.cancel()
        return self.differences

    async def _send(self, event: dict[str, Any]) -> None:
        request = asyncio.create_task(self._ask(event))
        self._open.append((f"{event['method']} {event['path']}", event, request))
        await self._arrived(1)

    async def _arrived(self, count: int) -> None:
        """The clock must not move before the server has the request."""
        self._sent += count
        async with asyncio.timeout(_PATIENCE_S):
            while sum(self._server.requests.values()) < self._sent:
                await asyncio.sleep(0.001)

    async def _ask(self, event: dict[str, Any]) -> tuple[int, Any]:
        headers = dict(event.get("headers", {}))
        found = re.fullmatch(r"Basic <(.*)>", headers.get("Authorization", ""))
        if found:
            headers["Authorization"] = f"Basic {base64.b64encode(found[1].encode()).decode()}"
        body = event.get("body")
        content: dict[str, Any] = {"data": body} if isinstance(body, str) else {"json": body}
        async with self._session.request(
            event["method"], self._server.url + event["path"], headers=headers, **(content if body else {})
        ) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else None

    async def _expect(self, event: dict[str, Any]) -> None:
        label = event["for"]
        if not any(each == label for each, _, _ in self._open):
            method, path = label.split(" ", 1)
            await self._send({"method": method, "path": path})
        _, sent, request = self._take(label)
        where = f"{event['t']} {label}"
        await asyncio.wait({request}, timeout=_PATIENCE_S)
        if not request.done() or request.exception() is not None:
            self.differences.append(f"{where}: no answer")
            request.cancel()
            return
        status, body = request.result()
        self.compared += 1
        if status != event["status"]:
            self.differences.append(f"{where}: status {status}, recorded {event['status']}: {body}")
            return
        self._compare(where, event["body"], body, sent.get("body"))

    def _take(self, label: str) -> tuple[str, dict[str, Any], asyncio.Task[tuple[int, Any]]]:
        found = next(each for each in self._open if each[0] == label)
        self._open.remove(found)
        return found

    def _compare(self, where: str, expected: Any, actual: Any, sent: Any = None) -> None:
        if isinstance(expected, dict):
            self._compare_objects(where, expected, actual, sent)
        elif isinstance(expected, list):
            if not isinstance(actual, list) or len(actual) != len(expected):
                self.differences.append(f"{where}: {actual!r:.300}, recorded {expected!r:.300}")
                return
            for index, pair in enumerate(zip(expected, actual, strict=True)):
                self._compare(f"{where}[{index}]", *pair)
        elif isinstance(expected, float) and isinstance(actual, int | float):
            if abs(expected - actual) > 1e-6:
                self.differences.append(f"{where}: {actual}, recorded {expected}")
        elif isinstance(expected, str) and "<base64" in expected:
            start = expected.partition("...<")[0] if expected.startswith("data:") else ""
            if not isinstance(actual, str) or len(actual) < 50 or not actual.startswith(start):
                self.differences.append(f"{where}: {actual!r:.80} is no picture")
        elif isinstance(expected, str) and TASK.fullmatch(expected):
            if not isinstance(actual, str) or not TASK.fullmatch(actual):
                self.differences.append(f"{where}: {actual!r} is no task id")
        elif expected != actual or type(expected) is not type(actual):
            self.differences.append(f"{where}: {actual!r:.300}, recorded {expected!r:.300}")

    def _compare_objects(self, where: str, expected: dict[str, Any], actual: Any, sent: Any) -> None:
        if not isinstance(actual, dict):
            self.differences.append(f"{where}: {actual!r:.300}, recorded an object")
            return
        for name, value in expected.items():
            if name == "...":
                continue
            if name not in actual:
                self.differences.append(f"{where}: it has no {name!r}")
            elif name in FORMS:
                if not isinstance(actual[name], FORMS[name]):
                    self.differences.append(f"{where}.{name}: {actual[name]!r}")
            elif name == "job_timestamp":
                if not TIMESTAMP.fullmatch(str(actual[name])):
                    self.differences.append(f"{where}.{name}: {actual[name]!r}")
            elif name == "info":
                self._compare_info(f"{where}.info", json.loads(value), json.loads(actual[name]), sent or {})
            else:
                self._compare(f"{where}.{name}", value, actual[name])
        extra = actual.keys() - expected.keys()
        if extra and "..." not in expected and "parameters" not in where and "info" not in where:
            self.differences.append(f"{where}: also {sorted(extra)}")

    def _compare_info(self, where: str, expected: dict[str, Any], actual: dict[str, Any], sent: Any) -> None:
        # The recorded sampler was pretended: it drew no seed, loaded nothing and wrote short texts.
        pretended = {"infotexts", "job_timestamp", "all_prompts"}
        if sent.get("seed", -1) == -1:
            pretended.add("seed")
        if sent.get("override_settings"):
            pretended.add("sd_model_name")
        for name in expected.keys() - pretended:
            self._compare(f"{where}.{name}", expected[name], actual.get(name))
        if missing := expected.keys() - actual.keys():
            self.differences.append(f"{where}: it has no {sorted(missing)}")
