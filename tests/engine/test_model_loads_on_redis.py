"""Several engines on one Redis, with servers that keep the models of their last run: no job runs twice, and the engines
load hardly more often than one would."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.engine._model_fleet import CHECKPOINTS, ModelFleet, draw, servers
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.ports import Store
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.time import ManualClock

_QUIET_TURNS = 3


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


class RedisClock(ManualClock):
    """Stands still while a call to the server is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.stores: list[RedisStore] = []

    async def settle(self) -> None:  # type: ignore[override]
        quiet = 0
        while quiet < _QUIET_TURNS:
            await super().settle()
            is_waiting = any(store._client._sent or store._client._unsent for store in self.stores)
            quiet = 0 if is_waiting else quiet + 1
            # The answer comes from another process.
            await asyncio.sleep(0.0002 if is_waiting else 0)


@dataclass
class RedisFleet(ModelFleet):
    url: str = ""

    def make_clock(self) -> ManualClock:
        return RedisClock()

    def make_stores(self) -> list[Store]:
        assert isinstance(self.clock, RedisClock)
        self.clock.stores = [RedisStore(self.url, winding=self.clock) for _ in range(self.engines)]
        return list(self.clock.stores)


async def loads_of(engines: int, url: str, seed: int) -> int:
    jobs = draw(CHECKPOINTS, 80, seed, rate=5.0)
    async with RedisFleet(servers(8), engines=engines, url=with_prefix(url)) as fleet:
        await fleet.play(jobs)
        completed = [(await fleet.engine.get(job_id)).dispatch for job_id in fleet.runs]
    assert len(fleet.order) == len(jobs) == len({run.job_id for run in fleet.order})
    assert all(dispatch.lease_number == 1 for dispatch in completed), "each job was leased once"
    assert len({run.server for run in fleet.order}) > 1
    return fleet.loads


@pytest.mark.slow
@pytest.mark.parametrize("engines", [2, 4])
async def test_engines_on_one_redis_run_no_job_twice_and_load_at_most_half_as_often_again_as_one(
    server_url: str, engines: int
) -> None:
    alone = sum([await loads_of(1, server_url, seed) for seed in range(2)])
    together = sum([await loads_of(engines, server_url, seed) for seed in range(2)])
    assert together <= 1.5 * alone
