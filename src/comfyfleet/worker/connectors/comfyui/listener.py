"""The WebSocket to a server, shared by all attempts that run there.

It reconnects after a loss, passes each message to the attempt of its prompt, and tells the attempts when
messages may be missing. It closes the old WebSocket before it opens a new one: a server forgets both clients
with the same id when the older one closes. Frames that cannot be parsed are dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import aiohttp
import msgspec

from comfyfleet.worker.connectors.comfyui.api import LARGE_BODY, ComfyApi
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings

log = logging.getLogger(__name__)

FEATURE_FLAGS = '{"type": "feature_flags", "data": {"supports_preview_metadata": true}}'
"""The first message to a server: previews then name their prompt and node."""

MAX_PREVIEW_HEADER = 1 << 20
_IMAGE_FORMATS = {1: "image/jpeg", 2: "image/png"}


class Message(msgspec.Struct, frozen=True):
    """One frame. Kinds are the server's, with `preview` and `text` for binary frames."""

    kind: str
    prompt_id: str | None
    data: dict[str, Any]
    image: bytes | None = None
    size: int = 0
    """The length of a text frame in characters."""

    @property
    def node(self) -> str | None:
        return text_or_none(self.data.get("node"))

    @property
    def is_end_of_run(self) -> bool:
        """The message that ends every run, successful or not."""
        return self.kind == "executing" and "node" in self.data and self.data["node"] is None


def text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def parse_text(frame: str) -> Message | None:
    try:
        # Not msgspec: servers send NaN and Infinity.
        content = json.loads(frame)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    kind, data = content.get("type"), content.get("data")
    if not isinstance(kind, str) or not isinstance(data, dict):
        return None
    return Message(kind, text_or_none(data.get("prompt_id")), data, size=len(frame))


def parse_binary(frame: bytes) -> Message | None:
    match int.from_bytes(frame[:4], "big"):
        case 1 if len(frame) > 8:
            image_format = _IMAGE_FORMATS.get(int.from_bytes(frame[4:8], "big"), "application/octet-stream")
            return Message("preview", None, {"format": image_format}, frame[8:])
        case 3 if len(frame) >= 8:
            end = 8 + int.from_bytes(frame[4:8], "big")
            if end > len(frame):
                return None
            node = frame[8:end].decode("utf-8", "replace")
            return Message("text", None, {"node": node, "text": frame[end:].decode("utf-8", "replace")})
        case 4 if len(frame) > 8:
            return _preview_with_metadata(frame)
    return None


def _preview_with_metadata(frame: bytes) -> Message | None:
    length = int.from_bytes(frame[4:8], "big")
    if length > MAX_PREVIEW_HEADER or 8 + length > len(frame):
        return None
    try:
        header = json.loads(frame[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    node = text_or_none(header.get("display_node_id")) or text_or_none(header.get("node_id"))
    data = {"format": text_or_none(header.get("image_type")) or "application/octet-stream", "node": node}
    return Message("preview", text_or_none(header.get("prompt_id")), data, frame[8 + length :])


def _is_too_much(frame: aiohttp.WSMessage) -> bool:
    error = frame.data
    return (
        frame.type is aiohttp.WSMsgType.ERROR
        and isinstance(error, aiohttp.WebSocketError)
        and error.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
    )


class MessageHandler(Protocol):
    """Receives the messages of one prompt id."""

    def on_message(self, message: Message) -> None: ...
    def disconnected(self) -> None:
        """The WebSocket was lost: the prompt must be looked up."""

    def reconnected(self) -> None:
        """Messages may be missing: the prompt must be looked up."""


class WebSocketListener:
    def __init__(
        self,
        api: ComfyApi,
        settings: ComfyUISettings,
        client_id: str,
        on_restart: Callable[[], None],
        on_connection: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`on_connection` is called for every unexpected loss and for the return after it."""
        self._api = api
        self._settings = settings
        self._client_id = client_id
        self._on_restart = on_restart
        self._on_connection = on_connection
        self._handlers: dict[str, MessageHandler] = {}
        self._executing: str | None = None
        self._reading: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_reopening = False
        self._is_lost = False
        self.lost_at: float | None = None
        """When the WebSocket was last lost unexpectedly, on the event loop's clock."""
        self.losses = 0
        self.reopened = 0
        self.connections = 0
        """Counts connections; the last one is the current one, if one is open."""
        self._last_other_prompt: tuple[str, float] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_listening(), name=f"listen {self._api.address.server_id}")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def attach(self, prompt_id: str, handler: MessageHandler) -> None:
        self._handlers[prompt_id] = handler
        self._hurry.set()

    def detach(self, prompt_id: str) -> None:
        self._handlers.pop(prompt_id, None)

    def listens_for(self, prompt_id: str) -> bool:
        return prompt_id in self._handlers

    def last_foreign_message_at(self, prompt_id: str) -> float | None:
        """When another client's prompt last sent a message: prompts without a client id send to everybody."""
        sign = self._last_other_prompt
        return sign[1] if sign is not None and sign[0] == prompt_id else None

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait_connected(self, timeout_s: float) -> bool:
        self._hurry.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._open.wait()
        return self.is_open

    def reopen(self) -> None:
        """Replaces a WebSocket that is open and silent."""
        if self._reading is None or self._is_reopening:
            return
        self._is_reopening = True
        self.reopened += 1
        self._hurry.set()
        self._reading.cancel()

    async def _keep_listening(self) -> None:
        delay_s = self._settings.reconnect_min_s
        failed = 0
        loop = asyncio.get_running_loop()
        while True:
            self._hurry.clear()
            begun_at = loop.time()
            try:
                await self._listen_once(had_failures=failed > 0)
                failed = 0
                # A connection that breaks again and again is opened less and less often.
                if loop.time() >= begun_at + self._settings.reconnect_max_s:
                    delay_s = self._settings.reconnect_min_s
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failed += 1
                # Only the text: the exception contains the request with its credentials.
                log.debug("no WebSocket to %s: %s", self._api.address.server_id, str(error) or type(error))
            except Exception:
                # Later runs need a listener after any error.
                log.exception("the WebSocket to %s failed and is opened again", self._api.address.server_id)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._hurry.wait()
            longest_s = self._settings.reconnect_max_s
            # During a run the WebSocket is tried at least as often as the prompt is looked up.
            delay_s = min(delay_s * 2, min(longest_s, self._settings.poll_s) if self._handlers else longest_s)

    async def _listen_once(self, *, had_failures: bool) -> None:
        async with asyncio.timeout(self._settings.connect_s):
            socket = await self._api.session.ws_connect(
                self._api.address.websocket,
                params={"clientId": self._client_id},
                # One message may contain an output of tens of megabytes.
                max_msg_size=self._settings.max_message_bytes,
                compress=0,
                heartbeat=self._settings.heartbeat_s,
            )
        try:
            await socket.send_str(FEATURE_FLAGS)
            self._reading = reading = asyncio.create_task(self._read(socket))
            try:
                self._opened(had_failures)
                await asyncio.wait({reading})
            finally:
                reading.cancel()
                await asyncio.wait({reading})
            if not reading.cancelled():
                reading.result()
        finally:
            self._closed()
            # Waits for the server's close, within a bound: only then is the client id free.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.close_s):
                    await socket.close()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for frame in socket:
            await self._deliver(frame)

    def _opened(self, had_failures: bool) -> None:
        self._is_reopening = False
        self.connections += 1
        self._open.set()
        if had_failures and self.lost_at is not None:
            self._on_restart()
        is_back, self._is_lost = self._is_lost, False
        if is_back:
            self._on_connection(True)
        for handler in list(self._handlers.values()):
            handler.reconnected()

    def _closed(self) -> None:
        if self._reading is not None and not self._is_reopening:
            self.lost_at = asyncio.get_running_loop().time()
            self.losses += 1
            self._is_lost = True
        was_open = self._open.is_set()
        self._reading = None
        self._executing = None
        self._open.clear()
        if self._is_lost and was_open and self._task is not None:
            self._on_connection(False)
            for handler in list(self._handlers.values()):
                handler.disconnected()

    async def _deliver(self, frame: aiohttp.WSMessage) -> None:
        if frame.type is aiohttp.WSMsgType.TEXT:
            text: str = frame.data
            message = (
                await asyncio.to_thread(parse_text, text) if len(text) > LARGE_BODY else parse_text(text)
            )
        elif frame.type is aiohttp.WSMsgType.BINARY:
            message = parse_binary(frame.data)
        else:
            if _is_too_much(frame):
                self._too_much()
            return
        if message is not None:
            self.route(message)

    def _too_much(self) -> None:
        words = f"its WebSocket sends messages of more than {self._settings.max_message_bytes} bytes"
        log.warning("%s: %s", self._api.address.server_id, words)
        if not self._handlers:
            # During our run it may be an output of that run, which goes on without the WebSocket.
            self._api.on_too_much(words)

    def route(self, message: Message) -> None:
        """Passes a message to its attempt. Frames without a prompt id belong to the executing prompt."""
        prompt_id = message.prompt_id
        if prompt_id is None:
            if message.kind not in ("preview", "text") or self._executing is None:
                return
            prompt_id = self._executing
        elif message.is_end_of_run:
            self._executing = None
        elif message.kind in ("execution_start", "executing", "progress", "progress_state"):
            self._executing = prompt_id
        handler = self._handlers.get(prompt_id)
        if handler is None:
            self._last_other_prompt = prompt_id, asyncio.get_running_loop().time()
            return
        try:
            handler.on_message(message)
        except Exception:
            # Custom nodes send anything: one bad message must not end the listener.
            log.warning("ignored a %s message of prompt %s", message.kind, prompt_id, exc_info=True)
