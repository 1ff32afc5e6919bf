"""What an operator says of a worker lasts until an operator says otherwise; and a name is one agent's."""

from __future__ import annotations

import pytest
from tests.engine._rig import Rig, graph, offers

from comfyfleet.model.calls import LeasedJob, Poll, RegisterWorker
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.worker import WorkerRecord

GPU = WorkerId("gpu")


async def register(rig: Rig, instance: str = "") -> WorkerRecord:
    return await rig.engine.register(RegisterWorker(GPU, offers("KSampler"), 1, instance=instance))


async def poll(rig: Rig, poll_id: str, instance: str = "") -> LeasedJob | None:
    return await rig.engine.poll(Poll(GPU, PollId(poll_id), 0.0, instance))


async def refused(rig: Rig, instance: str = "") -> str:
    with pytest.raises(Refusal) as told:
        await register(rig, instance)
    assert told.value.code is RefusalCode.NOT_ALLOWED
    return str(told.value)


async def test_a_drained_worker_that_is_started_again_gets_no_work_until_it_is_resumed() -> None:
    async with Rig() as rig:
        await register(rig)
        await rig.submit()
        await rig.engine.drain_worker(GPU)
        beat = await rig.engine.heartbeat(GPU, [])
        assert {each.action for each in beat.commands} == {"drain"}
        await rig.engine.unregister(GPU, "drain")
        await register(rig)
        assert await poll(rig, "one") is None
        beat = await rig.engine.heartbeat(GPU, [])
        assert beat.commands == (), "it is not sent away again and again by whatever starts it"
        await rig.clock.advance(5)
        assert await poll(rig, "two") is None
        await rig.engine.resume_worker(GPU)
        assert await poll(rig, "three") is not None


async def test_a_worker_that_leaves_by_itself_works_again_when_it_is_back() -> None:
    async with Rig() as rig:
        await register(rig)
        await rig.submit()
        await rig.engine.unregister(GPU, "drain")
        await register(rig)
        assert await poll(rig, "one") is not None


async def test_a_drained_worker_can_be_resumed_while_it_is_away() -> None:
    async with Rig() as rig:
        await register(rig)
        await rig.submit()
        await rig.engine.drain_worker(GPU)
        await rig.engine.unregister(GPU, "drain")
        resumed = await rig.engine.resume_worker(GPU)
        assert resumed.is_offline and not resumed.is_draining
        await register(rig)
        assert await poll(rig, "one") is not None


async def test_a_worker_that_is_removed_while_it_is_there_is_kept_out_until_it_is_resumed() -> None:
    async with Rig() as rig:
        await register(rig)
        await rig.submit()
        await rig.engine.remove_worker(GPU, is_banned=True)
        with pytest.raises(Refusal, match="not registered"):
            await poll(rig, "one")
        assert "workers resume gpu" in await refused(rig)
        assert await rig.engine.workers() == []
        back = await rig.engine.resume_worker(GPU)
        assert (back.worker_id, back.is_offline) == (GPU, True)
        await register(rig)
        assert await poll(rig, "two") is not None
        with pytest.raises(Refusal, match="there is no worker"):
            await rig.engine.resume_worker(WorkerId("nobody"))


# one name, one agent


async def test_a_second_agent_of_the_same_name_is_refused_while_the_first_is_heard_of() -> None:
    async with Rig() as rig:
        await register(rig, "first")
        await rig.submit()
        said = await refused(rig, "second")
        assert "--name" in said and "60 s" in said
        await rig.clock.advance(59)
        await rig.engine.heartbeat(GPU, [])
        await rig.clock.advance(59)
        await refused(rig, "second")
        assert await poll(rig, "one", "first") is not None


async def test_an_agent_that_comes_back_where_it_ran_is_let_in_at_once() -> None:
    async with Rig() as rig:
        await register(rig, "first")
        await rig.clock.advance(5)
        assert (await register(rig, "first")).instance == "first"
        await rig.engine.unregister(GPU, "stopped")
        assert (await register(rig, "second")).instance == "second", "the first has left"


async def test_another_agent_is_let_in_when_the_first_is_lost_and_that_one_has_to_ask_again() -> None:
    async with Rig() as rig:
        await register(rig, "first")
        await rig.submit()
        await rig.clock.advance(65)
        await register(rig, "second")
        with pytest.raises(Refusal) as told:
            await poll(rig, "one", "first")
        assert told.value.code is RefusalCode.NOT_FOUND, "so that it registers, and is told"
        await refused(rig, "first")
        assert await poll(rig, "two", "second") is not None


async def test_agents_that_do_not_say_who_they_are_are_taken_as_before() -> None:
    async with Rig() as rig:
        await register(rig, "first")
        await register(rig)
        assert (await register(rig, "second")).instance == "second"


async def test_a_warning_names_the_workers_that_were_seen_last_and_says_drained() -> None:
    async with Rig() as rig:
        for name in ("old-1", "old-2", "old-3", "newest"):
            await rig.engine.register(RegisterWorker(WorkerId(name), offers("KSampler"), 1))
            await rig.engine.unregister(WorkerId(name), "drain")
            await rig.clock.advance(1)
        warnings = (await rig.engine.submit(Submission(graph()))).unworkable
        assert warnings == tuple(f"{name} is offline: drained" for name in ("newest", "old-3", "old-2"))
