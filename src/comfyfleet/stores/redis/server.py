"""Checks a server before the store uses it (version, role, eviction, durability), and lists the ACL rules of
its users.

Functions run with their caller's rights, so a user needs the commands that they use, on this fleet's keys. A
direct worker's user cannot harm another fleet or the server, but it can read this fleet's jobs. The document
store (keys, grants, the audit log) is outside the prefix and hidden from it.
"""

from __future__ import annotations

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
