"""HTTP requests to one server of the A1111 family: each method returns an answer or raises `Unreachable`.

It owns the session, timeouts, credentials and bounds. It never repeats a request, because the server would run it
twice.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from comfyfleet.worker.connectors.a1111.settings import A1111Settings
from comfyfleet.worker.connectors.comfyui.api import (
    AnswerTooLarge,
    ApiAnswer,
    bounded_body,
    reaching,
    read_json,
)
from comfyfleet.worker.connectors.comfyui.settings import ServerAddress

WHAT = "the web UI"


class A1111Api:
    def __init__(
        self,
        address: ServerAddress,
        settings: A1111Settings,
        on_too_much: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_too_much` gets a message when the server sends more than the limits allow."""
        self.address = address
        self.on_too_much = on_too_much
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        if self._session is not None:
            return
        headers = dict(self._settings.headers)
        user = self._settings.user or self.address.user
        if user and "authorization" not in {name.lower() for name in headers}:
            password = self._settings.password if self._settings.user else self.address.password
            secret = base64.b64encode(f"{user}:{password}".encode()).decode()
            headers["Authorization"] = f"Basic {secret}"
        # A few compressed kilobytes may become gigabytes, so compression is neither requested nor unpacked.
        headers["Accept-Encoding"] = "identity"
        self._session = aiohttp.ClientSession(
            # The server closes idle connections. A run that is sent on a closing one may or may not have arrived.
            connector=aiohttp.TCPConnector(limit=0, ssl=self._settings.verify_tls, force_close=True),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def run(self, route: str, body: dict[str, Any]) -> ApiAnswer:
        """Returns when the run is over: there is no limit on time."""
        # In a thread: the pictures in it may have megabytes.
        content = await asyncio.to_thread(lambda: json.dumps(body).encode())
        headers = {"Content-Type": "application/json"}
        return await self._ask("POST", f"/sdapi/v1/{route}", None, is_run=True, data=content, headers=headers)

    async def progress(self, timeout_s: float | None = None) -> ApiAnswer:
        return await self._ask(
            "GET", "/sdapi/v1/progress?skip_current_image=true", timeout_s or self._request_s
        )

    async def task_progress(self, task_id: str, preview_id: int | None = None) -> ApiAnswer:
        """`preview_id`: the last preview that is known. None: no preview is wanted."""
        body = {
            "id_task": task_id,
            "live_preview": preview_id is not None,
            "id_live_preview": -1 if preview_id is None else preview_id,
        }
        return await self._ask("POST", "/internal/progress", self._request_s, json=body)

    async def pending_tasks(self) -> ApiAnswer:
        return await self._ask("GET", "/internal/pending-tasks", self._request_s)

    async def interrupt(self) -> ApiAnswer:
        return await self._ask("POST", "/sdapi/v1/interrupt", self._request_s)

    async def get(self, path: str, timeout_s: float) -> ApiAnswer:
        return await self._ask("GET", path, timeout_s)

    @property
    def _request_s(self) -> float:
        return self._settings.request_s

    async def _ask(
        self, method: str, path: str, timeout_s: float | None, *, is_run: bool = False, **content: Any
    ) -> ApiAnswer:
        if self._session is None:
            raise RuntimeError("the A1111 connector is not open: call open() first")
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._settings.connect_s)
        settings = self._settings
        most = settings.max_message_bytes if is_run else settings.max_answer_bytes
        async with (
            reaching(self.address.base, WHAT),
            # A redirect could lead our credentials elsewhere, and make a run a GET.
            self._session.request(
                method, self.address.url(path), timeout=timeout, allow_redirects=False, **content
            ) as response,
        ):
            try:
                body = await bounded_body(response, most, settings.max_answer_values)
            except AnswerTooLarge as error:
                words = f"it answers {method} {path.partition('?')[0]} with {error}"
                if not is_run:
                    self.on_too_much(words)
                raise AnswerTooLarge(words, is_of_prompt=is_run) from error
            return ApiAnswer(response.status, await read_json(body), len(body))
