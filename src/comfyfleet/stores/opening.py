"""A store by its URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.memory import MemoryStore


def open_store(url: str, clock: Clock) -> Store:
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return MemoryStore(clock)
    raise Refusal(
        RefusalCode.INVALID_REQUEST,
        f"there is no store for {url!r}: this version knows 'memory:' (everything in this process, gone at its end)",
    )
