"""Jobs of LangFlow from a caller to a fake server and back: a real hub, a real agent over HTTP, and the content."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.hub._hub import HubRig, running_hub
from tests.worker._comfyui import QUICK as QUICK_COMFYUI
from tests.worker._comfyui import picture
from tests.worker._langflow import QUICK
from tests.worker._scripted import quick

from comfyfleet.model.access import Role
from comfyfleet.model.ids import WorkerId
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.testing.fake_langflow import FakeLangFlow
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.langflow import LangFlow
from comfyfleet.worker.transports.http import HttpWorkerApi


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[tuple[HubRig, FakeLangFlow]]:
    """One hub, one ComfyUI worker, one LangFlow worker."""
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(running_hub(folder=folder))
        flows = await stack.enter_async_context(FakeLangFlow())
        comfy = await stack.enter_async_context(FakeComfyUI())
        api = await stack.enter_async_context(HttpWorkerApi(rig.url, rig.keys[Role.WORKER]))
        for name, connector in (
            ("gpu", ComfyUI(comfy.url, QUICK_COMFYUI)),
            ("flows", LangFlow(flows.url, QUICK)),
        ):
            agent = Agent(api, WorkerId(name), [connector], quick())
            await stack.enter_async_context(agent)
            await agent.wait_for_first_check()
        yield rig, flows


async def submitted(rig: HubRig, payload: dict[str, Any], **more: Any) -> str:
    body = {"workflow": payload, "service": "langflow", **more}
    answer = await rig.post("/api/jobs", body, role=Role.TENANT)
    assert answer.status == 201, answer.content
    return str(answer.body["id"])


async def ended(rig: HubRig, job_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (answer := await rig.get(f"/api/jobs/{job_id}/result", role=Role.TENANT)).status == 202:
            await asyncio.sleep(0.02)
    return dict(answer.body)


async def test_texts_come_as_data_and_files_from_the_hub(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (rig, flows):
        jobs = [await submitted(rig, {"flow": "lab-picture", "input_value": f"cat {n}"}) for n in range(3)]
        comfy = await rig.post("/api/jobs", {"workflow": picture()}, role=Role.TENANT)
        results = [(await ended(rig, job))["result"] for job in jobs]
        assert (await ended(rig, comfy.body["id"]))["status"] == "completed"
        # The files are the hub's own now.
        await flows.kill()
        for number, result in enumerate(results):
            assert result["outputs"]["ChatOutput-z"]["content"] == f"drew cat {number}"
            (file,) = result["files"]
            answer = await rig.get(file["url"], role=None)
            assert answer.content == f"made from: cat {number}".encode()
    assert sorted(flows.jobs.runs) == ["cat 0", "cat 1", "cat 2"]


async def test_a_file_of_the_hub_reaches_the_flow_and_does_not_stay_there(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (rig, flows):
        made = (await rig.post("/api/files", {"name": "in.txt"}, role=Role.TENANT)).body
        assert (await rig.ask("PUT", made["link"]["url"], raw=b"my letter", role=None)).status == 200
        assert (await rig.post(f"/api/files/{made['id']}/complete", role=Role.TENANT)).status == 200
        for node, field in (("files", "letter"), ("LabRead-m", "path")):
            inputs = [{"file": made["id"], "node": node, "input": field}]
            job = await submitted(rig, {"flow": "lab-read", "input_value": "I"}, inputs=inputs)
            result = (await ended(rig, job))["result"]
            assert result["outputs"]["ChatOutput-z"]["content"] == "I read: my letter"
        async with asyncio.timeout(60):
            while flows.storage:
                await asyncio.sleep(0.02)


async def test_a_wrong_payload_is_refused_at_submit_and_an_unknown_flow_waits_for_a_worker(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as (rig, flows):
        for payload, field in (
            ({"data": {}}, "data"),
            ({"flow": "f", "tweaks": 3}, "tweaks"),
            ({"flow": " f "}, "`flow` begins or ends with a space"),
        ):
            answer = await rig.post(
                "/api/jobs", {"workflow": payload, "service": "langflow"}, role=Role.TENANT
            )
            assert answer.status == 422 and field in answer.body["detail"]
        job = await submitted(rig, {"flow": "not there yet", "input_value": "x"})
        assert (await rig.get(f"/api/jobs/{job}", role=Role.TENANT)).body["status"] == "queued"
        assert flows.jobs.runs == []


async def test_a_server_that_dies_in_a_run_costs_one_attempt_and_the_job_completes(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (rig, flows):
        flows.faults.holds = True
        job = await submitted(rig, {"flow": "lab-picture", "input_value": "cat"}, retry_delay_s=0.1)
        async with asyncio.timeout(60):
            while not flows.jobs.runs:
                await asyncio.sleep(0.02)
        await flows.kill()
        flows.faults.holds = False
        await flows.start()
        found = await ended(rig, job)
        assert found["status"] == "completed", found
        assert found["result"]["outputs"]["ChatOutput-z"]["content"] == "drew cat"
    assert flows.jobs.runs == ["cat", "cat"]


async def test_a_cancel_by_the_caller_stops_the_run_at_the_server(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (rig, flows):
        flows.faults.holds = True
        job = await submitted(rig, {"flow": "lab-picture", "input_value": "cat"})
        async with asyncio.timeout(60):
            while not flows.jobs.runs:
                await asyncio.sleep(0.02)
        assert (await rig.post(f"/api/jobs/{job}/cancel", role=Role.TENANT)).status in (200, 202)
        assert (await ended(rig, job))["status"] == "cancelled"
        async with asyncio.timeout(60):
            while [each.state for each in flows.jobs.by_id.values()] != ["cancelled"]:
                await asyncio.sleep(0.02)
