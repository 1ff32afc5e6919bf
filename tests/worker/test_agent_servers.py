"""An agent whose servers come, go, and change what they have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.worker._scripted import ScriptedApi, leased_job, quick, running, until

from comfyfleet.model.calls import LeasedJob, Report
from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.worker.agent import AgentState, AgentStatus
from comfyfleet.worker.connectors.simulated import SimulatedConnector, fails

# servers that come and go


def states() -> tuple[list[AgentState], Callable[[AgentState], None]]:
    told: list[AgentState] = []
    return told, told.append


async def test_a_server_that_is_down_at_the_start_is_waited_for() -> None:
    api, connector = ScriptedApi(), SimulatedConnector()
    connector.is_healthy = False
    told, listener = states()
    async with running(api, connector, on_state=listener) as agent:
        assert agent.state.status is AgentStatus.OFFLINE
        assert not api.calls
        connector.is_healthy = True
        await until(lambda: api.parked == 1)
    assert [state.status for state in told] == ["offline", "online", "draining", "stopped"]


async def test_a_connector_that_cannot_be_opened_is_opened_again() -> None:
    class Stiff(SimulatedConnector):
        tries = 0

        async def open(self) -> None:
            self.tries += 1
            if self.tries < 3:
                raise ConnectionError("connection refused")
            await super().open()

    api, connector = ScriptedApi(), Stiff()
    async with running(api, connector) as agent:
        assert "connection refused" in agent.state.reason
        await until(lambda: api.parked == 1)
        assert connector.is_open
    assert not connector.is_open


async def test_a_lost_server_takes_the_worker_offline_and_its_return_brings_it_back_after_the_grace() -> None:
    api, connector = ScriptedApi(), SimulatedConnector()
    told, listener = states()
    async with running(api, connector, settings=quick(reconnect_grace_s=0.1), on_state=listener):
        await until(lambda: api.parked == 1)
        connector.go_down()
        await until(lambda: api.named("unregister") == ["offline"])
        assert api.parked == 0
        connector.come_back(restarted=True)
        back_at = asyncio.get_running_loop().time()
        await until(lambda: len(api.named("register")) == 2)
        assert asyncio.get_running_loop().time() - back_at >= 0.09
        await until(lambda: api.parked == 1)
        api.give(leased_job())
        await until(lambda: api.named("complete"))
    assert [state.status for state in told][:4] == ["online", "offline", "reconnecting", "online"]
    assert told[1].disconnects == 1


async def test_a_single_missed_check_is_forgiven() -> None:
    api, connector = ScriptedApi(), SimulatedConnector()

    class Once(SimulatedConnector):
        misses = 0

        async def check_health(self) -> bool:
            self.misses += 1
            return self.misses != 2

    connector = Once()
    async with running(api, connector, settings=quick(missed_checks=2)):
        await until(lambda: connector.misses > 4)
    assert api.named("unregister") == ["stopped"]


async def test_one_of_two_services_can_be_lost_alone() -> None:
    api, pictures, words = ScriptedApi(), SimulatedConnector("comfyui"), SimulatedConnector("langflow")
    async with running(api, pictures, words) as agent:
        words.go_down()
        await until(lambda: len(api.named("register")) == 2)
        assert api.named("register")[1].capabilities.services == (Service("comfyui"),)
        assert agent.state.status is AgentStatus.ONLINE
        words.come_back()
        await until(lambda: len(api.named("register")) == 3)
        assert not api.named("unregister")


async def test_a_registration_that_fails_is_repeated() -> None:
    api = ScriptedApi()
    api.faults["register"].extend([Fault("away")] * 3)
    async with running(api, SimulatedConnector()) as agent:
        assert "away" in agent.state.reason
        await until(lambda: api.parked == 1)
        assert agent.state.status is AgentStatus.ONLINE


async def test_a_dead_server_does_not_fail_one_job_after_the_other() -> None:
    api = ScriptedApi()

    async def behave(job: LeasedJob, report: Callable[[Report], None]) -> JobResult:
        connector.is_healthy = False
        raise ServiceFailed(Failure(FailureKind.TRANSIENT, "connection refused"))

    connector = SimulatedConnector(behaviour=behave)
    async with running(api, connector, settings=quick(health_interval_s=1000.0)):
        api.give(*(leased_job(str(number)) for number in range(10)))
        await until(lambda: api.named("unregister"))
    assert len(api.named("fail")) == 1
    assert all(call.reason == "declined" for call in api.named("release"))


# inventory


@pytest.mark.parametrize("kind", [FailureKind.MISSING_MODEL, FailureKind.MISSING_NODE])
async def test_a_failure_for_something_missing_refreshes_the_inventory(kind: FailureKind) -> None:
    api = ScriptedApi()
    connector = SimulatedConnector(behaviour=fails(Failure(kind, "not here", missing=("x",))))
    async with running(api, connector, settings=quick(health_interval_s=1000.0)):
        await until(lambda: api.parked == 1)
        connector.capabilities = Capabilities((Service("comfyui", models=frozenset({"b"})),))
        api.give(leased_job())
        await until(lambda: len(api.named("register")) == 2)
    assert api.names.index("fail") < len(api.names) - 1 - api.names[::-1].index("register")
    assert api.named("register")[1].capabilities == connector.capabilities


async def test_an_unchanged_inventory_is_registered_again_only_when_somebody_asks() -> None:
    api, connector = ScriptedApi(), SimulatedConnector()
    async with running(api, connector, settings=quick(inventory_interval_s=0.005)) as agent:
        await until(lambda: connector.inventory_count > 3)
        assert len(api.named("register")) == 1
        await agent.refresh()
        assert len(api.named("register")) == 2, "whoever asks for a look has a reason"


async def test_a_server_that_was_started_anew_is_registered_again() -> None:
    api, connector = ScriptedApi(), SimulatedConnector()
    async with running(api, connector) as agent:
        await until(lambda: api.parked == 1)
        parked = api.named("poll")[0].poll_id
        connector.boot = "2"
        await agent.refresh()
        assert len(api.named("register")) == 2
        await until(lambda: len(api.named("poll")) == 2)
        assert api.named("poll")[1].poll_id == parked


async def test_a_server_that_was_away_for_a_moment_is_looked_at_again() -> None:
    class Restarts(SimulatedConnector):
        checks = 0

        async def check_health(self) -> bool:
            self.checks += 1
            if self.checks == 2:
                self.boot = "2"
            return self.checks != 2

    api, connector = ScriptedApi(), Restarts()
    async with running(api, connector, settings=quick(missed_checks=2)):
        await until(lambda: len(api.named("register")) == 2)
        assert not api.named("unregister")
