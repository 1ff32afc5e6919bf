"""A server that somebody else's prompt occupies, or has killed: our jobs move on, and the true reason is shown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.worker._comfyui import (
    Attempt,
    eventually,
    leased,
    picture,
    queue_of,
    server_and_connector,
    slow,
    tuned,
)
from tests.worker._scripted import WORKER, ScriptedApi, leased_job, quick, until

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.failure import FailureKind, ServiceBusy
from comfyfleet.model.job import Timeouts
from comfyfleet.testing.fake_comfyui import FakeComfyUI, Faults, NodeFault
from comfyfleet.worker.agent import Agent, AgentStatus
from comfyfleet.worker.connectors.comfyui import ComfyUI

PATIENT = tuned(idle_queue_s=600.0, occupied_s=0.5)
"""What these notice, they notice by the prompt that occupies the server."""
START = Timeouts(start_s=600.0, stall_s=600.0)
DEADLY = {
    **picture(),
    "9": {"class_type": "PreviewAny", "inputs": {"source": {"__value__": ["a", 1]}}},
}
KILLERS = ["KeyboardInterrupt", "asyncio.exceptions.CancelledError", "SystemExit"]


async def occupy(connector: ComfyUI, graph: dict[str, Any], prompt_id: str = "foreign") -> None:
    """Somebody else submits a prompt, and it starts."""
    answer = await connector._api.submit(graph, prompt_id, "somebody", 2.0)
    assert answer.status == 200, answer

    async def is_running() -> bool:
        queue = (await connector._api.queue()).body
        return [item[1] for item in queue["queue_running"]] == [prompt_id]

    await eventually(is_running)


async def given_back(attempt: Attempt) -> ServiceBusy:
    with pytest.raises(ServiceBusy) as occupied:
        await attempt.result()
    return occupied.value


@pytest.mark.parametrize("exception_type", KILLERS)
async def test_a_thread_that_somebody_elses_prompt_killed_is_found_by_our_prompt_that_does_not_start(
    exception_type: str,
) -> None:
    async with server_and_connector(PATIENT) as (fake, connector):
        fake.faults.fail_nodes = [NodeFault(class_type="LabSlow", exception_type=exception_type)]
        await occupy(connector, slow())
        attempt = Attempt(connector, leased(picture(), timeouts=START))
        occupied = await given_back(attempt)
        assert "prompt foreign of another client" in occupied.failure.message
        assert [item[1] for item in await queue_of(fake, connector)] == ["foreign"], "ours was taken back"
        assert not await connector.check_health()
        assert connector.defect is not None and "its execution thread is dead; restart it" in connector.defect
        await fake.restart()
        await eventually(connector.check_health)
        await Attempt(connector, leased(picture())).result()


async def test_a_graph_that_kills_threads_is_recognised_in_the_queue_long_before() -> None:
    settings = tuned(idle_queue_s=0.3, occupied_s=60.0)
    async with server_and_connector(settings) as (_, connector):
        await occupy(connector, DEADLY)
        await given_back(Attempt(connector, leased(picture(), timeouts=START)))
        assert not await connector.check_health()
        assert connector.defect is not None
        assert connector.defect.startswith("its execution thread is dead; restart it"), "no doubt is left"


async def test_what_is_merely_suspected_is_said_as_such_until_it_has_lasted_long_enough() -> None:
    async with server_and_connector(msgspec.structs.replace(PATIENT, occupied_dead_s=2.0)) as (
        fake,
        connector,
    ):
        fake.faults.stall = "LabSlow"
        await occupy(connector, slow())
        await given_back(Attempt(connector, leased(picture(), timeouts=START)))
        assert not await connector.check_health()
        assert connector.defect is not None and "it is busy, or" in connector.defect

        async def is_certain() -> bool:
            assert not await connector.check_health()
            return (connector.defect or "").startswith("its execution thread is dead; restart it")

        await eventually(is_certain)


async def test_a_server_that_ends_the_other_prompt_after_all_is_used_again_and_given_more_time() -> None:
    async with server_and_connector(PATIENT) as (fake, connector):
        fake.faults.stall = "LabSlow"
        await occupy(connector, slow())
        await given_back(Attempt(connector, leased(picture(), timeouts=START)))
        assert not await connector.check_health()
        fake.faults.stall = None
        await eventually(connector.check_health)
        # Another of that length is not suspected any more.
        assert connector._thread_health.patience_s >= 2 * PATIENT.occupied_s
        await Attempt(connector, leased(picture(), timeouts=START)).result()


async def test_a_prompt_of_somebody_else_that_shows_progress_is_waited_for() -> None:
    """One without a client id tells everybody of its progress."""
    async with server_and_connector(msgspec.structs.replace(PATIENT, occupied_s=1.0)) as (fake, connector):
        body = {"prompt": slow(steps=25, step_seconds=0.06), "prompt_id": "foreign"}
        async with connector._api.session.post(f"{fake.url}/prompt", json=body) as answer:
            assert answer.status == 200
        result = await Attempt(connector, leased(picture(), timeouts=START)).result()
        assert result.files


async def test_our_own_prompts_wait_for_each_other_as_long_as_they_like() -> None:
    async with server_and_connector(PATIENT) as (_, connector):
        first = Attempt(connector, leased(slow(steps=15, step_seconds=0.1)))
        await eventually(lambda: bool(first.reports))
        second = Attempt(connector, leased(picture(), timeouts=START))
        await first.result()
        await second.result()


async def test_a_start_timeout_spent_behind_one_silent_prompt_is_given_back() -> None:
    async with server_and_connector(tuned(occupied_s=60.0)) as (fake, connector):
        fake.faults.stall = "LabSlow"
        await occupy(connector, slow())
        await given_back(Attempt(connector, leased(picture(), timeouts=Timeouts(start_s=0.6))))
        assert not await connector.check_health()


def job(name: str) -> LeasedJob:
    return msgspec.structs.replace(leased_job(name), workflow=picture(), timeouts=START)


async def test_eight_jobs_lose_the_time_of_one_and_are_charged_nothing() -> None:
    faults = Faults(fail_nodes=[NodeFault(class_type="LabSlow", exception_type="KeyboardInterrupt")])
    async with FakeComfyUI(faults=faults) as fake:
        api, connector = ScriptedApi(), ComfyUI(fake.url, PATIENT)
        async with Agent(api, WORKER, [connector], quick(health_interval_s=0.1)) as agent:
            await until(lambda: api.parked == 1)
            await occupy(connector, slow())
            api.give(*(job(str(number)) for number in range(8)))
            await until(
                lambda: agent.state.status is AgentStatus.OFFLINE,
            )
            assert "its execution thread is dead; restart it" in agent.state.reason
            # One job tried; the others wait where every other worker can have them.
            assert [release.reason for release in api.named("release")] == ["declined"]
            assert api.named("fail") == []
            await until(lambda: bool(api.named("unregister")))
            (said,) = api.named("unregister")
            assert "its execution thread is dead; restart it" in said
            await fake.restart()
            await until(
                lambda: len(api.named("complete")) == 7,
            )


async def test_a_run_that_does_not_stop_is_the_reason_why_its_server_is_not_used() -> None:
    """Our own prompt, whose node raised what ComfyUI does not catch: it stalls, and its server stays occupied."""
    async with server_and_connector(tuned(stop_s=0.2)) as (fake, connector):
        fake.faults.fail_nodes = [NodeFault(class_type="LabSlow", exception_type="KeyboardInterrupt")]
        attempt = Attempt(connector, leased(slow(), timeouts=Timeouts(stall_s=0.4)))
        assert (await attempt.failure()).kind is FailureKind.STALL_TIMEOUT
        assert not await connector.check_health()
        assert connector.defect is not None
        assert attempt.prompt_id in connector.defect and "restart it" in connector.defect
