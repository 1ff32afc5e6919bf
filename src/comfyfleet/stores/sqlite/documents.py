"""Documents in the file, written in the store's batches and not kept in memory.

A change is *reserved* until its commit: the next writer compares with it, and readers wait. If the commit
fails, the file counts again.
"""

from __future__ import annotations

import asyncio
from functools import partial

from comfyfleet.ports import Document
from comfyfleet.stores.documents import check_document, check_start
from comfyfleet.stores.inprocess.store import Area
from comfyfleet.stores.sqlite.reader import DatabaseReader
from comfyfleet.stores.sqlite.writer import Writer

_PUT = "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?)"
_REMOVE = "DELETE FROM documents WHERE drawer = ? AND name = ?"

_Name = tuple[str, str]


class _Reserved:
    """The document after the commit. None: removed."""

    __slots__ = ("document",)

    def __init__(self, document: Document | None) -> None:
        self.document = document


class SqliteDocumentStore:
    def __init__(self, disk: DatabaseReader, writer: Writer) -> None:
        self._disk = disk
        self._writer = writer
        self._reserved: dict[_Name, _Reserved] = {}

    async def get(self, collection: str, name: str) -> Document | None:
        while self._is_reserved(collection, name):
            await self._settle()
        return self._disk.document(collection, name)

    async def put(self, collection: str, name: str, body: bytes, *, version: int | None) -> bool:
        check_document(collection, name, body)
        while True:
            self._writer.check()
            known = self._known(collection, name)
            current = 0 if known is None else known.version
            if version in (None, current):
                break
            if not self._is_reserved(collection, name):
                return False
            # Do not answer False because of an uncommitted version.
            await self._settle()
        document = Document(name, body, current + 1)
        await self._write(collection, name, document, _PUT, collection, name, current + 1, body)
        return True

    async def remove(self, collection: str, name: str) -> bool:
        while True:
            self._writer.check()
            if self._known(collection, name) is not None:
                break
            if not self._is_reserved(collection, name):
                return False
            await self._settle()
        await self._write(collection, name, None, _REMOVE, collection, name)
        return True

    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]:
        check_start(after)
        await self._settle()
        return self._disk.documents(collection, after, limit)

    async def collections(self) -> list[str]:
        await self._settle()
        return self._disk.collections()

    def forget(self) -> None:
        """After a failed commit."""
        self._reserved.clear()

    def _is_reserved(self, collection: str, name: str) -> bool:
        return (collection, name) in self._reserved and self._writer.is_pending(Area.DOCUMENTS)

    def _known(self, collection: str, name: str) -> Document | None:
        reserved = self._reserved.get((collection, name))
        return self._disk.document(collection, name) if reserved is None else reserved.document

    async def _write(
        self, collection: str, name: str, document: Document | None, sql: str, *values: str | int | bytes
    ) -> None:
        reserved = self._reserved[collection, name] = _Reserved(document)
        batch = self._writer.batch()
        batch.touch(Area.DOCUMENTS, sql, *values)
        watcher = self._writer.settling(Area.DOCUMENTS)
        assert watcher is not None, "the touched batch is pending"
        # On commit, not when the caller continues: a cancelled caller's document is still written.
        watcher.add_done_callback(partial(self._let_go, (collection, name), reserved))
        await self._writer.written(batch)

    def _let_go(self, name: _Name, reserved: _Reserved, _: asyncio.Future[bool]) -> None:
        if self._reserved.get(name) is reserved:
            del self._reserved[name]

    async def _settle(self) -> None:
        """Waits until the current reservations are written or have failed."""
        if (watcher := self._writer.settling(Area.DOCUMENTS)) is not None:
            await watcher
