"""How long what has ended is kept: by default a day, failures and workers that are gone a week, on every store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.engine._rig import offers
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import WorkerId
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.contract.store_bench import MakeStore, StoreBench, completion, failure
from comfyfleet.testing.time import SeededRandom

HOUR_S = 3600.0


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture(params=["memory", "sqlite", "redis", "postgresql"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StoreBench]:
    makers: dict[str, MakeStore] = {
        "memory": MemoryStore,
        "sqlite": lambda clock: SqliteStore(tmp_path / "fleet.db", clock),
        "redis": lambda clock: RedisStore(with_prefix(request.getfixturevalue("redis_url")), winding=clock),
        "postgresql": lambda clock: PostgresStore(emptied_database(request.config), clock_for_tests=clock),
    }
    bench = StoreBench(makers[request.param])
    await bench.open()
    yield bench
    await bench.store.close()


async def test_completed_and_cancelled_jobs_are_kept_a_day_and_failed_ones_a_week(bench: StoreBench) -> None:
    store = bench.store
    for end in (completion, failure):
        _, ref = await bench.leased(reference=end.__name__)
        assert await store.write(end(ref)) is not None
    assert await bench.cancel(await bench.enqueue()) is not None
    waiting = await bench.enqueue()
    engine = Engine(store, rules=Rules(), clock=bench.clock, rng=SeededRandom())
    kept = []
    for hours in (23.9, 0.2, 24 * 6 - 0.2, 0.2):
        await bench.clock.advance(hours * HOUR_S)
        await engine.sweep()
        counts = (await store.counts()).by_phase
        kept.append([counts[phase] for phase in (Phase.COMPLETED, Phase.CANCELLED, Phase.FAILED)])
    assert kept == [[1, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]]
    assert await store.records.by_reference(waiting.tenant, "completion") is None
    assert await store.load(waiting.job_id) == waiting, "what waits is never forgotten"


async def test_a_worker_is_forgotten_a_week_after_it_was_last_seen_whoever_sweeps(bench: StoreBench) -> None:
    store = bench.store
    first, second = (
        Engine(store, rules=Rules(), clock=bench.clock, rng=SeededRandom(seed)) for seed in (1, 2)
    )
    for name in ("left", "lost", "lives"):
        await first.register(
            RegisterWorker(WorkerId(name), offers("KSampler", models=(f"{name}.safetensors",)))
        )
    await first.unregister(WorkerId("left"), "done")
    kept = []
    for hours in (24 * 7 - 0.1, 0.2, 0.1):
        await bench.clock.advance(hours * HOUR_S)
        await first.heartbeat(WorkerId("lives"), [])
        for engine in (first, second):
            await engine.sweep()
        kept.append([(str(each.worker_id), each.is_offline) for each in await store.workers()])
    assert kept[0] == [("left", True), ("lost", True), ("lives", False)]
    assert kept[1:] == [[("lives", False)]] * 2
    await first.register(RegisterWorker(WorkerId("left"), offers("KSampler")))
    assert [each.worker_id for each in await store.workers()] == ["lives", "left"]
