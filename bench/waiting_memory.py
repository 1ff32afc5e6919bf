"""Goal 10: what a waiting job costs in memory beside its payload.

Counted is what the process holds more (resident, so with all that the allocator wastes) after the jobs came than
before, in a process of its own for each case. The payload is the submission: the workflow and the options given with
it. All jobs get the same workflow; what the product keeps of the payload for each job alone is taken off and shown.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from bench._measure import Entry, Plan, entry
from bench._store import PROFILE, StoreRig, lane
from bench.pooling import twelve_nodes
from comfyfleet import Server, WorkflowPool
from comfyfleet.worker.connectors.simulated import SimulatedConnector


class Found(msgspec.Struct, frozen=True):
    """Bytes a job."""

    all: float
    payload: float = 0
    """What no two jobs share of their payloads."""
    workflow: float = 0
    """The part of it that is the workflow; the rest are options."""


async def memory_of_waiting(plan: Plan) -> list[Entry]:
    # Not fewer when quick: tables grow in jumps, and a page is not to be one job's.
    jobs = 20_000 if plan.quick else 100_000
    entries = []
    for goal, case, name in (("10a", "store", "memory store"), ("10b", "pool", "pool")):
        found = await _in_own_process(case, jobs)
        entries.append(
            entry(
                goal,
                f"{name}, bytes a waiting job beside its payload",
                found.all - found.payload,
                "<= 1024",
                "bytes",
                jobs=jobs,
                payload_bytes=round(found.payload),
                beside_the_workflow_alone=round(found.all - found.workflow),
            )
        )
    return entries


async def _in_own_process(case: str, jobs: int) -> Found:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.waiting_memory", case, str(jobs), stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"measuring the memory of the {case} ended with {child.returncode}; see above")
    return msgspec.json.decode(answer, type=Found)


async def _in_store(jobs: int) -> Found:
    rig = StoreRig()
    await rig.add_profiles(PROFILE)
    lanes = [lane(await rig.add_class(f"class {number}")) for number in range(10)]
    return Found(await _bytes_a_job(lambda count: rig.fill(lanes, count), jobs))


async def _in_pool(jobs: int) -> Found:
    workflow = twelve_nodes(1)
    async with WorkflowPool([Server(connector=SimulatedConnector(), id="server")]) as pool:
        await pool.pause_queue()

        async def enqueue(count: int) -> None:
            for _ in range(count):
                await pool.enqueue(workflow)

        resident = await _bytes_a_job(enqueue, jobs)
        # No caller gets to see the payload as it is kept.
        records = pool._engine.store.records
        first, second = await records.listing(tenant=None, phase=None, limit=2, after=None)
        return Found(
            resident,
            _own_bytes(first.payload, second.payload),
            _own_bytes(first.payload.workflow, second.payload.workflow),
        )


async def _bytes_a_job(fill: Callable[[int], Awaitable[None]], jobs: int) -> float:
    # The first ones pay for what is made once.
    await fill(1000)
    gc.collect()
    before = _resident_bytes()
    await fill(jobs)
    gc.collect()
    return (_resident_bytes() - before) / jobs


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _own_bytes(one: object, other: object) -> int:
    """What one value does not share with another."""
    shared = {id(part) for part in _parts(other)}
    own = {id(part): sys.getsizeof(part) for part in _parts(one) if id(part) not in shared}
    return sum(own.values())


def _parts(value: object) -> Iterator[object]:
    yield value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _parts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _parts(inner)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _parts(getattr(value, name))


if __name__ == "__main__":
    case, jobs = sys.argv[1:]
    found = asyncio.run({"store": _in_store, "pool": _in_pool}[case](int(jobs)))
    sys.stdout.buffer.write(msgspec.json.encode(found))
