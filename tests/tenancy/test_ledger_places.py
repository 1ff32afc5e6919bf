"""The store of tenants' ledgers gives what scheduling needs as the store inside does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tenancy._tenant_services import one_fleet

from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.services import TenantServices
from comfyfleet.testing.contract.load_times import LoadTimesContract
from comfyfleet.testing.contract.store_bench import MakeStore, UsesBench
from comfyfleet.testing.time import ManualClock


class TestLedgerStore(LoadTimesContract, UsesBench):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda clock: TenantServices(MemoryStore(clock), clock, {}).store


async def test_a_job_whose_tenant_has_a_database_has_its_place_in_the_queue(tmp_path: Path) -> None:
    clock = ManualClock()
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        await fleet.tenant(granted=100)
        await fleet.worker()
        places = []
        for _ in range(3):
            dispatch = await fleet.tenant_services.store.load(await fleet.submit())
            assert dispatch is not None and dispatch.has_tenant_database
            places.append(dispatch.place)
        assert places == [1, 2, 3], "no slot is idle, so each has one more before it"
        taken = await fleet.take()
        kept = await fleet.tenant_services.store.load(taken.ref.job_id)
        assert kept is not None and kept.place == 1
