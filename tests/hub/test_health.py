"""Whether a hub serves: it says what is wrong with its store, and asks it no more often than it must."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.hub._hub import HubRig, ask_app, hub_in_process, submission
from tests.stores._sqlite import FullDisk

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.app import Hub
from comfyfleet.hub.health import DRAWER
from comfyfleet.sim.time import ManualClock
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.sqlite.store import SqliteStore


async def test_a_full_disk_is_told_and_so_is_that_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with Engine(SqliteStore(tmp_path / "fleet.db", clock), clock=clock) as engine:
        rig = HubRig(Hub(engine, engine.store.cabinet, clock), engine, engine.store.cabinet, {})
        assert (await rig.get("/health", role=None)).status == 200
        disk = FullDisk(monkeypatch)
        await clock.advance(6)
        answer = await rig.get("/health", role=None)
        assert (answer.status, answer.body["status"]) == (503, "failing")
        assert "disk is full" in answer.body["detail"] and "make room" in answer.body["detail"]
        assert (await rig.get("/health/live", role=None)).status == 200
        disk.make_room()
        await clock.advance(2)
        assert (await rig.get("/health", role=None)).status == 200


async def test_however_many_ask_the_store_is_written_every_few_seconds() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    async with Engine(store, clock=clock) as engine:
        hub = Hub(engine, store.cabinet, clock)

        async def ask() -> int:
            return (await ask_app(hub, "GET", "/health", {"host": "h"}, b"")).status

        async def written() -> int:
            (document,) = await store.cabinet.listing(DRAWER)
            return document.version

        assert await asyncio.gather(*(ask() for _ in range(20))) == [200] * 20
        assert await written() == 1
        await clock.advance(6)
        await ask()
        assert await written() == 2


async def test_a_store_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hub_in_process() as rig:

        async def never(*_: object, **__: object) -> bool:
            return await asyncio.Event().wait()

        monkeypatch.setattr("comfyfleet.hub.health._STORE_ANSWERS_WITHIN_S", 0.01)
        monkeypatch.setattr(rig.cabinet, "put", never)
        answer = await rig.get("/health", role=None)
        assert answer.status == 503 and "does not answer" in answer.body["detail"]
        monkeypatch.undo()
        assert (await rig.post("/api/jobs", submission())).status == 201
