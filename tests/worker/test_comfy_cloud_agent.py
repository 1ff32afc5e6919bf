"""An agent whose lease is over leaves the paid run to the next lease; a job that is cancelled is stopped."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tests.worker._comfy_cloud import QUICK, again, color_of, slow
from tests.worker._comfyui import eventually
from tests.worker._scripted import WORKER, ScriptedApi, cancel, leased_job, quick, until

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.testing.fake_comfy_cloud import FakeComfyCloud
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfy_cloud import ComfyCloud
from comfyfleet.worker.journal import Journal


def job() -> LeasedJob:
    graph = slow(30, 0.05)
    graph["3"] = {
        "class_type": "EmptyImage",
        "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0xCC3300},
    }
    graph["4"] = {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "flag"}}
    return msgspec.structs.replace(leased_job(), workflow=graph)


async def assert_completed_with_the_first_run(
    fake: FakeComfyCloud, api: ScriptedApi, connector: ComfyCloud
) -> None:
    await until(lambda: api.named("complete"))
    (completion,) = api.named("complete")
    (file,) = (file for file in completion.result.files if file.node_id == "4")
    assert color_of(await connector.fetch(file)) == 0xCC3300
    assert fake.stats.charged == 1.0 and fake.stats.submissions == 1 and fake.stats.cancels == []


async def test_a_run_whose_lease_is_lost_goes_on_and_the_next_lease_gets_its_result() -> None:
    async with FakeComfyCloud() as fake:
        api, connector, first = ScriptedApi(), ComfyCloud(fake.url, QUICK), job()
        async with Agent(api, WORKER, [connector], quick()) as agent:
            api.give(first)
            await until(lambda: fake.stats.charged)
            api.lost.add(first.ref)
            await until(lambda: not agent._runs)
            assert fake.stats.cancels == []
            api.give(again(first, number=2))
            await assert_completed_with_the_first_run(fake, api, connector)


async def test_a_worker_that_returns_does_not_stop_the_run_that_another_one_continues(tmp_path: Path) -> None:
    async with FakeComfyCloud() as fake:
        first = job()
        former = ComfyCloud(fake.url, QUICK)
        async with former:
            api = ScriptedApi()
            async with Agent(api, WorkerId("former"), [former], quick()) as agent:
                api.give(first)
                await until(lambda: fake.stats.charged)
                api.lost.add(first.ref)
                await until(lambda: not agent._runs)
        journal = Journal(tmp_path, WorkerId("former"))
        journal.open()
        journal.begin(first.ref, first.service, PollId("poll-of-former"))
        journal.close()
        other_api, other = ScriptedApi(), ComfyCloud(fake.url, QUICK)
        async with Agent(other_api, WORKER, [other], quick()) as agent:
            other_api.give(again(first, number=2))
            await until(lambda: agent._runs)
            back, returning = ScriptedApi(), Journal(tmp_path, WorkerId("former"))
            async with Agent(
                back, WorkerId("former"), [ComfyCloud(fake.url, QUICK)], quick(), journal=returning
            ):
                await until(lambda: len(back.named("poll")) > 1)
                await assert_completed_with_the_first_run(fake, other_api, other)


async def test_a_job_that_is_cancelled_is_stopped_and_given_back() -> None:
    async with FakeComfyCloud() as fake:
        api, first = ScriptedApi(), job()
        async with Agent(api, WORKER, [ComfyCloud(fake.url, QUICK)], quick()):
            api.give(first)
            await until(lambda: fake.stats.charged)
            api.push(cancel(first))
            await until(lambda: api.named("release"))
            assert api.named("release")[0].reason == "cancelled"
            await eventually(lambda: [made.status for made in fake.jobs.values()] == ["canceled"])
