"""A hub that goes away is told of once, and once more when it is back: never a line for each retry."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hub._hub import hub_in_process
from tests.worker._scripted import QUICK, WORKER, ScriptedApi, leased_job, running, until

from comfyfleet.hub.http.server import HubServer, HubServerSettings
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.worker.agent import Agent, AgentStatus
from comfyfleet.worker.connectors.simulated import SimulatedConnector
from comfyfleet.worker.transports.http import HttpWorkerApi


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What whoever has not asked for more reads: warnings, and nothing below."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


async def test_polls_without_an_answer_are_one_line_and_their_end_is_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = ScriptedApi()
    api.faults["poll"].extend([Fault("the hub did not answer")] * 5)
    async with running(api, SimulatedConnector()):
        await until(lambda: api.parked == 1)
        assert len(api.named("poll")) == 6
        assert len(told(caplog)) == 1, "heartbeats were answered all the time: they tell nothing of polls"
        api.give(leased_job())
        await until(lambda: len(told(caplog)) == 2)
    away, back = told(caplog)
    assert away == f"worker {WORKER} gets no jobs for now and tries again: the hub did not answer"
    assert back.startswith(f"worker {WORKER}: the hub answers again after 0 s")


async def test_a_registration_that_fails_over_and_over_is_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = ScriptedApi()
    refusal = Refusal(RefusalCode.NOT_ALLOWED, "this key is for another worker")
    api.faults["register"].extend([Fault("away"), Fault("still away"), *[refusal] * 4])
    async with running(api, SimulatedConnector()) as agent:
        await until(lambda: agent.state.status is AgentStatus.ONLINE)
    away, refused, back = told(caplog)
    assert away.endswith("gets no jobs for now and tries again: away")
    assert refused.endswith("is refused and tries again: this key is for another worker")
    assert "the hub answers again" in back


async def test_a_hub_that_is_stopping_is_gone_once_though_it_answers_some_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It refuses polls, as long as it can, and takes beats and registrations, when it can."""
    api = ScriptedApi()
    stopping = Refusal(RefusalCode.UNAVAILABLE, "the hub is stopping; try again")
    unknown = Refusal(RefusalCode.NOT_FOUND, "this worker is not registered")
    async with running(api, SimulatedConnector()):
        await until(lambda: api.parked == 1)
        api.faults["poll"].extend([*[stopping] * 20, unknown, *[stopping] * 20])
        api.faults["heartbeat"].extend([Fault("the connection was closed")] * 2)
        api.give(leased_job())
        await until(lambda: len(api.named("heartbeat")) > 8 and not api.faults["poll"])
        await until(lambda: len(told(caplog)) >= 2)
        assert len(api.named("register")) == 2
    away, back = told(caplog)
    assert away.endswith("gets no jobs for now and tries again: the hub is stopping; try again")
    assert "the hub answers again" in back


async def test_all_slots_and_a_real_hub_that_is_started_anew_are_two_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = f"sqlite:///{tmp_path}/fleet.db"
    async with (
        hub_in_process(store_url=store) as rig,
        HubServer(rig.hub, HubServerSettings(port=0)) as serving,
    ):
        port = serving.port
        api = HttpWorkerApi(serving.url, rig.keys[Role.WORKER])
        agent = Agent(api, WORKER, [SimulatedConnector()], QUICK)
        await api.__aenter__()
        await agent.start()
        await until(lambda: rig.engine.idle_slots == 1)
    await until(lambda: told(caplog))
    async with hub_in_process(store_url=store) as rig, HubServer(rig.hub, HubServerSettings(port=port)):
        await until(lambda: len(told(caplog)) >= 2 and rig.engine.idle_slots == 1)
        await agent.stop()
        await api.__aexit__(None, None, None)
    away, back = told(caplog)
    assert "gets no jobs for now" in away
    assert "the hub answers again" in back
