"""Bounds of documents, the encoding of values as bytes, and the document store of the memory store."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.ports import Document

MAX_BODY_BYTES = 64 * 1024
MAX_NAME = 512
_COLLECTION = re.compile(r"[a-z_]{1,64}")


def is_name(name: str) -> bool:
    """Whether every store accepts this document name, and sorts it in the same order."""
    return 0 < len(name) <= MAX_NAME and name.isprintable()


def check_document(collection: str, name: str, body: bytes) -> None:
    assert _COLLECTION.fullmatch(collection), "the source names collections, in lower case"
    if not is_name(name):
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"a name has 1 to {MAX_NAME} characters, all of them printable"
        )
    if len(body) > MAX_BODY_BYTES:
        raise Refusal(
            RefusalCode.TOO_LARGE,
            f"a document has at most {MAX_BODY_BYTES} bytes, this one has {len(body)}: keep less in it",
        )


def check_start(after: str) -> None:
    if after and not is_name(after):
        raise Refusal(RefusalCode.INVALID_REQUEST, "`after` is not a document name: start the list again")


class MemoryDocumentStore:
    def __init__(self) -> None:
        self._collections: dict[str, dict[str, Document]] = {}
        self._names: dict[str, list[str]] = {}
        """The document names of each collection, sorted."""

    async def get(self, collection: str, name: str) -> Document | None:
        return self._collections.get(collection, {}).get(name)

    async def put(self, collection: str, name: str, body: bytes, *, version: int | None) -> bool:
        check_document(collection, name, body)
        documents = self._collections.setdefault(collection, {})
        known = documents.get(name)
        current = 0 if known is None else known.version
        if version not in (None, current):
            return False
        documents[name] = Document(name, body, current + 1)
        if known is None:
            insort(self._names.setdefault(collection, []), name)
        return True

    async def remove(self, collection: str, name: str) -> bool:
        if self._collections.get(collection, {}).pop(name, None) is None:
            return False
        names = self._names[collection]
        del names[bisect_left(names, name)]
        return True

    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]:
        check_start(after)
        documents, names = self._collections.get(collection, {}), self._names.get(collection, [])
        start = bisect_right(names, after) if after else 0
        return [documents[name] for name in names[start : start + limit]]

    async def collections(self) -> list[str]:
        return sorted(name for name, documents in self._collections.items() if documents)


_encoder = msgspec.msgpack.Encoder()


def pack(value: object) -> bytes:
    """Stores call this before they change anything, so that no write fails on a value that cannot be encoded."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"this cannot be stored: {error}. Values must be plain JSON: text in UTF-8, numbers of 64 bits",
        ) from error
