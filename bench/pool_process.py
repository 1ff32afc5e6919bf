"""A pool that is filled and measured in a process of its own: `python -m bench.pool_process KINDS WAITING SLICES`.

It prints jobs and enqueues a CPU second as JSON. The source tree that it measures is the one on its path.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from bench._measure import settle_memory
from bench.pooling import PoolRig


async def _measure(kinds: int, waiting: int, slices: int) -> dict[str, float]:
    rig = PoolRig(kinds)
    await rig.fill(waiting)
    settle_memory()
    await rig.rates(2)
    enqueued, run = await rig.rates(slices)
    await rig.pool.close()
    return {"run": run, "enqueued": enqueued}


if __name__ == "__main__":
    print(msgspec.json.encode(asyncio.run(_measure(*map(int, sys.argv[1:])))).decode())
