"""Documents as calls of the function library. The version precedes the body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfyfleet.ports import Document
from comfyfleet.stores.documents import check_document, check_start
from comfyfleet.stores.redis.address import document_key
from comfyfleet.stores.redis.codec import as_list
from comfyfleet.stores.redis.dispatches import as_bytes

if TYPE_CHECKING:
    from comfyfleet.stores.redis.store import RedisStore


class RedisDocumentStore:
    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._key = document_key(store.prefix)

    async def get(self, collection: str, name: str) -> Document | None:
        text = await self._store.diagnose("HGET", f"{self._key}:{collection}", name)
        return None if text is None else _document(name, text)

    async def put(self, collection: str, name: str, body: bytes, *, version: int | None) -> bool:
        check_document(collection, name, body)
        expected = "" if version is None else version
        return await self._store._do("cabinet_put", collection, name, expected, body) is not None

    async def remove(self, collection: str, name: str) -> bool:
        return await self._store._do("cabinet_remove", collection, name) is not None

    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]:
        check_start(after)
        if limit < 1:
            return []
        found = as_list(await self._store._ask("cabinet_list", collection, after, limit))
        names = [as_bytes(name).decode() for name in found[::2]]
        return [_document(name, text) for name, text in zip(names, found[1::2], strict=True)]

    async def collections(self) -> list[str]:
        found = as_list(await self._store.diagnose("SMEMBERS", self._key))
        return sorted(as_bytes(name).decode() for name in found)


def _document(name: str, text: object) -> Document:
    version, _, body = as_bytes(text).partition(b" ")
    return Document(name, body, int(version))
