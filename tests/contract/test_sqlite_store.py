"""The SQLite store keeps the contract of stores."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.contract._bench import MakeStore
from tests.contract.store_contract import StoreContract

from comfyfleet.stores.sqlite.store import SqliteStore


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        numbers = itertools.count()
        return lambda clock: SqliteStore(tmp_path / f"fleet-{next(numbers)}.db", clock)
