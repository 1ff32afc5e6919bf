"""Checks a fleet on Redis from outside: server, library, counts, and that each key is a documented one."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from comfyfleet.model.errors import Fault
from comfyfleet.stores.redis.address import document_key, parse_address
from comfyfleet.stores.redis.client import Argument, RedisClient
from comfyfleet.stores.redis.codec import FleetHead, as_list, decode_head
from comfyfleet.stores.redis.dispatches import as_bytes, decode_dispatch
from comfyfleet.stores.redis.server import (
    LIBRARY,
    check_server,
    installed_revision,
    library_text,
    revision_of,
)

_PAGE = 1000
_TRIES = 5
_SHOWN = 10


def layout() -> list[re.Pattern[str]]:
    """Patterns of the documented keys, read from the comment at the head of the library."""
    text = library_text()
    patterns = []
    for names in re.findall(
        r"^--   (\S.*?) +(?:string|zset|hash|set|list|stream)\b",
        text[: text.index("local REVISION")],
        re.MULTILINE,
    ):
        first, *others = names.split(", ")
        stem = first.rpartition(":")[0]
        for name in (first, *(stem + each if each.startswith(":") else each for each in others)):
            parts = re.split(r"<[^>]+>", name)
            patterns.append(re.compile(".+".join(re.escape(part) for part in parts), re.DOTALL))
    return patterns


async def examine_redis(url: str) -> dict[str, Any]:
    address = parse_address(url)
    client = RedisClient(address, secrets.token_hex(8), patience_s=5.0)
    try:
        await client.connect()
        problems: list[str] = []
        settings: dict[str, Any] = {}
        await _check_server(client, address.name, problems, settings)
        holds = await _check_fleet(client, address.prefix, problems, settings)
        return {
            "store": f"{address.name} {address.prefix}",
            "problems": problems,
            "holds": holds,
            "settings": settings,
        }
    finally:
        await client.close()


async def has_fleet(url: str) -> bool:
    address = parse_address(url)
    client = RedisClient(address, secrets.token_hex(8), patience_s=5.0)
    try:
        await client.connect()
        return await client.call("EXISTS", f"{address.prefix}meta") == 1
    finally:
        await client.close()


async def _check_server(
    client: RedisClient, name: str, problems: list[str], settings: dict[str, Any]
) -> None:
    try:
        server = await check_server(client.call, name)
        settings["durability"] = server.durability
        if server.can_lose:
            settings["can_lose"] = (
                f"{server.can_lose}, if the server dies (durable: appendonly yes, appendfsync always)"
            )
    except Fault as fault:
        problems.append(str(fault))
    ours, found = revision_of(library_text()), await installed_revision(client.call)
    settings["library_revision"] = found
    if found is None:
        problems.append(f"the function library {LIBRARY} is missing: an engine that opens the fleet loads it")
    elif found < ours:
        problems.append(
            f"the function library has revision {found}, this version has {ours}: open the fleet with it"
        )


async def _check_fleet(
    client: RedisClient, prefix: str, problems: list[str], settings: dict[str, Any]
) -> dict[str, int]:
    text = await client.call("GET", f"{prefix}meta")
    if text is None:
        problems.append(
            f"there is no fleet under the prefix {prefix}: check the URL, or open the fleet with an engine first"
        )
        return {}
    head = decode_head(text)
    settings["epoch"], settings["is_paused"] = head.epoch, head.is_paused
    await _compare_counts(client, prefix, problems, settings)
    patterns, kinds, unknown = layout(), Counter[str](), []
    async for key in _keys(client, prefix):
        kinds[key.partition(":")[0]] += 1
        if not any(pattern.fullmatch(key) for pattern in patterns):
            unknown.append(key)
    if unknown:
        shown = ", ".join(sorted(unknown)[:_SHOWN])
        problems.append(f"{len(unknown)} keys under {prefix} are not ComfyFleet's: {shown}")
    settings["keys"] = sum(kinds.values())
    settings["keys_by_kind"] = dict(sorted(kinds.items()))
    return {
        **{name: getattr(head, name) for name in ("queued", "leased", "completed", "failed", "cancelled")},
        "workers": await _size(client, "ZCARD", f"{prefix}workers:active"),
        "blocks": await _size(client, "ZCARD", f"{prefix}blocks:ends"),
        "lessons": await _size(client, "HLEN", f"{prefix}lessons"),
        "classes": await _size(client, "HLEN", f"{prefix}classes"),
        "documents": await _count_documents(client, prefix, problems),
    }


async def _count_documents(client: RedisClient, prefix: str, problems: list[str]) -> int:
    total = 0
    for name in as_list(await client.call("SMEMBERS", document_key(prefix))):
        collection = f"{document_key(prefix)}:{as_bytes(name).decode()}"
        kept, named = (
            await _size(client, "HLEN", collection),
            await _size(client, "ZCARD", f"{collection}:names"),
        )
        if kept != named:
            problems.append(f"the collection {collection} has {kept} documents but lists {named} names")
        total += kept
    return total


async def _compare_counts(
    client: RedisClient, prefix: str, problems: list[str], settings: dict[str, Any]
) -> None:
    """Compares the head's counts with the lists, and retries while the fleet changes."""
    for _ in range(_TRIES):
        before = await client.call("GET", f"{prefix}meta")
        head = decode_head(before)
        found = await _listed(client, prefix)
        wrong = await _add_unsettled(client, prefix, found)
        if await client.call("GET", f"{prefix}meta") == before:
            for name, expected in _promised(head).items():
                if found[name] != expected:
                    problems.append(f"{name}: the head counts {expected}, {found[name]} are listed")
            problems += [f"jobs:unsettled has {name}, which has nothing to settle" for name in wrong]
            return
    settings["counts"] = "not compared: the fleet is busy"


def _promised(head: FleetHead) -> dict[str, int]:
    ended = {f"jobs:{name}": getattr(head, name) for name in ("completed", "failed", "cancelled")}
    total = head.queued + head.leased + sum(ended.values())
    return {
        "jobs": total,
        **ended,
        "jobs:dead": head.failed,
        "waiting in lanes": head.in_lane,
        "priorities whose waiting jobs are miscounted": 0,
    }


async def _listed(client: RedisClient, prefix: str) -> dict[str, int]:
    names = ("jobs", "jobs:completed", "jobs:failed", "jobs:cancelled", "jobs:dead")
    found = {name: await _size(client, "ZCARD", prefix + name) for name in names}
    lanes = as_list(await client.call("ZRANGE", f"{prefix}jobs:pending", 0, -1))
    by_priority = Counter[int]()
    for first in range(0, len(lanes), _PAGE):
        page = [as_bytes(lane) for lane in lanes[first : first + _PAGE]]
        sizes = [_size(client, "ZCARD", prefix.encode() + b"lane:" + lane) for lane in page]
        for lane, size in zip(page, await asyncio.gather(*sizes), strict=True):
            by_priority[int(lane.split(b" ", 2)[1])] += size
    found["waiting in lanes"] = by_priority.total()
    counts = as_list(await client.call("HGETALL", f"{prefix}jobs:waiting"))
    counted = {int(as_bytes(counts[at])): int(as_bytes(counts[at + 1])) for at in range(0, len(counts), 2)}
    found["priorities whose waiting jobs are miscounted"] = sum(
        by_priority[priority] != counted.get(priority, 0) for priority in {*by_priority, *counted}
    )
    return found


async def _add_unsettled(client: RedisClient, prefix: str, found: dict[str, int]) -> list[str]:
    """Adds unsettled jobs to the count of their phase. Returns the first few that do not belong there."""
    names, wrong = as_list(await client.call("ZRANGE", f"{prefix}jobs:unsettled", 0, -1)), []
    for first in range(0, len(names), _PAGE):
        page = [as_bytes(name) for name in names[first : first + _PAGE]]
        texts = as_list(await client.call("MGET", *(prefix.encode() + b"job:" + name for name in page)))
        for name, text in zip(page, texts, strict=True):
            dispatch = None if text is None else decode_dispatch(text)
            if dispatch is not None and dispatch.is_unsettled:
                found[f"jobs:{dispatch.phase.value}"] += 1
            else:
                wrong.append(name.decode(errors="replace"))
    return wrong[:_SHOWN]


async def _size(client: RedisClient, command: str, key: Argument) -> int:
    answer = await client.call(command, key)
    assert isinstance(answer, int), "the size of a key is a number"
    return answer


async def _keys(client: RedisClient, prefix: str) -> AsyncIterator[str]:
    tag = prefix.removesuffix(":")
    pattern = re.sub(r"([*?\[\]\\])", r"\\\1", tag) + "[:!]*"
    cursor, seen = b"0", set[bytes]()
    while True:
        answer = as_list(await client.call("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE))
        cursor = as_bytes(answer[0])
        for key in map(as_bytes, as_list(answer[1])):
            # A scan may return a key twice.
            if key not in seen:
                seen.add(key)
                yield key.decode(errors="replace").removeprefix(prefix).removeprefix(tag)
        if cursor == b"0":
            return
