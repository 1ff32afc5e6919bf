"""An engine that closes closes all of it; what is forgotten is forgotten in small steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine._rig import Rig

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.matcher import Matcher
from comfyfleet.model.dispatch import Phase
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.time import ManualClock


async def test_a_part_that_fails_while_it_is_closed_leaves_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Matcher) -> None:
        raise OSError("it broke")

    clock = ManualClock()
    engine = Engine(SqliteStore(tmp_path / "fleet.db", clock), clock=clock)
    await engine.__aenter__()
    with monkeypatch.context() as patched:
        patched.setattr(Matcher, "close", fail)
        with pytest.raises(OSError, match="it broke"):
            await engine.close()
    # Its file is free again.
    async with Engine(SqliteStore(tmp_path / "fleet.db", clock), clock=clock) as again:
        assert (await again.stats()).waiting == 0


class Counting(MemoryStore):
    largest = 0

    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        self.largest = max(self.largest, limit)
        return await super().purge(phase, before, limit)


async def test_what_is_old_is_forgotten_in_steps_that_hold_nobody_up() -> None:
    async with Rig(Counting) as rig:
        jobs = [await rig.submit() for _ in range(450)]
        for job_id in jobs:
            await rig.engine.cancel(job_id)
        await rig.clock.advance(24 * 3600 + 100)
        await rig.engine.sweep()
        assert (await rig.engine.stats()).cancelled == 0
        assert isinstance(rig.store, Counting) and 0 < rig.store.largest <= 500
        assert await rig.engine.purge_dead_letter(limit=10_000) == 0
        assert rig.store.largest <= 500
