"""Whatever happens to a job between two reads of whoever watches it: every fact comes once, and the end ends it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from tests.engine._interleaving import STORIES, DeafBus, Scene, interleavings
from tests.engine._rig import graph

from comfyfleet.engine.local_bus import LocalBus
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import Event, Fact, FactKind
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Submission

ENDS = {FactKind.COMPLETED, FactKind.FAILED, FactKind.CANCELLED}


async def _facts(scene: Scene) -> list[Fact]:
    async with aclosing(scene.watching.watch(scene.job_id)) as watched:
        return [event async for event in watched if isinstance(event, Fact)]


async def _check(scene: Scene, story: str, reads: tuple[int, ...]) -> None:
    async with scene:
        scene.plan(scene.stories[story], reads)
        watching = asyncio.create_task(_facts(scene))
        await scene.come_to_rest()
        if not watching.done():
            watching.cancel()
            raise AssertionError("it waits for ever")
        facts = await watching
        assert [fact.number for fact in facts] == list(range(1, len(facts) + 1))
        assert facts[-1].kind in ENDS
        # One end may come and be told before the job is taken up again.
        assert [fact.kind in ENDS for fact in facts].count(True) == facts[-1].round


@pytest.mark.parametrize("is_shared", [True, False], ids=["another engine", "this engine"])
@pytest.mark.parametrize("story", STORIES)
async def test_a_watcher_ends_with_an_end_in_every_interleaving(story: str, is_shared: bool) -> None:
    wrong = {}
    for reads in interleavings(STORIES[story], 5):
        try:
            await _check(Scene(is_shared=is_shared), story, reads)
        except AssertionError as error:
            wrong[reads] = str(error)
    assert wrong == {}


@pytest.mark.parametrize("is_shared", [True, False], ids=["another engine", "this engine"])
async def test_a_bus_that_loses_every_message_hides_no_end(is_shared: bool) -> None:
    for reads in interleavings(2, 5):
        await _check(Scene(is_shared=is_shared, bus=DeafBus(LocalBus())), "completed", reads)


async def test_a_job_purged_under_the_eyes_of_its_watchers_ends_them() -> None:
    async with Scene(is_shared=False, bus=DeafBus(LocalBus())) as scene:
        scene.store.job_id = scene.job_id
        watching = asyncio.create_task(_facts(scene))
        await scene.clock.settle()
        await scene.watching.cancel(scene.job_id)
        await scene.store.purge(Phase.CANCELLED, scene.clock.now() + 1, 10)
        await scene.come_to_rest()
        assert watching.done()
        assert [fact.number for fact in await watching] == [1]


@pytest.mark.parametrize("story", STORIES)
async def test_a_job_is_shown_with_what_came_of_the_round_that_ended(story: str) -> None:
    for reads in interleavings(STORIES[story], 4):
        async with Scene(is_shared=True) as scene:
            scene.plan(scene.stories[story], reads)
            view = await scene.watching.get(scene.job_id)
            if view.dispatch.phase is Phase.COMPLETED:
                assert view.job.result is not None
                assert view.job.result.outputs == {"2": {"round": [view.dispatch.round]}}
            elif view.dispatch.phase is Phase.FAILED:
                assert view.job.failure is not None
                assert view.job.failure.message == f"broken in round {view.dispatch.round}"
            else:
                assert not view.job.phase.is_final


async def test_a_job_purged_between_two_reads_is_not_there() -> None:
    async with Scene(is_shared=True) as scene:

        async def purge() -> None:
            await scene.moving.cancel(scene.job_id)
            await scene.store.purge(Phase.CANCELLED, scene.clock.now() + 1, 10)

        scene.plan((purge,), (2,))
        with pytest.raises(Refusal) as refused:
            await scene.watching.get(scene.job_id)
        assert refused.value.code is RefusalCode.NOT_FOUND


async def test_whoever_follows_other_jobs_is_not_held_up_by_one_that_cannot_be_read() -> None:
    async with Scene(is_shared=True) as scene:
        unreadable = (await scene.moving.submit(Submission(graph(seed=1)))).job_id
        heard: list[Event] = []
        scene.watching.bus.listen(heard.append)
        facts = scene.store.facts

        async def facts_of_most(job_id: JobId, after: int = 0) -> list[Fact]:
            if job_id == unreadable:
                raise Fault("its key is gone")
            return list(await facts(job_id, after))

        scene.store.__dict__["facts"] = facts_of_most
        with scene.watching.following(unreadable), scene.watching.following(scene.job_id):
            await scene.clock.advance(1)
        assert [event.job_id for event in heard if isinstance(event, Fact)] == [scene.job_id]
