"""What every store keeps to. A store's own test module says how to make one, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.contract._bench import Bench, MakeStore
from tests.contract._differential import DifferentialContract
from tests.contract._keeping import KeepingContract
from tests.contract._leasing import LeasingContract


class StoreContract(LeasingContract, KeepingContract, DifferentialContract):
    @pytest.fixture
    async def bench(self, make_store: MakeStore) -> AsyncIterator[Bench]:
        bench = Bench(make_store)
        await bench.open()
        yield bench
        await bench.store.close()
