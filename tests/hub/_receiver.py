"""A receiver of webhooks on a port of this machine: keeps what came, and answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from comfyfleet import WebhookEvent, verify_webhook


class Delivered(msgspec.Struct, frozen=True):
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def said(self) -> dict[str, Any]:
        return msgspec.json.decode(self.body, type=dict[str, Any])

    def verified(self, secret: str) -> WebhookEvent:
        return verify_webhook(self.body, self.headers, secret)


class Receiver:
    """`answer` may be changed at any time; what it gets is how many came before."""

    def __init__(self) -> None:
        self.url = ""
        self.came: list[Delivered] = []
        self.answer: Callable[[int], web.Response] = lambda _: web.Response(status=204)
        self.is_open = asyncio.Event()
        """Answers wait for it."""
        self.is_open.set()
        self._arrived = asyncio.Condition()

    async def handle(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.came.append(Delivered(headers, await request.read()))
        async with self._arrived:
            self._arrived.notify_all()
        number = len(self.came) - 1
        await self.is_open.wait()
        return self.answer(number)

    async def until(self, count: int, within_s: float = 60.0) -> list[Delivered]:
        async with asyncio.timeout(within_s), self._arrived:
            await self._arrived.wait_for(lambda: len(self.came) >= count)
        return self.came

    @property
    def events(self) -> list[str]:
        return [each.said["type"] for each in self.came]


@asynccontextmanager
async def receiving(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/{rest:.*}", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    receiver.url = f"http://{host}:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        receiver.is_open.set()
        await runner.cleanup()
