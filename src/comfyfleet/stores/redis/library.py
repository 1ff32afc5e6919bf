"""The text and revision of the function library, and its installation on a server.

Each name has the version of the protocol (`cf1_…` in `comfyfleet1`), so two versions can coexist. Within a
version, a newer revision replaces an older one, never the reverse.
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
    *("dispatches.lua", "leases.lua", "keeping.lua", "workers.lua", "moving.lua", "documents.lua"),
)

Send = Callable[..., Awaitable[object]]


def library_text() -> str:
    """One text, because the parts share local names."""
    folder = files("comfyfleet.stores.redis")
    parts = [folder.joinpath(part).read_text(encoding="utf-8") for part in PARTS]
    return f"#!lua name={LIBRARY}\n" + "\n".join(parts)


def revision_of(text: str) -> int:
    found = re.search(r"^local REVISION = (\d+)$", text, re.MULTILINE)
    assert found is not None, "the library names its revision"
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
    """Loads the library if it is missing or older. Returns the revision on the server."""
    text = library_text() if text is None else text
    ours = revision_of(text)
    found = await installed_revision(send)
    if found is not None and found >= ours:
        return found
    what = "is missing" if found is None else f"has revision {found}, and {ours} is needed"
    if not may_load:
        raise Fault(
            f"the function library {LIBRARY} {what} on this Redis: open it first with an engine that may load functions"
        )
    try:
        await send("FUNCTION", "LOAD", "REPLACE", text)
    except RedisServerError as error:
        raise Fault(
            f"the function library {LIBRARY} {what} on this Redis and could not be loaded ({error}): "
            "let this user call FUNCTION LOAD, or load it with a user that may"
        ) from error
    return ours
