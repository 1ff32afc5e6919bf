"""A graph that servers die of gets one more try; then nobody runs it for this tenant until an operator says so."""

from __future__ import annotations

import contextlib
import logging

import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.model.block import EVERY_WORKER, BlockReason
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import DEFAULT_TENANT, JobId, TenantId
from comfyfleet.model.job import Timeouts

BOB, EVE = TenantId("bob"), TenantId("eve")


async def kill_two(rig: Rig, kind: str = "KSampler", tenant: TenantId = EVE) -> JobId:
    job_id = await rig.submit(graph(kind), tenant=tenant, retry_delay_s=0, max_attempts=9)
    first = await rig.fail(await rig.take("a"), FailureKind.DEAD_WORKER, server_died="thread")
    assert first.will_retry, "it gets one more try"
    assert await rig.poll("a") is None, "elsewhere"
    second = await rig.fail(await rig.take("b"), FailureKind.CRASHED, server_died="process")
    assert second.phase is Phase.FAILED
    return job_id


async def test_a_graph_that_two_servers_died_of_fails_and_is_refused_to_its_tenant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Rig() as rig:
        for name in "abc":
            await rig.worker(name)
        with caplog.at_level(logging.WARNING):
            job_id = await kill_two(rig)
        told_of = (await rig.store.facts(job_id))[-1].data
        assert told_of is not None and "2 servers died" in told_of["why"]
        assert (
            f"comfyfleet blocks lift '*' {(await rig.engine.get(job_id)).dispatch.block_targets[1]}"
            in caplog.text
        )
        assert [event.data["tenant"] for event in rig.fleet_events("workflow_refused")] == [EVE]
        with pytest.raises(
            Refusal, match="servers died while they ran this workflow of tenant 'eve'"
        ) as told:
            await rig.submit(tenant=EVE)
        assert told.value.code is RefusalCode.INVALID_WORKFLOW
        with pytest.raises(Refusal, match="servers died"):
            await rig.engine.retry(job_id)
        of_bob = await rig.submit(tenant=BOB)
        assert (await rig.take("c")).job_id == of_bob


async def test_equal_jobs_of_the_tenant_that_wait_fail_with_the_reason_and_no_server_gets_them() -> None:
    async with Rig(max_failures_before_block=99) as rig:
        for name in "ab":
            await rig.worker(name)
        poison_workflows = await rig.submit(tenant=EVE, retry_delay_s=0, priority=5)
        equal = [await rig.submit(tenant=EVE) for _ in range(150)]
        later = await rig.submit(tenant=EVE, not_before=rig.clock.now() + 3600)
        other, of_bob = await rig.submit(graph("Other"), tenant=EVE), await rig.submit(tenant=BOB)
        await rig.fail(await rig.take("a"), FailureKind.DEAD_WORKER, server_died="thread")
        running = await rig.take("a")
        assert running.job_id == equal[0]
        await rig.fail(await rig.take("b"), FailureKind.DEAD_WORKER, server_died="thread")
        assert (await rig.take("b")).job_id == of_bob, (
            "those of the tenant are kept from every worker at once"
        )
        await rig.clock.advance(1)
        for job_id in (*equal[1:], later):
            job = (await rig.engine.get(job_id)).job
            assert job.phase is Phase.FAILED and job.failure is not None
            assert job.failure.kind is FailureKind.INVALID_WORKFLOW
            assert "servers died" in job.failure.message
        assert (await rig.engine.get(poison_workflows)).job.phase is Phase.FAILED
        assert (await rig.engine.get(other)).job.phase is Phase.QUEUED
        # What ran meanwhile may end as it does; where it would be tried again it fails too.
        settled = await rig.fail(running, FailureKind.NODE_ERROR)
        assert settled.will_retry
        await rig.clock.advance(1)
        assert (await rig.engine.get(equal[0])).job.phase is Phase.FAILED


async def test_an_operator_lists_and_lifts_it_and_the_workflow_runs_again() -> None:
    async with Rig() as rig:
        for name in "abc":
            await rig.worker(name)
        await kill_two(rig)
        (block,) = [each for each in await rig.engine.blocks() if each.worker_id == EVERY_WORKER]
        assert (block.tenant, block.reason, block.failures) == (EVE, BlockReason.SERVER_DIED, 2)
        await rig.clock.advance(600)
        with pytest.raises(Refusal):
            await rig.submit(tenant=EVE)
        assert await rig.engine.unblock(EVERY_WORKER, block.target)
        assert [event.data["tenant"] for event in rig.fleet_events("workflow_allowed")] == [EVE]
        await rig.worker("c")
        again = await rig.submit(tenant=EVE)
        assert (await rig.take("c")).job_id == again


async def test_three_such_graphs_within_an_hour_suspend_the_tenant() -> None:
    suspended: list[TenantId] = []

    async def suspend(tenant: TenantId) -> bool:
        suspended.append(tenant)
        return True

    async with Rig() as rig:
        rig.engine.set_tenant_suspension(suspend)
        kinds = [f"Kind{number}" for number in range(4)]
        for name in "ab":
            await rig.worker(name, *kinds)
        await kill_two(rig, kinds[0])
        await rig.clock.advance(3601)
        for name in "ab":
            await rig.worker(name, *kinds)
        for kind in kinds[1:3]:
            await kill_two(rig, kind)
        assert suspended == [], "the first was more than an hour ago"
        await kill_two(rig, kinds[3])
        assert suspended == [EVE]
        assert [event.data["tenant"] for event in rig.fleet_events("tenant_suspended")] == [EVE]


async def test_the_default_tenant_is_not_suspended_and_its_graphs_are_refused_all_the_same() -> None:
    async def suspend(_: TenantId) -> bool:
        raise AssertionError("nobody else would be left")

    async with Rig() as rig:
        rig.engine.set_tenant_suspension(suspend)
        kinds = [f"Kind{number}" for number in range(4)]
        for name in "ab":
            await rig.worker(name, *kinds)
        for kind in kinds:
            await kill_two(rig, kind, DEFAULT_TENANT)
        with pytest.raises(Refusal, match=r"servers died while they ran this workflow, .*pool\.unblock"):
            await rig.submit(graph(kinds[0]))


async def test_leases_that_ran_out_and_deaths_of_nobodys_run_do_not_count() -> None:
    async with Rig(max_failures_before_block=99) as rig:
        await rig.worker("a")
        job_id = await rig.submit(tenant=EVE, retry_delay_s=0, max_attempts=9)
        await rig.take("a")
        await rig.clock.advance(61)
        for name in "bc":
            await rig.worker(name)
            await rig.fail(await rig.take(name), FailureKind.CRASHED)
        assert (await rig.engine.get(job_id)).dispatch.server_deaths == 0
        await rig.submit(tenant=EVE)


async def test_a_refusal_outlives_the_engine_and_another_one_ends_what_still_waits() -> None:
    async with Rig() as rig:
        for name in "ab":
            await rig.worker(name)
        await kill_two(rig)
        target = next(iter(rig.engine._context.fleet.refused))
        # Another engine's job that came in before it had heard of it.
        rig.engine._context.fleet.refused = frozenset()
        late = await rig.submit(tenant=EVE)
        for block in await rig.store.blocks():
            rig.engine._context.fleet.cache_block(block)
        assert rig.engine._context.fleet.refused == {target}
        assert await rig.poll("b") is None
        await rig.clock.advance(5)
        assert (await rig.engine.get(late)).job.phase is Phase.FAILED


async def test_a_job_of_one_attempt_gets_its_second_try_all_the_same() -> None:
    async with Rig() as rig:
        for name in "ab":
            await rig.worker(name)
        await rig.submit(tenant=EVE, max_attempts=1)
        settled = await rig.fail(await rig.take("a"), FailureKind.CRASHED, server_died="process")
        assert settled.will_retry, "or such jobs would kill one server after the other, one each"
        settled = await rig.fail(await rig.take("b"), FailureKind.CRASHED, server_died="process")
        assert settled.phase is Phase.FAILED
        with pytest.raises(Refusal, match="servers died"):
            await rig.submit(tenant=EVE)


@pytest.mark.parametrize("ends", ["cancelled", "retried by hand", "timed out"])
async def test_a_job_that_is_over_before_its_second_try_is_counted_for_its_workflow(ends: str) -> None:
    async with Rig() as rig:
        for name in "abc":
            await rig.worker(name)
        job_id = await rig.submit(tenant=EVE, retry_delay_s=30, timeouts=Timeouts(total_s=10))
        first = await rig.fail(await rig.take("a"), FailureKind.CRASHED, server_died="process")
        assert first.will_retry
        if ends == "timed out":
            await rig.clock.advance(11)
        else:
            await rig.engine.cancel(job_id)
            await rig.clock.advance(1)
        if ends == "retried by hand":
            await rig.engine.retry(job_id)
        else:
            await rig.submit(tenant=EVE)
        second = await rig.fail(await rig.take("b"), FailureKind.CRASHED, server_died="process")
        assert second.phase is Phase.FAILED, "or one server would die after the other"
        with pytest.raises(Refusal, match="servers died"):
            await rig.submit(tenant=EVE)


async def test_a_death_before_a_success_is_bad_luck_and_forgotten() -> None:
    async with Rig() as rig:
        for name in "abc":
            await rig.worker(name)
        await rig.submit(tenant=EVE, retry_delay_s=0)
        await rig.fail(await rig.take("a"), FailureKind.CRASHED, server_died="process")
        await rig.complete(await rig.take("b"))
        await rig.clock.advance(1)
        assert await rig.store.blocks(EVERY_WORKER) == []


@pytest.mark.parametrize("ends", ["cancelled", "timed out"])
async def test_deaths_of_jobs_that_were_over_before_count_for_their_workflow(ends: str) -> None:
    async with Rig(cancel_grace_s=5) as rig:
        for name in "abc":
            await rig.worker(name)
        for name in "ab":
            job_id = await rig.submit(tenant=EVE, timeouts=Timeouts(total_s=10))
            leased = await rig.take(name)
            if ends == "cancelled":
                await rig.engine.cancel(job_id)
            else:
                await rig.clock.advance(11)
            for _ in range(2):
                # The second time because the answer was lost.
                with contextlib.suppress(Refusal):
                    await rig.fail(leased, FailureKind.DEAD_WORKER, server_died="thread")
            assert len(rig.fleet_events("workflow_refused")) == (name == "b")
        with pytest.raises(Refusal, match="servers died"):
            await rig.submit(tenant=EVE)


async def test_a_death_more_than_an_hour_ago_is_no_first_one() -> None:
    async with Rig() as rig:
        for name in "ab":
            await rig.worker(name)
            job_id = await rig.submit(tenant=EVE)
            leased = await rig.take(name)
            await rig.engine.cancel(job_id)
            await rig.fail(leased, FailureKind.DEAD_WORKER, server_died="thread")
            await rig.clock.advance(3601)
        await rig.submit(tenant=EVE)


async def test_the_only_server_gets_the_job_that_it_died_of_as_soon_as_it_answers_and_the_second_death_refuses_it() -> (
    None
):
    async with Rig(cooldown_s=3600.0) as rig:
        await rig.worker("a")
        await rig.submit(tenant=EVE, retry_delay_s=0, max_attempts=9)
        first = await rig.fail(await rig.take("a"), FailureKind.CRASHED, server_died="process")
        assert first.will_retry
        assert [block.blocked_until for block in await rig.engine.blocks()] == [None], "it is counted"
        second = await rig.fail(await rig.take("a"), FailureKind.CRASHED, server_died="process")
        assert second.phase is Phase.FAILED
        with pytest.raises(Refusal, match="servers died"):
            await rig.submit(tenant=EVE)


async def test_where_another_server_is_there_a_crash_blocks_for_the_cooldown_also_when_that_one_crashed_too() -> (
    None
):
    async with Rig(cooldown_s=60.0) as rig:
        for name in "ab":
            await rig.worker(name)
        await rig.submit(tenant=EVE, retry_delay_s=0, max_attempts=9)
        for name in "ab":
            await rig.fail(await rig.take(name), FailureKind.CRASHED)
        assert await rig.poll("a") is None and await rig.poll("b") is None


async def test_a_crash_shortens_no_block_that_the_only_server_had_before() -> None:
    async with Rig(cooldown_s=60.0) as rig:
        await rig.worker("a", slots=2)
        for _ in range(2):
            await rig.submit(tenant=EVE, retry_delay_s=0, max_attempts=9)
        failing, crashing = await rig.take("a"), await rig.take("a")
        await rig.fail(failing, FailureKind.NODE_ERROR)
        await rig.fail(crashing, FailureKind.CRASHED)
        assert await rig.poll("a") is None
