"""Whether a hub serves: it says what is wrong with its store, and asks it no more often than it must."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.hub._hub import HubRig, ask_app, graph, hub_in_process, submission
from tests.stores._sqlite import FullDisk

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.app import Hub
from comfyfleet.hub.health import COLLECTION
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.time import ManualClock


async def test_a_full_disk_is_told_and_so_is_that_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with Engine(SqliteStore(tmp_path / "fleet.db", clock), clock=clock) as engine:
        rig = HubRig(Hub(engine, engine.store.documents, clock), engine, engine.store.documents, {})
        assert (await rig.get("/health", role=None)).status == 200
        disk = FullDisk(monkeypatch)
        await clock.advance(6)
        answer = await rig.get("/health", role=None)
        assert (answer.status, answer.body["status"]) == (503, "failing")
        assert "disk is full" in answer.body["detail"] and "free space" in answer.body["detail"]
        assert (await rig.get("/health/live", role=None)).status == 200
        disk.make_room()
        await clock.advance(2)
        assert (await rig.get("/health", role=None)).status == 200


async def test_however_many_ask_the_store_is_written_every_few_seconds() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    async with Engine(store, clock=clock) as engine:
        hub = Hub(engine, store.documents, clock)

        async def ask() -> int:
            return (await ask_app(hub, "GET", "/health", {"host": "h"}, b"")).status

        async def written() -> int:
            (document,) = await store.documents.listing(COLLECTION)
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
        monkeypatch.setattr(rig.documents, "put", never)
        answer = await rig.get("/health", role=None)
        assert answer.status == 503 and "does not answer" in answer.body["detail"]
        monkeypatch.undo()
        assert (await rig.post("/api/jobs", submission())).status == 201


async def test_a_store_that_may_not_grow_is_told_as_soon_as_a_job_was_refused_for_it(tmp_path: Path) -> None:
    """What it has it can still change: that alone is not ready."""
    clock = ManualClock()
    async with Engine(SqliteStore(tmp_path / "fleet.db", clock), clock=clock) as engine:
        hub = Hub(engine, engine.store.documents, clock, is_open=True)
        rig = HubRig(hub, engine, engine.store.documents, {})
        assert (await rig.get("/health", role=None)).status == 200
        assert isinstance(engine.store, SqliteStore)
        database = engine.store._writer._database
        ((pages,),) = database.execute("PRAGMA page_count").fetchall()
        database.execute(f"PRAGMA max_page_count = {pages}").fetchall()
        status = 201
        while status == 201:
            large = graph() | {"3": {"class_type": "A", "inputs": {"x": "x" * 3_000}}}
            status = (await rig.post("/api/jobs", submission(workflow=large), role=None)).status
        assert status == 503
        await clock.advance(1.5)
        answer = await rig.get("/health", role=None)
        assert (answer.status, answer.body["status"]) == (503, "failing")
        assert "full" in answer.body["detail"]
        database.execute("PRAGMA max_page_count = 1000000").fetchall()
        await clock.advance(1.5)
        assert (await rig.get("/health", role=None)).status == 200
