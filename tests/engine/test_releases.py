"""A worker gives a job back without a result: how often it may, and where the job goes."""

from __future__ import annotations

from tests.engine._rig import Rig

from comfyfleet.model.calls import Release
from comfyfleet.model.dispatch import AttemptOutcome, Phase


async def test_a_lease_that_is_never_acknowledged_returns_uncharged_to_its_old_place() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        first = await rig.submit()
        assert await rig.poll("a") is not None
        later = await rig.submit()
        await rig.clock.advance(9.9)
        assert (await rig.engine.get(first)).dispatch.phase is Phase.LEASED
        await rig.clock.advance(0.1)
        view = await rig.engine.get(first)
        assert view.dispatch.phase is Phase.QUEUED
        assert (view.dispatch.charged, view.dispatch.worker_faults, view.dispatch.releases) == (0, 0, 1)
        assert view.attempts[0].outcome is AttemptOutcome.RELEASED
        assert await rig.engine.blocks() == []
        assert [(await rig.take("a")).job_id, (await rig.take("a")).job_id] == [first, later]


async def test_a_job_that_is_given_back_more_than_twenty_times_fails() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        for _ in range(20):
            settled = await rig.engine.release(Release((await rig.take("a")).ref))
            assert settled.will_retry
        last = await rig.take("a")
        settled = await rig.engine.release(Release(last.ref))
        assert settled.phase is Phase.FAILED
        view = await rig.engine.get(job_id)
        assert view.dispatch.releases == 20
        assert view.attempts[-1].outcome is AttemptOutcome.RELEASED
        assert await rig.engine.release(Release(last.ref)) == settled, "a repeat gets the same answer"


async def test_a_declined_job_is_kept_off_the_worker_for_a_while_and_never_given_up() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        for _ in range(30):
            leased = await rig.take("a")
            await rig.engine.release(Release(leased.ref, "declined"))
            assert await rig.poll("a") is None, "it would only be declined again"
            await rig.clock.advance(10)
        assert (await rig.engine.get(job_id)).dispatch.phase is Phase.QUEUED
