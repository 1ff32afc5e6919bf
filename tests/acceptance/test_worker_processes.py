"""`comfyfleet worker --hub` as a real process over both transports: killed, told to stop, left by its server or hub."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance._process import CLI, read_until, started, stop
from tests.hub._hub import HubRig, running_hub, submission
from tests.worker._comfyui import slow
from tests.worker._scripted import until

from comfyfleet.cli.hub_connection import read_hub
from comfyfleet.client.client import FleetClient
from comfyfleet.policy.rules import Rules
from comfyfleet.testing.fake_comfyui import FakeComfyUI

Process = subprocess.Popen[str]

RULES = Rules(retry_base_s=0.05, retry_cap_s=0.1, cooldown_s=0.1, sweep_s=0.1)
BRIEF_LEASES = Rules(lease_ttl_s=1.0, acknowledge_s=1.0, sweep_s=0.1)


@pytest.fixture(params=["http", "websocket"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Fleet:
    def __init__(self, rig: HubRig, fake: FakeComfyUI, folder: Path, transport: str) -> None:
        self.rig = rig
        self.fake = fake
        self._folder = folder
        self._transport = transport
        self.stack = AsyncExitStack()

    async def start_worker(self, *options: str) -> Process:
        command = ("worker", "--hub", self.rig.url, "--transport", self._transport, "--name", "gpu")
        env = {"COMFYFLEET_DATA": str(self._folder), "COMFYFLEET_LOG_LEVEL": "error"}
        context = started(*CLI, *command, "--server", self.fake.url, *options, env=env)
        process = self.stack.enter_context(context)
        await said(process, ": online")
        return process

    async def submit(self, seconds: float) -> str:
        # Between two steps, and only there, a prompt can be interrupted.
        workflow = slow(steps=int(seconds / 0.05), step_seconds=0.05)
        answer = await self.rig.post("/api/jobs", submission(workflow=workflow))
        return str(answer.body["id"])

    async def running(self, number: int = 1) -> None:
        await until(lambda: len(self.fake.stats.prompt_log) == number)

    @property
    def outcomes(self) -> list[str | None]:
        """How each run of a prompt ended, as the server knows it."""
        return [run.outcome for run in self.fake.stats.prompt_log]

    async def ends(self, job_id: str, status: str = "completed") -> list[str]:
        """How each of its attempts ended, once the job has."""
        async with asyncio.timeout(60):
            while (job := (await self.rig.get(f"/api/jobs/{job_id}")).body)["status"] != status:
                await asyncio.sleep(0.02)
        return [attempt["outcome"] for attempt in job["history"]]

    async def result(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.rig.get(f"/api/jobs/{job_id}/result")).body["result"]
        return found


@asynccontextmanager
async def fleet_of(folder: Path, transport: str, rules: Rules = RULES) -> AsyncIterator[Fleet]:
    async with (
        running_hub(is_open=True, rules=rules, folder=folder / "files") as rig,
        FakeComfyUI() as fake,
    ):
        fleet = Fleet(rig, fake, folder / "worker", transport)
        try:
            yield fleet
        finally:
            # In a thread: a worker that drains still has something to say to the hub, which is here.
            await asyncio.to_thread(asyncio.run, fleet.stack.aclose())


async def said(process: Process, text: str) -> None:
    await asyncio.to_thread(read_until, process, lambda line: text in line)


async def kill(process: Process) -> None:
    process.kill()
    await asyncio.to_thread(process.communicate)


async def test_a_killed_worker_goes_on_with_its_run_when_it_is_back_in_time(
    tmp_path: Path, transport: str
) -> None:
    async with fleet_of(tmp_path, transport) as fleet:
        worker = await fleet.start_worker()
        job_id = await fleet.submit(1.5)
        await fleet.running()
        await kill(worker)
        await fleet.start_worker()
        assert await fleet.ends(job_id) == ["completed"]
        assert fleet.outcomes == ["success"], "it was run once"
        assert (await fleet.result(job_id))["files"][0]["file_id"], "and its picture came to the hub"


async def test_a_killed_worker_that_is_back_too_late_stops_what_it_left_running(
    tmp_path: Path, transport: str
) -> None:
    async with fleet_of(tmp_path, transport, BRIEF_LEASES) as fleet:
        worker = await fleet.start_worker()
        job_id = await fleet.submit(60.0)
        await fleet.running()
        await kill(worker)
        await fleet.rig.post(f"/api/jobs/{job_id}/cancel")
        assert await fleet.ends(job_id, "cancelled")
        assert fleet.outcomes == [None], "the server works on for nobody"
        await fleet.start_worker()
        await until(lambda: fleet.outcomes == ["interrupted"])
        assert await fleet.ends(await fleet.submit(0.1)) == ["completed"]


async def test_a_worker_comes_back_with_its_server_and_runs_what_died_with_it_again(
    tmp_path: Path, transport: str
) -> None:
    async with fleet_of(tmp_path, transport) as fleet:
        worker = await fleet.start_worker()
        job_id = await fleet.submit(1.0)
        await fleet.running()
        await fleet.fake.restart()
        assert (await fleet.ends(job_id))[-1] == "completed"
        assert (await asyncio.to_thread(stop, worker, signal.SIGTERM))[0] == 0


async def test_the_first_signal_lets_a_run_end_and_the_second_gives_it_back(
    tmp_path: Path, transport: str
) -> None:
    async with fleet_of(tmp_path, transport) as fleet:
        worker = await fleet.start_worker()
        first = await fleet.submit(1.0)
        await fleet.running()
        code, output, errors = await asyncio.to_thread(stop, worker, signal.SIGTERM)
        assert (code, errors) == (0, ""), output
        assert await fleet.ends(first) == ["completed"]

        worker = await fleet.start_worker()
        second = await fleet.submit(60.0)
        await fleet.running(2)
        worker.send_signal(signal.SIGTERM)
        await said(worker, "Draining: ")
        assert await fleet.ends(second, "leased") == ["running"]
        code, output, errors = await asyncio.to_thread(stop, worker, signal.SIGTERM)
        assert (code, errors.strip()) == (143, ""), output
        assert await fleet.ends(second, "queued") == ["released"]
        await until(lambda: fleet.outcomes == ["success", "interrupted"])


async def test_a_drain_gives_back_what_does_not_end_in_its_grace(tmp_path: Path, transport: str) -> None:
    async with fleet_of(tmp_path, transport) as fleet:
        worker = await fleet.start_worker("--grace", "0.3")
        job_id = await fleet.submit(60.0)
        await fleet.running()
        assert (await asyncio.to_thread(stop, worker, signal.SIGTERM))[0] == 0
        assert await fleet.ends(job_id, "queued") == ["released"]
        await until(lambda: fleet.outcomes == ["interrupted"])


async def test_a_run_outlives_its_hub_and_is_reported_to_the_next_under_its_lease(
    tmp_path: Path, transport: str
) -> None:
    env = {"COMFYFLEET_DATA": str(tmp_path), "COMFYFLEET_LOG_LEVEL": "error"}
    hub = (*CLI, "hub", "--store", f"sqlite:///{tmp_path}/fleet.db")
    async with FakeComfyUI() as fake, AsyncExitStack() as stack:
        with started(*hub, "--port", "0", env=env) as first:
            await said(first, "The hub answers at")
            here = read_hub(tmp_path)
            assert here is not None
            worker = started(
                *CLI, "worker", "--transport", transport, "--name", "gpu", "--server", fake.url, env=env
            )
            await said(stack.enter_context(worker), ": online")
            client = await stack.enter_async_context(FleetClient(here.url, here.key))
            job = await client.submit(slow(steps=30, step_seconds=0.05))
            await until(lambda: fake.stats.prompt_log)
            await kill(first)
        with started(*hub, "--port", here.url.rpartition(":")[2], env=env):
            assert (await client.wait(job.id, timeout=60)).status == "completed"
            ended = await client.get(job.id)
        assert [attempt.outcome for attempt in ended.history] == ["completed"]
        assert [run.outcome for run in fake.stats.prompt_log] == ["success"]


async def test_a_run_that_ended_while_its_hub_was_away_longer_than_a_lease_is_not_run_again(
    tmp_path: Path, transport: str
) -> None:
    env = {
        "COMFYFLEET_DATA": str(tmp_path),
        "COMFYFLEET_LOG_LEVEL": "error",
        "COMFYFLEET_RULES_LEASE_TTL_S": "5",
        "COMFYFLEET_RULES_ACKNOWLEDGE_S": "5",
        "COMFYFLEET_RULES_SWEEP_S": "0.01",
    }
    hub = (*CLI, "hub", "--store", f"sqlite:///{tmp_path}/fleet.db")
    async with FakeComfyUI() as fake, AsyncExitStack() as stack:
        with started(*hub, "--port", "0", env=env) as first:
            await said(first, "The hub answers at")
            here = read_hub(tmp_path)
            assert here is not None
            command = (*CLI, "worker", "--transport", transport, "--name", "gpu", "--server", fake.url)
            worker = stack.enter_context(started(*command, env=env))
            await said(worker, ": online")
            client = await stack.enter_async_context(FleetClient(here.url, here.key))
            job = await client.submit(slow(steps=20, step_seconds=0.05))
            # The worker sends its first heartbeat, which acknowledges the lease, before it reports the start.
            async with asyncio.timeout(60):
                while (await client.get(job.id)).started_at is None:
                    await asyncio.sleep(0.01)
            await kill(first)
        await until(lambda: [run.outcome for run in fake.stats.prompt_log] == ["success"])
        # Longer than the lease, which nobody could renew.
        await asyncio.sleep(6.0)
        with started(*hub, "--port", here.url.rpartition(":")[2], env=env):
            assert (await client.wait(job.id, timeout=60)).status == "completed"
            ended = await client.get(job.id)
            # Before its hub, which may owe it the answer to the report.
            await asyncio.to_thread(stop, worker, signal.SIGTERM)
        assert [attempt.outcome for attempt in ended.history] == ["completed"], ended.history
        assert [run.outcome for run in fake.stats.prompt_log] == ["success"]
