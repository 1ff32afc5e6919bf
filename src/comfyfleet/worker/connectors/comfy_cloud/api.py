"""HTTP requests to one Comfy Cloud account: each method returns an answer or raises `Unreachable`.

It owns the sessions, the key and the bounds of answers. It never repeats a request, because only the caller knows
whether that costs money. v2 runs jobs; v1 tells what v2 does not: account, node classes, models and the list of jobs.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import quote, urljoin, urlsplit

import aiohttp
import msgspec

from comfyfleet.net.reachability import cause_of
from comfyfleet.worker.connectors.comfy_cloud.settings import CloudAddress, ComfyCloudSettings
from comfyfleet.worker.connectors.comfyui.api import AnswerTooLarge, Unreachable, pieces_of, read_json

HIDDEN = b"(the key)"
_MAX_RETRY_AFTER_S = 3600.0
_ASSET_LIFE_S = 86_400
_LONGEST_LINK = 4_096

Version = Literal[1, 2]


class CloudAnswer(msgspec.Struct, frozen=True):
    status: int
    body: Any
    """Parsed JSON, or else the text. It does not contain the key."""
    retry_after_s: float | None = None
    size: int = 0

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def error(self) -> Mapping[str, Any]:
        """The error object of either version."""
        body = self.body
        inner = body.get("error") if isinstance(body, Mapping) else None
        if isinstance(inner, Mapping):
            return inner
        return {"message": inner} if isinstance(inner, str) else body if isinstance(body, Mapping) else {}

    @property
    def code(self) -> str:
        """v2 has `code`, v1 has `type`, other routes of v1 have `code`."""
        error = self.error
        found = error.get("code") or error.get("type")
        return found[:200] if isinstance(found, str) else ""

    @property
    def message(self) -> str:
        message = self.error.get("message")
        found = message if isinstance(message, str) else self.body if isinstance(self.body, str) else ""
        return found.strip()[:2_000]


class CloudApi:
    def __init__(
        self,
        address: CloudAddress,
        settings: ComfyCloudSettings,
        on_too_much: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_too_much` gets a message when answers exceed the limits."""
        self.address = address
        self._settings = settings
        self._on_too_much = on_too_much
        self._key = settings.key
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            # A few compressed kilobytes may become gigabytes, so compression is neither requested nor unpacked.
            headers={"Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # v2

    async def submit(self, graph: dict[str, Any], idempotency_key: str, timeout_s: float) -> CloudAnswer:
        body: dict[str, Any] = {"workflow": graph}
        if self._settings.partner_nodes:
            body["extra_data"] = {"api_key_comfy_org": self._key}
        headers = {"Idempotency-Key": idempotency_key}
        return await self._ask(2, "POST", "/api/v2/jobs", timeout_s, headers, json=body)

    async def job(self, job_id: str) -> CloudAnswer:
        return await self._ask(2, "GET", f"/api/v2/jobs/{_quoted(job_id)}")

    async def workflow(self, job_id: str) -> CloudAnswer:
        return await self._ask(2, "GET", f"/api/v2/jobs/{_quoted(job_id)}/workflow")

    async def cancel(self, job_id: str) -> CloudAnswer:
        return await self._ask(2, "POST", f"/api/v2/jobs/{_quoted(job_id)}/cancel")

    async def upload(self, path: Path | bytes, name: str) -> CloudAnswer:
        if isinstance(path, bytes):
            return await self._upload(path, name)
        with await asyncio.to_thread(path.open, "rb") as content:
            return await self._upload(content, name)

    async def _upload(self, content: bytes | BinaryIO, name: str) -> CloudAnswer:
        form = aiohttp.FormData()
        form.add_field("content_type", "application/octet-stream")
        form.add_field("file_path", name)
        form.add_field("expires_in", str(_ASSET_LIFE_S))
        form.add_field("tags", "input")
        form.add_field("file", content, filename=name, content_type="application/octet-stream")
        return await self._ask(2, "POST", "/api/v2/assets", self._settings.transfer_s, data=form)

    def content_url(self, asset_id: str) -> str:
        return self.address.url(f"/api/v2/assets/{_quoted(asset_id)}/content")

    @asynccontextmanager
    async def events(self, job_id: str, link: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """`link`: the job's own link to its events."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._settings.connect_s, sock_read=self._settings.quiet_s
        )
        headers = {**self._authorization(2), "Accept": "text/event-stream"}
        async with (
            self._reaching(),
            self._opened().get(
                self._event_url(job_id, link), headers=headers, timeout=timeout, allow_redirects=False
            ) as response,
        ):
            yield response

    def _event_url(self, job_id: str, link: Any) -> str:
        """Links may have a prefix that the base lacks. The key goes to no other origin."""
        if isinstance(link, str) and link and len(link) <= _LONGEST_LINK:
            url = urljoin(f"{self.address.origin}/", link)
            parts = urlsplit(url)
            if f"{parts.scheme}://{parts.netloc}" == self.address.origin:
                return url
        return self.address.url(f"/api/v2/jobs/{_quoted(job_id)}/events")

    @asynccontextmanager
    async def content(self, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The beginning of a download. A redirect is the caller's to follow, without the key."""
        if not url.startswith(self.address.url("/api/v2/assets/")):
            raise Unreachable("the file is not one of this account's address")
        async with (
            self._reaching(),
            self._opened().get(
                url,
                headers=self._authorization(2),
                timeout=self._timeout(self._settings.transfer_s),
                allow_redirects=False,
            ) as response,
        ):
            yield response

    # v1

    async def get(
        self, path: str, timeout_s: float | None = None, query: Mapping[str, str] | None = None
    ) -> CloudAnswer:
        return await self._ask(1, "GET", path, timeout_s, params=query)

    # requests

    async def _ask(
        self,
        version: Version,
        method: str,
        path: str,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        **content: Any,
    ) -> CloudAnswer:
        timeout = self._timeout(self._settings.request_s if timeout_s is None else timeout_s)
        async with (
            self._reaching(),
            # A redirected POST would arrive as a GET and look like success, with our key elsewhere.
            self._opened().request(
                method,
                self.address.url(path),
                headers={**self._authorization(version), **(headers or {})},
                timeout=timeout,
                allow_redirects=False,
                **content,
            ) as response,
        ):
            try:
                pieces = pieces_of(response, self._settings.max_answer_bytes)
                body = b"".join([piece async for piece in pieces])
                if len(body) > self._settings.max_answer_values:
                    values = body.count(b",") + body.count(b"[") + body.count(b"{")
                    if values > self._settings.max_answer_values:
                        raise AnswerTooLarge(f"more than {self._settings.max_answer_values} values")
            except AnswerTooLarge as error:
                words = f"it answers {method} {path.partition('?')[0]} with {error}"
                self._on_too_much(words)
                raise AnswerTooLarge(words) from error
            parsed = await read_json(body.replace(self._key.encode(), HIDDEN) if self._key else body)
            return CloudAnswer(response.status, parsed, _retry_after(response), len(body))

    def _authorization(self, version: Version) -> dict[str, str]:
        return {"X-API-Key": self._key} if version == 1 else {"Authorization": f"Bearer {self._key}"}

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the Comfy Cloud connector is not open: call open() first")
        return self._session

    def _timeout(self, total_s: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=min(total_s, self._settings.connect_s))

    def _reaching(self) -> Any:
        return reaching(self.address.origin)


@asynccontextmanager
async def reaching(url: str) -> AsyncIterator[None]:
    """Turns errors of a request into `Unreachable`. The text contains no URL."""
    try:
        yield
    except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
        is_refused = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        is_closed = isinstance(error, aiohttp.ClientConnectorError) and (
            error.os_error.errno == errno.ECONNREFUSED
        )
        is_timeout = isinstance(error, TimeoutError) and not is_refused
        why = cause_of(error, url, "Comfy Cloud")
        raise Unreachable(why, is_refused=is_refused, is_closed=is_closed, is_timeout=is_timeout) from error


def _quoted(part: str) -> str:
    return quote(part, safe="")


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    text = response.headers.get("Retry-After", "").strip()
    return min(float(text), _MAX_RETRY_AFTER_S) if text.isascii() and text.isdigit() else None
