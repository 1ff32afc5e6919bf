"""Cancelling on an A1111 server: only what is surely ours is interrupted, and half a picture is no result."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.worker._a1111 import (
    LONG,
    QUICK,
    attempt,
    base64_of,
    job_of,
    picture,
    ran,
    server_and_connector,
    tuned,
)

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.testing.fake_a1111 import FakeA1111
from comfyfleet.worker.connectors.a1111 import A1111

INTERRUPT = "/sdapi/v1/interrupt"


async def test_a_running_attempt_is_interrupted_and_its_half_picture_is_no_result() -> None:
    async with server_and_connector() as (fake, connector):
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        await connector.cancel_job(run.job)
        assert fake.runs[0].outcome == "interrupted"
        assert (await run.failure()).kind is FailureKind.INTERRUPTED
        # The server is free for the next one.
        assert (await attempt(connector, job_of()).result()).files


async def test_an_interrupt_that_came_too_early_is_repeated() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.ignores_interrupts = True
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        cancel = asyncio.create_task(connector.cancel_job(run.job))
        while fake.requests.get(INTERRUPT, 0) < 3:
            await asyncio.sleep(0.005)
        assert not cancel.done()
        fake.faults.ignores_interrupts = False
        await asyncio.wait_for(cancel, 60)
        assert (await run.failure()).kind is FailureKind.INTERRUPTED


async def test_a_run_that_does_not_react_is_told() -> None:
    async with server_and_connector(tuned(cancel_s=0.2)) as (fake, connector):
        fake.faults.ignores_interrupts = True
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        with pytest.raises(Exception, match=r"still goes on 0\.2 s after the cancel"):
            await connector.cancel_job(run.job)
        await fake.crash()
        assert (await run.failure()).kind is FailureKind.CRASHED


async def test_an_attempt_that_waits_for_its_turn_is_never_sent() -> None:
    async with server_and_connector() as (fake, connector):
        first = attempt(connector, job_of(**LONG))
        await first.heard(ProgressKind.STARTED)
        second = attempt(connector, job_of())
        await asyncio.sleep(0)
        await connector.cancel_job(second.job)
        assert (await second.failure()).kind is FailureKind.INTERRUPTED
        assert fake.requests.get(INTERRUPT, 0) == 0
        await connector.cancel_job(first.job)
        await first.failure()
        assert len(fake.runs) == 1


async def test_an_attempt_that_waits_for_a_stranger_is_cancelled_at_once() -> None:
    async with server_and_connector(tuned(occupied_s=60.0)) as (fake, connector):
        stranger = asyncio.create_task(connector._api.run("txt2img", LONG))
        await ran(fake, lambda run: run.steps_done > 0)
        run = attempt(connector, job_of())
        while fake.requests.get("/internal/pending-tasks", 0) < 3:
            await asyncio.sleep(0.005)
        await connector.cancel_job(run.job)
        assert (await run.failure()).kind is FailureKind.INTERRUPTED
        assert fake.requests.get(INTERRUPT, 0) == 0 and len(fake.runs) == 1
        fake.interrupt()
        await stranger


async def test_a_run_behind_a_stranger_is_interrupted_only_when_it_is_its_turn() -> None:
    """The stranger came between our look and our request."""
    async with server_and_connector() as (fake, connector):
        job = job_of(**LONG)
        async with fake.process.lock:
            run = attempt(connector, job)
            while prompt_id_of(job.attempt_id) not in fake.process.tasks.pending:
                await asyncio.sleep(0.005)
            cancel = asyncio.create_task(connector.cancel_job(job))
            asked = fake.requests["/internal/progress"]
            while fake.requests["/internal/progress"] < asked + 5:
                await asyncio.sleep(0.005)
            assert fake.requests.get(INTERRUPT, 0) == 0 and not cancel.done()
        await asyncio.wait_for(cancel, 60)
        assert (await run.failure()).kind is FailureKind.INTERRUPTED
        assert fake.requests[INTERRUPT] >= 1


@pytest.mark.parametrize(
    ("settings", "fake_settings"),
    [
        (tuned(exclusive=False), {}),
        (tuned(exclusive=False), {"has_web_ui": False}),
        (tuned(exclusive=False), {"flavour": "sdnext"}),
    ],
    ids=["with ids", "without /internal", "SD.Next"],
)
async def test_a_run_that_may_not_be_ours_is_left_to_its_end(
    settings: Any, fake_settings: dict[str, Any]
) -> None:
    async with server_and_connector(settings, **fake_settings) as (fake, connector):
        run = attempt(connector, job_of(steps=30))
        await run.heard(ProgressKind.STARTED)
        await connector.cancel_job(run.job)
        assert fake.requests.get(INTERRUPT, 0) == 0
        assert fake.runs[0].outcome == "completed"
        assert (await run.result()).files


@pytest.mark.parametrize("fake_settings", [{"has_web_ui": False}, {"flavour": "sdnext"}], ids=str)
async def test_a_server_without_ids_that_is_ours_alone_is_interrupted_in_our_run(
    fake_settings: dict[str, Any],
) -> None:
    async with server_and_connector(**fake_settings) as (fake, connector):
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        await connector.cancel_job(run.job)
        assert (await run.failure()).kind is FailureKind.INTERRUPTED
        assert fake.runs[0].outcome == "interrupted"
        assert (await attempt(connector, job_of()).result()).files, "and the next job runs"


async def test_an_upscaling_has_no_id_so_it_is_left_to_its_end() -> None:
    async with server_and_connector(extras_seconds=0.2) as (fake, connector):
        run = attempt(connector, job_of("extra-single-image", image=base64_of(picture())))
        await run.heard(ProgressKind.STARTED)
        await connector.cancel_job(run.job)
        assert fake.requests.get(INTERRUPT, 0) == 0
        assert (await run.result()).files


async def test_another_agent_stops_the_run_that_a_killed_one_left() -> None:
    async with server_and_connector() as (fake, first):
        job = job_of(**LONG)
        run = attempt(first, job)
        await run.heard(ProgressKind.STARTED)
        async with A1111(fake.url, QUICK) as second:
            assert (await second.reconcile(job)).state == "running"
            await second.cancel_job(job)
            assert (await second.reconcile(job)).state == "failed"
        assert fake.runs[0].outcome == "interrupted"
        await run.failure()


async def test_the_cancel_of_an_unknown_attempt_touches_nobody() -> None:
    async with server_and_connector() as (fake, connector):
        stranger = asyncio.create_task(connector._api.run("txt2img", {"steps": 50}))
        await ran(fake, lambda run: run.steps_done > 0)
        await connector.cancel_job(job_of())
        assert fake.requests.get(INTERRUPT, 0) == 0
        assert (await stranger).is_ok and fake.runs[0].outcome == "completed"


async def test_the_interrupt_of_somebody_else_is_no_success() -> None:
    async with server_and_connector() as (fake, connector):
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        fake.interrupt()
        failure = await run.failure()
        assert failure.kind is FailureKind.INTERRUPTED and "Somebody else" in failure.message


async def test_an_interrupt_after_the_last_look_is_noticed_too() -> None:
    async with server_and_connector(tuned(poll_s=0.5)) as (fake, connector):
        run = attempt(connector, job_of(**LONG))
        await ran(fake, lambda each: each.steps_done > 3)
        fake.interrupt()
        assert (await run.failure()).kind is FailureKind.INTERRUPTED


async def test_an_interrupt_is_remembered_although_the_next_run_clears_the_flag() -> None:
    async with server_and_connector() as (fake, connector):
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        stranger = asyncio.create_task(connector._api.run("txt2img", {"steps": 20}))
        while len(fake.process.work) < 2:
            await asyncio.sleep(0.005)
        fake.faults.ignores_interrupts = True
        fake.interrupt()
        looks = fake.requests["/sdapi/v1/progress"]
        while fake.requests["/sdapi/v1/progress"] < looks + 3:
            await asyncio.sleep(0.005)
        fake.faults.ignores_interrupts = False
        assert (await run.failure()).kind is FailureKind.INTERRUPTED
        assert (await stranger).is_ok


async def test_the_flag_of_an_interrupt_while_idle_does_not_count() -> None:
    async with server_and_connector() as (fake, connector):
        assert (await attempt(connector, job_of()).result()).files
        fake.interrupt()
        assert (await attempt(connector, job_of(steps=20)).result()).files


async def test_fewer_pictures_than_ordered_are_no_success() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.drop_pictures = 1
        failure = await attempt(connector, job_of(n_iter=3)).failure()
        assert failure.kind is FailureKind.INTERRUPTED and "2 of 3 pictures" in failure.message


async def test_a_script_may_make_any_number_of_pictures() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.drop_pictures = 1
        job = job_of(n_iter=3, script_name="Prompt Matrix")
        assert len((await attempt(connector, job).result()).files) == 2


async def test_a_closed_connector_leaves_the_run_to_the_server() -> None:
    async with server_and_connector() as (fake, other):
        job = job_of(steps=60)
        async with A1111(fake.url, msgspec.structs.replace(QUICK, close_s=0.01)) as connector:
            run = attempt(connector, job)
            await run.heard(ProgressKind.STARTED)
        assert (await run.failure()).kind is FailureKind.INTERRUPTED
        # A new agent with the same attempt waits for the end of the old run and then says that it is lost.
        failure = await attempt(other, job).failure()
        assert failure.kind is FailureKind.TRANSIENT and "pictures are lost" in failure.message
        await completed_once(fake)


async def completed_once(fake: FakeA1111) -> None:
    assert [run.outcome for run in fake.runs] == ["completed"]
    assert fake.requests.get(INTERRUPT, 0) == 0


async def test_the_cancel_of_an_id_that_waits_for_ever_ends() -> None:
    """Its request failed before it started, and its agent is gone."""
    async with server_and_connector() as (fake, connector):
        job = job_of("img2img", init_images=["bm90IGEgcGljdHVyZQ=="])
        assert (await attempt(connector, job).failure()).kind is FailureKind.MISSING_INPUT
        assert prompt_id_of(job.attempt_id) in fake.process.tasks.pending
        async with A1111(fake.url, QUICK) as another:
            assert (await another.reconcile(job)).state == "failed"
            await asyncio.wait_for(another.cancel_job(job), 10)
        assert fake.requests.get(INTERRUPT, 0) == 0


async def test_a_failed_task_that_stays_active_is_not_interrupted() -> None:
    async with server_and_connector() as (fake, connector):
        job = job_of(prompt="raise")
        await attempt(connector, job).failure()
        await connector.cancel_job(job)
        assert fake.requests.get(INTERRUPT, 0) == 0
