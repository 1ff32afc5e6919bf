"""Small documents in this process, gone at its end: the cabinet of the memory store."""

from __future__ import annotations

from bisect import bisect_right

from comfyfleet.ports import Document


class MemoryCabinet:
    def __init__(self) -> None:
        self._drawers: dict[str, dict[str, Document]] = {}

    async def get(self, drawer: str, name: str) -> Document | None:
        return self._drawers.get(drawer, {}).get(name)

    async def put(self, drawer: str, name: str, body: bytes, *, version: int | None) -> bool:
        documents = self._drawers.setdefault(drawer, {})
        known = documents.get(name)
        current = 0 if known is None else known.version
        if version not in (None, current):
            return False
        documents[name] = Document(name, body, current + 1)
        return True

    async def remove(self, drawer: str, name: str) -> bool:
        return self._drawers.get(drawer, {}).pop(name, None) is not None

    async def listing(self, drawer: str, after: str = "", limit: int = 100) -> list[Document]:
        documents = self._drawers.get(drawer, {})
        names = sorted(documents)
        start = bisect_right(names, after) if after else 0
        return [documents[name] for name in names[start : start + limit]]
