"""Reads a job's event stream (SSE). It only brings news earlier than a look at the job does.

A stream has no ids and no replay, so an interrupted one is simply opened again. Not every address has streams, and
an account may have only a few open ones.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from comfyfleet.worker.connectors.comfy_cloud.api import CloudApi
from comfyfleet.worker.connectors.comfy_cloud.backoff import CloudBackoff
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings
from comfyfleet.worker.connectors.comfyui.api import Unreachable

_log = logging.getLogger(__name__)

_MAX_FAILURES = 5
_NAMES = frozenset({"status", "progress", "preview", "output"})


class CloudEvent(msgspec.Struct, frozen=True):
    name: str
    data: Mapping[str, Any]
    image: bytes | None = None


class CloudEventStream:
    def __init__(self, api: CloudApi, settings: ComfyCloudSettings) -> None:
        self._api = api
        self._settings = settings
        self._is_missing = False
        """The address has no event streams."""

    async def of(self, job_id: str, link: Callable[[], Any]) -> AsyncIterator[CloudEvent]:
        """The events of a job until its stream ends. Never raises because of the service."""
        backoff, failures = CloudBackoff(self._settings), 0
        while not self._is_missing and failures < _MAX_FAILURES:
            failures += 1
            asked_s: float | None = None
            try:
                async with self._api.events(job_id, link()) as response:
                    if response.status != 200:
                        self._is_missing = response.status in (404, 405, 501)
                        text = response.headers.get("Retry-After", "")
                        asked_s = float(text) if text.isascii() and text.isdigit() else None
                    else:
                        async for event in self._read(response):
                            failures = 0
                            yield event
            except (Unreachable, TimeoutError, aiohttp.ClientError, ConnectionError, ValueError) as error:
                _log.debug("the event stream of %s ended: %r", job_id, error)
            if not self._is_missing:
                await asyncio.sleep(backoff.next_s(asked_s))

    async def _read(self, response: aiohttp.ClientResponse) -> AsyncIterator[CloudEvent]:
        most, name, data = self._settings.max_event_bytes, "", b""
        buffer = b""
        async for chunk in response.content.iter_any():
            *lines, buffer = (buffer + chunk).split(b"\n")
            if len(buffer) > most:
                raise ValueError("an event is too large")
            for line in lines:
                line = line.rstrip(b"\r")
                if not line:
                    if (event := _event(name, data)) is not None:
                        yield event
                    name, data = "", b""
                elif line.startswith(b"event:"):
                    name = line[6:].strip().decode("utf-8", "replace")
                elif line.startswith(b"data:"):
                    data += line[5:]
                    if len(data) > most:
                        raise ValueError("an event is too large")


def _event(name: str, text: bytes) -> CloudEvent | None:
    if name not in _NAMES:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if name != "preview":
        return CloudEvent(name, data)
    try:
        image = base64.b64decode(data.pop("data_base64", ""), validate=True)
    except (TypeError, ValueError, binascii.Error):
        return None
    return CloudEvent(name, data, image) if image else None
