"""The progress of a real run at the hub: in words, and with an end that follows from the pace of its steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, hub_in_process, running_hub, submission
from tests.hub._watching import report
from tests.hub.test_agent_over_a_wire import GPU
from tests.hub.test_jobs import take
from tests.hub.test_socket import connected
from tests.pool._fleet import text_to_image
from tests.worker._comfyui import QUICK as QUICK_COMFYUI
from tests.worker._scripted import quick, until

from comfyfleet import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


async def progress(rig: HubRig, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await rig.get(f"/jobs/{job_id}/progress")).body
    return found


async def test_the_end_is_estimated_from_what_the_worker_says_of_its_pace(rig: HubRig) -> None:
    job_id = await rig.submit()
    job = await take(rig)
    await report(rig, job, value=5, max=20, remaining_s=30)
    body = await progress(rig, job_id)
    assert body["estimated_completion"] == pytest.approx(body["updated_at"] + 30)
    # It is faster than it seemed.
    await report(rig, job, value=15, max=20, remaining_s=2)
    body = await progress(rig, job_id)
    assert body["estimated_completion"] == pytest.approx(body["updated_at"] + 2)


@pytest.mark.parametrize("nonsense", ["soon", -1, 1e300, True, None, float("nan")])
async def test_a_pace_that_is_none_is_not_believed(rig: HubRig, nonsense: Any) -> None:
    job_id = await rig.submit()
    job = await take(rig)
    await report(rig, job, value=5, max=20, remaining_s=nonsense)
    assert (await progress(rig, job_id))["estimated_completion"] is None


async def test_a_run_is_watched_in_words_with_a_bar_that_never_goes_back() -> None:
    async with (
        running_hub() as rig,
        FakeComfyUI(FakeSettings(time_scale=0.5)) as fake,
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, GPU, [ComfyUI(fake.url, QUICK_COMFYUI)], quick()),
        FleetClient(rig.url, rig.keys[Role.OPERATOR]) as client,
    ):
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        graph = text_to_image(steps=20)
        graph["5"]["inputs"] |= {"width": 1024, "height": 1024}
        made = await rig.post("/api/jobs", submission(workflow=graph))
        async with asyncio.timeout(60):
            told = [update async for update in client.watch(made.body["id"]) if update.kind == "progress"]
        running = [update for update in told if update.message and "step" in update.message]
        assert running and all(
            update.message == f"KSampler: step {update.value:g} of 20" for update in running
        )
        percentages = [update.percentage for update in told if update.percentage is not None]
        assert percentages == sorted(percentages)
        estimates = [
            update.estimated_completion for update in running if update.estimated_completion is not None
        ]
        assert estimates, "two steps are enough to tell"


async def test_the_words_are_told_over_the_websocket_too() -> None:
    async with running_hub() as rig, connected(rig) as line:
        job_id = await rig.submit()
        job = await take(rig)
        await line.ask("subscribe_progress", job_id=job_id)
        await report(
            rig, job, value=3, max=8, percentage=30.0, message="KSampler: step 3 of 8", remaining_s=50
        )
        async with asyncio.timeout(60):
            while (told := await line.until("job_progress"))["message"] is None:
                pass
        assert (told["message"], told["progress"]) == ("KSampler: step 3 of 8", 30.0)
        assert told["estimated_completion"] == pytest.approx(told["updated_at"] + 50)
