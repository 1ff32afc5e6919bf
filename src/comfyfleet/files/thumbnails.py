"""Thumbnails: made on first request, stored as files, deleted with their picture.

`thumbnail_process.py` draws them. Few are drawn at a time, and each only once for simultaneous requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory

from comfyfleet.files import thumbnail_process
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.ports import FileStore

SIZES = (64, 128, 256, 512, 1024)
MAX_BYTES = 256 << 20
_CONCURRENCY = 2
_MAX_PENDING = 64
_DRAWN_WITHIN_S = 30.0


class Thumbnails:
    def __init__(self, assets: FileStore) -> None:
        self._assets = assets
        self._free = asyncio.Semaphore(_CONCURRENCY)
        self._making: dict[tuple[str, int], asyncio.Task[FileRecord]] = {}

    async def get(self, record: FileRecord, size: int) -> FileRecord:
        """Fits into a square of this size or the next larger one of `SIZES`. Never enlarges the picture."""
        size = next(each for each in SIZES if each >= size)
        known = record.thumbnails.get(str(size))
        if known is not None and (kept := await self._assets.get(known, record.tenant)) is not None:
            return kept
        making = self._making.get((record.file_id, size))
        if making is None:
            if len(self._making) >= _MAX_PENDING:
                raise Refusal(
                    RefusalCode.UNAVAILABLE,
                    "the hub is making too many thumbnails; try again",
                    retry_after_s=2.0,
                )
            making = asyncio.create_task(self._make(record, size), name=f"thumbnail of {record.file_id}")
            self._making[record.file_id, size] = making
            making.add_done_callback(lambda _: self._making.pop((record.file_id, size)))
            # Retrieve the exception, or asyncio logs it.
            making.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(making)

    async def _make(self, record: FileRecord, size: int) -> FileRecord:
        if not record.is_complete:
            raise Refusal(
                RefusalCode.WRONG_PHASE, "this file is not complete: PUT it to its link, then complete it"
            )
        if record.kind == "thumbnail":
            raise Refusal(RefusalCode.INVALID_REQUEST, "this file is a thumbnail already")
        if (record.size or 0) > MAX_BYTES:
            raise Refusal(
                RefusalCode.TOO_LARGE,
                f"the hub makes no thumbnails of files over {MAX_BYTES} bytes",
                max_bytes=MAX_BYTES,
            )
        async with self._free:
            with TemporaryDirectory(prefix="comfyfleet-") as folder:
                path = Path(folder) / "picture"
                await self._fetch(record, path)
                content = await _drawn(path, size)
        made = await self._assets.reserve(
            record.tenant,
            name=f"{Path(record.name).stem or 'picture'}-{size}.webp"[-256:],
            content_type="image/webp",
            kind="thumbnail",
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            job_id=record.job_id,
        )
        await self._assets.receive(made, _pieces(content))
        made = await self._assets.complete(made.file_id)
        await self._assets.keep_thumbnail(record.file_id, size, made.file_id)
        return made

    async def _fetch(self, record: FileRecord, path: Path) -> None:
        is_first = True
        with await asyncio.to_thread(path.open, "wb") as target:
            async with aclosing(self._assets.read(record)) as pieces:
                async for piece in pieces:
                    if is_first and not _may_be_picture(piece):
                        raise _no_picture()
                    is_first = False
                    await asyncio.to_thread(target.write, piece)


async def _drawn(path: Path, size: int) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-m", thumbnail_process.__name__, str(path), str(size)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_DRAWN_WITHIN_S):
            content, _ = await process.communicate()
    except TimeoutError:
        raise _no_picture() from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    match process.returncode:
        case 0 if content:
            return content
        case thumbnail_process.HAS_TOO_MANY_PIXELS:
            raise Refusal(
                RefusalCode.TOO_LARGE,
                f"the hub makes no thumbnails of pictures over {thumbnail_process.MAX_PIXELS} pixels",
            )
        case thumbnail_process.HAS_NO_PILLOW:
            raise Refusal(
                RefusalCode.NOT_FOUND, "this hub cannot make thumbnails: install comfyfleet[thumbnails] on it"
            )
        case thumbnail_process.IS_NO_PICTURE:
            raise _no_picture()
    # Its limits or the system killed it: trying again would not help.
    if process.returncode is not None and process.returncode < 0:
        raise _no_picture()
    raise Fault(f"cannot draw a thumbnail: the process ended with status {process.returncode}")


def _may_be_picture(start: bytes) -> bool:
    return start.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")) or (
        start[:4] == b"RIFF" and start[8:12] == b"WEBP"
    )


def _no_picture() -> Refusal:
    return Refusal(
        RefusalCode.INVALID_REQUEST,
        "cannot make a thumbnail of this file: it is not a readable PNG, JPEG, WebP or GIF picture",
    )


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    yield content
