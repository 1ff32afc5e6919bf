"""The worker in Node.js, with nothing but a Redis client and the rights of a worker, beside one in Python."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis
from tests.acceptance._node import node, worker_folder
from tests.acceptance._process import CLI, picture_workflow, read_until, started, stop
from tests.servers.redis_fixtures import new_prefix, own_server, with_prefix
from tests.servers.redis_proxy import CuttingProxy
from tests.servers.redis_server import RedisServer
from tests.stores._redis_users import worker_rules

from comfyfleet import WorkflowPool
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.ids import JobId
from comfyfleet.policy.rules import Rules

RULES = {"lease_ttl_s": 2, "acknowledge_s": 2, "retry_base_s": 0.05, "retry_cap_s": 0.2, "sweep_s": 0.2}

Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with own_server(is_durable=False) as server:
        yield server


class Fleet:
    """One prefix on the server, a Redis user for the Node.js worker, and processes that end with the test."""

    def __init__(self, server: RedisServer, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.prefix = new_prefix()
        self.url = with_prefix(server.url, self.prefix)
        self.admin = stack.enter_context(Redis(port=server.port, decode_responses=True))
        send: Callable[..., object] = self.admin.execute_command
        send("ACL", "SETUSER", "gpu", "reset", "on", ">secret", *worker_rules(f"{{{self.prefix}}}:"))
        self._worker_url = f"redis://gpu:secret@127.0.0.1:{server.port}"

    async def node(self, name: str = "node", **settings: object) -> Process:
        env = {"REDIS_URL": self._worker_url, "PREFIX": f"{{{self.prefix}}}:", "WORKER": name}
        env |= {key: str(value) for key, value in {"WORK_MS": 100, "LEASE_S": 2, **settings}.items()}
        binary = node()
        assert binary is not None
        process = self._stack.enter_context(started(binary, "worker.js", cwd=self._folder, env=env))
        await self.said(process, "registered")
        return process

    async def python(self, *options: str) -> Process:
        command = (
            "worker",
            "--store",
            self.url,
            "--name",
            "python",
            "--rules",
            json.dumps(RULES),
            *options,
            "--fake-beside-real",
        )
        process = self._stack.enter_context(started(*CLI, *command))
        await self.said(process, ": online")
        return process

    @staticmethod
    async def said(process: Process, text: str) -> str:
        lines = await asyncio.to_thread(read_until, process, lambda line: text in line)
        return lines[-1]

    @asynccontextmanager
    async def front(self) -> AsyncIterator[WorkflowPool]:
        rules = Rules(sweep_s=0.2, retry_base_s=0.05, retry_cap_s=0.2)
        async with WorkflowPool([], store=self.url, rules=rules, cooldown=60) as pool:
            yield pool


@pytest.fixture
def fleet(server: RedisServer, tmp_path: Path) -> Iterator[Fleet]:
    folder = worker_folder(tmp_path)
    with ExitStack() as stack:
        yield Fleet(server, folder, stack)


async def test_it_works_beside_one_in_python_and_when_it_is_killed_another_does_its_job(fleet: Fleet) -> None:
    async with fleet.front() as pool:
        await fleet.python("--simulated", "0.1")
        in_node = await fleet.node()
        jobs = [await pool.enqueue(picture_workflow(f"cat {number}")) for number in range(16)]
        records = [await pool.wait_for_record(job_id, timeout=60) for job_id in jobs]
        assert {record.status for record in records} == {"completed"}
        assert {record.client_id for record in records} == {"python", "node"}
        (made, *_) = (record for record in records if record.client_id == "node")
        assert made.result is not None
        assert made.result.outputs["9"]["text"] == ["made by node"]
        in_node.send_signal(signal.SIGTERM)
        slow = await fleet.node("slow", WORK_MS=60_000)
        jobs = [await pool.enqueue(picture_workflow(f"dog {number}")) for number in range(4)]
        job_id = JobId((await fleet.said(slow, "run ")).split()[1].split("/")[0])
        # A lease that nobody has acknowledged yet would only be given back.
        while not _is_acknowledged(await pool._engine.store.load(job_id)):
            await asyncio.sleep(0.02)
        slow.kill()
        records = [await pool.wait_for_record(job_id, timeout=60) for job_id in jobs]
        (taken_over,) = (record for record in records if record.id == job_id)
        ends = [attempt.outcome.value for attempt in taken_over.history if attempt.outcome]
        assert (taken_over.client_id, ends) == ("python", ["expired", "completed"])


def _is_acknowledged(dispatch: Dispatch | None) -> bool:
    return dispatch is not None and dispatch.lease is not None and dispatch.lease.is_acknowledged


async def test_a_cancel_reaches_it_by_its_stream_long_before_its_next_heartbeat(fleet: Fleet) -> None:
    async with fleet.front() as pool:
        # Its heartbeats are minutes apart, so they cannot be what tells it.
        process = await fleet.node(WORK_MS=600_000, LEASE_S=600)
        job_id = await pool.enqueue(picture_workflow())
        await fleet.said(process, "run ")
        await pool.cancel(job_id)
        record = await pool.wait_for_record(job_id, timeout=60)
        assert record.status == "cancelled"
        assert await fleet.said(process, "released") == f"released {job_id} 1"


async def test_pause_and_retry_of_its_job_reach_it_by_its_stream(fleet: Fleet) -> None:
    async with fleet.front() as pool:
        process = await fleet.node(WORK_MS=600_000, LEASE_S=600)
        job_id = await pool.enqueue(picture_workflow())

        async def begun() -> None:
            await fleet.said(process, "run ")
            # Its first heartbeat, which would tell it too, is over.
            while not _is_acknowledged(await pool._engine.store.load(JobId(job_id))):
                await asyncio.sleep(0.02)

        await begun()
        await pool.pause(job_id)
        assert await fleet.said(process, "released") == f"released {job_id} 1"
        await pool.resume(job_id)
        await begun()
        await pool.retry(job_id)
        assert await fleet.said(process, "released") == f"released {job_id} 1"
        await fleet.said(process, "run ")
        await pool.cancel(job_id)
        assert (await pool.wait_for_record(job_id, timeout=60)).status == "cancelled"


async def test_what_it_reports_as_failed_is_judged_by_an_engine(fleet: Fleet) -> None:
    async with fleet.front() as pool:
        await fleet.node()
        hopeless = await pool.enqueue(picture_workflow(), metadata={"fail": "invalid_workflow"})
        record = await pool.wait_for_record(hopeless, timeout=60)
        assert record.status == "failed"
        assert record.last_error is not None
        assert record.last_error.message == "this job asked to fail"
        broken = await pool.enqueue(picture_workflow("a dog"), metadata={"fail": "node_error"})
        async for event in pool.events(broken):
            if event.name == "job:retrying":
                break
        await fleet.python("--simulated", "0.1")
        record = await pool.wait_for_record(broken, timeout=60)
        assert (record.status, record.client_id) == ("completed", "python")


async def test_it_connects_again_and_repeats_what_was_lost_and_no_job_is_done_twice(fleet: Fleet) -> None:
    async with fleet.front() as pool:
        await fleet.node(WORK_MS=40)
        jobs = [await pool.enqueue(picture_workflow(f"cat {number}")) for number in range(20)]
        for _ in range(10):
            fleet.admin.execute_command("CLIENT", "KILL", "USER", "gpu")
            await asyncio.sleep(0.1)
        for job_id in jobs:
            record = await pool.wait_for_record(job_id, timeout=60)
            ends = [attempt.outcome.value for attempt in record.history if attempt.outcome]
            assert ends == ["completed"]


async def test_a_server_that_goes_while_it_connects_is_waited_for(server: RedisServer, fleet: Fleet) -> None:
    async with fleet.front(), CuttingProxy(server.port) as proxy:
        # Each of its first answers is lost, whatever it was to.
        proxy.cut_after, proxy.plan = 0, iter([0, 1, 2, 0, 1, 2, 3])
        process = await fleet.node(REDIS_URL=f"redis://gpu:secret@127.0.0.1:{proxy.port}")
        assert proxy.cuts >= 5
        # Once the proxy is gone it could not say goodbye, and would try to for as long as it is let.
        process.kill()


async def test_told_to_stop_it_ends_what_runs_and_leaves(fleet: Fleet) -> None:
    async with fleet.front() as pool:
        process = await fleet.node(WORK_MS=1000)
        jobs = [await pool.enqueue(picture_workflow(f"cat {number}")) for number in range(2)]
        await fleet.said(process, "run ")
        code, output, errors = await asyncio.to_thread(stop, process, signal.SIGTERM)
        assert (code, errors) == (0, "")
        assert output.splitlines() == ["draining", f"completed {jobs[0]} 1", "left"]
        records = [await pool.get_job(job_id) for job_id in jobs]
        assert [record.status for record in records] == ["completed", "queued"]
        async with asyncio.timeout(60):
            while not all(worker.is_offline for worker in await pool._engine.store.workers()):
                await asyncio.sleep(0.02)
