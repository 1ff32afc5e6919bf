"""What is unsettled is found, and what may be purged is, by looking at these and not at all that a database keeps."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers.postgres_database import emptied_database
from tests.stores._postgres import Jobs, fill_table
from tests.stores._sqlite import make_bench

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.postgres.rows import _PURGE
from comfyfleet.stores.postgres.store import _UNSETTLED
from comfyfleet.testing.contract.store_bench import completion
from comfyfleet.testing.time import ManualClock


async def test_the_file_answers_from_its_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    asked: list[tuple[str, tuple[Any, ...]]] = []
    disk = bench.store._disk  # type: ignore[attr-defined]
    real = disk._all

    def ask(sql: str, *values: Any) -> list[Any]:
        asked.append((sql, values))
        return list(real(sql, *values))

    monkeypatch.setattr(disk, "_all", ask)
    await bench.store.unsettled(10, JobId("job-0001"))
    await bench.store.purge(Phase.COMPLETED, 1e12, 10)
    await bench.store.close()
    assert len(asked) == 3
    with closing(sqlite3.connect(tmp_path / "fleet.db")) as database:
        for sql, values in asked:
            plan = " ".join(row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {sql}", values))
            assert "SCAN" not in plan and "TEMP B-TREE" not in plan, plan
            assert "(apart>?)" in plan or "(phase=? AND apart=?)" in plan, plan


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return emptied_database(request.config)


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, clock_for_tests=ManualClock())
    await store.open()
    await fill_table(store)
    yield store
    await store.close()


async def test_the_tables_answer_from_their_indexes(url: str, store: PostgresStore) -> None:
    jobs = Jobs()
    job = await jobs.enqueue(store)
    leased = await store.lease(job.job_id, jobs.offer())
    assert leased is not None
    assert await store.write(completion(leased.dispatch.lease_ref())) is not None
    values = {"phase": "completed", "before": 0.0, "settled_before": 0.0, "limit": 10}
    touched: dict[str, list[int]] = {"unsettled": [], "purge": []}
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        for first, last in ((2, 100), (101, 10_000)):
            # What must stay ended before what may go, and comes after it by its id.
            connection.execute(
                "INSERT INTO comfyfleet.ended SELECT CASE kind WHEN 0 THEN 'z' ELSE 'a' END || number, number, phase,"
                " CASE kind WHEN 0 THEN -1 ELSE 1 END, due_at, fact_count, job_phase, envelope, kind < 2, kind = 0"
                " FROM comfyfleet.ended, generate_series(%s, %s) AS number, LATERAL (SELECT number %% 3 AS kind) AS k"
                " WHERE sequence = 1",
                (first, last),
            )
            connection.execute("ANALYZE comfyfleet.ended")
            for name, question, given in (
                ("unsettled", _UNSETTLED, ("", 10)),
                ("purge", _PURGE, values),
            ):
                text = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {question}"
                row = connection.execute(text.encode(), given).fetchone()
                assert row is not None
                plan = row[0][0]["Plan"]
                touched[name].append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    for name, (few, many) in touched.items():
        assert many <= few * 1.5 + 10, f"pages touched for {name}: {touched[name]}"
