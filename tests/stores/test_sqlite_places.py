"""What scheduling by load times needs of a SQLite store is there again after a restart, also in an older file."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
from tests.stores._sqlite import make_bench, reopened

from comfyfleet.model.dispatch import Candidate, Readiness
from comfyfleet.model.ids import ClassKey, JobId
from comfyfleet.ports import Peek
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.contract.store_bench import FAST, FOR_BOTH, FOR_FAST, QUEUED, A, StoreBench


async def _filled(path: Path) -> StoreBench:
    """Three wait at priority 0 and one at 5, one is paused and one is leased."""
    bench = make_bench(path)
    await bench.open()
    for _ in range(3):
        await bench.enqueue(place=1)
    await bench.enqueue(FOR_FAST, priority=5)
    await bench.enqueue(standing=Readiness.PAUSED)
    offer = msgspec.structs.replace(bench.offer(), run_s=0.5, load_s=12.0)
    assert await bench.store.lease((await bench.enqueue()).job_id, offer) is not None
    await bench.store.close()
    return bench


async def _seen(store: SqliteStore, *warm: ClassKey) -> list[Candidate]:
    return await store.peek(Peek(FAST, A, 10, 32, 30.0, warm=frozenset(warm)))


async def _next_place(bench: StoreBench, store: SqliteStore) -> int:
    job = msgspec.structs.replace(await _any(bench, store), job_id=JobId("next"), place=0)
    written = await store.enqueue(job, bench.job(job), QUEUED)
    assert written is not None
    return written.dispatch.place


async def _any(bench: StoreBench, store: SqliteStore) -> Any:
    found = await store.load(bench.jobs[0])
    assert found is not None
    return found


async def test_places_and_lengths_of_lanes_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    bench = await _filled(path)
    async with reopened(path, bench.clock) as store:
        seen = await _seen(store, FOR_BOTH.key)
        assert [(each.waiting, each.place) for each in seen] == [(1, 0), (3, 1), (3, 2), (3, 3)]
        (leased,) = await store.leases_of(A)
        assert leased.place == 4
        assert leased.lease is not None and (leased.lease.run_s, leased.lease.load_s) == (0.5, 12.0)
        assert await _next_place(bench, store) == 4


async def test_a_file_of_an_older_version_has_no_places_and_is_counted_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    bench = await _filled(path)
    _write_as_before(path)
    async with reopened(path, bench.clock) as store:
        assert [(each.waiting, each.place) for each in await _seen(store)] == [(1, 0), (3, 0), (3, 0), (3, 0)]
        (leased,) = await store.leases_of(A)
        assert leased.lease is not None and (leased.lease.run_s, leased.lease.load_s) == (0.0, 0.0)
        assert await _next_place(bench, store) == 4


def _write_as_before(path: Path) -> None:
    """Rewrites each open job without the fields that older versions did not have."""
    database = sqlite3.connect(path)
    with database:
        for sequence, blob in database.execute("SELECT sequence, state FROM open_jobs").fetchall():
            dispatch, *rest = msgspec.msgpack.decode(blob)
            dispatch.pop("place", None)
            for name in ("run_s", "load_s"):
                (dispatch.get("lease") or {}).pop(name, None)
            text = msgspec.msgpack.encode([dispatch, *rest])
            database.execute("UPDATE open_jobs SET state = ? WHERE sequence = ?", (text, sequence))
    database.close()
