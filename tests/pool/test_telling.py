"""Telling of events goes on whatever happens, forgets what it needs no more, and says all that is known."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.pool._fleet import Told, fleet, quick, text_to_image

from comfyfleet import BlockedWorkflow, JobCancelled, OutputFile, Server, WorkflowPool, hash_workflow
from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.job import JobResult
from comfyfleet.policy.rules import Rules
from comfyfleet.testing.fake_comfyui import NodeFault
from comfyfleet.worker.connectors.simulated import Reporter, SimulatedConnector


def reporting(files: Any) -> Server:
    async def behave(job: LeasedJob, report: Reporter) -> JobResult:
        report(ProgressReport(job.ref, ProgressKind.OUTPUT, {"node": "9", "files": files}))
        return JobResult()

    return Server(id="a", connector=SimulatedConnector(behaviour=behave))


async def test_an_event_that_cannot_be_told_of_is_an_error_and_the_next_ones_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = WorkflowPool([reporting("no list of files")])
    told = Told(pool)
    async with pool:
        for _ in range(2):
            await pool.run(text_to_image())
        await told.until("job:completed", count=2)
        assert len(told.of("pool:error")) == 2
        assert "output" in told.of("pool:error")[0].message
    assert "could not be published" in caplog.text


async def test_an_output_without_files_is_an_output() -> None:
    pool = WorkflowPool([reporting(None)])
    told = Told(pool)
    async with pool:
        await pool.run(text_to_image())
        assert (await told.until("job:output")).files == ()


async def test_watching_a_job_ends_with_the_pool() -> None:
    pool = WorkflowPool()
    await pool.start()
    job_id = await pool.enqueue(text_to_image())
    names: list[str] = []
    seen = asyncio.Event()

    async def watch() -> None:
        async for event in pool.events(job_id):
            names.append(event.name)
            seen.set()

    watching = asyncio.create_task(watch())
    await seen.wait()
    await pool.close()
    async with asyncio.timeout(60):
        await watching
    assert names == ["job:queued"]


async def test_nothing_is_kept_of_jobs_that_are_over_or_that_nobody_listens_to() -> None:
    async with WorkflowPool([reporting([])]) as pool:
        for _ in range(3):
            job_id = await pool.enqueue(text_to_image())
            assert [event.name async for event in pool.events(job_id)][-1] == "job:completed"
        assert pool._dispatcher._labels == {}
        told = Told(pool)
        await pool.run(text_to_image())
        await told.until("job:completed")
        assert pool._dispatcher._labels == {}


async def test_the_files_of_an_output_event_can_be_fetched() -> None:
    async with fleet() as it:
        await it.pool.run(text_to_image())
        output = await it.told.until("job:output")
        assert isinstance(output.files[0], OutputFile)
        assert (await it.pool.fetch(output.files[0])).startswith(b"\x89PNG")


async def test_a_failure_is_told_with_its_server_and_all_that_is_known_of_it() -> None:
    async with fleet(quick(), quick(), cooldown=0.1) as it:
        for server in it.servers:
            server.faults.fail_nodes = [NodeFault(times=-1, class_type="KSampler", message="unwell")]
        job_id = await it.pool.enqueue(text_to_image(), max_attempts=2)
        record = await it.pool.wait_for_record(job_id, timeout=60)
        await it.told.until("job:failed", job_id, count=2)
        failed = it.told.of("job:failed", job_id)
        assert [event.client_id for event in failed] == [attempt.worker_id for attempt in record.history]
        assert [event.failure for event in failed] == [attempt.failure for attempt in record.history]
        assert all(event.failure and event.failure.traceback for event in failed)
        kept = [event async for event in it.pool.events(job_id)]
        assert [event.failure for event in kept if event.name == "job:failed"] == [
            event.failure for event in failed
        ]


async def test_a_block_is_told_of_with_the_error_and_its_end_with_the_reason() -> None:
    async with fleet(cooldown=600) as it:
        it.servers[0].faults.fail_nodes = [NodeFault(class_type="KSampler", times=1, message="unwell")]
        await it.pool.enqueue(text_to_image())
        blocked = await it.told.until("client:blocked_workflow")
        assert "unwell" in blocked.message
        block = BlockedWorkflow(
            it.id_of(0), hash_workflow(text_to_image()), 1, blocked.blocked_until, "failures"
        )
        assert await it.pool.blocks() == [block]
        await it.pool.unblock(block.client_id, block.workflow_hash)
        assert (await it.told.until("client:unblocked_workflow")).reason == "by hand"


async def test_waiting_and_watching_end_though_nobody_is_told_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with WorkflowPool(rules=Rules(recheck_s=0.05)) as pool:
        job_id = await pool.enqueue(text_to_image())
        monkeypatch.setattr(pool._engine.bus, "publish", lambda _: None)

        async def names() -> list[str]:
            return [event.name async for event in pool.events(job_id)]

        waiting, watching = asyncio.create_task(pool.wait(job_id)), asyncio.create_task(names())
        await pool.cancel(job_id)
        async with asyncio.timeout(60):
            with pytest.raises(JobCancelled):
                await waiting
            assert await watching == ["job:queued", "job:cancelled"]
