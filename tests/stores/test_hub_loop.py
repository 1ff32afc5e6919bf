"""The stores of a hub on the loop that a hub runs on, which is not asyncio's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.cli.bootstrap import run_loop
from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Poll, RegisterWorker
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.ports import Store
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.redis.store import RedisStore

GPU = WorkerId("gpu-a")
GRAPH = {"1": {"class_type": "KSampler", "inputs": {"seed": 7}}}


@pytest.fixture(params=["redis", "postgresql"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "redis":
        with some_server() as url:
            yield RedisStore(with_prefix(url))
    else:
        yield PostgresStore(emptied_database(request.config))


def test_a_shared_store_works_on_the_loop_of_the_hub(store: Store) -> None:
    async def submit_and_lease() -> str:
        async with Engine(store) as engine:
            await engine.register(RegisterWorker(GPU, Capabilities((Service("comfyui"),))))
            submitted = await engine.submit(Submission(GRAPH))
            leased = await engine.poll(Poll(GPU, PollId("1"), 5))
            assert leased is not None and leased.job_id == submitted.job_id
            return leased.job_id

    assert run_loop(submit_and_lease())
