"""A heartbeat that is due is sent, whatever else is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.worker._scripted import ScriptedApi, leased_job, quick

from comfyfleet.model.calls import HeartbeatReply
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.ids import WorkerId
from comfyfleet.worker.heartbeat import HeartbeatLoop
from comfyfleet.worker.slots import AgentContext, Outage


class Held:
    def __init__(self, name: str) -> None:
        self.ref = leased_job(name).ref
        self.ttl_s = 60.0
        self.confirmed_at = asyncio.get_running_loop().time()

    def abandon(self) -> None:
        raise AssertionError("its heartbeats are answered")


class SlowApi(ScriptedApi):
    """Each heartbeat is told of, and answered when the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.beats: asyncio.Queue[list[LeaseRef]] = asyncio.Queue()
        self.admission_control = asyncio.Event()

    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
        self.beats.put_nowait(list(refs))
        await self.admission_control.wait()
        return HeartbeatReply(60.0, tuple(refs))


async def test_a_beat_that_falls_due_during_another_is_not_forgotten() -> None:
    api = SlowApi()
    context = AgentContext(api, WorkerId("w"), quick(heartbeat_s=600.0), Outage(WorkerId("w")))
    heart = HeartbeatLoop(context, lambda _: None, lambda _: None)
    task = asyncio.create_task(heart.run())
    first, second = Held("first"), Held("second")
    try:
        async with asyncio.timeout(60):
            api.admission_control.set()
            heart.add(first)
            assert await api.beats.get() == [first.ref]
            await asyncio.sleep(0)
            api.admission_control.clear()
            heart.add(second)
            assert await api.beats.get() == [second.ref], "the receipt of a new lease alone"
            # The beat that all leases live by falls due while this one is still on its way.
            heart._ring()
            api.admission_control.set()
        async with asyncio.timeout(60):
            assert set(await api.beats.get()) == {first.ref, second.ref}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
