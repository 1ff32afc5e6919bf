"""A plain client for the fake, and the graphs that its tests submit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from tests.sim._compare import read_binary

from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings, Faults

DEADLINE_S = 60.0
SAME_FAST = FakeSettings(time_scale=0.01)

Graph = dict[str, dict[str, Any]]


def plain(color: int = 1, prefix: str = "plain") -> Graph:
    """Two nodes that take no time."""
    return {
        "1": {
            "class_type": "EmptyImage",
            "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": color},
        },
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": prefix}},
    }


def slow(steps: int = 4, step_seconds: float = 1.0, seed: int = 1, preview: bool = False) -> Graph:
    """A node with progress, then a picture."""
    inputs = {"steps": steps, "step_seconds": step_seconds, "preview": preview, "seed": seed}
    return {
        "1": {"class_type": "LabSlow", "inputs": inputs},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }


def text_to_image(checkpoint: str, seed: int = 1, edge: int = 512, steps: int = 4) -> Graph:
    """The usual graph: checkpoint, text, sampler, decoder, file."""
    sampler = {
        "model": ["1", 0],
        "positive": ["3", 0],
        "negative": ["3", 0],
        "latent_image": ["2", 0],
        "seed": seed,
        "steps": steps,
        "cfg": 7.0,
        "sampler_name": "euler",
        "scheduler": "normal",
        "denoise": 1.0,
    }
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}},
        "2": {"class_type": "EmptyLatentImage", "inputs": {"width": edge, "height": edge, "batch_size": 1}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "a lighthouse", "clip": ["1", 1]}},
        "4": {"class_type": "KSampler", "inputs": sampler},
        "5": {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0], "vae": ["1", 2]}},
        "6": {"class_type": "SaveImage", "inputs": {"images": ["5", 0], "filename_prefix": "picture"}},
    }


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition of this process; fails when it does not come true in time."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.002)


class Listener:
    """A websocket that keeps everything it hears."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.messages: list[dict[str, Any]] = []
        self.frames: list[dict[str, Any]] = []
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            if message.type == aiohttp.WSMsgType.TEXT:
                self.messages.append(json.loads(message.data))
            elif message.type == aiohttp.WSMsgType.BINARY:
                self.frames.append(read_binary(message.data))

    def kinds(self, prompt_id: str | None = None) -> list[str]:
        """Message types in order, of one prompt or of all."""
        return [
            message["type"]
            for message in self.messages
            if prompt_id is None or message["data"].get("prompt_id") == prompt_id
        ]

    def has(self, kind: str) -> bool:
        return kind in self.kinds()

    async def close(self) -> None:
        await self.socket.close()
        await self.reader


class Client:
    """Speaks to one fake."""

    def __init__(self, server: FakeComfyUI, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session
        self._listeners: list[Listener] = []

    async def get(self, path: str) -> Any:
        async with self.session.get(self.server.url + path) as answer:
            assert answer.status == 200, f"{path}: {answer.status} {await answer.text()}"
            return await answer.json()

    async def status(self, path: str) -> int:
        async with self.session.get(self.server.url + path) as answer:
            return answer.status

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.server.url + path, json=body) as answer:
            content = await answer.read()
            return answer.status, json.loads(
                content
            ) if answer.content_type == "application/json" else content

    async def submit(self, graph: Graph, client_id: str | None = None, **more: Any) -> str:
        """Queue a prompt that has to be accepted; gives back its id."""
        body = {"prompt": graph, **({"client_id": client_id} if client_id is not None else {}), **more}
        status, answer = await self.post("/prompt", body)
        assert status == 200, answer
        return str(answer["prompt_id"])

    async def finished(self, prompt_id: str) -> dict[str, Any]:
        """Wait for a prompt to reach the history."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                history = await self.get(f"/history/{prompt_id}")
                if prompt_id in history:
                    entry: dict[str, Any] = history[prompt_id]
                    return entry
                await asyncio.sleep(0.005)

    async def worker_died(self) -> None:
        """Wait for the death of the server's worker thread."""
        async with asyncio.timeout(DEADLINE_S):
            while not (await self.get("/fake/stats"))["now"]["worker_is_dead"]:
                await asyncio.sleep(0.005)

    async def run(self, graph: Graph, client_id: str | None = None, **more: Any) -> dict[str, Any]:
        """Queue and wait."""
        return await self.finished(await self.submit(graph, client_id, **more))

    async def listen(self, client_id: str, with_metadata: bool = False) -> Listener:
        """Open a websocket and wait for its first message."""
        listener = Listener(await self.session.ws_connect(f"{self.server.url}/ws?clientId={client_id}"))
        self._listeners.append(listener)
        if with_metadata:
            flags = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
            await listener.socket.send_json(flags)
        if not self.server.faults.deaf_sockets:
            await until(lambda: len(listener.messages) > int(with_metadata))
        return listener

    async def close(self) -> None:
        for listener in self._listeners:
            await listener.close()


@asynccontextmanager
async def fake(settings: FakeSettings = SAME_FAST, faults: Faults | None = None) -> AsyncIterator[Client]:
    """A running fake with a client."""
    async with FakeComfyUI(settings, faults=faults) as server, aiohttp.ClientSession() as session:
        client = Client(server, session)
        try:
            yield client
        finally:
            await client.close()


def error_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The execution_error of a history entry."""
    found: dict[str, Any] = dict(entry["status"]["messages"])["execution_error"]
    return found
