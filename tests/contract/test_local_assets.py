"""Files on the hub's own disk keep the contract; their links lead through a hub."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.contract._assets import AssetsContract, MakeAssets, Moved, apart
from tests.hub._hub import ask_app

from comfyfleet.engine.engine import Engine
from comfyfleet.files.local import LocalFileStore
from comfyfleet.hub.app import Hub
from comfyfleet.model.file import FileGrant
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock


class _Bench:
    def __init__(self, assets: LocalFileStore, clock: ManualClock, hub: Hub) -> None:
        self.assets = assets
        self.clock = clock
        self._hub = hub

    async def move(
        self, grant: FileGrant, content: bytes | None = None, *, method: str = "", **headers: str
    ) -> Moved:
        sent = {"host": "127.0.0.1", **grant.headers, **headers}
        answer = await ask_app(self._hub, method or grant.method, grant.url, sent, content or b"")
        return Moved(answer.status, answer.headers, answer.content)

    async def swept(self) -> None:
        """Done by whoever brings a file."""


class TestLocalAssets(AssetsContract):
    @pytest.fixture(params=["central", "apart"])
    def make_assets(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeAssets:
        @asynccontextmanager
        async def make(**options: Any) -> AsyncIterator[_Bench]:
            clock = ManualClock(time.time())
            store = MemoryStore(clock)
            async with Engine(store, clock=clock) as engine:
                if request.param == "apart":
                    options["documents_of"] = apart(store.documents)
                assets = LocalFileStore(tmp_path, store.documents, clock, **options)
                yield _Bench(assets, clock, Hub(engine, store.documents, clock, assets=assets))

        return make
