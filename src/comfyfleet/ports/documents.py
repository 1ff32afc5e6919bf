"""The document store: small documents in the same store as the queue."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Document(msgspec.Struct, frozen=True, gc=False):
    """One document. `version` counts its writes."""

    name: str
    body: bytes
    version: int


class DocumentStore(Protocol):
    """Collections of documents: keys, enrolments, deliveries, the audit log. A body has at most 64 KB.

    Names are ordered. Names that must be ordered in time are version 7 UUIDs.
    """

    async def get(self, collection: str, name: str) -> Document | None: ...
    async def put(self, collection: str, name: str, body: bytes, *, version: int | None) -> bool:
        """False: the document has another version, and nothing changed. 0: it must be new. None: any version."""

    async def remove(self, collection: str, name: str) -> bool: ...
    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]: ...
    async def collections(self) -> list[str]:
        """The collections that are not empty."""
