"""Taking an attempt back at any moment: waiting, running, on its way, on servers old and new."""

from __future__ import annotations

import asyncio
from typing import Any

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

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, ServiceFailed
from comfyfleet.model.job import Attachment, Timeouts
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.comfyui.api import ApiAnswer
from comfyfleet.worker.connectors.comfyui.prompt_state import parse_version

VERSIONS = ["0.3.45", "0.3.57", "0.7.0", "0.33.0"]


async def is_empty(fake: FakeComfyUI, connector: ComfyUI) -> bool:
    return not await queue_of(fake, connector)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_running_attempt_is_interrupted(version: str) -> None:
    async with server_and_connector(version=version) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=200)))
        await attempt.heard(ProgressKind.STARTED)
        await connector.cancel_job(attempt.job)
        assert fake.stats.prompt_log[0].outcome == "interrupted"
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED


async def test_a_held_node_waits_and_reacts_to_an_interrupt() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.hold = "LabSlow"
        attempt = Attempt(connector, leased(slow()))
        await attempt.heard(ProgressKind.PROGRESS)
        await connector.cancel_job(attempt.job)
        assert fake.stats.prompt_log[0].outcome == "interrupted"
        other = Attempt(connector, leased(slow(seed=2)))
        await other.heard(ProgressKind.PROGRESS)
        fake.faults.hold = None
        assert (await other.result()).files


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_waiting_attempt_is_removed_and_the_running_one_goes_on(version: str) -> None:
    async with server_and_connector(version=version) as (fake, connector):
        running = Attempt(connector, leased(slow(steps=15)))
        await running.heard(ProgressKind.STARTED)
        waiting = Attempt(connector, leased(picture()))
        await waiting.heard(ProgressKind.ACCEPTED)
        await connector.cancel_job(waiting.job)
        failure = await waiting.failure()
        assert failure.kind is FailureKind.INTERRUPTED
        assert "cancelled" in failure.message
        assert (await running.result()).files
        assert list(fake.stats.prompts_run) == [running.prompt_id]


@pytest.mark.parametrize("version", VERSIONS)
async def test_cancelling_what_is_over_or_unknown_touches_nobody(version: str) -> None:
    async with server_and_connector(version=version) as (fake, connector):
        done = Attempt(connector, leased(picture()))
        await done.result()
        other = Attempt(connector, leased(slow(steps=15)))
        await other.heard(ProgressKind.STARTED)
        await connector.cancel_job(done.job)
        await connector.cancel_job(leased(picture()))
        assert (await other.result()).files
        assert {run.outcome for run in fake.stats.prompt_log} == {"success"}


async def test_a_cancel_that_comes_too_late_leaves_the_result() -> None:
    graph = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 1}},
        "2": {"class_type": "LabBlockOut", "inputs": {"seconds": 0.4, "seed": 1, "image": ["1", 0]}},
    }
    async with server_and_connector() as (_, connector):
        attempt = Attempt(connector, leased(graph))
        await attempt.heard(ProgressKind.PROGRESS, 3)
        await connector.cancel_job(attempt.job)
        assert (await attempt.result()).outputs == {"2": {"text": ["slept"]}}


async def test_a_timeout_that_comes_too_late_leaves_the_result() -> None:
    graph = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 1}},
        "2": {"class_type": "LabBlockOut", "inputs": {"seconds": 0.8, "seed": 1, "image": ["1", 0]}},
    }
    async with server_and_connector() as (_, connector):
        attempt = Attempt(connector, leased(graph, timeouts=Timeouts(stall_s=0.3)))
        assert (await attempt.result()).outputs == {"2": {"text": ["slept"]}}


async def test_a_node_that_does_not_react_is_told_of_when_the_time_is_over() -> None:
    graph = {
        "1": {"class_type": "LabBlock", "inputs": {"seconds": 1.5, "seed": 1}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    async with server_and_connector(tuned(cancel_s=0.3)) as (_, connector):
        attempt = Attempt(connector, leased(graph))
        await attempt.heard(ProgressKind.STARTED)
        with pytest.raises(ServiceFailed, match="still running"):
            await connector.cancel_job(attempt.job)
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED


@pytest.mark.parametrize("is_hanging", [False, True])
async def test_a_cancel_during_the_submit_leaves_nothing_behind(is_hanging: bool) -> None:
    graph = {
        "0": {"class_type": "LabSlowValidate", "inputs": {"seconds": 0.3, "seed": 1}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["0", 0], "filename_prefix": "x"}},
        **slow(steps=200),
    }
    async with server_and_connector() as (fake, connector):
        if is_hanging:
            fake.faults.lost_answer_manner = "hang"
            fake.faults.lose_submit_answers = 1
        attempt = Attempt(connector, leased(graph))
        await eventually(lambda: bool(connector._submits))
        await connector.cancel_job(attempt.job)
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED
        assert await queue_of(fake, connector) == []


async def test_a_submit_that_gets_through_while_a_cancel_looks_is_stopped_as_well() -> None:
    async with server_and_connector() as (fake, connector):
        api = connector._api
        submit, history = api.submit, api.history
        is_looked_up, may_go = asyncio.Event(), asyncio.Event()

        async def held_submit(*arguments: Any) -> ApiAnswer:
            is_looked_up.set()
            await may_go.wait()
            return await submit(*arguments)

        async def history_of_a_moment_ago(prompt_id: str) -> ApiAnswer:
            answer = await history(prompt_id)
            if is_looked_up.is_set() and not may_go.is_set():
                may_go.set()
                await eventually(lambda: not connector._submits)
            return answer

        api.__dict__.update(submit=held_submit, history=history_of_a_moment_ago)
        attempt = Attempt(connector, leased(slow(steps=400)))
        async with asyncio.timeout(60):
            await is_looked_up.wait()
        await connector.cancel_job(attempt.job)
        assert await queue_of(fake, connector) == []
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED


@pytest.mark.parametrize("slow_step", ["/system_stats", "/upload"])
async def test_an_attempt_cancelled_before_its_submit_is_never_sent(slow_step: str) -> None:
    graph = {**picture(), "1": {"class_type": "LoadImage", "inputs": {"image": ""}}}
    attachment = Attachment("a.png", b"x", "1", "image")
    async with server_and_connector() as (fake, connector):
        fake.faults.slow_paths = [slow_step]
        fake.faults.slow_answer_s = 0.3
        attempt = Attempt(connector, leased(graph, attachments=(attachment,)))
        await eventually(lambda: bool(connector._runs))
        await connector.cancel_job(attempt.job)
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED
        assert fake.stats.prompts_accepted == 0


async def test_a_task_cancelled_during_its_submit_leaves_no_prompt_behind() -> None:
    graph = {
        "0": {"class_type": "LabSlowValidate", "inputs": {"seconds": 0.3, "seed": 1}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["0", 0], "filename_prefix": "x"}},
        **slow(steps=200),
    }
    async with server_and_connector() as (fake, connector):
        attempt = Attempt(connector, leased(graph))
        await eventually(lambda: bool(connector._submits))
        attempt.task.cancel()
        await asyncio.wait({attempt.task}, timeout=0.2)
        assert attempt.task.cancelled()
        await eventually(lambda: fake.stats.prompts_accepted == 1)
        await eventually(lambda: is_empty(fake, connector))


async def test_a_cancelled_task_leaves_at_once_and_nothing_of_it_remains() -> None:
    async with server_and_connector() as (fake, connector):
        await eventually(lambda: connector._listening().is_open)
        before = asyncio.all_tasks()
        attempt = Attempt(connector, leased(slow(steps=200)))
        await attempt.heard(ProgressKind.STARTED)
        attempt.task.cancel()
        await asyncio.wait({attempt.task}, timeout=0.2)
        assert attempt.task.cancelled()
        left = [repr(task.get_coro()) for task in asyncio.all_tasks() - before]
        assert not [text for text in left if "ComfyUI." in text or "Submission." in text or "Run." in text]
        assert not connector._runs
        assert not connector._listening()._handlers
        await connector.cancel_job(attempt.job)
        assert await queue_of(fake, connector) == []


async def test_a_cancel_of_an_unreachable_server_says_so() -> None:
    async with server_and_connector(tuned(cancel_s=0.2)) as (fake, connector):
        await fake.crash()
        with pytest.raises(ServiceFailed) as raised:
            await connector.cancel_job(leased(picture()))
        assert raised.value.failure.kind is FailureKind.CRASHED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.3.57", (0, 3, 57)),
        ("v0.33.0", (0, 33, 0)),
        ("0.8.2-rc1", (0, 8, 2)),
        ("unknown", None),
        (None, None),
    ],
)
def test_versions_are_read(text: object, expected: tuple[int, ...] | None) -> None:
    assert parse_version(text) == expected
