"""Goal 12: an embedded store that is opened again with a backlog, from a new process to its first lease."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from bench._measure import Entry, Plan, entry, rounded
from bench.sqlite_cycles import restart

_WAITING = 100_000
_ROUNDS = 3
_PAYLOAD_BYTES = 256


async def restart_with_a_backlog(plan: Plan, kind: str) -> list[Entry]:
    waiting = plan.size(_WAITING)
    with tempfile.TemporaryDirectory() as folder:
        found = [
            (await restart(Path(folder) / f"{number}.db", waiting, _PAYLOAD_BYTES))[0]
            for number in range(_ROUNDS)
        ]
    what = f"restart with {waiting:,} waiting jobs, to the first lease"
    return [entry("12", kind, what, statistics.median(found), "<= 5", "s", rounds=[*map(rounded, found)])]
