"""One hub, three services, two workers of each: one of each dies, and all jobs complete on the right service."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.hub._hub import HubRig, running_hub
from tests.worker import _a1111, _comfyui, _langflow
from tests.worker._scripted import quick

from comfyfleet.model.access import Role
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.workflow import read_workflow_file
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Connector
from comfyfleet.testing.fake_a1111 import FakeA1111, FakeSubject, drawn_pixels, pixels_of
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.testing.fake_langflow import FakeLangFlow
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.a1111 import A1111
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.langflow import LangFlow
from comfyfleet.worker.transports.http import HttpWorkerApi

EACH = 4
STEPS = 10


class MixedFleet:
    """The hub, and the servers of each service by the names of their workers."""

    def __init__(self, rig: HubRig) -> None:
        self.rig = rig
        self.comfyui: list[FakeComfyUI] = []
        self.a1111: list[FakeA1111] = []
        self.langflow: list[FakeLangFlow] = []

    async def submit(self, payload: dict[str, Any], service: str) -> str:
        answer = await self.rig.post("/api/jobs", {"service": service, "payload": payload, "max_attempts": 9})
        assert answer.status == 201, answer.content
        return str(answer.body["id"])

    async def ended(self, job_id: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while not (await self.rig.engine.get(JobId(job_id))).dispatch.phase.is_final:
                await asyncio.sleep(0.02)
        job = dict((await self.rig.get(f"/api/jobs/{job_id}")).body)
        assert job["status"] == "completed", job
        return job

    async def running_on(self, workers: set[str]) -> None:
        """Until each of these workers runs a job."""
        async with asyncio.timeout(60):
            while True:
                leases = await self.rig.engine.leases(await self.rig.engine.workers())
                if workers <= {str(name) for name, held in leases.items() if held}:
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def mixed_fleet(folder: Path) -> AsyncIterator[MixedFleet]:
    async with AsyncExitStack() as stack:
        rules = Rules(retry_base_s=0.05, cooldown_s=0.2)
        rig = await stack.enter_async_context(running_hub(folder=folder, rules=rules))
        fleet = MixedFleet(rig)
        api = await stack.enter_async_context(HttpWorkerApi(rig.url, rig.keys[Role.WORKER]))
        for number in (1, 2):
            comfy = await stack.enter_async_context(FakeComfyUI())
            picture = await stack.enter_async_context(
                FakeA1111(msgspec.structs.replace(_a1111.FAST, step_seconds=0.05))
            )
            flows = await stack.enter_async_context(FakeLangFlow())
            fleet.comfyui.append(comfy)
            fleet.a1111.append(picture)
            fleet.langflow.append(flows)
            connectors: dict[str, Connector] = {
                "comfyui": ComfyUI(comfy.url, _comfyui.QUICK),
                "a1111": A1111(picture.url, _a1111.QUICK),
                "langflow": LangFlow(flows.url, _langflow.QUICK),
            }
            for service, connector in connectors.items():
                agent = Agent(api, WorkerId(f"{service}-{number}"), [connector], quick())
                await stack.enter_async_context(agent)
                await agent.wait_for_first_check()
        yield fleet


def _sleep(number: int) -> dict[str, Any]:
    tweaks = {"LabSleep-m": {"seconds": 0.5}}
    return {"flow": "lab-sleep", "input_value": f"tea {number}", "tweaks": tweaks}


async def test_jobs_of_three_services_survive_the_death_of_a_server_of_each(tmp_path: Path) -> None:
    async with mixed_fleet(tmp_path) as fleet:
        graphs = [
            await fleet.submit({"workflow": _comfyui.slow(step_seconds=0.1, seed=number)}, "comfyui")
            for number in range(EACH)
        ]
        pictures = [
            await fleet.submit(_a1111.payload(prompt=f"fox {number}", seed=number, steps=STEPS), "a1111")
            for number in range(EACH)
        ]
        flows = [await fleet.submit(_sleep(number), "langflow") for number in range(EACH)]
        await fleet.running_on({"comfyui-1", "a1111-1", "langflow-1"})
        await asyncio.gather(fleet.comfyui[0].crash(), fleet.a1111[0].crash(), fleet.langflow[0].kill())
        for number, job_id in enumerate(graphs):
            job = await fleet.ended(job_id)
            assert job["worker_id"].startswith("comfyui-")
            graph = read_workflow_file(io.BytesIO(await _content(fleet, job_id)), "output")
            assert graph["1"]["inputs"]["seed"] == number
        for number, job_id in enumerate(pictures):
            job = await fleet.ended(job_id)
            assert job["worker_id"].startswith("a1111-")
            drawn = drawn_pixels(FakeSubject(prompt=f"fox {number}", seed=number, steps=STEPS))
            assert pixels_of(await _content(fleet, job_id)) == drawn
        for number, job_id in enumerate(flows):
            job = await fleet.ended(job_id)
            assert job["worker_id"].startswith("langflow-")
            result = (await fleet.rig.get(f"/api/jobs/{job_id}/result")).body["result"]
            assert result["outputs"]["ChatOutput-z"]["content"] == f"slept 0.5: tea {number}"


async def _content(fleet: MixedFleet, job_id: str) -> bytes:
    """The bytes of the only file, as a caller downloads it."""
    result = (await fleet.rig.get(f"/api/jobs/{job_id}/result")).body["result"]
    (file,) = result["files"]
    answer = await fleet.rig.get(file["url"], role=None)
    assert answer.status == 200
    return answer.content
