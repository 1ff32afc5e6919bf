"""The part of `FleetClient` that is about files: the same whether a hub keeps them in a folder or in a storage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from comfyfleet.client import downloading
from comfyfleet.client.link import Link
from comfyfleet.client.uploading import FileLike, upload
from comfyfleet.model.file import FileKind
from comfyfleet.model.job import OutputFile
from comfyfleet.wire.files import FileDetails, FileList, FileView


class FileCalls:
    _link: Link

    async def upload(
        self,
        source: FileLike,
        *,
        name: str | None = None,
        content_type: str | None = None,
        tenant: str | None = None,
    ) -> FileView:
        """A file, by its path or its content, for the `inputs` of any number of jobs: name it by its `id`."""
        return await upload(self._link, source, name, content_type, tenant)

    async def file(self, file_id: str) -> FileDetails:
        return await self._link.ask("get_file", FileDetails, file_id=file_id)

    async def files(
        self,
        *,
        kind: FileKind | None = None,
        job_id: str | None = None,
        tenant: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> FileList:
        """One page, the oldest first. Ask again with its cursor for what follows."""
        query = {"kind": kind, "job_id": job_id, "tenant": tenant, "cursor": cursor, "limit": limit}
        return await self._link.ask("list_files", FileList, query=query)

    async def every_file(self, **wanted: Any) -> AsyncIterator[FileView]:
        """All that `files` would list, page after page."""
        cursor: str | None = None
        while True:
            page = await self.files(**wanted, cursor=cursor)
            for file in page.files:
                yield file
            cursor = page.cursor
            if cursor is None:
                return

    async def delete_file(self, file_id: str) -> None:
        """With its thumbnails. Refused while a job that has not ended needs it."""
        await self._link.ask("delete_file", type(None), file_id=file_id)

    async def fetch(self, file: OutputFile | FileView | str) -> bytes:
        """A file of a result, or one of the hub's by its id, from the hub or from where it lies. Our key does not
        travel there."""
        return await downloading.fetch(self._link, await self._found(file))

    async def save(self, file: OutputFile | FileView | str, path: str | Path) -> int:
        """The same to a path, however large it is; what lies there is replaced once all of it has come."""
        return await downloading.save_as(self._link, await self._found(file), Path(path))

    async def _found(self, file: OutputFile | FileView | str) -> OutputFile:
        if isinstance(file, OutputFile):
            return file
        # A link of before may have expired.
        known = await self.file(file if isinstance(file, str) else file.id)
        url = known.link.url if known.link is not None and known.link.method == "GET" else None
        return OutputFile("", known.kind, known.name, url=url, file_id=known.id)
