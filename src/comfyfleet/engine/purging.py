"""Forgets what has ended, a little at a time: a store that forgets thousands at once answers nobody else meanwhile."""

from __future__ import annotations

from comfyfleet.model.dispatch import Phase
from comfyfleet.ports import Store

_STEP = 200


async def purge(store: Store, phase: Phase, before: float, limit: int) -> int:
    """How many went. Fewer than the limit: there are no more."""
    purged = 0
    while purged < limit:
        step = min(_STEP, limit - purged)
        gone = await store.purge(phase, before, step)
        purged += gone
        if gone < step:
            break
    return purged
