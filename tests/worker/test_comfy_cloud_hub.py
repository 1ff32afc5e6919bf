"""Comfy Cloud behind a real hub: files in and out, an account without money, and workers that are killed.

Each test compares content and counts the credits.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance._process import CLI, read_until, run_cli, started
from tests.hub._hub import HubRig, running_hub, submission
from tests.worker._comfy_cloud import KEY, QUICK, color_of, picture, slow, tuned
from tests.worker._comfyui import QUICK as QUICK_COMFYUI
from tests.worker._comfyui import eventually
from tests.worker._scripted import quick

from comfyfleet.model.access import Role
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.policy.rules import Rules
from comfyfleet.testing.fake_comfy_cloud import FakeCloudSettings, FakeComfyCloud
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfy_cloud import ComfyCloud, ComfyCloudSettings
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi

COPY = {
    "10": {"class_type": "LoadImage", "inputs": {"image": "example.png"}},
    "11": {"class_type": "SaveImage", "inputs": {"images": ["10", 0], "filename_prefix": "copy"}},
}


@asynccontextmanager
async def worker_at(
    rig: HubRig,
    fake: FakeComfyCloud,
    settings: ComfyCloudSettings = QUICK,
    name: str = "cloud",
    slots: int = 1,
) -> AsyncIterator[Agent]:
    async with (
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, WorkerId(name), [ComfyCloud(fake.url, settings)], quick(slots=slots)) as agent,
    ):
        yield agent


async def submitted(rig: HubRig, workflow: dict[str, Any], **more: Any) -> str:
    answer = await rig.post("/api/jobs", submission(workflow=workflow, **more), role=Role.TENANT)
    assert answer.status == 201, answer.content
    return str(answer.body["id"])


async def ended(rig: HubRig, job_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (answer := await rig.get(f"/api/jobs/{job_id}/result", role=Role.TENANT)).status == 202:
            await asyncio.sleep(0.02)
    return dict(answer.body)


async def content_of(rig: HubRig, result: dict[str, Any]) -> bytes:
    (file,) = result["result"]["files"]
    assert "127.0.0.1" not in file["url"] or file["url"].startswith(rig.url)
    return (await rig.get(file["url"], role=None)).content


async def worker_of(rig: HubRig, name: str = "cloud") -> dict[str, Any]:
    workers = (await rig.get("/api/workers")).body["workers"]
    return next((worker for worker in workers if worker["id"] == name), {})


async def test_eight_jobs_and_one_with_an_input_are_kept_by_the_hub_and_paid_once_each(
    tmp_path: Path,
) -> None:
    async with (
        running_hub(folder=tmp_path) as rig,
        FakeComfyCloud(FakeCloudSettings(plan="creator")) as fake,
        worker_at(rig, fake, slots=3),
    ):
        jobs = {number: await submitted(rig, picture(color=number << 8)) for number in range(1, 9)}
        for number, job_id in jobs.items():
            assert color_of(await content_of(rig, await ended(rig, job_id))) == number << 8
        first = jobs[5]
        copy = await submitted(rig, COPY, inputs=[{"job": first, "node": "10", "input": "image"}])
        assert color_of(await content_of(rig, await ended(rig, copy))) == 5 << 8
        worker = await worker_of(rig)
        assert (worker["environment"], worker["slots"]) == ("cloud", 3)
        assert fake.stats.charged == 9.0 == len(fake.stats.jobs_made)
        assert fake.stats.keys_at_storage == fake.stats.interrupts == 0


async def test_an_account_without_credits_pauses_the_worker_and_another_service_runs_the_job(
    tmp_path: Path,
) -> None:
    async with (
        running_hub(folder=tmp_path) as rig,
        FakeComfyCloud(FakeCloudSettings(credits=0.0)) as fake,
        worker_at(rig, fake, tuned(pause_s=60.0)),
    ):
        job_id = await submitted(rig, picture(color=0x445566))

        async def has_told_why() -> bool:
            # A worker that is slow to start is offline for a moment too, for another reason.
            worker = await worker_of(rig)
            reason = worker.get("offline_reason") or ""
            return worker.get("status") == "offline" and "the account cannot pay (Out of credits.)" in reason

        await eventually(has_told_why)
        assert "127.0.0.1" not in (await worker_of(rig))["offline_reason"]
        dispatch = await rig.engine.store.load(JobId(job_id))
        assert dispatch is not None and (dispatch.charged, dispatch.worker_faults, dispatch.releases) == (
            0,
            0,
            0,
        )
        async with (
            FakeComfyUI() as local,
            HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
            Agent(api, WorkerId("local"), [ComfyUI(local.url, QUICK_COMFYUI)], quick()),
        ):
            assert color_of(await content_of(rig, await ended(rig, job_id))) == 0x445566
        assert fake.stats.submissions == 1 and fake.stats.charged == 0.0


async def test_the_worker_returns_by_itself_when_the_account_can_pay_again(tmp_path: Path) -> None:
    async with (
        running_hub(folder=tmp_path) as rig,
        FakeComfyCloud(FakeCloudSettings(credits=0.0)) as fake,
        worker_at(rig, fake),
    ):
        job_id = await submitted(rig, picture(color=0x010203))
        await eventually(lambda: fake.stats.submissions > 0)
        fake.give_credits(10.0)
        assert color_of(await content_of(rig, await ended(rig, job_id))) == 0x010203
        assert fake.stats.charged == 1.0
        dispatch = await rig.engine.store.load(JobId(job_id))
        assert dispatch is not None and dispatch.charged == 0


async def test_a_job_whose_fate_is_unknown_fails_once_and_a_person_may_retry_it(tmp_path: Path) -> None:
    async with (
        running_hub(folder=tmp_path) as rig,
        FakeComfyCloud() as fake,
        worker_at(rig, fake),
    ):
        fake.faults.lose_after, fake.faults.hides_jobs = 1, True
        job_id = await submitted(rig, picture(color=0x111111), max_attempts=5)
        error = (await ended(rig, job_id))["error"]
        assert error["kind"] == "outcome_unknown" and "It may have run and cost credits" in error["message"]
        assert len(fake.stats.jobs_made) == 1 and fake.stats.charged == 1.0
        fake.faults.hides_jobs = False
        assert (await rig.post(f"/api/jobs/{job_id}/retry", role=Role.TENANT)).status == 200
        assert color_of(await content_of(rig, await ended(rig, job_id))) == 0x111111
        assert fake.stats.charged == 2.0, "a person decided to pay again"


async def test_outputs_that_are_gone_do_not_make_the_hub_pay_for_another_run(tmp_path: Path) -> None:
    async with (
        running_hub(folder=tmp_path) as rig,
        FakeComfyCloud() as fake,
        worker_at(rig, fake),
    ):
        fake.faults.are_outputs_gone = True
        job_id = await submitted(rig, picture(), max_attempts=5)
        error = (await ended(rig, job_id))["error"]
        assert error["kind"] == "outcome_unknown" and "no longer has the output" in error["message"]
        assert fake.stats.charged == 1.0


# real processes


def settings_file(folder: Path, **settings: object) -> Path:
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else value}"
        for name, value in settings.items()
    ]
    (folder / "key").write_text(f"{KEY}\n")
    path = folder / "worker.toml"
    table = ["[connectors.comfy_cloud]", f'key_file = "{folder}/key"', 'allow = ["127.0.0.1"]', *lines]
    path.write_text("\n".join(table) + "\n")
    return path


def command(rig: HubRig, fake: FakeComfyCloud, folder: Path, name: str) -> tuple[str, ...]:
    config = str(settings_file(folder, poll_s=0.05, poll_max_s=0.5))
    options = ("--hub", rig.url, "--service", f"comfy_cloud={fake.url}", "--name", name)
    return (*CLI, "worker", "--config", config, *options)


@pytest.mark.parametrize("successor", ["cloud", "other"], ids=["the same worker", "another worker"])
async def test_a_worker_that_is_killed_during_a_run_leaves_it_to_its_successor_which_pays_nothing(
    tmp_path: Path, successor: str
) -> None:
    data = {"COMFYFLEET_DATA": str(tmp_path / "data")}
    rules = Rules(lease_ttl_s=5.0)
    async with (
        running_hub(folder=tmp_path / "files", is_open=True, rules=rules) as rig,
        FakeComfyCloud() as fake,
    ):
        job_id = await submitted(rig, slow(40, 0.1, seed=77))
        with started(*command(rig, fake, tmp_path, "cloud"), env=data) as first:
            await asyncio.to_thread(read_until, first, lambda line: line.endswith(": online"))
            await eventually(lambda: fake.stats.charged == 1.0)
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.wait)
        with started(*command(rig, fake, tmp_path, successor), env=data) as second:
            result = await ended(rig, job_id)
            worker_id = (await rig.get(f"/api/jobs/{job_id}")).body["worker_id"]
            second.kill()
        assert result["status"] == "completed" and worker_id == successor
        (made,) = fake.jobs.values()
        asset = fake._account.assets[made.outputs[0]["id"]]
        assert await content_of(rig, result) == asset.path.read_bytes()
        assert fake.stats.charged == 1.0 and fake.stats.cancels == []


async def test_the_command_line_shows_why_the_worker_is_offline_and_never_the_key(tmp_path: Path) -> None:
    data = {"COMFYFLEET_DATA": str(tmp_path / "data")}
    async with running_hub(is_open=True) as rig, FakeComfyCloud(FakeCloudSettings(key="another")) as fake:
        fake.faults.echoes_key = True
        with started(*command(rig, fake, tmp_path, "cloud"), env=data) as process:

            async def is_told() -> bool:
                return "key" in (await worker_of(rig)).get("offline_reason", "")

            await eventually(is_told)
            shown = await asyncio.to_thread(run_cli, "workers", "--hub", rig.url, env=data)
            process.terminate()
            out, err = await asyncio.to_thread(process.communicate)
        assert "it does not accept the key" in shown.stdout
        assert KEY not in shown.stdout + out + err
