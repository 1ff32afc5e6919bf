"""The SQLite store keeps the contract of stores."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.stores._sqlite import FullDisk

from comfyfleet.ports import Store
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.contract.full_disk import FullDiskContract, NoRoom
from comfyfleet.testing.contract.job_transfer import JobTransferContract
from comfyfleet.testing.contract.store import StoreContract
from comfyfleet.testing.contract.store_bench import MakeStore


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    numbers = itertools.count()
    return lambda clock: SqliteStore(tmp_path / f"fleet-{next(numbers)}.db", clock)


class TestSqliteStore(StoreContract, JobTransferContract):
    pass


class TestSqliteStoreOnAFullDisk(FullDiskContract):
    @pytest.fixture
    def no_room(self) -> NoRoom:
        @asynccontextmanager
        async def no_room(_: Store) -> AsyncIterator[None]:
            with pytest.MonkeyPatch.context() as patch:
                FullDisk(patch)
                yield

        return no_room
