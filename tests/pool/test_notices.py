"""A pool says what it waits for: in the log, to whoever listens, and in the errors of those who waited in vain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from tests.pool._fleet import QUICK_AGENT, QUICK_COMFYUI, Told, fleet, text_to_image
from tests.worker._scripted import until

from comfyfleet import JobFailed, WorkflowPool
from comfyfleet.pool import notices
from comfyfleet.testing.fake_comfyui import FakeComfyUI

CLOSED = "127.0.0.1:9"
CAUSE = "connection refused. Is ComfyUI running there"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(notices, "_POLL_S", 0.02)
    monkeypatch.setattr(notices, "_LOOK_AGAIN_S", 0.05)
    with caplog.at_level(logging.WARNING, logger=notices.__name__):
        yield


def logged(caplog: pytest.LogCaptureFixture, beginning: str) -> list[str]:
    found = [record for record in caplog.records if record.name == notices.__name__]
    assert all(record.levelno == logging.WARNING for record in found)
    return [record.getMessage() for record in found if record.getMessage().startswith(beginning)]


def pool_of(*servers: str, **options: Any) -> WorkflowPool:
    return WorkflowPool(servers, agent=QUICK_AGENT, comfyui=QUICK_COMFYUI, **options)


async def test_a_server_that_cannot_be_reached_is_told_with_the_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = pool_of(CLOSED)
    told = Told(pool)
    async with pool:
        job_id = await pool.enqueue(text_to_image(), metadata={"user": "42"})
        await until(lambda: any(event.name == "job:waiting" for event in told.events))
        (waiting,) = [event for event in told.events if event.name == "job:waiting"]
        assert waiting.job_id == job_id and waiting.metadata == {"user": "42"} and waiting.workflow_hash
        assert CLOSED in waiting.message and CAUSE in waiting.message
        (offline,) = [event for event in told.events if event.state == "offline"]
        assert CAUSE in offline.message
        with pytest.raises(TimeoutError, match=f"{CLOSED}, is offline: {CAUSE}"):
            await pool.wait(job_id, 0.01)
        (server,) = (await pool.stats()).servers
        assert CAUSE in server.reason
    (line,) = logged(caplog, f"server {CLOSED} is offline")
    assert f"http://{CLOSED}: {CAUSE}" in line
    (line,) = logged(caplog, f"job {job_id} waits")
    assert CAUSE in line


async def test_a_job_whose_time_is_over_says_what_it_waited_for() -> None:
    async with pool_of(CLOSED) as pool:
        with pytest.raises(JobFailed, match=f"total_timeout: .* is over: .*{CLOSED}, is offline: {CAUSE}"):
            await pool.run(text_to_image(), timeout=0.05)


@pytest.mark.parametrize("missing", ["model", "node"])
async def test_a_missing_model_or_node_is_told(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as it:
        graph = text_to_image("not-there.safetensors") if missing == "model" else text_to_image()
        words = "does not have the model 'not-there.safetensors'"
        if missing == "node":
            graph["5"]["class_type"], words = "NotInstalled", "lacks the node class 'NotInstalled'"
        told = Told(it.pool)
        job_id = await it.pool.enqueue(graph)
        await until(lambda: any(event.name == "job:waiting" for event in told.events))
        (line,) = logged(caplog, f"job {job_id} waits")
        assert words in line
        with pytest.raises(TimeoutError, match=words):
            await it.pool.wait(job_id, 0.01)


async def test_a_cause_is_logged_once_however_many_jobs_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(CLOSED)
    told = Told(pool)
    async with pool:
        # Eight workflows of another structure each, and each three times.
        graphs = [text_to_image(f"model-{number}.safetensors") for number in range(8)]
        for graph in graphs * 3:
            await pool.enqueue(graph)
        await until(lambda: sum(event.name == "job:waiting" for event in told.events) >= len(graphs))
    assert sum(event.name == "job:waiting" for event in told.events) == len(graphs)
    assert len(logged(caplog, "job ")) == 1
    assert len(logged(caplog, "server ")) == 1


async def test_a_job_that_a_server_can_take_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as it:
        told = Told(it.pool)
        await asyncio.gather(*(it.pool.run(text_to_image(text=str(number))) for number in range(5)))
        assert not any(event.name == "job:waiting" for event in told.events)
    assert logged(caplog, "") == []


async def test_a_server_that_comes_is_told_of_and_takes_what_waits(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeComfyUI() as fake:
        await fake.crash()
        pool = pool_of(fake.url, reconnection_grace=0, health_check_interval=0.05)
        async with pool:
            job_id = await pool.enqueue(text_to_image())
            await until(lambda: logged(caplog, "job "))
            await fake.restart()
            await pool.wait(job_id, 60)
        name = fake.url.removeprefix("http://")
        assert len(logged(caplog, f"server {name} is online again")) == 1
