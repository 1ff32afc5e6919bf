"""A hub that goes away is told of once, and once more when it is back: never a line for each retry."""

from __future__ import annotations

import pytest
from tests.hub._hub import hub_in_process
from tests.worker._scripted import QUICK, WORKER, ScriptedApi, leased_job, running, until

from comfyfleet.hub.serving import Serving, ServingSettings
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
    assert away == f"worker {WORKER} gets no jobs for now and tries on: the hub did not answer"
    assert back.startswith(f"worker {WORKER} is answered again, after 0 s")


async def test_a_registration_that_fails_over_and_over_is_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = ScriptedApi()
    refusal = Refusal(RefusalCode.NOT_ALLOWED, "this key is for another worker")
    api.faults["register"].extend([Fault("away"), Fault("still away"), *[refusal] * 4])
    async with running(api, SimulatedConnector()) as agent:
        await until(lambda: agent.state.status is AgentStatus.ONLINE)
    away, refused, back = told(caplog)
    assert away.endswith("gets no jobs for now and tries on: away")
    assert refused.endswith("is refused and tries on: this key is for another worker")
    assert "answered again" in back


async def test_all_slots_and_a_real_hub_that_is_started_anew_are_two_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with hub_in_process() as rig:
        serving = Serving(rig.hub, ServingSettings(port=0))
        async with serving:
            url, key = serving.url, rig.keys[Role.WORKER]
            api = HttpWorkerApi(url, key)
            agent = Agent(api, WORKER, [SimulatedConnector()], QUICK)
            await api.__aenter__()
            await agent.start()
            await until(lambda: rig.engine.idle_slots == 1)
        await until(lambda: told(caplog))
        again = Serving(rig.hub, ServingSettings(port=int(url.rpartition(":")[2])))
        async with again:
            await until(lambda: len(told(caplog)) >= 2)
            await agent.stop()
            await api.__aexit__(None, None, None)
    # This hub goes on refusing polls after it was told to stop: a third line may follow at once.
    away, back = told(caplog)[:2]
    assert "gets no jobs for now" in away
    assert "is answered again" in back
