"""A worker thread that died while HTTP goes on answering: noticed, believed, and forgotten after a restart."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from tests.worker._comfyui import Attempt, eventually, leased, picture, server_and_connector, slow, tuned

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.job import Timeouts
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.comfyui.run import PromptExecution
from comfyfleet.worker.connectors.comfyui.submission import AcceptedPrompt


async def test_a_worker_thread_that_died_idle_is_noticed() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.dead_worker = True
        failure = await Attempt(connector, leased(picture())).failure()
        assert (failure.kind, failure.server_died) == (FailureKind.DEAD_WORKER, None)


async def test_a_server_with_a_dead_worker_thread_is_unhealthy_until_it_was_restarted() -> None:
    async with server_and_connector() as (fake, connector):
        assert await connector.check_health()
        fake.faults.dead_worker = True
        assert (await Attempt(connector, leased(picture())).failure()).kind is FailureKind.DEAD_WORKER
        assert not await connector.check_health()
        fake.faults.dead_worker = False
        assert not await connector.check_health(), "a thread that died does not come back by itself"
        await fake.restart()
        await eventually(connector.check_health)
        await Attempt(connector, leased(picture())).result()


async def test_a_server_that_runs_prompts_again_is_healthy_although_its_worker_thread_was_found_dead() -> (
    None
):
    async with server_and_connector() as (fake, connector):
        fake.faults.never_start = True
        assert (await Attempt(connector, leased(picture())).failure()).kind is FailureKind.DEAD_WORKER
        await connector._api.submit(slow(steps=100), "foreign", "somebody", 2.0)
        assert not await connector.check_health()
        fake.faults.never_start = False
        await eventually(connector.check_health)


async def test_a_diagnosis_that_nothing_confirms_does_not_stand_for_ever() -> None:
    async with server_and_connector(tuned(dead_worker_s=0.0)) as (fake, connector):
        fake.faults.dead_worker = True
        assert (await Attempt(connector, leased(picture())).failure()).kind is FailureKind.DEAD_WORKER
        assert await connector.check_health()
        await connector._api.submit(picture(), "foreign", "somebody", 2.0)
        assert (await Attempt(connector, leased(picture())).failure()).kind is FailureKind.DEAD_WORKER
        assert not await connector.check_health(), "a prompt waits and none runs"


async def test_a_server_busy_with_a_prompt_that_does_not_stop_is_unhealthy_until_it_is_done() -> None:
    async with server_and_connector(tuned(stop_s=0.2)) as (fake, connector):
        fake.faults.stall = "LabSlow"
        attempt = Attempt(connector, leased(slow(steps=5), timeouts=Timeouts(stall_s=0.3)))
        assert (await attempt.failure()).kind is FailureKind.STALL_TIMEOUT
        assert not await connector.check_health(), "the next job would wait behind a prompt that never ends"
        fake.faults.stall = None
        await eventually(connector.check_health)
        await Attempt(connector, leased(picture())).result()


async def test_a_worker_thread_that_dies_in_a_run_is_noticed() -> None:
    async with server_and_connector(tuned(silent_run_s=0.6, stop_s=0.2)) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=10)))
        await attempt.heard(ProgressKind.STARTED)
        fake.faults.dead_worker = True
        failure = await attempt.failure()
        assert (failure.kind, failure.server_died) == (FailureKind.DEAD_WORKER, "thread")


class Careless(ComfyUI):
    """Sends what kills the execution thread of a real server, past all checks."""

    poison_workflows: ClassVar[dict[str, Any]] = {}

    async def _submit(
        self, run: PromptExecution, graph: dict[str, Any], accept_s: float | None
    ) -> AcceptedPrompt:
        return await super()._submit(run, {**graph, **self.poison_workflows}, accept_s)


class NoInputs(Careless):
    poison_workflows: ClassVar[dict[str, Any]] = {"9": {"class_type": "EmptyImage"}}


class LooksLikeALink(Careless):
    """As recorded in 18d: `execution_start`, `execution_cached`, and nothing more."""

    poison_workflows: ClassVar[dict[str, Any]] = {
        "9": {"class_type": "PreviewAny", "inputs": {"source": {"__value__": ["a", 1]}}}
    }


@pytest.mark.parametrize("careless", [NoInputs, LooksLikeALink])
async def test_a_worker_thread_that_died_of_our_prompt_is_noticed_at_its_start(
    careless: type[Careless],
) -> None:
    """Within the patience for a start, however long a run may be silent."""
    async with FakeComfyUI() as fake, careless(fake.url, tuned(stop_s=0.2)) as connector:
        attempt = Attempt(connector, leased(picture(), timeouts=Timeouts(start_s=600.0, stall_s=600.0)))
        failure = await attempt.failure()
        assert (failure.kind, failure.server_died) == (FailureKind.DEAD_WORKER, "thread")
        assert "execution thread is dead" in failure.message
        assert attempt.of(ProgressKind.STARTED)
        assert not attempt.of(ProgressKind.OUTPUT)


async def test_a_run_whose_first_node_is_slow_is_not_taken_for_dead() -> None:
    async with server_and_connector(tuned(silent_start_s=0.2)) as (_, connector):
        block = {"class_type": "LabBlock", "inputs": {"seconds": 1.0, "seed": 1}}
        graph = {**picture(), "1": block}
        assert (await Attempt(connector, leased(graph)).result()).files


async def test_a_server_that_goes_down_under_a_run_is_said_to_have_died_of_it() -> None:
    async with server_and_connector() as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=50)))
        await attempt.heard(ProgressKind.PROGRESS)
        await fake.restart()
        failure = await attempt.failure()
        assert (failure.kind, failure.server_died) == (FailureKind.CRASHED, "process")
        attempt = Attempt(connector, leased(slow(steps=50)))
        await attempt.heard(ProgressKind.PROGRESS)
        await fake.crash()
        failure = await attempt.failure()
        assert (failure.kind, failure.server_died) == (FailureKind.CRASHED, "process")


async def test_a_server_that_goes_down_before_the_prompt_started_did_not_die_of_it() -> None:
    async with server_and_connector(tuned(idle_queue_s=30.0)) as (fake, connector):
        fake.faults.never_start = True
        attempt = Attempt(connector, leased(picture()))
        await attempt.heard(ProgressKind.ACCEPTED)
        await fake.restart()
        failure = await attempt.failure()
        assert (failure.kind, failure.server_died) == (FailureKind.CRASHED, None)
