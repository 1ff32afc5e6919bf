"""An agent in front of a fake A1111 server: what happens to the server, and what the agent tells of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.worker._a1111 import FAST, QUICK, payload, tuned
from tests.worker._scripted import WORKER, ScriptedApi, leased_job, quick, until

from comfyfleet.model.calls import Command, LeasedJob
from comfyfleet.model.failure import FailureKind
from comfyfleet.testing.fake_a1111 import FakeA1111, FakeA1111Settings
from comfyfleet.worker.agent import Agent, AgentStatus
from comfyfleet.worker.connectors.a1111 import A1111, A1111Settings

RARE = quick(health_interval_s=1000.0, missed_checks=2, reconnect_grace_s=0.0)
"""Whatever is noticed with these was told, not asked for."""


@asynccontextmanager
async def agent_on(
    fake: FakeA1111, settings: A1111Settings = QUICK, agent_settings: Any = RARE
) -> AsyncIterator[tuple[ScriptedApi, Agent]]:
    api = ScriptedApi()
    async with Agent(api, WORKER, [A1111(fake.url, settings)], agent_settings) as agent:
        yield api, agent


def job(name: str = "job", **body: Any) -> LeasedJob:
    return msgspec.structs.replace(leased_job(name, service="a1111"), workflow=payload(**body))


async def test_the_worker_offers_what_its_server_has_and_completes_jobs() -> None:
    async with FakeA1111(FAST) as fake, agent_on(fake) as (api, _):
        api.give(job("1", seed=1), job("2", seed=2))
        await until(lambda: len(api.named("complete")) == 2)
        offered = api.named("register")[-1].capabilities
        assert offered.is_fake and "base.safetensors" in offered.services[0].models
        assert [run.body["seed"] for run in fake.runs] == [1, 2]


async def test_a_server_that_dies_in_a_run_is_offline_at_once() -> None:
    settings = quick(health_interval_s=1000.0, missed_checks=1, reconnect_grace_s=0.0)
    async with FakeA1111(FAST) as fake, agent_on(fake, QUICK, settings) as (api, agent):
        fake.faults.crash_at_step = 1
        api.give(job())
        await until(lambda: api.named("fail"))
        assert api.named("fail")[0].failure.kind is FailureKind.CRASHED
        await until(lambda: agent.state.status is AgentStatus.OFFLINE)


async def test_a_wrong_password_takes_the_worker_out_and_says_what_to_do() -> None:
    settings = FakeA1111Settings(user="me", password="right")
    async with (
        FakeA1111(settings) as fake,
        agent_on(fake, tuned(user="me", password="wrong")) as (api, agent),
    ):
        await until(lambda: agent.state.status is AgentStatus.OFFLINE)
        await until(lambda: "refuses our user and password" in agent.state.reason)
        assert "wrong" not in agent.state.reason and not api.named("poll")


async def test_a_cancelled_job_is_interrupted_and_given_back() -> None:
    async with FakeA1111(FAST) as fake, agent_on(fake) as (api, _):
        long = job(steps=100_000)
        api.give(long)
        await until(lambda: fake.runs and fake.runs[0].steps_done)
        api.push(Command("cancel", long.job_id, long.ref.number))
        await until(lambda: api.named("release"))
        assert fake.runs[0].outcome == "interrupted"
        assert api.named("release")[0].reason == "cancelled"
        api.give(job("next"))
        await until(lambda: api.named("complete"))


async def test_a_busy_server_gives_the_job_back_and_it_costs_nothing() -> None:
    async with FakeA1111(FAST) as fake, agent_on(fake) as (api, _):
        await until(lambda: api.parked == 1)
        fake.process.flags.begin("scripts_txt2img")
        api.give(job())
        await until(lambda: api.named("release"))
        assert api.named("release")[0].reason == "declined" and not api.named("fail")
        assert fake.runs == []


async def test_nothing_is_left_on_disk_when_the_worker_stops(tmp_path: Path) -> None:
    async with FakeA1111(FAST) as fake, agent_on(fake, tuned(spool=tmp_path)) as (api, _):
        api.give(job())
        await until(lambda: api.named("complete"))
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240
