"""A tenant whose database is away is left alone for a moment, and keeps nobody else waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tenancy._estate import ACME, BORG, one_fleet

from comfyfleet.model.errors import Fault
from comfyfleet.sim.time import ManualClock
from comfyfleet.stores.memory import MemoryStore


async def test_a_job_whose_database_is_away_is_given_back_once_and_leased_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        await fleet.tenant(granted=100)
        await fleet.tenant(BORG, granted=100, pool="second")
        await fleet.worker()
        theirs = await fleet.submit()
        home = await fleet.estate.homes.of(ACME)
        assert home is not None
        looks = 0

        async def away(*_: object) -> None:
            nonlocal looks
            looks += 1
            raise Fault("the database is away")

        with monkeypatch.context() as patch:
            patch.setattr(home.database, "leasable", away)
            assert [await fleet.poll() for _ in range(5)] == [None] * 5
            assert looks == 1
            other = await fleet.submit(BORG)
            assert (await fleet.take()).job_id == other
            await clock.advance(3.5)
            assert await fleet.poll() is None
            assert looks == 2
        await clock.advance(3.5)
        assert (await fleet.take()).job_id == theirs
