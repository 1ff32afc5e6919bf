"""Workers directly on the store, and tenants whose jobs and credits lie in databases that they cannot reach."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.engine._rig import graph, offers
from tests.servers.redis_fixtures import some_server, with_prefix
from tests.tenancy._estate import ACME, BORG, WORKER, Fleet

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.shell import SystemClock
from comfyfleet.model.calls import Completion, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import PollId
from comfyfleet.model.job import JobResult, OutputFile, Submission
from comfyfleet.model.ledger import Account
from comfyfleet.model.requirement import Requirements
from comfyfleet.stores.redis.store import RedisStore

HUBS_ALONE = Requirements(needs_hub=True)
"""As a hub adds it to the jobs of a tenant that allows no direct workers."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture
def store_url(url: str) -> str:
    return with_prefix(url)


@pytest.fixture
async def fleet(store_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    pools = {"first": f"sqlite:///{tmp_path}/first.db"}
    async with Fleet(RedisStore(store_url), SystemClock(), pools) as fleet:
        yield fleet


@pytest.fixture
async def direct(store_url: str) -> AsyncIterator[Engine]:
    """The engine of such a worker: it knows the store and nothing else."""
    async with Engine(RedisStore(store_url)) as engine:
        await engine.register(RegisterWorker(WORKER, offers("KSampler"), 1))
        yield engine


async def leased(engine: Engine) -> LeasedJob | None:
    return await engine.poll(Poll(WORKER, PollId("1"), 0))


async def test_a_job_of_a_tenant_that_allows_it_is_run_by_a_direct_worker_and_settled_by_a_hub(
    fleet: Fleet, direct: Engine
) -> None:
    await fleet.tenant(granted=100, allows_direct=True)
    job_id = await fleet.submit()
    job = await leased(direct)
    assert job is not None and job.workflow == graph()
    left = JobResult({"2": {}}, (OutputFile("2", "images", "x.png"),))
    await direct.complete(Completion(job.ref, left, 1.0))
    assert await fleet.account() == Account(ACME, 100, held=10), "such a worker has no way to the book"
    await fleet.relay.look(at_once=True)
    assert await fleet.account() == Account(ACME, 90)
    home = await fleet.estate.homes.of(ACME)
    assert home is not None
    (run,) = await home.database.runs(ACME, after=0, limit=10)
    assert (run.verified_by, run.worker_id, run.outputs) == ("worker", WORKER, 1)
    view = await fleet.engine.get(job_id)
    assert (view.dispatch.phase, view.job.result) == (Phase.COMPLETED, left)
    await fleet.check()


async def test_a_direct_worker_is_offered_nothing_of_a_tenant_that_does_not_allow_it(
    fleet: Fleet, direct: Engine
) -> None:
    await fleet.tenant(granted=100)
    job_id = await fleet.submit(requirements=HUBS_ALONE)
    assert await leased(direct) is None
    assert await direct.store.records.get(job_id) is not None
    stub = await direct.store.records.get(job_id)
    assert stub is not None and stub.payload == Submission({}, tenant=ACME), "nor has it anything to read"


async def test_without_a_way_to_its_tenants_database_no_job_is_retried(fleet: Fleet, direct: Engine) -> None:
    await fleet.tenant(BORG, granted=100, allows_direct=True)
    job_id = await fleet.submit(BORG)
    await fleet.engine.cancel(job_id)
    with pytest.raises(Refusal) as refused:
        await direct.retry(job_id)
    assert refused.value.code is RefusalCode.NOT_ALLOWED
    await fleet.engine.retry(job_id)
    assert await fleet.account(BORG) == Account(BORG, 100, held=10)
