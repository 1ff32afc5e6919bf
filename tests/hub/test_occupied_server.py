"""One of two servers was killed by somebody else's prompt: nothing is lost there, and the hub says what is wrong."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from tests.hub._hub import running_hub
from tests.pool._fleet import QUICK_AGENT, QUICK_COMFYUI
from tests.worker._comfyui import eventually, picture, slow

from comfyfleet import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.testing.fake_comfyui import FakeComfyUI, Faults, NodeFault
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi

SETTINGS = msgspec.structs.replace(QUICK_COMFYUI, occupied_s=0.5, idle_queue_s=60.0)


async def test_eight_jobs_complete_and_the_dead_server_says_why_it_is_offline() -> None:
    poison_workflows = Faults(
        fail_nodes=[NodeFault(class_type="LabSlow", exception_type="KeyboardInterrupt")]
    )
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(running_hub())
        api = await stack.enter_async_context(HttpWorkerApi(rig.url, rig.keys[Role.WORKER]))
        dead = await stack.enter_async_context(FakeComfyUI(faults=poison_workflows))
        killer = ComfyUI(dead.url, SETTINGS)
        await stack.enter_async_context(Agent(api, WorkerId("dead"), [killer], QUICK_AGENT))
        await eventually(lambda: killer._listener is not None and killer._listener.is_open)
        assert (await killer._api.submit(slow(), "foreign", "somebody", 2.0)).status == 200
        client = await stack.enter_async_context(FleetClient(rig.url, rig.keys[Role.TENANT]))
        jobs = [await client.submit(picture(color=number)) for number in range(8)]

        async def found() -> dict[str, Any]:
            return {worker["id"]: worker for worker in (await rig.get("/api/workers")).body["workers"]}

        async def is_offline() -> bool:
            return bool((await found()).get("dead", {}).get("status") == "offline")

        await eventually(is_offline)
        assert "its execution thread is dead; restart it" in (await found())["dead"]["offline_reason"]
        told = (await rig.get(f"/api/jobs/{jobs[-1].id}/explain")).body["summary"]
        assert "its execution thread is dead; restart it" in told

        alive = await stack.enter_async_context(FakeComfyUI())
        await stack.enter_async_context(
            Agent(api, WorkerId("alive"), [ComfyUI(alive.url, SETTINGS)], QUICK_AGENT)
        )
        results = await asyncio.gather(*(client.wait(job.id, timeout=60) for job in jobs))
        assert [result.status for result in results] == ["completed"] * 8
        assert dead.stats.prompts_accepted == 2, "somebody else's, and the one job that found it out"
        for job in jobs:
            dispatch = await rig.engine.store.load(JobId(job.id))
            assert dispatch is not None and (dispatch.charged, dispatch.worker_faults) == (0, 0)
