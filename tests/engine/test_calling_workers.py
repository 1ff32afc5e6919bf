"""Workers are called when a job comes that they could take but for a model: at once, and not for each of many jobs."""

from __future__ import annotations

import asyncio

from tests.engine._rig import Rig, graph

from comfyfleet.model.calls import Command
from comfyfleet.model.ids import WorkerId


async def listening(rig: Rig, worker_id: WorkerId, heard: list[int]) -> None:
    """As an agent does: asked and answered, again and again."""
    while True:
        commands: tuple[Command, ...] = await rig.engine.commands(worker_id, 1e9)
        assert commands == ()
        heard[0] += 1


async def test_however_many_jobs_lack_something_a_worker_is_called_every_other_second_at_most() -> None:
    async with Rig() as rig:
        worker_id = await rig.worker("a", models=("old.safetensors",))
        heard = [0]
        agent = asyncio.ensure_future(listening(rig, worker_id, heard))
        await rig.settle()
        await rig.submit(graph(model="new-0.safetensors"))
        await rig.settle()
        assert heard == [1], "the first calls at once"
        for number in range(1, 300):
            await rig.submit(graph(model=f"new-{number}.safetensors"))
            await rig.settle()
        assert heard == [1]
        await rig.clock.advance(2.1)
        assert heard == [2], "those that came meanwhile call once, together"
        assert len((await rig.engine.heartbeat(worker_id, [])).missing) == 50
        await rig.clock.advance(10)
        assert heard == [2]
        await rig.submit(graph(model="another.safetensors"))
        await rig.settle()
        assert heard == [3], "after a pause at once again"
        agent.cancel()
