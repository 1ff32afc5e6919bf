"""A dispatcher as people write it: each job goes at once to the server that has the fewest, in ComfyUI's own queue.

It knows nothing of models. A load balancer with "least connections" does the same.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec


class _Server:
    def __init__(self, url: str) -> None:
        self.url = url
        self.client_id = uuid.uuid4().hex
        self.unfinished: dict[str, asyncio.Future[None]] = {}
        self.listening: asyncio.Task[None] | None = None


class ShortestQueue:
    """Use it as an async context manager."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = [_Server(url) for url in urls]
        self._session = aiohttp.ClientSession()

    async def __aenter__(self) -> Self:
        for server in self._servers:
            socket = await self._session.ws_connect(f"{server.url}/ws?clientId={server.client_id}")
            server.listening = asyncio.create_task(self._listen(server, socket))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        listening = [server.listening for server in self._servers if server.listening is not None]
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
        await self._session.close()

    async def submit(self, workflow: dict[str, Any]) -> tuple[str, str, asyncio.Future[None]]:
        """Queues a job; the address of its server, its prompt id, and what is done when it has ended."""
        server = min(self._servers, key=lambda each: len(each.unfinished))
        prompt_id = str(uuid.uuid4())
        ended = server.unfinished[prompt_id] = asyncio.get_running_loop().create_future()
        body = {"prompt": workflow, "client_id": server.client_id, "prompt_id": prompt_id}
        async with self._session.post(f"{server.url}/prompt", json=body) as answer:
            answer.raise_for_status()
        return server.url, prompt_id, ended

    async def fetch(self, url: str, prompt_id: str) -> bytes:
        """The only picture of a job."""
        async with self._session.get(f"{url}/history/{prompt_id}") as answer:
            outputs = (await answer.json())[prompt_id]["outputs"]
        ((image,),) = (output["images"] for output in outputs.values())
        async with self._session.get(f"{url}/view", params=image) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def _listen(self, server: _Server, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type != aiohttp.WSMsgType.TEXT:
                continue
            event = msgspec.json.decode(message.data)
            if event["type"] == "execution_success":
                server.unfinished.pop(event["data"]["prompt_id"]).set_result(None)
            elif event["type"] in ("execution_error", "execution_interrupted"):
                failed = server.unfinished.pop(event["data"]["prompt_id"])
                failed.set_exception(RuntimeError(f"a job failed: {event['data']}"))
