"""One WebSocket connection as a line: one reader, one writer, and no more unread answers than it may hold.

Whoever reads nothing is not read from either. What a message means, and what else there is to tell, is for the sessions
in `socket.py` and `socket_agents.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Send

_LOG = logging.getLogger(__name__)

_MAX_UNREAD = 256


async def _nothing_more() -> None:
    """Answers are all there is to tell."""


class Line:
    """`tell_more` is called after the answers, each time `wake` was; it tells by `put`."""

    def __init__(self, send: Send, tell_more: Callable[[], Awaitable[None]] = _nothing_more) -> None:
        self._send = send
        self._tell_more = tell_more
        self._answers: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._room_for_more = asyncio.Event()
        self._closing: tuple[int, str] | None = None

    def wake(self) -> None:
        self._news.set()

    def answer(self, message: bytes) -> None:
        """Told in its turn."""
        self._answers.append(message)
        self._news.set()

    def close(self, code: int = 1012, reason: str = "the hub is stopping") -> None:
        """After what is to be told already. 1012: the service restarts; come again."""
        self._closing = self._closing or (code, reason)
        self._news.set()

    async def put(self, message: bytes) -> None:
        """At once."""
        await self._send({"type": "websocket.send", "text": message.decode()})

    async def run(self, receive: Receive, hear: Callable[[bytes], Awaitable[None]]) -> None:
        """Until either side ends it. `hear` is given one message after the other."""
        both = (
            asyncio.ensure_future(self._read(receive, hear)),
            asyncio.ensure_future(self._write()),
        )
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
            for task in both:
                if not task.cancelled() and (error := task.exception()) is not None:
                    _LOG.debug("a connection ended: %r", error)

    async def _read(self, receive: Receive, hear: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return
            text = event.get("text")
            await hear(event.get("bytes") or b"" if text is None else text.encode("utf-8", "surrogatepass"))
            while len(self._answers) > _MAX_UNREAD:
                self._room_for_more.clear()
                await self._room_for_more.wait()

    async def _write(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._answers:
                await self.put(self._answers.popleft())
            self._room_for_more.set()
            await self._tell_more()
            if self._closing is not None:
                code, reason = self._closing
                await self._send({"type": "websocket.close", "code": code, "reason": reason})
                return
