"""An agent in front of a fake ComfyUI: what happens to the server is noticed without waiting for the next check."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from tests.worker._comfyui import QUICK as QUICK_COMFYUI
from tests.worker._comfyui import picture
from tests.worker._scripted import WORKER, ScriptedApi, leased_job, quick, until

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.failure import FailureKind
from comfyfleet.ports import Inventory
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.agent import Agent, AgentStatus
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.servers import ReportsConnection

RARE = quick(health_interval_s=1000.0, missed_checks=2)
"""Whatever is noticed with these was told, not asked for."""


class Counting(ComfyUI):
    looks = 0

    async def inventory(self) -> Inventory:
        self.looks += 1
        return await super().inventory()


@asynccontextmanager
async def agent_on(fake: FakeComfyUI) -> AsyncIterator[tuple[ScriptedApi, Agent, Counting]]:
    api, connector = ScriptedApi(), Counting(fake.url, QUICK_COMFYUI)
    async with Agent(api, WORKER, [connector], RARE) as agent:
        await until(lambda: api.parked == 1)
        # A loss can only be told of a socket that was open.
        assert await connector._listening().wait_connected(2.0)
        yield api, agent, connector


def job(name: str = "job") -> LeasedJob:
    return msgspec.structs.replace(leased_job(name), workflow=picture())


def models_of(api: ScriptedApi) -> frozenset[str]:
    models = api.named("register")[-1].capabilities.services[0].models
    assert models is not None
    return frozenset(models)


def test_the_connector_tells_of_its_connection() -> None:
    assert isinstance(ComfyUI("http://gpu-a:8188"), ReportsConnection)


async def test_a_restart_between_two_checks_is_noticed_with_what_it_brought() -> None:
    async with FakeComfyUI() as fake, agent_on(fake) as (api, _, _):
        fake.faults.added_models = {"checkpoints": {"new.safetensors": 2.0}}
        assert "new.safetensors" not in models_of(api)
        await fake.restart()
        await until(lambda: "new.safetensors" in models_of(api))
        api.give(job())
        await until(lambda: api.named("complete"))


async def test_a_server_that_dies_between_two_checks_is_offline_at_once_and_back_with_its_return() -> None:
    async with FakeComfyUI() as fake, agent_on(fake) as (api, agent, _):
        await fake.crash()
        await until(lambda: api.named("unregister"))
        assert "connection" in api.named("unregister")[0]
        assert agent.state.status is AgentStatus.OFFLINE
        await fake.restart()
        await until(lambda: len(api.named("register")) == 2)
        await until(lambda: agent.state.status is AgentStatus.ONLINE)


async def test_a_lost_socket_alone_costs_a_look_and_nothing_else() -> None:
    async with FakeComfyUI() as fake, agent_on(fake) as (api, agent, connector):
        assert connector.looks == 1
        fake.faults.drop_sockets = True
        await until(lambda: connector.looks == 2)
        assert agent.state.status is AgentStatus.ONLINE
        assert len(api.named("register")) == 1


async def test_a_server_with_a_dead_worker_thread_is_offline_until_it_is_restarted() -> None:
    async with FakeComfyUI() as fake, agent_on(fake) as (api, agent, _):
        fake.faults.dead_worker = True
        api.give(job("1"), job("2"))
        await until(lambda: agent.state.status is AgentStatus.OFFLINE)
        assert "its execution thread is dead" in agent.state.reason
        assert "Restart the server" in agent.state.reason
        assert [call.failure.kind for call in api.named("fail")] == [FailureKind.DEAD_WORKER]
        fake.faults.dead_worker = False
        await fake.restart()
        await until(lambda: api.named("complete"))
        assert agent.state.status is AgentStatus.ONLINE
    assert len(api.named("fail")) == 1
