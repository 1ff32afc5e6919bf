"""From submit to the end of a lease."""

from __future__ import annotations

import asyncio

import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.model.calls import Poll
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import PollId


async def test_a_job_runs_and_completes() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        assert leased.job_id == job_id
        assert (await rig.complete(leased)).phase is Phase.COMPLETED
        assert (await rig.engine.get(job_id)).job.phase is Phase.COMPLETED
        assert rig.facts(job_id) == ["queued", "leased", "completed"]


async def test_a_parked_poll_gets_the_job_that_arrives() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        parked = rig.park("a")
        await rig.settle()
        assert not parked.done()
        job_id = await rig.submit()
        await rig.settle()
        leased = parked.result()
        assert leased is not None
        assert leased.job_id == job_id


async def test_a_lease_that_runs_stays_when_whoever_asked_for_it_again_hangs_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.submit()
        leased = await rig.take("a")
        with monkeypatch.context() as patch:
            patch.setattr(rig.store.records, "get", lambda _: asyncio.Event().wait())
            again = asyncio.create_task(rig.engine.poll(Poll(leased.worker_id, PollId("poll-1"), 0)))
            await rig.settle()
            again.cancel()
            await asyncio.wait({again})
        assert (await rig.complete(leased)).phase is Phase.COMPLETED


async def test_the_only_worker_takes_the_job_again_by_itself_when_the_cooldown_ends() -> None:
    async with Rig(cooldown_s=60) as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        await rig.fail(await rig.take("a"))
        parked = rig.park("a")
        await rig.clock.advance(59.9)
        assert not parked.done()
        assert len(rig.fleet_events("blocked")) == 1
        await rig.clock.advance(0.1)
        leased = parked.result()
        assert leased is not None
        assert leased.job_id == job_id
        unblocked = rig.fleet_events("unblocked")
        assert [event.data["workflow_hash"] for event in unblocked] == [leased.workflow_hash]


async def test_a_fitting_job_behind_ten_thousand_misfits_of_higher_priority_is_found_at_once() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("other", "Rare")
        for number in range(10_000):
            await rig.submit(graph("Rare", seed=number), priority=10)
        job_id = await rig.submit()
        leased = await rig.poll("a")
        assert leased is not None
        assert leased.job_id == job_id
