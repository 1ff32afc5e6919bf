"""The answer that sends a stored file, also when somebody deletes the file meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

_OPEN_FILES = Path("/dev/fd")
"""The files that this process has open, by descriptor. A deleted file stays readable here."""


class OpenFileResponse(FileResponse):
    """Sends a file that is open already, and closes it."""

    def __init__(self, file: BinaryIO, name: str, content_type: str, headers: Mapping[str, str]) -> None:
        self._file = file
        descriptor = _OPEN_FILES / str(file.fileno())
        super().__init__(
            descriptor if descriptor.exists() else file.name,
            media_type=content_type,
            filename=name,
            headers=headers,
            stat_result=os.fstat(file.fileno()),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


async def open_file(path: Path) -> BinaryIO:
    return await asyncio.to_thread(path.open, "rb")
