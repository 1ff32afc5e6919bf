"""Servers whose process is gone, and people who press Interrupt: what runs there moves on at once."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest
from tests.pool._fleet import QUICK_COMFYUI, Fleet, fleet, quick, text_to_image

from comfyfleet import JobFailed
from comfyfleet.model.failure import FailureKind

# A server that merely does not answer is waited for: nothing here is found out by that.
PATIENT = msgspec.structs.replace(
    QUICK_COMFYUI, unreachable_s=3600.0, unresponsive_s=3600.0, poll_s=3600.0, refused_s=0.3
)
SLOW = quick(time_scale=1.0, step_seconds=0.2)


async def test_a_job_whose_server_refuses_connections_moves_to_another_at_once() -> None:
    async with fleet(SLOW, quick(), comfyui=PATIENT) as it:
        job_id = await it.pool.enqueue(
            text_to_image(steps=1000), preferred_client_ids=[it.id_of(0)], affinity_mode="prefer"
        )
        await it.told.until("job:progress", job_id)
        await it.servers[0].crash()
        failed = await it.told.until("job:failed", job_id)
        assert failed.failure is not None and failed.will_retry
        assert failed.failure.kind is FailureKind.CRASHED
        assert "refused connections" in failed.failure.message
        await it.pool.wait(job_id, timeout=60)
        assert (await it.pool.get_job(job_id)).client_id == it.id_of(1)


async def press_interrupt(it: Fleet) -> None:
    """As ComfyUI's own page does."""
    async with aiohttp.ClientSession() as session, session.post(f"{it.servers[0].url}/interrupt") as answer:
        assert answer.status == 200


async def test_an_interrupt_on_the_servers_own_page_blocks_nothing() -> None:
    async with fleet(SLOW, cooldown=3600) as it:
        job_id = await it.pool.enqueue(text_to_image(steps=20))
        await it.told.until("job:progress", job_id)
        await press_interrupt(it)
        failed = await it.told.until("job:failed", job_id)
        assert failed.failure is not None and failed.will_retry
        assert failed.failure.kind is FailureKind.INTERRUPTED
        await it.pool.wait(job_id, timeout=60)
        assert (await it.pool.get_job(job_id)).attempts == 2
        assert it.told.of("client:blocked_workflow") == []


async def test_a_job_of_one_attempt_that_is_interrupted_fails_so_and_the_next_one_runs() -> None:
    async with fleet(SLOW, cooldown=3600) as it:
        job_id = await it.pool.enqueue(text_to_image(steps=1000), max_attempts=1)
        await it.told.until("job:progress", job_id)
        await press_interrupt(it)
        with pytest.raises(JobFailed, match="interrupted"):
            await it.pool.wait(job_id, timeout=60)
        other = await it.pool.enqueue(text_to_image(steps=2))
        async with asyncio.timeout(60):
            assert (await it.pool.wait(other)).files


async def test_the_only_server_of_a_pool_runs_its_job_again_as_soon_as_it_is_back() -> None:
    async with fleet(SLOW, comfyui=PATIENT, cooldown=3600) as it:
        job_id = await it.pool.enqueue(text_to_image(steps=20))
        await it.told.until("job:progress", job_id)
        await it.servers[0].crash()
        failed = await it.told.until("job:failed", job_id)
        assert failed.failure is not None and failed.will_retry
        await it.servers[0].restart()
        async with asyncio.timeout(60):
            assert (await it.pool.wait(job_id)).files
        assert (await it.pool.get_job(job_id)).attempts == 2, "while it was away nothing was tried there"
        assert it.told.of("client:blocked_workflow") == []
