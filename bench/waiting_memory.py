"""Goal 10: what a waiting job costs in memory beside its payload.

Counted is what the process (in Redis: the server's data) holds more after the jobs came than before, in a process of
its own for each case. The payload is the submission: the workflow and the options given with it, as the engine keeps
it; what it costs alone, made and kept in a third process, is taken off and shown.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench._measure import Entry, Plan, entry
from bench._places import Place
from bench._store import PROFILE, lane
from bench.pooling import twelve_nodes
from comfyfleet import Server, WorkflowPool
from comfyfleet.model.job import Submission
from comfyfleet.model.workflow_graph import parse_workflow
from comfyfleet.worker.connectors.simulated import SimulatedConnector

_WHERE = {
    "memory": "resident in the process",
    "sqlite": "resident in the process",
    "redis": "in the server's memory",
    "postgres": "on disk, indexes included",
}


async def memory_of_waiting(plan: Plan, kind: str) -> list[Entry]:
    # Not fewer when quick: tables grow in jumps, and a page is not to be one job's.
    jobs = 20_000 if plan.quick else 100_000
    # All jobs of a store share one empty payload; each of the pool's has a copy of its own.
    name = f"bytes a waiting job beside its payload, {_WHERE[kind]}"
    bound = None if kind == "postgres" else "<= 1024"
    value = await _in_own_process(kind, jobs)
    entries = [entry("10a", kind, f"store, {name}", value, bound, "bytes", jobs=jobs)]
    if kind == "memory":
        payload = await _in_own_process("payload", jobs)
        value = await _in_own_process("pool", jobs) - payload
        entries.append(
            entry(
                "10b", kind, f"pool, {name}", value, bound, "bytes", jobs=jobs, payload_bytes=round(payload)
            )
        )
    return entries


async def _in_own_process(case: str, jobs: int) -> float:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.waiting_memory", case, str(jobs), stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"measuring the memory of the {case} ended with {child.returncode}; see above")
    return float(answer)


async def _in_store(kind: str, jobs: int) -> float:
    async with Place(kind) as place:
        rig = await place.rig()
        await rig.add_profiles(PROFILE)
        lanes = [lane(await rig.add_class(f"class {number}")) for number in range(10)]
        return await _bytes_a_job(
            lambda count: rig.fill(lanes, count), jobs, place.held_bytes or _resident_bytes
        )


async def _in_pool(jobs: int) -> float:
    workflow = twelve_nodes(1)
    async with WorkflowPool([Server(connector=SimulatedConnector(), id="server")]) as pool:
        await pool.pause_queue()

        async def enqueue(count: int) -> None:
            for _ in range(count):
                await pool.enqueue(workflow)

        return await _bytes_a_job(enqueue, jobs)


async def _payload_alone(jobs: int) -> float:
    """The submissions as the engine makes and keeps them, and nothing else."""
    workflow = twelve_nodes(1)
    kept: list[Submission] = []

    async def make(count: int) -> None:
        kept.extend(Submission(parse_workflow(workflow).to_graph()) for _ in range(count))

    return await _bytes_a_job(make, jobs)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _bytes_a_job(
    fill: Callable[[int], Awaitable[None]], jobs: int, held_bytes: Callable[[], int] = _resident_bytes
) -> float:
    # The first ones pay for what is made once.
    await fill(1000)
    gc.collect()
    before = held_bytes()
    await fill(jobs)
    gc.collect()
    return (held_bytes() - before) / jobs


if __name__ == "__main__":
    case, jobs = sys.argv[1:]
    cases = {"pool": _in_pool, "payload": _payload_alone}
    print(asyncio.run(cases[case](int(jobs)) if case in cases else _in_store(case, int(jobs))))
