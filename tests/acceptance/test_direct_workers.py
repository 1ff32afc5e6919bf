"""`comfyfleet worker --store …` as real processes on one store, with no hub: killed, drained, told to stop."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.acceptance._process import (
    CLI,
    fake_servers,
    picture_workflow,
    read_until,
    run_cli,
    started,
    stop,
    written,
)
from tests.servers.postgres_database import empty_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet import WorkflowPool
from comfyfleet.policy.rules import Rules

RULES = {"lease_ttl_s": 2, "acknowledge_s": 2, "retry_base_s": 0.05, "retry_cap_s": 0.2, "sweep_s": 0.2}

Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture
def url(redis_url: str) -> str:
    return with_prefix(redis_url)


def worker(stack: ExitStack, url: str, name: str, *options: str) -> Process:
    command = (*CLI, "worker", "--store", url, "--name", name, "--rules", json.dumps(RULES), *options)
    # Tests beside this one have workers of the same names, each with a journal.
    journals = stack.enter_context(TemporaryDirectory())
    return stack.enter_context(started(*command, env={"COMFYFLEET_DATA": journals}))


async def ready(*workers: Process) -> None:
    for process in workers:
        await asyncio.to_thread(read_until, process, lambda line: line.endswith(": online"))


async def said(process: Process, text: str) -> None:
    await asyncio.to_thread(read_until, process, lambda line: text in line)


@asynccontextmanager
async def front(url: str) -> AsyncIterator[WorkflowPool]:
    """A pool without servers: it submits and waits."""
    async with WorkflowPool([], store=url, rules=Rules(sweep_s=0.2, retry_base_s=0.05)) as pool:
        yield pool


async def test_workers_on_one_redis_share_the_jobs_and_kills_lose_and_repeat_none(url: str) -> None:
    with ExitStack() as stack:
        workers = [worker(stack, url, f"w{number}", "--simulated", "0.1") for number in range(4)]
        await ready(*workers)
        async with front(url) as pool:
            jobs = [await pool.enqueue(picture_workflow(f"cat {number}")) for number in range(60)]
            for killed in workers[:2]:
                await said(killed, "run ")
                killed.kill()
            workers.append(worker(stack, url, "late", "--simulated", "0.1"))
            records = [await pool.wait_for_record(job_id, timeout=120) for job_id in jobs]
            assert {record.status for record in records} == {"completed"}
            for record in records:
                ends = [attempt.outcome.value for attempt in record.history if attempt.outcome]
                assert ends.count("completed") == 1, ends
            expired = sum("expired" in [a.outcome for a in record.history] for record in records)
            assert expired <= 2, "each kill costs the one run it interrupted"
            # Whether the others completed anything before they were killed, or came in time, is up to the machine.
            assert {record.client_id for record in records} >= {"w2", "w3"}


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
async def test_a_pool_without_servers_gets_pictures_from_a_worker_elsewhere(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if kind == "redis":
        url = request.getfixturevalue("url")
    else:
        parts = conninfo_to_dict(empty_database(request.config))
        url = f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    with fake_servers("--time-scale", "0.01") as (address,), ExitStack() as stack:
        process = worker(stack, url, "gpu", "--server", address)
        await ready(process)
        async with front(url) as pool:
            job_id = await pool.enqueue(picture_workflow(), require_workable=True)
            names = [event.name async for event in pool.events(job_id)]
            assert (names[0], names[-1]) == ("job:queued", "job:completed")
            record = await pool.get_job(job_id)
            assert record.client_id == "gpu"
            assert record.result is not None
            (path,) = await pool.save(record.result, tmp_path)
            assert path.read_bytes().startswith(b"\x89PNG")
        written(tmp_path / "workflow.json", picture_workflow("a dog"))
        ran = await asyncio.to_thread(run_cli, "run", "workflow.json", "--store", url, "-q", cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert (tmp_path / ran.stdout.strip()).read_bytes().startswith(b"\x89PNG")
        assert await asyncio.to_thread(stop, process, signal.SIGTERM) == (
            0,
            "Draining: running jobs may finish. Press Ctrl-C again to stop at once.\n"
            "gpu: draining\ngpu: stopped\n",
            "",
        )


async def test_the_first_signal_lets_a_run_end_and_the_second_gives_it_back(url: str) -> None:
    with ExitStack() as stack:
        patient, hasty = (worker(stack, url, name, "--simulated", "1.5") for name in ("patient", "hasty"))
        await ready(patient, hasty)
        async with front(url) as pool:
            jobs = [await pool.enqueue(picture_workflow(), job_id=f"job-{number}") for number in range(2)]
            await said(patient, "run ")
            await said(hasty, "run ")
            patient.send_signal(signal.SIGTERM)
            hasty.send_signal(signal.SIGINT)
            await said(hasty, "Draining: ")
            code, _, errors = await asyncio.to_thread(stop, hasty, signal.SIGTERM)
            assert (code, errors.strip()) == (130, "")
            assert await asyncio.to_thread(patient.wait, 20) == 0
            records = [await pool.get_job(job_id) for job_id in jobs]
            assert sorted(record.status for record in records) == ["completed", "queued"]
            (given_back,) = (record for record in records if record.status == "queued")
            assert [attempt.outcome for attempt in given_back.history] == ["released"]


async def test_a_worker_that_is_drained_from_elsewhere_ends_well(url: str) -> None:
    with ExitStack() as stack:
        process = worker(stack, url, "gpu", "--simulated", "0.5")
        await ready(process)
        async with front(url) as pool:
            job_id = await pool.enqueue(picture_workflow())
            await said(process, "run ")
            (known,) = await pool._engine.workers()
            await pool._engine.drain_worker(known.worker_id)
            await pool.wait(job_id, timeout=60)
            assert await asyncio.to_thread(process.wait, 60) == 0


async def test_a_cancel_asked_of_a_pool_without_servers_stops_the_run_long_before_its_next_heartbeat(
    url: str,
) -> None:
    with ExitStack() as stack:
        process = worker(stack, url, "gpu", "--simulated", "600", "--rules", '{"lease_ttl_s": 60}')
        await ready(process)
        async with front(url) as pool:
            job_id = await pool.enqueue(picture_workflow())
            await said(process, "run ")
            await pool.cancel(job_id)
            assert (await pool.wait_for_record(job_id, timeout=8)).status == "cancelled"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--store", "sqlite:///fleet.db", "--fake", "1"), 3, "sqlite: store belongs to the one process"),
        (("--store", "memory:", "--fake", "1"), 3, "memory: store belongs to the one process"),
        (("--store", "redis://127.0.0.1:1", "--fake", "1"), 4, "no Redis answers at redis://127.0.0.1:1"),
        (("--store", "redis://127.0.0.1:1"), 2, "Name a --server"),
        (("--fake", "1"), 2, "COMFYFLEET_STORE"),
        (("--store", "redis://127.0.0.1:1", "--fake", "1", "--rules", '{"lease": 1}'), 2, "lease"),
    ],
)
def test_what_cannot_work_is_refused_in_words(
    options: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    ended = run_cli("worker", *options, cwd=tmp_path, env={"REDIS_URL": "", "HUB_REDIS_URL": ""})
    assert (ended.returncode, ended.stdout) == (code, "")
    assert words in ended.stderr
    assert not list(tmp_path.iterdir())


def test_the_seeds_names_for_the_store_are_understood() -> None:
    server = ("--server", "http://127.0.0.1:9")
    for variable in ("COMFYFLEET_STORE", "HUB_REDIS_URL", "REDIS_URL"):
        ended = run_cli("worker", *server, env={"REDIS_URL": "", variable: "redis://127.0.0.1:1"})
        assert (ended.returncode, "no Redis answers" in ended.stderr) == (4, True)


def test_a_fake_worker_joins_no_store_that_the_environment_names() -> None:
    for variable in ("COMFYFLEET_STORE", "HUB_REDIS_URL", "REDIS_URL"):
        ended = run_cli(
            "worker", "--fake", "1", env={"REDIS_URL": "", variable: "redis://me:secret@127.0.0.1:1"}
        )
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "For this one, add: --store redis://…@127.0.0.1:1" in ended.stderr
