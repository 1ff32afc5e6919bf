"""Jobs that wait for others: they start when all completed, fail when one did not, and no crash leaves them waiting."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.engine._rig import Rig, graph, offers
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.dependencies import COLLECTION
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import Completion, Poll, RegisterWorker
from comfyfleet.model.dispatch import Dispatch, Phase, Readiness, WriteResult
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import ClassKey, JobId, PollId, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.timers import next_check
from comfyfleet.stores.factory import open_store
from comfyfleet.stores.memory import MemoryStore


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        yield rig


async def phase_of(rig: Rig, job_id: JobId) -> Phase:
    return (await rig.engine.get(job_id)).dispatch.phase


async def is_tidy(rig: Rig) -> bool:
    await rig.settle()
    return await rig.store.documents.listing(COLLECTION) == []


async def test_a_second_stage_starts_when_the_first_completed(rig: Rig) -> None:
    await rig.worker("a")
    first = await rig.submit()
    second = await rig.submit(after=(first,))
    leased = await rig.take("a")
    assert leased.job_id == first
    assert await rig.poll("a") is None, "the second is in no lane"
    assert first in (await rig.engine.explain(second)).summary
    await rig.clock.advance(40)
    assert await phase_of(rig, second) is Phase.QUEUED
    parked = rig.park("a")
    again = await rig.engine.heartbeat(leased.worker_id, [leased.ref])
    assert again.alive
    await rig.complete(leased)
    await rig.settle()
    taken = await parked
    assert taken is not None and taken.job_id == second, "told at once, no time has passed"
    assert await is_tidy(rig)


async def test_a_job_waits_for_all_it_named_in_whatever_order_they_end(rig: Rig) -> None:
    await rig.worker("a", slots=3)
    stages = [await rig.submit() for _ in range(3)]
    last = await rig.submit(after=(*stages, stages[0]))
    leases = [await rig.take("a") for _ in stages]
    for leased in (leases[2], leases[0]):
        await rig.complete(leased)
        assert await rig.poll("a") is None
    await rig.complete(leases[1])
    await rig.settle()
    assert (await rig.take("a")).job_id == last
    assert await is_tidy(rig)


async def test_the_end_of_one_without_a_result_fails_all_that_wait_for_it(rig: Rig) -> None:
    await rig.worker("a")
    first = await rig.submit(max_attempts=1)
    other = await rig.submit()
    second = await rig.submit(after=(first, other))
    third = await rig.submit(after=(second,))
    leased = await rig.take("a")
    await rig.fail(leased, FailureKind.INVALID_WORKFLOW)
    await rig.settle()
    for job_id, named in ((second, first), (third, second)):
        job = (await rig.engine.get(job_id)).job
        assert job.phase is Phase.FAILED and job.failure is not None
        assert job.failure.kind is FailureKind.DEPENDENCY_FAILED and named in job.failure.message
    assert await phase_of(rig, other) is Phase.QUEUED
    assert await is_tidy(rig)


async def test_a_cancel_of_what_is_waited_for_fails_who_waits(rig: Rig) -> None:
    first = await rig.submit()
    second = await rig.submit(after=(first,))
    await rig.engine.cancel(first)
    await rig.settle()
    assert await phase_of(rig, second) is Phase.FAILED
    assert rig.facts(second) == ["queued", "failed"]


async def test_what_is_not_there_or_another_tenants_is_refused_and_nothing_is_left(rig: Rig) -> None:
    theirs = await rig.submit(tenant=TenantId("other"))
    for after in ((JobId("nobody"),), (theirs,)):
        with pytest.raises(Refusal) as refused:
            await rig.submit(after=after)
        assert refused.value.code is RefusalCode.INVALID_REQUEST
        assert "no job" in refused.value.message
    with pytest.raises(Refusal):
        await rig.submit(after=tuple(JobId(str(number)) for number in range(101)))
    assert (await rig.engine.stats()).delayed == 0 and await is_tidy(rig)


async def test_what_ended_before_the_submit_counts_as_it_ended(rig: Rig) -> None:
    await rig.worker("a")
    done = await rig.submit()
    await rig.complete(await rig.take("a"))
    lost = await rig.submit()
    await rig.engine.cancel(lost)
    ready = await rig.submit(after=(done,))
    assert (await rig.take("a")).job_id == ready
    hopeless = await rig.submit(after=(done, lost))
    assert await phase_of(rig, hopeless) is Phase.FAILED
    assert await is_tidy(rig)


# crashes


async def test_who_was_never_told_is_found_by_the_sweep(rig: Rig) -> None:
    """As if the engine had died right after its write."""
    await rig.worker("a")
    first, doomed = await rig.submit(), await rig.submit()
    second = await rig.submit(after=(first,))
    third = await rig.submit(after=(doomed,))
    leased = await rig.take("a")
    rig.engine._context.awaited_ended = lambda _: None
    await rig.complete(leased)
    await rig.engine.cancel(doomed)
    await rig.settle()
    assert await phase_of(rig, third) is Phase.QUEUED
    await rig.clock.advance(rig.engine.rules.held_look_s)
    assert (await rig.take("a")).job_id == second
    assert await phase_of(rig, third) is Phase.FAILED


class EndsInBetween(MemoryStore):
    """What a new job waits for ends at the worst of moments: it is marked, and the new one not yet written."""

    between: Callable[[], Any] | None = None

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Any) -> WriteResult | None:
        between, self.between = self.between, None
        if between is not None:
            await between()
        return await super().enqueue(dispatch, job, facts)


async def test_an_end_between_the_mark_and_the_write_is_seen() -> None:
    async with Rig(EndsInBetween) as own:
        assert isinstance(own.store, EndsInBetween)
        await own.worker("a")
        first = await own.submit()
        leased = await own.take("a")

        async def end() -> None:
            await own.complete(leased)
            await own.settle()

        own.store.between = end
        second = await own.submit(after=(first,))
        assert (await own.take("a")).job_id == second


async def test_a_submit_that_died_after_its_announcement_hurts_nobody(rig: Rig) -> None:
    await rig.worker("a")
    first = await rig.submit()
    await rig.engine._dependencies.announce((first,), JobId("never-written"))
    second = await rig.submit(after=(first,))
    await rig.complete(await rig.take("a"))
    await rig.settle()
    assert (await rig.take("a")).job_id == second
    assert await is_tidy(rig)


async def test_a_completed_job_that_is_kept_no_longer_was_completed_all_the_same(rig: Rig) -> None:
    await rig.worker("a", slots=2)
    first, slow = await rig.submit(), await rig.submit()
    last = await rig.submit(after=(first, slow))
    leased, running = await rig.take("a"), await rig.take("a")
    await rig.complete(leased)
    await rig.settle()
    assert await rig.store.purge(Phase.COMPLETED, 1e12, 10) == 1
    await rig.complete(running)
    await rig.settle()
    assert (await rig.take("a")).job_id == last


async def test_a_job_that_vanished_before_it_completed_fails_who_waits(rig: Rig) -> None:
    """Moved to another store without those who wait for it."""
    first = await rig.submit()
    second = await rig.submit(after=(first,))
    dispatch = await rig.store.load(first)
    assert dispatch is not None and await rig.store.job_transfer.discard([dispatch]) == [True]
    await rig.clock.advance(rig.engine.rules.held_look_s)
    failure = (await rig.engine.get(second)).job.failure
    assert failure is not None and "no longer exists" in failure.message


async def test_the_engine_that_ends_a_job_lets_go_those_that_were_submitted_at_another() -> None:
    async with Rig() as rig:
        other = Engine(rig.store, clock=rig.clock)
        await other._context.fleet.load()
        await rig.worker("a")
        first = await rig.submit()
        second = (await other.submit(Submission(graph(), after=(first,)))).job_id
        await rig.complete(await rig.take("a"))
        await rig.settle()
        assert (await rig.take("a")).job_id == second


# beside everything else that can be done to a job


async def test_a_held_job_can_be_paused_resumed_and_changed_and_still_waits(rig: Rig) -> None:
    await rig.worker("a")
    first = await rig.submit()
    second = await rig.submit(after=(first,))
    await rig.engine.pause(second)
    await rig.engine.resume(second)
    await rig.engine.set_priority(second, 9)
    assert (await rig.take("a")).job_id == first
    assert await rig.poll("a") is None
    await rig.engine.pause(second)
    leased = (await rig.store.leases_of(WorkerId("a")))[0]
    await rig.engine.complete(Completion(leased.lease_ref(), JobResult()))
    await rig.settle()
    dispatch = (await rig.engine.get(second)).dispatch
    assert (dispatch.awaits_jobs, dispatch.standing) == (False, Readiness.PAUSED)
    await rig.engine.resume(second)
    assert (await rig.take("a")).job_id == second


async def test_a_delay_a_deadline_and_a_cancel_go_on_counting_for_a_held_job(rig: Rig) -> None:
    await rig.worker("a")
    now = rig.clock.now()
    first = await rig.submit()
    later = await rig.submit(after=(first,), not_before=now + 50)
    late = await rig.submit(after=(first,), deadline=now + 20)
    gone = await rig.submit(after=(first,))
    leased = await rig.take("a")
    await rig.engine.cancel(gone)
    await rig.clock.advance(30)
    failure = (await rig.engine.get(late)).job.failure
    assert failure is not None and failure.kind is FailureKind.DEADLINE_PASSED
    await rig.complete(leased)
    await rig.settle()
    assert await rig.poll("a") is None, "its own time has not come"
    await rig.clock.advance(21)
    assert (await rig.take("a")).job_id == later
    assert await is_tidy(rig)


async def test_a_retry_by_hand_waits_again_for_what_is_tried_again(rig: Rig) -> None:
    await rig.worker("a")
    first = await rig.submit()
    second = await rig.submit(after=(first,))
    await rig.engine.cancel(first)
    await rig.settle()
    await rig.engine.retry(second)
    assert await phase_of(rig, second) is Phase.FAILED, "what it waits for has not completed"
    await rig.engine.retry(first)
    await rig.engine.retry(second)
    leased = await rig.take("a")
    assert leased.job_id == first and await rig.poll("a") is None
    await rig.complete(leased)
    await rig.settle()
    assert (await rig.take("a")).job_id == second
    assert await is_tidy(rig)


def test_ten_thousand_held_jobs_cost_few_looks_and_fewer_the_longer_they_wait() -> None:
    rules, looks, now = Rules(), 0, 0.0
    held = Dispatch(JobId("j"), ClassKey("c"), WorkflowHash("h"), 0, queued_at=0.0, awaits_jobs=True)
    while now < 86_400:
        now = next_check(held, now, rules)
        looks += 1
    assert looks * 10_000 / 86_400 < 15, "looks a second, over a day"
    assert next_check(held, 0.0, rules) == rules.held_look_s


# on every store


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture(params=["memory", "sqlite", "redis", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/fleet.db"
        case "redis":
            return with_prefix(request.getfixturevalue("redis_url"))
        case "postgresql":
            parts = psycopg.conninfo.conninfo_to_dict(emptied_database(request.config))
            return f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    return "memory:"


@asynccontextmanager
async def engine_on(url: str) -> AsyncIterator[Engine]:
    clock = SystemClock()
    async with Engine(open_store(url, clock), clock=clock, rules=Rules(held_look_s=0.2)) as engine:
        await engine.register(RegisterWorker(WorkerId("a"), offers("KSampler")))
        yield engine


async def take(engine: Engine, number: int) -> Any:
    leased = await engine.poll(Poll(WorkerId("a"), PollId(f"poll-{number}"), 10.0))
    assert leased is not None
    await engine.heartbeat(leased.worker_id, [leased.ref])
    return leased


async def test_stages_follow_one_another_on_every_store_also_through_a_restart(store_url: str) -> None:
    async with engine_on(store_url) as engine:
        first = (await engine.submit(Submission(graph()))).job_id
        second = (await engine.submit(Submission(graph(), after=(first,)))).job_id
        third = (await engine.submit(Submission(graph(), after=(second, first)))).job_id
        leased = await take(engine, 1)
        assert leased.job_id == first
        await engine.complete(Completion(leased.ref, JobResult()))
        leased = await take(engine, 2)
        assert leased.job_id == second
        # It dies with its write: nobody is told.
        engine._context.awaited_ended = lambda _: None
        await engine.complete(Completion(leased.ref, JobResult()))
        if store_url == "memory:":
            assert (await take(engine, 3)).job_id == third
            return
    async with engine_on(store_url) as engine:
        assert (await take(engine, 3)).job_id == third
