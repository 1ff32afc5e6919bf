"""Bounded requests to a service with an HTTP API in JSON, for connectors that need no more.

It follows no redirect, asks for no compression, reads no more than it should and retries nothing. What an answer means
is the connector's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.net.reachability import cause_of

T = TypeVar("T")

_CHUNK = 1 << 16


class JsonReply(NamedTuple):
    status: int
    content: bytes
    service: str

    def read(self, kind: type[T]) -> T:
        """Raises `ServiceFailed` if the content is something else."""
        try:
            return msgspec.json.decode(self.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            words = f"The server's answer ({self.status}) makes no sense: {error}. Is it {self.service}?"
            raise ServiceFailed(Failure(FailureKind.DEAD_WORKER, words)) from error


class JsonApi:
    """One server. `service` is its name in messages."""

    def __init__(
        self,
        service: str,
        base: str,
        headers: Mapping[str, str],
        *,
        request_s: float = 15.0,
        max_answer_bytes: int = 16 << 20,
    ) -> None:
        self._service, self._base, self._headers = service, base.rstrip("/"), dict(headers)
        self._request_s, self._most = request_s, max_answer_bytes
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        if self._session is None:
            # A few compressed kilobytes may become gigabytes.
            headers = {**self._headers, "Accept-Encoding": "identity"}
            self._session = aiohttp.ClientSession(
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._request_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, method: str, path: str, body: Any = None) -> JsonReply:
        """Raises `ServiceFailed`: TRANSIENT if the answer did not arrive, DEAD_WORKER for one without an end."""
        if self._session is None:
            raise RuntimeError(f"the connector of {self._service} is not open: call open() first")
        try:
            # A redirect would take the credentials to a stranger.
            async with self._session.request(
                method, self._base + path, json=body, allow_redirects=False
            ) as response:
                return JsonReply(response.status, await self._content(response), self._service)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            words = f"No answer to {method} {path}: {cause_of(error, self._base, self._service)}"
            raise ServiceFailed(Failure(FailureKind.TRANSIENT, words)) from error

    async def _content(self, response: aiohttp.ClientResponse) -> bytes:
        pieces, size = [], 0
        async for piece in response.content.iter_chunked(_CHUNK):
            pieces.append(piece)
            size += len(piece)
            if size > self._most:
                response.close()
                words = f"The server sends more than {self._most} bytes. Is it {self._service}?"
                raise ServiceFailed(Failure(FailureKind.DEAD_WORKER, words))
        return b"".join(pieces)
