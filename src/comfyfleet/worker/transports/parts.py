"""A large output on its way in parts: a few at a time, each with a link of its own, and each tried again by itself.

So a way that breaks costs a part and not the whole. How bytes travel by a link is `links.py`'s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import Grant, PartPlan
from comfyfleet.wire.parts import Part, parts_of, sha256_of
from comfyfleet.worker.fetching import side_by_side
from comfyfleet.worker.transports.links import Links

_TRIES = 5
_BASE_S = 0.25

LinkOf = Callable[[Part, str], Awaitable[Grant]]
"""Asks for a link to a part of this SHA-256."""


async def put_parts(links: Links, path: Path, size: int, plan: PartPlan, link_of: LinkOf) -> None:
    await side_by_side([_put(links, path, part, link_of) for part in parts_of(size, plan)])


async def _put(links: Links, path: Path, part: Part, link_of: LinkOf) -> None:
    digest = await asyncio.to_thread(_digest, path, part)
    for tries_left in reversed(range(_TRIES)):
        try:
            # Asked for anew each time: a link may expire while others are under way.
            grant = await link_of(part, digest)
            await links.put(grant.url, path, grant.headers, part)
            return
        except Fault:
            if not tries_left:
                raise
        except Refusal as refusal:
            may_pass = refusal.code in (RefusalCode.UNAUTHENTICATED, RefusalCode.UNAVAILABLE)
            if not tries_left or not may_pass:
                raise
        await asyncio.sleep(_BASE_S * (1 << (_TRIES - tries_left)) * random.random())


def _digest(path: Path, part: Part) -> str:
    with path.open("rb") as content:
        return sha256_of(content, part)
