"""The memory store keeps the contract of stores."""

from __future__ import annotations

import pytest

from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.contract.job_transfer import JobTransferContract
from comfyfleet.testing.contract.store import StoreContract
from comfyfleet.testing.contract.store_bench import MakeStore


class TestMemoryStore(StoreContract, JobTransferContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return MemoryStore
