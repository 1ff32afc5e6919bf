"""The memory store keeps the contract of stores."""

from __future__ import annotations

import pytest

from comfyfleet.contract.bench import MakeStore
from comfyfleet.contract.moving import MovingContract
from comfyfleet.contract.store import StoreContract
from comfyfleet.stores.memory import MemoryStore


class TestMemoryStore(StoreContract, MovingContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return MemoryStore
