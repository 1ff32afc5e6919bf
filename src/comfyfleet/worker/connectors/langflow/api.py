"""HTTP requests to one LangFlow server: each method returns an answer or raises `Unreachable`.

It owns the session, the key and the limits of answers. It never repeats a request, because only the caller knows
whether that is safe.
"""

from __future__ import annotations

import asyncio
import errno
import json
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from comfyfleet.net.reachability import cause_of
from comfyfleet.worker.connectors.comfyui.api import (
    CHUNK,
    AnswerTooLarge,
    ApiAnswer,
    Unreachable,
    pieces_of,
    read_json,
)
from comfyfleet.worker.connectors.langflow.settings import LangFlowSettings

_FLOWS = "/api/v1/flows/?get_all=true&header_flows=true&remove_example_flows=true"


class LangFlowApi:
    def __init__(self, base: str, settings: LangFlowSettings) -> None:
        self.base = base
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        if self._session is not None:
            return
        headers = dict(self._settings.headers)
        if self._settings.key is not None:
            headers["x-api-key"] = self._settings.key
        # A few compressed kilobytes may become gigabytes, so compression is neither requested nor unpacked.
        headers["Accept-Encoding"] = "identity"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._settings.verify_tls),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the LangFlow connector is not open: call open() first")
        return self._session

    # the server

    async def health(self) -> ApiAnswer:
        return await self._ask("GET", "/health_check", self._settings.health_s)

    async def version(self) -> ApiAnswer:
        return await self._ask("GET", "/api/v1/version")

    async def whoami(self) -> ApiAnswer:
        return await self._ask("GET", "/api/v1/users/whoami")

    async def flows(self) -> ApiAnswer:
        return await self._ask("GET", _FLOWS, self._settings.inventory_s)

    async def flow(self, flow_id: str) -> ApiAnswer:
        return await self._ask("GET", f"/api/v1/flows/{quote(flow_id, safe='')}")

    # jobs

    async def submit(self, body: Mapping[str, Any], timeout_s: float) -> ApiAnswer:
        return await self._ask("POST", "/api/v2/workflows", timeout_s, json=body)

    async def status(self, job_id: str) -> ApiAnswer:
        return await self._ask("GET", f"/api/v2/workflows?job_id={quote(job_id, safe='')}")

    async def stop(self, job_id: str) -> ApiAnswer:
        return await self._ask("POST", "/api/v2/workflows/stop", json={"job_id": job_id})

    @asynccontextmanager
    async def events(self, job_id: str, last_id: str | None) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = last_id
        path = f"/api/v2/workflows/{quote(job_id, safe='')}/events"
        async with self._open("GET", path, self._stream_timeout(), headers=headers) as response:
            yield response

    @asynccontextmanager
    async def run(
        self, flow_id: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The stream of a run on a server without background jobs. Leaving it stops the run."""
        path = f"/api/v1/run/{quote(flow_id, safe='')}?stream=true"
        # A component may be silent for as long as it runs.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_s)
        async with self._open("POST", path, timeout, json=body, headers=headers) as response:
            yield response

    # files

    async def upload(self, flow_id: str, name: str, data: bytes | Path) -> ApiAnswer:
        path = f"/api/v1/files/upload/{quote(flow_id, safe='')}"
        if isinstance(data, bytes):
            return await self._upload(path, name, data)
        with await asyncio.to_thread(data.open, "rb") as content:
            return await self._upload(path, name, content)

    async def _upload(self, path: str, name: str, content: Any) -> ApiAnswer:
        form = aiohttp.FormData()
        form.add_field("file", content, filename=name, content_type="application/octet-stream")
        return await self._ask("POST", path, self._settings.transfer_s, data=form)

    async def files_of_flow(self, flow_id: str) -> ApiAnswer:
        return await self._ask("GET", f"/api/v1/files/list/{quote(flow_id, safe='')}")

    async def remove_file(self, flow_id: str, name: str) -> ApiAnswer:
        return await self._ask(
            "DELETE", f"/api/v1/files/delete/{quote(flow_id, safe='')}/{quote(name, safe='')}"
        )

    async def files_of_user(self) -> ApiAnswer:
        return await self._ask("GET", "/api/v2/files/")

    @asynccontextmanager
    async def download(self, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(
            total=self._settings.transfer_s, sock_connect=self._settings.connect_s
        )
        async with self._open("GET", path, timeout) as response:
            yield response

    # requests

    async def _ask(self, method: str, path: str, timeout_s: float | None = None, **content: Any) -> ApiAnswer:
        total_s = self._settings.request_s if timeout_s is None else timeout_s
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=min(total_s, self._settings.connect_s))
        async with self._open(method, path, timeout, **content) as response:
            body = await read_bounded(response, self._settings)
            return ApiAnswer(response.status, await read_json(body), len(body))

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, timeout: aiohttp.ClientTimeout, **content: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with (
            reaching(self.base),
            # A redirect would carry the key to another address.
            self.session.request(
                method, f"{self.base}{path}", timeout=timeout, allow_redirects=False, **content
            ) as response,
        ):
            yield response

    def _stream_timeout(self) -> aiohttp.ClientTimeout:
        settings = self._settings
        return aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_s, sock_read=settings.stream_silence_s
        )


async def read_bounded(response: aiohttp.ClientResponse, settings: LangFlowSettings) -> bytes:
    """The body. Raises `AnswerTooLarge`."""
    if response.headers.get("Content-Encoding", "").strip().lower() == "gzip":
        body = await _unpacked(response, settings.max_answer_bytes)
    else:
        body = b"".join([piece async for piece in pieces_of(response, settings.max_answer_bytes)])
    most = settings.max_answer_values
    # Counts separators, also those in texts: there cannot be more values than that.
    if len(body) > most and body.count(b",") + body.count(b"[") + body.count(b"{") > most:
        raise AnswerTooLarge(f"more than {most} values")
    return body


async def _unpacked(response: aiohttp.ClientResponse, most: int) -> bytes:
    """LangFlow before 1.13 compresses the list of flows although we ask for plain answers."""
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    body = bytearray()
    try:
        async for chunk in response.content.iter_chunked(CHUNK):
            # A few kilobytes may become gigabytes, so no more is unpacked than is allowed.
            body += unpacker.decompress(chunk, most - len(body) + 1)
            if len(body) > most:
                response.close()
                raise AnswerTooLarge(f"more than {most} bytes")
    except zlib.error as error:
        raise Unreachable(f"the server sent a broken compressed answer ({error})") from error
    return bytes(body)


async def chunks_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """A stream as it arrives. The caller bounds it."""
    packed = response.headers.get("Content-Encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        raise Unreachable(f"the server compressed its stream ({packed[:20]!r}) without being asked")
    async for chunk in response.content.iter_any():
        yield chunk


@asynccontextmanager
async def reaching(url: str) -> AsyncIterator[None]:
    try:
        yield
    except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
        is_refused = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        is_closed = isinstance(error, aiohttp.ClientConnectorError) and (
            error.os_error.errno == errno.ECONNREFUSED
        )
        why = cause_of(error, url, "LangFlow")
        raise Unreachable(
            why,
            is_refused=is_refused,
            is_closed=is_closed,
            is_timeout=isinstance(error, TimeoutError) and not is_refused,
        ) from error


def decode_object(text: bytes) -> dict[str, Any] | None:
    """A JSON object, or None: a stream may contain anything."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


__all__ = ["CHUNK", "AnswerTooLarge", "ApiAnswer", "LangFlowApi", "Unreachable", "chunks_of", "pieces_of"]
