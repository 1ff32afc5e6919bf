"""Goal 4: how much of what the server can do with our functions one Python process gets out of it.

    python -m bench.client_calls store|client|load <url> <callers> <calls>

`store` calls through the store's own methods, values encoded and answers decoded; `client` sends the same calls,
already encoded, through our client; `load` gives them to the load generator. All prepare alike.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

import hiredis
import msgspec
from redis import Redis

from bench._measure import Case, Entry, Plan, entry, in_turn, rate, ratio, ratio_range, rounded
from bench._places import Place
from bench._report import ROOT
from bench.load import seconds
from bench.redis_direct import Direct
from comfyfleet.model.dispatch import Write
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.stores.redis import codec
from comfyfleet.stores.redis.address import parse_address
from comfyfleet.stores.redis.client import Argument, RedisClient

_CALLS = 10_000
_BOUNDS = {50: ">= 60", 500: ">= 85"}
_FUNCTIONS = {"charge_tenant": "a cheap write", "lease": "a lease", "finish": "a completion"}
_MODES = ("store", "client", "load")

Call = Callable[[], Awaitable[object]]
Raw = tuple[Argument, ...]


async def share_of_the_server(plan: Plan, kind: str) -> list[Entry]:
    # Never fewer than there are callers.
    calls = 1000 if plan.quick else _CALLS
    entries = []
    letters = iter("abcdef")
    async with Place(kind) as place:
        server = place.redis_server()
        for callers, bound in _BOUNDS.items():
            rates: dict[str, dict[str, list[float]]] = {function: {} for function in _FUNCTIONS}

            def case(mode: str, callers: int, rates: dict[str, dict[str, list[float]]]) -> Case:
                async def measure() -> float:
                    with Redis(port=server.port) as redis:
                        redis.flushall()
                    spent = await _in_own_process(mode, server.url, callers, calls)
                    for function, seconds in spent.items():
                        rates[function].setdefault(mode, []).append(calls / seconds)
                    return sum(spent.values())

                return measure

            await in_turn({mode: case(mode, callers, rates) for mode in _MODES}, plan.rounds)
            entries += [
                _entry(f"4{next(letters)}", kind, function, callers, bound, rates[function])
                for function in _FUNCTIONS
            ]
    return entries


def _entry(
    goal: str, kind: str, function: str, callers: int, bound: str, rates: dict[str, list[float]]
) -> Entry:
    return entry(
        goal,
        kind,
        f"{callers} callers, {_FUNCTIONS[function]}: calls/s as a share of a load generator's",
        100 * ratio(rates["store"], rates["load"]),
        bound,
        "%",
        range=[rounded(100 * each) for each in ratio_range(rates["store"], rates["load"])],
        calls_a_second={mode: rate(found) for mode, found in rates.items()},
        client_alone_percent=rounded(100 * ratio(rates["client"], rates["load"])),
    )


async def _in_own_process(*arguments: object) -> dict[str, float]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.client_calls",
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    answer, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"the calls ended with {child.returncode}; see above")
    return msgspec.json.decode(answer, type=dict[str, float])


async def _prepared(direct: Direct, calls: int) -> dict[str, list[tuple[Call, Raw]]]:
    """Each call as the store makes it, and as it goes over the wire."""
    store = direct.store
    jobs: list[JobId] = []
    for _ in range(0, 2 * calls, 500):
        jobs += await asyncio.gather(*(direct.enqueue() for _ in range(500)))
    writes = []
    for first in range(0, calls, 500):
        leases = [store.lease(jobs[first + slot], direct.offer(slot)) for slot in range(500)]
        found = await asyncio.gather(*leases)
        writes += [direct.completion(each.dispatch) for each in found if each is not None]
    tenant = TenantId("tenant")
    return {
        "charge_tenant": [(partial(store.fair_share.charge, tenant, 1.0), (tenant, "1.0"))] * calls,
        "lease": [
            (partial(store.lease, job_id, offer), (job_id, *codec.encode_offer(offer)))
            for job_id, offer in (
                (jobs[calls + number], direct.offer(number % 500)) for number in range(calls)
            )
        ],
        "finish": [(partial(store.write, write), _finish(write)) for write in writes],
    }


def _finish(write: Write) -> Raw:
    arguments = codec.encode_finish(write)
    assert arguments is not None, "a completion is an end and nothing else"
    return arguments


async def _timed(calls: list[Call], callers: int) -> float:
    shared = iter(calls)

    async def caller() -> None:
        for call in shared:
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return time.perf_counter() - began


def _packed(
    prefix: str, function: str, calls: list[Raw], callers: int, numbers: Iterator[int]
) -> list[bytes]:
    """With a slot for each connection, as our client uses them, so that the server keeps as many answers."""
    pack = cast("Any", hiredis.pack_command)
    opening = ("FCALL", f"cf1_{function}", 1, f"{prefix}meta")
    return [
        pack((*opening, f"load:{place % callers}", next(numbers), "", *arguments))
        for place, arguments in enumerate(calls)
    ]


async def main() -> None:
    mode, url, callers_text, count = sys.argv[1:]
    callers = int(callers_text)
    direct = Direct(url)
    await direct.open()
    prepared = await _prepared(direct, int(count))
    address = parse_address(url)
    numbers = itertools.count(1)
    spent = {}
    for function, calls in prepared.items():
        match mode:
            case "load":
                packed = _packed(address.prefix, function, [raw for _, raw in calls], callers, numbers)
                spent[function] = seconds(address.port, callers, packed)
            case "client":
                client = RedisClient(address, f"client-{function}")
                await client.connect()
                ready: list[Call] = [partial(client.function, function, *raw) for _, raw in calls]
                spent[function] = await _timed(ready, callers)
                await client.close()
            case _:
                spent[function] = await _timed([call for call, _ in calls], callers)
    await direct.store.close()
    print(msgspec.json.encode(spent).decode())


if __name__ == "__main__":
    asyncio.run(main())
