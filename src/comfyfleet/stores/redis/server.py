"""Checks a server before the store uses it (version, role, eviction, durability), and lists the ACL rules of
its users.

Functions run with their caller's rights, so a user needs the commands that they use, on this fleet's keys. A
direct worker's user cannot harm another fleet or the server, but it can read this fleet's jobs. The document
store (keys, grants, the audit log) is outside the prefix and hidden from it.

It also installs the function library. Each name has the version of the protocol (`cf1_…` in `comfyfleet1`), so two
versions can coexist. Within a version, a newer revision replaces an older one, never the reverse.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Literal

import msgspec

from comfyfleet.model.errors import Fault
from comfyfleet.stores.redis.client import RedisServerError, Send
from comfyfleet.stores.redis.codec import as_list
from comfyfleet.stores.redis.dispatches import as_bytes

Durability = Literal["durable", "everysec", "none"]

_OLDEST = (7, 0)


class RedisServer(msgspec.Struct, frozen=True):
    run: str
    """Changes with each start and failover."""
    durability: Durability
    can_lose: str = ""
    """What a crash loses, as text. Empty: nothing."""


async def check_server(send: Send, name: str) -> RedisServer:
    facts = await _info(send)
    version = tuple(int(part) for part in facts.get("redis_version", "0.0").split(".")[:2])
    if version < _OLDEST:
        raise Fault(
            f"the Redis at {name} is {facts.get('redis_version')}: functions need Redis 7.0 or a Valkey"
        )
    if facts.get("role") == "slave":
        raise Fault(f"the Redis at {name} is a replica: name the primary in the URL of the store")
    policy = await _setting(send, "maxmemory-policy") or facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise Fault(
            f"the Redis at {name} evicts keys when memory is short (maxmemory-policy {policy}): it would lose jobs "
            "silently; set maxmemory-policy to noeviction"
        )
    run = f"{facts.get('run_id', '')}:{facts.get('master_replid', '')}"
    durability = await _durability(send, facts)
    return RedisServer(run, durability, await _can_lose(send, facts, durability))


async def _durability(send: Send, facts: dict[str, str]) -> Durability:
    if facts.get("aof_enabled") != "1":
        return "none"
    match await _setting(send, "appendfsync"):
        case "always":
            return "durable"
        case "no":
            return "none"
        case _:
            # Assume the server's default if CONFIG is not allowed.
            return "everysec"


async def _can_lose(send: Send, facts: dict[str, str], durability: Durability) -> str:
    match durability:
        case "durable":
            return ""
        case "everysec":
            return "about the last second"
    if facts.get("aof_enabled") == "1":
        return "the data that its system has not yet written to the disk"
    snapshots = await _setting(send, "save")
    if snapshots == "":
        return "everything"
    unknown = ", if it makes any" if snapshots is None else ""
    return f"everything since its last snapshot{unknown}"


async def _info(send: Send) -> dict[str, str]:
    lines = as_bytes(await send("INFO")).decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


async def _setting(send: Send, name: str) -> str | None:
    """None: CONFIG is not allowed, or not available."""
    try:
        answer = as_list(await send("CONFIG", "GET", name))
    except RedisServerError:
        return None
    return as_bytes(answer[1]).decode() if len(answer) == 2 else None


LIBRARY = "comfyfleet1"
PARTS = (
    *("keys.lua", "jobs.lua", "shares.lua", "index.lua", "blocks.lua"),
    *("dispatches.lua", "leases.lua", "keeping.lua", "workers.lua", "moving.lua", "documents.lua"),
)


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
