"""Small documents beside the queue: keys, webhooks, deliveries, the audit log."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Document(msgspec.Struct, frozen=True, gc=False):
    """One small document of a cabinet, with the number of times it was written."""

    name: str
    body: bytes
    version: int


class DocumentStore(Protocol):
    """Small documents beside the queue, in the same store: keys, enrolments, deliveries, the audit log. A body has at
    most 64 KB. What is refused has changed nothing.

    Names are ordered; those that must be ordered in time are version 7 UUIDs.
    """

    async def get(self, collection: str, name: str) -> Document | None: ...
    async def put(self, collection: str, name: str, body: bytes, *, version: int | None) -> bool:
        """False: it is not at that version. 0 means that it must be new, None that anything will do."""

    async def remove(self, collection: str, name: str) -> bool: ...
    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]: ...
    async def collections(self) -> list[str]:
        """Those that have a document in them."""
