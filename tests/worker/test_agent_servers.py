"""An agent whose servers come, go, and change what they have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.worker._scripted import ScriptedApi, leased_job, quick, running, until

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.ports import Inventory
from comfyfleet.worker.agent import AgentState, AgentStatus
from comfyfleet.worker.connectors.simulated import SimulatedConnector, fails
from comfyfleet.worker.servers import MonitoredServer

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
        # The other side knows of it, and why it takes nothing.
        (announced,) = api.named("register")
        assert announced.offline_reason and not announced.capabilities.services
        assert api.names == ["register"]
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
        connector.go_offline()
        await until(lambda: api.named("unregister") == ["its server does not answer"])
        await until(lambda: api.parked == 0)
        connector.go_online(restarted=True)
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


async def test_a_server_that_says_nothing_is_told_in_words() -> None:
    """As where another program listens on the port."""

    class Silent(SimulatedConnector):
        async def open(self) -> None:
            await asyncio.Event().wait()

    server = MonitoredServer(Silent(), quick(open_timeout_s=0.01))
    await server.check()
    assert "does not answer in time. Is the address right" in server.reason
    assert "TimeoutError" not in server.reason


async def test_one_of_two_services_can_be_lost_alone() -> None:
    api, pictures, words = ScriptedApi(), SimulatedConnector("comfyui"), SimulatedConnector("langflow")
    async with running(api, pictures, words) as agent:
        words.go_offline()
        await until(lambda: len(api.named("register")) == 2)
        assert api.named("register")[1].capabilities.services == (Service("comfyui"),)
        assert agent.state.status is AgentStatus.ONLINE
        words.go_online()
        await until(lambda: len(api.named("register")) == 3)
        assert not api.named("unregister")


async def test_a_registration_that_fails_is_repeated() -> None:
    api = ScriptedApi()
    api.faults["register"].extend([Fault("away")] * 3)
    async with running(api, SimulatedConnector()) as agent:
        assert "away" in agent.state.reason
        await until(lambda: api.parked == 1)
        assert agent.state.status is AgentStatus.ONLINE


class Mortal(SimulatedConnector):
    """Dies of its first job. The checks of a dead one but the first so many get no answer."""

    def __init__(self, service_name: str = "comfyui", answered: int = 1) -> None:
        super().__init__(service_name, behaviour=self._die)
        self.answered = answered

    async def _die(self, job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        self.is_healthy = False
        raise ServiceFailed(Failure(FailureKind.TRANSIENT, "connection refused"))

    async def check_health(self) -> bool:
        if not self.is_healthy:
            self.answered -= 1
            if self.answered < 0:
                await asyncio.Event().wait()
        return self.is_healthy


@pytest.mark.parametrize("missed_checks", [1, 2])
async def test_a_dead_server_does_not_fail_one_job_after_the_other(missed_checks: int) -> None:
    api, connector = ScriptedApi(), Mortal(answered=missed_checks)
    settings = quick(health_interval_s=1000.0, missed_checks=missed_checks)
    async with running(api, connector, settings=settings) as agent:
        api.give(*(leased_job(str(number)) for number in range(10)))
        await until(lambda: api.named("unregister") == ["its server does not answer"])
        assert agent.state.status is AgentStatus.OFFLINE
        assert agent.state.disconnects == 1
    assert len(api.named("fail")) == 1
    assert not api.named("release"), "what was never taken need not be declined"
    assert len(api.named("poll")) == 1


async def test_a_job_that_was_on_its_way_to_a_dead_server_is_declined_once() -> None:
    api, connector = ScriptedApi(), Mortal()
    async with running(api, connector, settings=quick(health_interval_s=1000.0, slots=2)):
        await until(lambda: api.parked == 2)
        api.give(leased_job("1"), leased_job("2"))
        await until(lambda: api.named("unregister"))
    assert len(api.named("fail")) + len(api.named("release")) == 2
    assert len(api.named("poll")) == 2


async def test_nothing_is_taken_for_a_lost_service_while_the_offer_still_holds_it() -> None:
    api, pictures, words = ScriptedApi(), SimulatedConnector("comfyui"), Mortal("langflow")
    async with running(api, pictures, words, settings=quick(health_interval_s=1000.0)):
        await until(lambda: api.parked == 1)
        api.holds["register"] = asyncio.Event()
        api.give(leased_job("1", service="langflow"))
        await until(lambda: len(api.named("register")) == 2)
        beats = len(api.named("heartbeat"))
        await until(lambda: len(api.named("heartbeat")) >= beats + 2)
        assert len(api.named("poll")) == 1
        assert api.named("register")[1].capabilities.services == (Service("comfyui"),)
        api.holds.pop("register").set()
        api.give(leased_job("2"))
        await until(lambda: api.named("complete"))
    assert not api.named("release")
    assert api.named("unregister") == ["stopped"]


async def test_a_server_that_is_back_before_its_offer_was_taken_back_gets_work_again() -> None:
    class Slow(SimulatedConnector):
        answers: asyncio.Event | None = None

        async def inventory(self) -> Inventory:
            found = await super().inventory()
            if self.answers is not None:
                await self.answers.wait()
            return found

    ends = {"1": asyncio.Event(), "2": asyncio.Event()}

    async def behave(job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        await ends[job.job_id].wait()
        raise ServiceFailed(Failure(FailureKind.TRANSIENT, "connection refused"))

    api, connector = ScriptedApi(), Slow(behaviour=behave)
    async with running(api, connector, settings=quick(health_interval_s=1000.0, slots=2)) as agent:
        api.give(leased_job("1"), leased_job("2"))
        await until(lambda: connector.run_count == 2)
        connector.answers = asyncio.Event()
        connector.go_online()
        await until(lambda: connector.inventory_count == 2)
        connector.is_healthy = False
        ends["1"].set()
        await until(lambda: agent.state.status is AgentStatus.OFFLINE)
        connector.is_healthy = True
        ends["2"].set()
        await until(lambda: len(api.named("fail")) == 2)
        connector.answers.set()
        await until(lambda: api.parked == 2)
        assert agent.state.status is AgentStatus.ONLINE


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


async def test_a_model_that_was_missing_is_looked_for_until_it_appears() -> None:
    api = ScriptedApi()
    missing = Failure(FailureKind.MISSING_MODEL, "not here", missing=("sub\\b.ckpt",))
    connector = SimulatedConnector(behaviour=fails(missing))
    settings = quick(health_interval_s=1000.0, missing_interval_s=0.002)
    async with running(api, connector, settings=settings):
        await until(lambda: api.parked == 1)
        api.give(leased_job())
        await until(lambda: connector.inventory_count >= 5)
        assert len(api.named("register")) == 1
        connector.capabilities = Capabilities((Service("comfyui", models=frozenset({"sub/b.ckpt"})),))
        await until(lambda: len(api.named("register")) == 2)


async def test_what_stays_missing_is_looked_for_less_and_less_often() -> None:
    connector = SimulatedConnector()
    server = MonitoredServer(connector, quick(missing_interval_s=10.0, inventory_interval_s=60.0))
    server.add_missing(("b.ckpt",))
    pauses = []
    for _ in range(5):
        await server.read_inventory()
        pauses.append(round(server.inventory_due_at - asyncio.get_running_loop().time()))
    assert pauses == [10, 20, 40, 60, 60]
    server.add_missing(("c.ckpt",))
    await server.read_inventory()
    assert round(server.inventory_due_at - asyncio.get_running_loop().time()) == 10
    connector.capabilities = Capabilities((Service("comfyui", models=frozenset({"b.ckpt", "c.ckpt"})),))
    await server.read_inventory()
    assert round(server.inventory_due_at - asyncio.get_running_loop().time()) == 60


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
