"""Two pools on one store: what one takes in the other runs, and the first hears of it."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from PIL import Image
from psycopg.conninfo import conninfo_to_dict
from tests.pool._fleet import QUICK_AGENT, QUICK_COMFYUI, QUICK_RULES, Told, invert, quick, text_to_image
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet import WorkflowPool, attach
from comfyfleet.testing.fake_comfyui import FakeComfyUI, NodeFault


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture(params=["redis", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return with_prefix(request.getfixturevalue("redis_url"))
    parts = conninfo_to_dict(emptied_database(request.config))
    return f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"


def pool_on(url: str, *servers: str) -> WorkflowPool:
    return WorkflowPool(
        servers,
        store=url,
        comfyui=QUICK_COMFYUI,
        agent=QUICK_AGENT,
        rules=QUICK_RULES,
        cooldown=5,
        reconnection_grace=0.05,
    )


async def test_a_job_taken_in_by_one_pool_runs_in_the_other_and_both_know(store_url: str) -> None:
    async with FakeComfyUI(quick()) as server, pool_on(store_url) as front, pool_on(store_url, server.url):
        told = Told(front)
        job_id = await front.enqueue(text_to_image(), metadata={"user": "42"})
        result = await front.wait(job_id, timeout=60)
        assert [file.filename for file in result.files] == ["cat_00001_.png"]
        done = await told.until("job:completed", job_id)
        assert done.metadata == {"user": "42"}
        assert told.names(job_id).count("job:completed") == 1


async def test_a_job_that_fails_on_one_pools_server_moves_on_to_the_others(store_url: str) -> None:
    async with (
        FakeComfyUI(quick()) as broken,
        FakeComfyUI(quick()) as sound,
        pool_on(store_url, broken.url) as one,
        pool_on(store_url, sound.url) as other,
    ):
        broken.faults.fail_nodes = [NodeFault(class_type="KSampler", times=-1)]
        jobs = [await one.enqueue(text_to_image(text=f"cat {number}")) for number in range(4)]
        for job_id in jobs:
            await one.wait(job_id, timeout=60)
        records = [await other.get_job(job_id) for job_id in jobs]
        assert {record.client_id for record in records} == {f"127.0.0.1:{sound.port}"}
        assert all(record.status == "completed" for record in records)


async def test_jobs_survive_the_pools_and_run_when_one_comes_back(store_url: str) -> None:
    async with pool_on(store_url) as pool:
        jobs = [await pool.enqueue(text_to_image(), job_id=f"mine-{number}") for number in range(3)]
    async with FakeComfyUI(quick()) as server, pool_on(store_url, server.url) as pool:
        for job_id in jobs:
            await pool.wait(job_id, timeout=60)
        assert sum(server.stats.prompts_run.values()) == 3


async def test_a_priority_is_changed_and_what_was_attached_is_gone_with_the_end(store_url: str) -> None:
    async with FakeComfyUI(quick()) as server, pool_on(store_url, server.url) as pool:
        await pool.pause_queue()
        picture = io.BytesIO()
        Image.new("RGB", (16, 16)).save(picture, "PNG")
        given = [attach(picture.getvalue(), "1", "image")]
        job_id = await pool.enqueue(invert(), attachments=given, job_id="mine")
        await pool.set_priority(job_id, 7)
        await pool.resume_queue()
        await pool.wait(job_id, timeout=60)
        assert (await pool.get_job(job_id)).priority == 7
        again = await pool.enqueue(invert(), attachments=given, job_id="mine")
        assert again == job_id
        engine = pool._engine
        inner = await engine.by_reference("mine")
        assert inner is not None
        assert (await engine.get(inner)).job.payload.attachments == ()
