"""The outputs of a job at Comfy Cloud: reads their list and downloads their content.

A download asks for the content with the key and is redirected to a signed link of the storage, which is followed
without the key, and only to a public address over TLS. Signed links are short-lived secrets: a result names the asset
instead.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import aiohttp
from yarl import URL

from comfyfleet.model.failure import Failure, FailureKind, FileTooLarge, ServiceFailed
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.net.url_guard import AllowedHosts, CheckingResolver, ForbiddenUrl, check_url
from comfyfleet.worker.connectors.comfy_cloud.api import CloudApi, reaching
from comfyfleet.worker.connectors.comfy_cloud.failures import fail
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings, is_allowed_host
from comfyfleet.worker.connectors.comfyui.api import AnswerTooLarge, Unreachable, pieces_of
from comfyfleet.worker.connectors.comfyui.outputs import MAX_FILES, is_included

_KINDS = {"image": "images", "video": "video", "audio": "audio", "latent": "latents"}
"""ComfyUI's own keys. Others are `files`."""
_ASSET_ID = re.compile(r"[\w.~-]{1,256}", re.ASCII)
_MAX_NAME = 1_000
_TRIES = 3


def read_outputs(job: Mapping[str, Any], api: CloudApi, included: Collection[str]) -> JobResult:
    """Raises `ServiceFailed` if an output of the run cannot be named."""
    found = job.get("outputs")
    if not isinstance(found, list) or len(found) > MAX_FILES:
        raise _unusable(job, "its list of outputs cannot be read")
    outputs: dict[str, dict[str, Any]] = {}
    files: list[OutputFile] = []
    for each in found:
        if not isinstance(each, Mapping) or not isinstance(each.get("node_id"), str):
            raise _unusable(job, "one of its outputs names no node")
        node_id, asset_id = each["node_id"], each.get("id")
        if not is_included(node_id, None, included):
            continue
        if not isinstance(asset_id, str) or _ASSET_ID.fullmatch(asset_id) is None:
            raise _unusable(job, f"an output of node {node_id[:100]} has no id")
        name = str(each.get("name") or asset_id).replace("\\", "/").rpartition("/")[2][:_MAX_NAME]
        name = asset_id if name in ("", ".", "..") else name
        kind = _KINDS.get(str(each.get("type")), "files")
        outputs.setdefault(node_id, {}).setdefault(kind, []).append(
            {"filename": name, "subfolder": "", "type": "output"}
        )
        files.append(OutputFile(node_id, kind, name, url=api.content_url(asset_id)))
    return JobResult(outputs, tuple(files))


def _unusable(job: Mapping[str, Any], why: str) -> ServiceFailed:
    return fail(
        FailureKind.OUTCOME_UNKNOWN,
        f"The job {str(job.get('id'))[:100]} ran at Comfy Cloud, but {why}. It cost credits, so it is not repeated: "
        "fetch its outputs there by hand, or retry this job.",
    )


class CloudDownload:
    """Closing twice is harmless."""

    def __init__(self, api: CloudApi, settings: ComfyCloudSettings) -> None:
        self._api = api
        self._settings = settings
        self._allowed = AllowedHosts(settings.allow)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def save(self, file: OutputFile, path: Path) -> int:
        """Saves the content at a path and returns its size. Raises `ServiceFailed`."""
        usage = await asyncio.to_thread(shutil.disk_usage, path.parent)
        free = max(0, usage.free - self._settings.min_free_bytes)
        most = min(self._settings.max_file_bytes, free)
        try:
            return await self._with_retries(file, path, most)
        except FileTooLarge:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise

    async def fetch(self, file: OutputFile) -> bytes:
        """The content, in memory. Raises `ServiceFailed`."""
        parts: list[bytes] = []

        def restart() -> None:
            parts.clear()

        await self._repeated(file, parts.append, restart, self._settings.max_fetch_bytes)
        return b"".join(parts)

    async def _with_retries(self, file: OutputFile, path: Path, most: int) -> int:
        with path.open("wb") as target:

            def restart() -> None:
                target.seek(0)
                target.truncate()

            return await self._repeated(file, target.write, restart, most)

    async def _repeated(
        self, file: OutputFile, write: Callable[[bytes], object], restart: Callable[[], object], most: int
    ) -> int:
        tries = 0
        while True:
            restart()
            tries += 1
            try:
                return await self._stream(file, write, most)
            except Unreachable as error:
                # A download costs nothing, and each try gets a new link.
                if tries >= _TRIES:
                    raise fail(
                        FailureKind.TRANSIENT,
                        f"The output {file.filename!r} did not arrive from Comfy Cloud: {error}",
                    ) from error
                await asyncio.sleep(min(self._settings.poll_s * tries, self._settings.poll_max_s))

    async def _stream(self, file: OutputFile, write: Callable[[bytes], object], most: int) -> int:
        size = 0
        async with self._content(file) as response:
            try:
                async for chunk in pieces_of(response, most):
                    write(chunk)
                    size += len(chunk)
            except AnswerTooLarge as error:
                words = f"The file {file.filename!r} has {error}, which is the limit."
                raise FileTooLarge(Failure(FailureKind.UNKNOWN, words)) from error
            except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
                raise Unreachable("the connection was lost during the download") from error
        return size

    @asynccontextmanager
    async def _content(self, file: OutputFile) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._api.content(file.url or "") as answer:
            if answer.status == 200:
                yield answer
                return
            if answer.status in (404, 410):
                raise fail(
                    FailureKind.OUTCOME_UNKNOWN,
                    f"Comfy Cloud no longer has the output {file.filename!r}: it is kept for a limited time. The run "
                    "cost credits, so it is not repeated. Retry this job to run it again.",
                )
            if answer.status not in (301, 302, 303, 307, 308):
                raise Unreachable(
                    f"Comfy Cloud answers {answer.status} to the download", status=answer.status
                )
            link = urljoin(str(answer.url), answer.headers.get("Location", ""))
        self._check(link, file)
        async with (
            reaching("https://storage"),
            self._opened().get(
                # As it was written: normalising may break the signature.
                URL(link, encoded=True),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=self._settings.transfer_s, sock_connect=self._settings.connect_s
                ),
            ) as response,
        ):
            if response.status != 200:
                raise Unreachable(f"the storage answers {response.status} to a signed link")
            yield response

    def _check(self, link: str, file: OutputFile) -> None:
        """No message shows the link: its signature gives access."""
        try:
            parts = check_url(link, self._allowed)
        except ForbiddenUrl as error:
            raise self._forbidden(file, "not a public address") from error
        if parts.scheme != "https" and not is_allowed_host(parts.hostname or "", self._allowed):
            raise self._forbidden(file, "an address without TLS")

    def _forbidden(self, file: OutputFile, what: str) -> ServiceFailed:
        return fail(
            FailureKind.OUTCOME_UNKNOWN,
            f"Comfy Cloud redirects the download of {file.filename!r} to {what}, which is not followed. The run cost "
            "credits, so it is not repeated. If the address is yours, name its host in `allow` and retry this job.",
        )

    def _opened(self) -> aiohttp.ClientSession:
        """A session of its own, so that the key can never be in it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=CheckingResolver(_look_up, self._allowed), use_dns_cache=False, limit=0
                ),
                headers={"Accept-Encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


async def _look_up(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]
