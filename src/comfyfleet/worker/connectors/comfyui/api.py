"""HTTP requests to one ComfyUI server: each method returns an answer or raises `Unreachable`.

It owns the session, timeouts, credentials and the lenient reading of JSON. It never repeats a request,
because only the caller knows whether that is safe.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import quote

import aiohttp
import msgspec

from comfyfleet.model.job import OutputFile
from comfyfleet.net.reachability import cause_of
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings, ServerAddress

CHUNK = 1 << 18
LARGE_BODY = 1 << 20
"""Larger JSON is parsed in a thread: a node catalogue has megabytes."""


class Unreachable(Exception):
    """No useful answer came. The request may have been carried out, unless the connection was refused."""

    def __init__(
        self,
        reason: str,
        *,
        is_refused: bool = False,
        is_closed: bool = False,
        is_timeout: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.status = status
        """The status of a useless answer."""
        self.is_refused = is_refused
        """No connection was made, so nothing was sent."""
        self.is_closed = is_closed
        """The port refuses connections: no process is there."""
        self.is_timeout = is_timeout


class HttpRefusals:
    """Measures how long a port has refused every connection."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._since: float | None = None

    def answered(self) -> None:
        self._since = None

    def are_enough(self, error: Unreachable) -> bool:
        """Whether it is certain that no process is there."""
        now = asyncio.get_running_loop().time()
        if not error.is_closed:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now >= self._since + self._longest_s


class AnswerTooLarge(Unreachable):
    """The server sent more than the limit, as a prompt's output (`is_of_prompt`) or because it is broken."""

    def __init__(self, reason: str, *, is_of_prompt: bool = False) -> None:
        super().__init__(reason)
        self.is_of_prompt = is_of_prompt


class ApiAnswer(msgspec.Struct, frozen=True):
    status: int
    body: Any
    """Parsed JSON, or else the text."""
    size: int = 0

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300


class UploadedImage(msgspec.Struct, frozen=True):
    filename: str
    data: bytes | Path
    """The content, or its path on this machine."""
    subfolder: str
    original: dict[str, str] | None = None
    """For a mask: the image it belongs to."""
    place: Literal["input", "output"] = "input"


class ComfyApi:
    def __init__(
        self,
        address: ServerAddress,
        settings: ComfyUISettings,
        on_too_much: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_too_much` gets a message when the server sends more than the limits allow."""
        self.address = address
        self._settings = settings
        self.on_too_much = on_too_much
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        if self._session is not None:
            return
        headers = dict(self._settings.headers)
        if self.address.user is not None and "authorization" not in {name.lower() for name in headers}:
            secret = f"{self.address.user}:{self.address.password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(secret).decode()}"
        # A few compressed kilobytes may become gigabytes, so compression is neither requested nor unpacked.
        headers["Accept-Encoding"] = "identity"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._settings.verify_tls),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trace_configs=[_follows_nobody()],
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the ComfyUI connector is not open: call open() first")
        return self._session

    async def submit(
        self, graph: dict[str, Any], prompt_id: str, client_id: str, timeout_s: float
    ) -> ApiAnswer:
        # Never a `number`: two prompts with the same number and id kill the server's execution thread.
        body = {"prompt": graph, "prompt_id": prompt_id, "client_id": client_id}
        return await self._ask("POST", "/prompt", timeout_s, json=body)

    async def queue(self) -> ApiAnswer:
        return await self._ask("GET", "/queue")

    async def history(self, prompt_id: str) -> ApiAnswer:
        return await self._ask("GET", f"/history/{quote(prompt_id, safe='')}", is_of_prompt=True)

    async def queue_length(self) -> ApiAnswer:
        return await self._ask("GET", "/prompt")

    async def delete(self, prompt_id: str) -> ApiAnswer:
        return await self._ask("POST", "/queue", json={"delete": [prompt_id]})

    async def forget(self, prompt_id: str) -> ApiAnswer:
        """Removes the prompt's history entry."""
        return await self._ask("POST", "/history", json={"delete": [prompt_id]})

    async def interrupt(self, prompt_id: str) -> ApiAnswer:
        return await self._ask("POST", "/interrupt", json={"prompt_id": prompt_id})

    async def system_stats(self) -> ApiAnswer:
        return await self._ask("GET", "/system_stats")

    async def get(self, path: str, timeout_s: float) -> ApiAnswer:
        return await self._ask("GET", path, timeout_s)

    async def upload(self, upload: UploadedImage) -> ApiAnswer:
        if isinstance(upload.data, bytes):
            return await self._upload(upload, upload.data)
        with await asyncio.to_thread(upload.data.open, "rb") as content:
            return await self._upload(upload, content)

    async def _upload(self, upload: UploadedImage, content: bytes | BinaryIO) -> ApiAnswer:
        form = aiohttp.FormData()
        form.add_field("image", content, filename=upload.filename, content_type="application/octet-stream")
        form.add_field("subfolder", upload.subfolder)
        form.add_field("type", upload.place)
        form.add_field("overwrite", "true")
        path = "/upload/image"
        if upload.original is not None:
            path = "/upload/mask"
            form.add_field("original_ref", json.dumps(upload.original))
        return await self._ask("POST", path, self._settings.transfer_s, data=form)

    @asynccontextmanager
    async def view(self, file: OutputFile) -> AsyncIterator[aiohttp.ClientResponse]:
        query = {"filename": file.filename, "subfolder": file.subfolder, "type": file.folder}
        async with (
            reaching(self.address.base),
            self.session.get(
                self.address.url("/view"),
                params=query,
                timeout=self._timeout(self._settings.transfer_s),
                allow_redirects=False,
            ) as response,
        ):
            yield response

    async def _ask(
        self,
        method: str,
        path: str,
        timeout_s: float | None = None,
        *,
        is_of_prompt: bool = False,
        **content: Any,
    ) -> ApiAnswer:
        timeout = self._timeout(self._settings.request_s if timeout_s is None else timeout_s)
        async with (
            reaching(self.address.base),
            # A redirected POST would arrive as a GET and look like success, with our credentials elsewhere.
            self.session.request(
                method, self.address.url(path), timeout=timeout, allow_redirects=False, **content
            ) as response,
        ):
            try:
                body = await bounded_body(
                    response, self._settings.max_answer_bytes, self._settings.max_answer_values
                )
            except AnswerTooLarge as error:
                words = f"it answers {method} {path} with {error}"
                if not is_of_prompt:
                    self.on_too_much(words)
                raise AnswerTooLarge(words, is_of_prompt=is_of_prompt) from error
            return ApiAnswer(response.status, await read_json(body), len(body))

    def _timeout(self, total_s: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=min(total_s, self._settings.connect_s))


async def pieces_of(response: aiohttp.ClientResponse, most: int) -> AsyncIterator[bytes]:
    """The content in pieces. Raises `AnswerTooLarge` as soon as there is more."""
    packed = response.headers.get("Content-Encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        raise Unreachable(f"the server compressed its answer ({packed[:20]!r}) without being asked")
    size = response.content_length or 0
    if size <= most:
        size = 0
        async for chunk in response.content.iter_chunked(CHUNK):
            size += len(chunk)
            if size > most:
                break
            yield chunk
    if size > most:
        # The rest is not read, so the connection cannot be used again.
        response.close()
        raise AnswerTooLarge(f"more than {most} bytes")


async def bounded_body(response: aiohttp.ClientResponse, most_bytes: int, most_values: int) -> bytes:
    """Raises `AnswerTooLarge`."""
    body = b"".join([piece async for piece in pieces_of(response, most_bytes)])
    _count(body, most_values)
    return body


def _count(body: bytes, most: int) -> None:
    """Counts separators, also those in texts: there cannot be more values than that."""
    if len(body) > most and body.count(b",") + body.count(b"[") + body.count(b"{") > most:
        raise AnswerTooLarge(f"more than {most} values")


def _follows_nobody() -> aiohttp.TraceConfig:
    """A WebSocket would follow any redirect, with our credentials."""

    async def refuse(*_: object) -> None:
        raise aiohttp.ClientError("the server redirects to another address, which is not followed")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return trace


@asynccontextmanager
async def reaching(url: str, what: str = "ComfyUI") -> AsyncIterator[None]:
    """Turns errors of a request to `url`, where `what` should answer, into `Unreachable`."""
    try:
        yield
    except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
        # Without a connection nothing was sent.
        is_refused = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        is_closed = isinstance(error, aiohttp.ClientConnectorError) and (
            error.os_error.errno == errno.ECONNREFUSED
        )
        is_timeout = isinstance(error, TimeoutError) and not is_refused
        why = cause_of(error, url, what)
        raise Unreachable(why, is_refused=is_refused, is_closed=is_closed, is_timeout=is_timeout) from error


async def read_json(body: bytes) -> Any:
    """The parsed body, or its text if it is not JSON. Accepts NaN and infinities."""
    if len(body) > LARGE_BODY:
        return await asyncio.to_thread(_parse, body)
    return _parse(body)


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace").strip()
