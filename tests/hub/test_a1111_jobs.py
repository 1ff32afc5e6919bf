"""Jobs of the service `a1111` through a real hub and agents: from the submit to the content of the stored picture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.hub._hub import HubRig, running_hub, submission
from tests.hub.test_inputs import ended, uploaded
from tests.worker import _comfyui
from tests.worker._a1111 import FAST, QUICK, payload, picture
from tests.worker._scripted import quick

from comfyfleet.model.access import Role
from comfyfleet.model.ids import WorkerId
from comfyfleet.testing.fake_a1111 import FakeA1111, FakeSubject, drawn_pixels, pixels_of
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.a1111 import A1111
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi

STEPS = 3


@asynccontextmanager
async def agent_at(rig: HubRig, fake: FakeA1111, name: str = "gpu-a") -> AsyncIterator[Agent]:
    async with (
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, WorkerId(name), [A1111(fake.url, QUICK)], quick()) as agent,
    ):
        yield agent


async def submitted(rig: HubRig, body: dict[str, Any], **more: Any) -> str:
    answer = await rig.post("/api/jobs", {"service": "a1111", "payload": body, **more}, role=Role.TENANT)
    assert answer.status == 201, answer.content
    return str(answer.body["id"])


async def record(rig: HubRig, job_id: str) -> dict[str, Any]:
    return dict((await rig.get(f"/api/jobs/{job_id}", role=Role.TENANT)).body)


async def pixels(rig: HubRig, job: dict[str, Any]) -> list[bytes]:
    files = job["result"]["files"]
    return [pixels_of((await rig.get(file["url"], role=None)).content) for file in files]


def expected(prompt: str, seed: int, **more: Any) -> bytes:
    return drawn_pixels(FakeSubject(prompt=prompt, seed=seed, steps=STEPS, **more))


async def test_a_picture_reaches_the_hub_and_was_made_from_the_payload(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeA1111(FAST) as fake, agent_at(rig, fake):
        job = await ended(rig, await submitted(rig, payload(prompt="a red fox", seed=11)))
        assert job["status"] == "completed", job
        assert await pixels(rig, job) == [expected("a red fox", 11)]
        assert job["result"]["outputs"]["txt2img"]["info"][0]["seeds"] == [11]


async def test_a_seed_is_drawn_at_submit_and_told(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeA1111(FAST) as fake, agent_at(rig, fake):
        body = {"route": "txt2img", "body": {"prompt": "x", "steps": STEPS, "sampler_name": "Euler"}}
        job_id = await submitted(rig, body)
        job = await ended(rig, job_id)
        (seed,) = job["result"]["outputs"]["txt2img"]["info"][0]["seeds"]
        assert seed >= 0 and fake.runs[0].body["seed"] == seed
        assert (await record(rig, job_id))["seeds"] == {"body.seed": seed}
        assert await pixels(rig, job) == [expected("x", seed)]


async def test_a_file_of_the_hub_is_the_picture_that_is_changed(tmp_path: Path) -> None:
    source = picture(8)
    async with running_hub(folder=tmp_path) as rig, FakeA1111(FAST) as fake, agent_at(rig, fake):
        file_id = await uploaded(rig, source)
        inputs = [{"file": file_id, "node": "body", "input": "init_images"}]
        job = await ended(rig, await submitted(rig, payload("img2img", prompt="y", seed=3), inputs=inputs))
        assert job["status"] == "completed", job
        subject = FakeSubject(route="img2img", prompt="y", seed=3, steps=STEPS, sources=(digest(source),))
        assert await pixels(rig, job) == [drawn_pixels(subject)]


async def test_a_picture_of_one_job_is_upscaled_by_the_next(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeA1111(FAST) as fake:
        first = await submitted(rig, payload(prompt="first", seed=1))
        inputs = [{"job": first, "node": "body", "input": "image"}]
        second = await submitted(rig, payload("extra-single-image", upscaler_1="4x-plain"), inputs=inputs)
        async with agent_at(rig, fake):
            one, two = await ended(rig, first), await ended(rig, second)
        assert two["status"] == "completed", two
        (file,) = one["result"]["files"]
        content = (await rig.get(file["url"], role=None)).content
        subject = FakeSubject(route="extra-single-image", sources=(digest(content),), model="")
        assert await pixels(rig, two) == [drawn_pixels(subject)]


async def test_a_server_that_dies_in_a_run_loses_no_job(tmp_path: Path) -> None:
    async with (
        running_hub(folder=tmp_path) as rig,
        FakeA1111(FAST) as dies,
        FakeA1111(FAST) as lives,
        agent_at(rig, dies, "dies"),
    ):
        dies.faults.crash_at_step = 1
        job_id = await submitted(rig, payload(prompt="kept", seed=5), retry_delay_s=0)
        async with asyncio.timeout(60):
            while dies.is_up:
                await asyncio.sleep(0.005)
        async with agent_at(rig, lives, "lives"):
            job = await ended(rig, job_id)
        assert job["status"] == "completed", job
        assert await pixels(rig, job) == [expected("kept", 5)]
        assert [run.outcome for run in dies.runs + lives.runs] == ["died", "completed"]


async def test_a_job_waits_for_a_server_with_its_checkpoint_and_is_told_why(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeA1111(FAST) as fake, agent_at(rig, fake):
        wanted = payload(override_settings={"sd_model_checkpoint": "gone.safetensors"})
        job_id = await submitted(rig, wanted)
        async with asyncio.timeout(60):
            while "gone.safetensors" not in str((await rig.get(f"/api/jobs/{job_id}/explain")).body):
                await asyncio.sleep(0.01)
        assert fake.runs == []


async def test_a_running_job_is_cancelled_at_the_server(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeA1111(FAST) as fake, agent_at(rig, fake):
        job_id = await submitted(rig, payload(steps=100_000))
        async with asyncio.timeout(60):
            while not fake.runs or not fake.runs[0].steps_done:
                await asyncio.sleep(0.005)
        assert (await rig.post(f"/api/jobs/{job_id}/cancel", role=Role.TENANT)).status in (200, 202)
        assert (await ended(rig, job_id))["status"] == "cancelled"
        assert fake.runs[0].outcome == "interrupted"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"route": "txt2img"}, "'body' of an A1111 payload is not valid: it is missing"),
        (payload(steps="many"), "'body.steps'"),
        (payload("img2img", init_images=["http://10.0.0.1/"]), "it is a URL"),
    ],
)
async def test_a_wrong_payload_is_refused_at_submit(tmp_path: Path, body: dict[str, Any], words: str) -> None:
    async with running_hub(folder=tmp_path) as rig:
        answer = await rig.post("/api/jobs", {"service": "a1111", "payload": body}, role=Role.TENANT)
        assert answer.status in (400, 422) and words in answer.content.decode()


async def test_each_job_of_a_mixed_hub_runs_on_its_own_service(tmp_path: Path) -> None:
    async with (
        running_hub(folder=tmp_path) as rig,
        FakeA1111(FAST) as web_ui,
        FakeComfyUI() as comfy,
        agent_at(rig, web_ui),
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, WorkerId("comfy"), [ComfyUI(comfy.url, _comfyui.QUICK)], quick()),
    ):
        ours = [await submitted(rig, payload(prompt=f"n{seed}", seed=seed)) for seed in range(3)]
        graph = submission(workflow=_comfyui.picture())
        theirs = str((await rig.post("/api/jobs", graph, role=Role.TENANT)).body["id"])
        for seed, job_id in enumerate(ours):
            job = await ended(rig, job_id)
            assert (job["status"], (await record(rig, job_id))["worker_id"]) == ("completed", "gpu-a")
            assert await pixels(rig, job) == [expected(f"n{seed}", seed)]
        job = await ended(rig, theirs)
        assert (job["status"], (await record(rig, theirs))["worker_id"]) == ("completed", "comfy")


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()
