"""Workers directly on the store, and tenants whose jobs and credits lie in databases that they cannot reach."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.engine._rig import graph, offers
from tests.servers.redis_fixtures import some_server, with_prefix
from tests.stores._at_rest import in_redis
from tests.tenancy._tenant_services import ACME, BORG, WORKER, Fleet
from tests.tenancy.test_failure_texts import SECRET, said

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import FactKind
from comfyfleet.model.failure import Failure, FailureKind, FailureText, bounded
from comfyfleet.model.ids import JobId, PollId
from comfyfleet.model.job import JobResult, OutputFile, Submission
from comfyfleet.model.ledger import Account, HoldId
from comfyfleet.model.requirement import Requirements
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.failure_texts import COLLECTION, PendingFailureText, body_of, left_in, without_a_hub
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
    databases = {"first": f"sqlite:///{tmp_path}/first.db"}
    async with Fleet(RedisStore(store_url), SystemClock(), databases) as fleet:
        yield fleet


@pytest.fixture
async def direct(store_url: str) -> AsyncIterator[Engine]:
    """The engine of such a worker: it knows the store and nothing else."""
    async with Engine(without_a_hub(RedisStore(store_url)), rules=Rules(retry_base_s=0.0)) as engine:
        await engine.register(RegisterWorker(WORKER, offers("KSampler"), 1))
        yield engine


async def leased(engine: Engine) -> LeasedJob | None:
    return await engine.poll(Poll(WORKER, PollId(uuid4().hex), 0))


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
    await fleet.relay.run_once(at_once=True)
    assert await fleet.account() == Account(ACME, 90)
    home = await fleet.tenant_services.directory.locate(ACME)
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


async def test_what_a_direct_worker_says_of_a_failure_goes_to_the_tenants_database(
    fleet: Fleet, direct: Engine, store_url: str
) -> None:
    await fleet.tenant(granted=100, allows_direct=True)
    job_id = await fleet.submit()
    for kind in (FailureKind.INTERRUPTED, FailureKind.INVALID_WORKFLOW):
        async with asyncio.timeout(60):
            while (job := await leased(direct)) is None:
                await asyncio.sleep(0.05)
        await direct.fail(FailureReport(job.ref, said(kind)))
        assert SECRET.encode() not in await in_redis(store_url)
        assert (await fleet.engine.get(job_id)).job.failure == said(kind), "seen before a hub came to it"
    await fleet.relay.run_once(at_once=True)
    assert await fleet.central.documents.listing(COLLECTION) == [], "nothing waits in the central store"
    assert await fleet.account() == Account(ACME, 100), "and the round is settled"
    view = await fleet.engine.get(job_id)
    told = [said(FailureKind.INTERRUPTED), said(FailureKind.INVALID_WORKFLOW)]
    assert (view.dispatch.phase, view.job.failure) == (Phase.FAILED, told[1])
    assert [attempt.failure for attempt in view.attempts] == told
    facts = await fleet.engine.store.facts(job_id)
    telling = [fact for fact in facts if fact.kind in (FactKind.RETRYING, FactKind.FAILED)]
    assert [fact.data and fact.data["message"] for fact in telling] == [each.message for each in told]
    home = await fleet.tenant_services.directory.locate(ACME)
    assert home is not None
    kept = await home.database.get(job_id)
    assert kept is not None and kept.failure == told[1]
    await fleet.check()


async def test_texts_of_attempts_reach_the_tenants_database_before_their_round_ends(
    fleet: Fleet, direct: Engine
) -> None:
    await fleet.tenant(granted=100, allows_direct=True)
    job_id = await fleet.submit()
    job = await leased(direct)
    assert job is not None
    await direct.fail(FailureReport(job.ref, said(FailureKind.INTERRUPTED)))
    await fleet.engine.cancel(job_id)
    assert await fleet.account() == Account(ACME, 100), "a hub has settled it, at once"
    assert [each.failure for each in (await fleet.engine.get(job_id)).attempts] == [
        said(FailureKind.INTERRUPTED)
    ]
    assert await fleet.central.documents.listing(COLLECTION) == []


async def test_of_a_tenant_that_was_deleted_nothing_that_was_said_stays(fleet: Fleet, direct: Engine) -> None:
    await fleet.tenant(granted=100, allows_direct=True)
    await fleet.submit()
    job = await leased(direct)
    assert job is not None
    await direct.fail(FailureReport(job.ref, said(FailureKind.INTERRUPTED)))
    assert len(await fleet.central.documents.listing(COLLECTION)) == 1
    await fleet.tenant_services.tenants.remove(ACME)
    await fleet.relay.run_once(at_once=True)
    assert await fleet.central.documents.listing(COLLECTION) == []


async def test_a_document_that_nobody_can_read_keeps_no_other_text_waiting(
    fleet: Fleet, direct: Engine
) -> None:
    await fleet.tenant(granted=100, allows_direct=True)
    job_id = await fleet.submit()
    job = await leased(direct)
    assert job is not None
    await direct.fail(FailureReport(job.ref, said(FailureKind.INTERRUPTED)))
    await fleet.central.documents.put(COLLECTION, "0", b"of a newer version", version=None)
    await fleet.relay.run_once(at_once=True)
    assert [each.name for each in await fleet.central.documents.listing(COLLECTION)] == ["0"]
    assert (await fleet.engine.get(job_id)).job.failure == said(FailureKind.INTERRUPTED)


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_text_that_waits_for_a_hub_fits_into_a_document(length: int) -> None:
    noise = "".join(map(chr, random.Random(1).choices(range(0x4E00, 0x9F00), k=length)))
    failure = bounded(
        Failure(FailureKind.NODE_ERROR, noise, traceback=(noise,) * 9, node_errors={"3": {"errors": [noise]}})
    )
    data = {"kind": "node_error", "message": failure.message, "why": failure.message}
    left = PendingFailureText(ACME, HoldId(JobId("1"), 1), FailureText(failure, data), 1.0)
    body = body_of(left)
    assert len(body) < 64 * 1024
    found = left_in(body)
    assert found is not None
    assert found.text.failure.message and failure.message.startswith(found.text.failure.message)
    assert found == left or length > 10
