"""A cancel in every phase of a job: what was asked for happens, and nothing of the job is left on a server."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from tests.pool._fleet import Fleet, eventually, fleet, quick, text_to_image

from comfyfleet import JobCancelled


async def is_cancelled(it: Fleet, job_id: str) -> None:
    with pytest.raises(JobCancelled):
        await it.pool.wait(job_id, timeout=60)
    await it.told.until("job:cancelled", job_id)
    assert it.told.names(job_id).count("job:cancelled") == 1
    assert (await it.pool.get_job(job_id)).status == "cancelled"


async def runs_the_next_job(it: Fleet) -> None:
    """The server is free again, and the cancel did not hit what came after."""
    await it.pool.run(text_to_image(), timeout=60)


async def test_a_waiting_job_is_cancelled_at_once_and_never_reaches_a_server() -> None:
    async with fleet() as it:
        await it.pool.pause_queue()
        job_id = await it.pool.enqueue(text_to_image())
        assert await it.pool.cancel(job_id)
        await is_cancelled(it, job_id)
        await it.pool.resume_queue()
        await runs_the_next_job(it)
        assert it.servers[0].stats.prompts_accepted == 1


async def test_a_paused_and_a_delayed_job_can_be_cancelled() -> None:
    async with fleet() as it:
        far = await it.pool.enqueue(text_to_image(), not_before=4e9)
        await it.pool.pause_queue()
        paused = await it.pool.enqueue(text_to_image())
        await it.pool.pause(paused)
        for job_id in (far, paused):
            assert await it.pool.cancel(job_id)
            await is_cancelled(it, job_id)


async def test_a_job_between_its_lease_and_its_acceptance_can_be_cancelled() -> None:
    async with fleet() as it:
        it.servers[0].faults.slow_answer_s = 0.4
        it.servers[0].faults.slow_paths = ["/prompt"]
        job_id = await it.pool.enqueue(text_to_image())
        # A fake notes a prompt before it answers: this one is leased, sent, and not accepted yet.
        await eventually(lambda: it.servers[0].stats.prompts_accepted == 1)
        assert it.told.of("job:accepted", job_id) == []
        assert await it.pool.cancel(job_id)
        await is_cancelled(it, job_id)
        it.servers[0].faults.slow_answer_s = 0.0
        await runs_the_next_job(it)
        await eventually(lambda: all(run.ended_at for run in it.servers[0].stats.prompt_log))
        outcomes = [run.outcome for run in it.servers[0].stats.prompt_log]
        assert outcomes.count("success") == 1, "only the next job may run to its end"


async def test_a_job_accepted_and_waiting_on_the_server_can_be_cancelled() -> None:
    async with fleet() as it:
        it.servers[0].faults.never_start = True
        job_id = await it.pool.enqueue(text_to_image())
        await it.told.until("job:accepted", job_id)
        assert await it.pool.cancel(job_id)
        await is_cancelled(it, job_id)
        it.servers[0].faults.never_start = False
        await runs_the_next_job(it)
        assert it.starts() == [1]


@pytest.mark.parametrize("version", ["0.3.45", "0.7.0", "0.33.0"])
async def test_a_running_job_can_be_cancelled_and_is_interrupted_on_its_server(version: str) -> None:
    async with fleet(quick(version=version)) as it:
        job_id = await it.pool.enqueue(text_to_image(steps=500))
        await it.told.until("job:progress", job_id)
        assert await it.pool.cancel(job_id)
        await is_cancelled(it, job_id)
        await eventually(lambda: it.servers[0].stats.prompt_log[0].outcome == "interrupted")
        await runs_the_next_job(it)


@pytest.mark.parametrize("asked", ["pause", "retry"])
async def test_a_running_job_is_interrupted_on_its_server_when_it_is_paused_or_retried(asked: str) -> None:
    async with fleet() as it:
        job_id = await it.pool.enqueue(text_to_image(steps=500))
        await it.told.until("job:progress", job_id)
        await getattr(it.pool, asked)(job_id)
        await eventually(lambda: it.servers[0].stats.prompt_log[0].outcome == "interrupted")
        if asked == "pause":
            async with asyncio.timeout(60):
                while not (record := await it.pool.get_job(job_id)).is_paused:
                    assert record.pause_requested
                    await asyncio.sleep(0.01)
            await runs_the_next_job(it)
            await it.pool.resume(job_id)
        await eventually(lambda: len(it.told.of("job:started", job_id)) == 2)
        assert (await it.pool.get_job(job_id)).attempts == 2
        await it.pool.cancel(job_id)
        await is_cancelled(it, job_id)


async def test_a_job_waiting_for_its_retry_can_be_cancelled() -> None:
    async with fleet(cooldown=600) as it:
        it.servers[0].faults.out_of_memory = 1
        job_id = await it.pool.enqueue(text_to_image())
        await it.told.until("job:retrying", job_id)
        assert await it.pool.cancel(job_id)
        await is_cancelled(it, job_id)


async def test_a_job_that_has_ended_cannot_be_cancelled() -> None:
    async with fleet() as it:
        job_id = await it.pool.enqueue(text_to_image())
        await it.pool.wait(job_id, timeout=60)
        assert not await it.pool.cancel(job_id)
        assert (await it.pool.get_job(job_id)).status == "completed"


async def test_cancelling_again_and_again_changes_nothing() -> None:
    async with fleet() as it:
        job_id = await it.pool.enqueue(text_to_image(steps=500))
        await it.told.until("job:started", job_id)
        assert all(await asyncio.gather(*(it.pool.cancel(job_id) for _ in range(5))))
        await is_cancelled(it, job_id)


async def test_a_cancelled_job_can_be_run_again_by_hand() -> None:
    async with fleet() as it:
        await it.pool.pause_queue()
        job_id = await it.pool.enqueue(text_to_image())
        await it.pool.cancel(job_id)
        await it.pool.retry(job_id)
        await it.pool.resume_queue()
        await it.pool.wait(job_id, timeout=60)
        assert (await it.pool.get_job(job_id)).status == "completed"


async def test_whoever_is_being_cancelled_can_wait_for_a_limited_time_and_is_told_when_it_is_over() -> None:
    async def wait_on(it: Fleet, job_id: str) -> str:
        try:
            await it.pool.wait(job_id)
        except asyncio.CancelledError:
            # Before Python 3.11.4 a timeout that was begun here ended as another cancellation.
            try:
                await it.pool.wait(job_id, timeout=0.05)
            except TimeoutError as error:
                return str(error)
        return "nothing was cancelled"

    async with fleet() as it:
        await it.pool.pause_queue()
        job_id = await it.pool.enqueue(text_to_image())
        waiting = asyncio.create_task(wait_on(it, job_id))
        await asyncio.sleep(0)
        waiting.cancel()
        assert "has not ended after 0.05 s" in await waiting


async def test_a_cancel_ends_a_wait_that_has_a_limit() -> None:
    async with fleet() as it:
        await it.pool.pause_queue()
        waiting = asyncio.create_task(it.pool.wait(await it.pool.enqueue(text_to_image()), timeout=60))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_somebody_elses_prompt_on_the_same_server_is_never_hit() -> None:
    async with fleet(quick(version="0.3.45"), quick()) as it:
        async with aiohttp.ClientSession() as session:
            graph = text_to_image(steps=60)
            graph["3"]["inputs"]["seed"] = 1
            direct_workers = {"prompt": graph, "client_id": "somebody"}
            await session.post(f"{it.servers[0].url}/prompt", json=direct_workers)
        await eventually(lambda: len(it.servers[0].stats.prompt_log) == 1)
        job_id = await it.pool.enqueue(text_to_image(), preferred_client_ids=[it.id_of(0)])
        await it.told.until("job:accepted", job_id)
        assert await it.pool.cancel(job_id)
        await is_cancelled(it, job_id)
        await eventually(lambda: it.servers[0].stats.prompt_log[0].ended_at is not None)
        assert [run.outcome for run in it.servers[0].stats.prompt_log] == ["success"]
