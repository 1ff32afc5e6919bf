"""The function library: its text, its revision, and how it gets onto a server. What it does is in the Lua files.

The version of the protocol is part of every name (`cf1_…` in `comfyfleet1`), so two versions live side by side. Within
a version, a newer revision replaces an older one and never the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

from comfyfleet.model.errors import Fault
from comfyfleet.stores.redis.client import RedisServerError

LIBRARY = "comfyfleet1"
PARTS = (
    *("keys.lua", "jobs.lua", "shares.lua", "index.lua", "blocks.lua"),
    *("dispatches.lua", "leases.lua", "keeping.lua", "workers.lua", "moving.lua", "cabinet.lua"),
)

Send = Callable[..., Awaitable[object]]


def library_text() -> str:
    """All parts in one text: their local names see each other."""
    folder = files("comfyfleet.stores.redis")
    parts = [folder.joinpath(part).read_text(encoding="utf-8") for part in PARTS]
    return f"#!lua name={LIBRARY}\n" + "\n".join(parts)


def revision_of(text: str) -> int:
    found = re.search(r"^local REVISION = (\d+)$", text, re.MULTILINE)
    assert found is not None, "the library says which revision it is"
    return int(found[1])


async def installed_revision(send: Send) -> int | None:
    """None: the server has no library of this version."""
    try:
        answer = await send("FCALL_RO", "cf1_revision", 0)
    except RedisServerError as error:
        if "Function not found" in str(error):
            return None
        raise
    assert isinstance(answer, int)
    return answer


async def ensure_library(send: Send, *, may_load: bool = True, text: str | None = None) -> int:
    """Answers the revision on the server, after loading ours where it is missing or older."""
    text = library_text() if text is None else text
    ours = revision_of(text)
    found = await installed_revision(send)
    if found is not None and found >= ours:
        return found
    what = "is missing" if found is None else f"is of revision {found}, and {ours} is needed"
    if not may_load:
        raise Fault(
            f"the function library {LIBRARY} {what} on this Redis: an engine that may load functions must open it first"
        )
    try:
        await send("FUNCTION", "LOAD", "REPLACE", text)
    except RedisServerError as error:
        raise Fault(
            f"the function library {LIBRARY} {what} on this Redis and could not be loaded ({error}): "
            "let this user call FUNCTION LOAD, or load it with a user that may"
        ) from error
    return ours
