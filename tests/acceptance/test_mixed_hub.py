"""One hub with workers of several services, all as real processes, and one worker of each service killed in a run.

The servers are fakes in the process of the test, so that it can count what really ran. A worker that is killed comes
back within its lease: ComfyUI, LangFlow and Comfy Cloud then deliver the run that went on without it, and A1111, which
cannot give a result twice, runs it once more.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chaos.programs import HubProgram, Program, settings_of
from tests.worker._a1111 import payload as a1111_payload
from tests.worker._comfy_cloud import KEY as CLOUD_KEY
from tests.worker._comfy_cloud import color_of
from tests.worker._comfyui import picture

from comfyfleet.testing.fake_a1111 import FakeA1111, FakeA1111Settings, FakeSubject, drawn_pixels, pixels_of
from comfyfleet.testing.fake_comfy_cloud import FakeCloudSettings, FakeComfyCloud
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.testing.fake_langflow import FakeLangFlow

# Seven processes on a machine that others use too.
pytestmark = pytest.mark.xdist_group("chaos")

LIMIT_S = 240.0
RULES = {
    # Longer than the test may last: a worker that was killed comes back to its run and no lease expires.
    "lease_ttl_s": 2 * LIMIT_S,
    "acknowledge_s": LIMIT_S,
    "retry_base_s": 0.05,
    "retry_cap_s": 0.2,
    "cooldown_s": 0.1,
    "sweep_s": 0.2,
}
CONFIG = f"""
[connectors.langflow]
key = "sk-fake"
poll_s = 0.2

[connectors.a1111]
poll_s = 0.1

[connectors.comfy_cloud]
key = "{CLOUD_KEY}"
allow = ["127.0.0.1"]
poll_s = 0.05
poll_max_s = 0.5
"""
QUICK_A1111 = FakeA1111Settings(step_seconds=0.01, load_seconds=0.01)


class Fleet:
    """A hub process, worker processes by name, and somebody to ask the hub."""

    def __init__(self, folder: Path, hub: HubProgram, session: aiohttp.ClientSession) -> None:
        self._folder = folder
        self._hub = hub
        self._session = session
        self._workers: dict[str, Program] = {}
        self._config = folder / "worker.toml"
        self._config.write_text(CONFIG)

    def start(self, name: str, *how: str) -> None:
        command = ["worker", "--hub", self._hub.url, "--name", name, "--config", str(self._config), *how]
        env = {"COMFYFLEET_KEY": self._hub.key, "COMFYFLEET_DATA": str(self._folder / name)}
        self._workers[name] = Program(command, env, self._folder / f"{name}.said")

    def kill(self, name: str) -> None:
        """SIGKILL. Nothing is left to tidy up for it."""
        self._workers.pop(name).kill()

    def end(self) -> None:
        for name in list(self._workers):
            self.kill(name)

    async def ask(self, method: str, path: str, **content: Any) -> Any:
        async with self._session.request(method, self._hub.url + path, **content) as answer:
            assert answer.status < 400, (path, answer.status, await answer.text())
            return await answer.json()

    async def is_online(self, *names: str) -> None:
        async def are_all() -> bool:
            workers = (await self.ask("GET", "/api/workers"))["workers"]
            return set(names) <= {
                each["id"] for each in workers if each["status"] in ("idle", "busy", "online")
            }

        await true(are_all)

    async def submit(self, payload: dict[str, Any], **more: Any) -> str:
        return str((await self.ask("POST", "/api/jobs", json={"payload": payload, **more}))["id"])

    async def ended(self, job_id: str) -> dict[str, Any]:
        """The record of the job, with its result."""

        async def is_over() -> bool:
            return (await self.ask("GET", f"/api/jobs/{job_id}"))["status"] in (
                "completed",
                "failed",
                "cancelled",
            )

        await true(is_over)
        record = await self.ask("GET", f"/api/jobs/{job_id}")
        assert record["status"] == "completed", record
        return {**record, **await self.ask("GET", f"/api/jobs/{job_id}/result")}

    async def file_of(self, job: dict[str, Any]) -> bytes:
        """The only file of the job, from the hub."""
        (file,) = job["result"]["files"]
        assert file["url"].startswith("/api/files/"), "the hub has it, and no server is named"
        async with self._session.get(self._hub.url + file["url"]) as answer:
            assert answer.status == 200
            return await answer.read()


async def true(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            met = condition()
            if met is True or (met is not False and await met):
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def fleet_in(folder: Path) -> AsyncIterator[Fleet]:
    hub = HubProgram(folder / "hub", settings_of("rules", RULES))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, hub.kill)
        await asyncio.to_thread(hub.start)
        headers = {"Authorization": f"Bearer {hub.key}"}
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
        fleet = Fleet(folder, hub, session)
        # In a thread: the fakes that they talk to are here.
        stack.push_async_callback(asyncio.to_thread, fleet.end)
        yield fleet


def mixed_jobs(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Of each service `count`, in turn. No two are alike."""
    kinds: list[list[tuple[str, dict[str, Any]]]] = [
        [("comfyui", picture(0x010000 + number)) for number in range(count)],
        [("a1111", a1111_payload(prompt=f"lamp {number}", seed=number)) for number in range(count)],
        [("langflow", {"flow": "lab-picture", "input_value": f"cat {number}"}) for number in range(count)],
    ]
    return list(itertools.chain.from_iterable(zip(*kinds, strict=True)))


async def check_made_from(fleet: Fleet, service: str, payload: dict[str, Any], job: dict[str, Any]) -> None:
    content = await fleet.file_of(job)
    match service:
        case "comfyui":
            assert color_of(content) == payload["1"]["inputs"]["color"]
        case "a1111":
            body = payload["body"]
            subject = FakeSubject(prompt=body["prompt"], seed=body["seed"], steps=body["steps"])
            assert pixels_of(content) == drawn_pixels(subject)
        case "langflow":
            assert content == f"made from: {payload['input_value']}".encode()
            said = job["result"]["outputs"]["ChatOutput-z"]["content"]
            assert said == f"drew {payload['input_value']}"


async def test_jobs_of_three_services_complete_on_the_right_one_although_a_worker_of_each_is_killed(
    tmp_path: Path,
) -> None:
    async with (
        FakeComfyUI() as comfy_1,
        FakeComfyUI() as comfy_2,
        FakeA1111(QUICK_A1111) as web_1,
        FakeA1111(QUICK_A1111) as web_2,
        FakeLangFlow() as flows_1,
        FakeLangFlow() as flows_2,
        fleet_in(tmp_path) as fleet,
    ):
        how = {
            "comfyui-1": ("--server", comfy_1.url),
            "comfyui-2": ("--server", comfy_2.url),
            "a1111-1": ("--service", f"a1111={web_1.url}"),
            "a1111-2": ("--service", f"a1111={web_2.url}"),
            "langflow-1": ("--service", f"langflow={flows_1.url}"),
            "langflow-2": ("--service", f"langflow={flows_2.url}"),
        }
        killed = ("comfyui-1", "a1111-1", "langflow-1")
        # What begins on the first server of each service does not end before its worker is killed.
        comfy_1.faults.hold = "SaveImage"
        web_1.faults.stall_at_step = 1
        flows_1.faults.holds = True
        for name, options in how.items():
            fleet.start(name, *options)
        await fleet.is_online(*how)

        jobs = mixed_jobs(12)
        ids = [await fleet.submit(payload, service=service) for service, payload in jobs]
        assert len(ids) == 36
        await true(
            lambda: bool(
                comfy_1.stats.prompt_log and web_1.runs and web_1.runs[0].steps_done and flows_1.jobs.runs
            )
        )
        for name in killed:
            await asyncio.to_thread(fleet.kill, name)
        # The servers go on for nobody.
        assert comfy_1.stats.prompt_log[0].outcome is None
        assert web_1.runs[0].outcome == "running"
        assert [job.state for job in flows_1.jobs.by_id.values()] == ["in_progress"]
        orphan = web_1.runs[0].body["prompt"]
        comfy_1.faults.hold = None
        web_1.faults.stall_at_step = None
        web_1.recheck_faults()
        flows_1.faults.holds = False
        await true(lambda: web_1.runs[0].outcome == "completed")
        for name in killed:
            fleet.start(name, *how[name])

        workers: set[str] = set()
        for (service, payload), job_id in zip(jobs, ids, strict=True):
            job = await fleet.ended(job_id)
            await check_made_from(fleet, service, payload, job)
            assert job["worker_id"].startswith(f"{service}-"), "it ran on its own service"
            workers.add(job["worker_id"])
        assert workers >= {name for name in how if name.endswith("-2")}

        # Run exactly once, also those whose worker was killed.
        prompts = comfy_1.stats.prompts_run | comfy_2.stats.prompts_run
        assert sorted(prompts.values()) == [1] * 12
        assert sorted(flows_1.jobs.runs + flows_2.jobs.runs) == sorted(
            f"cat {number}" for number in range(12)
        )
        # At least once: only the one whose pictures nobody could fetch ran again.
        runs = Counter(run.body["prompt"] for run in web_1.runs + web_2.runs)
        assert runs == {f"lamp {number}": 1 for number in range(12)} | {orphan: 2}
        assert {run.outcome for run in web_1.runs + web_2.runs} == {"completed"}


async def test_jobs_for_comfy_cloud_are_paid_once_each_and_others_run_there_or_on_a_server_of_our_own(
    tmp_path: Path,
) -> None:
    async with (
        FakeComfyCloud(FakeCloudSettings(plan="creator")) as cloud,
        FakeComfyUI() as comfy,
        fleet_in(tmp_path) as fleet,
    ):
        how = {
            "cloud": ("--service", f"comfy_cloud={cloud.url}", "--slots", "3"),
            "gpu": ("--server", comfy.url),
        }
        for name, options in how.items():
            fleet.start(name, *options)
        await fleet.is_online(*how)

        # Nothing of it completes before the worker is killed.
        card = cloud.card_faults
        card.hold = "SaveImage"
        there = {number: picture(0x020000 + number) for number in range(6)}
        anywhere = {number: picture(0x030000 + number) for number in range(6, 18)}
        ids = {number: await fleet.submit(graph, provider="comfy_cloud") for number, graph in there.items()}
        ids |= {number: await fleet.submit(graph) for number, graph in anywhere.items()}
        await true(lambda: cloud.stats.charged >= 3.0)
        await asyncio.to_thread(fleet.kill, "cloud")
        paid = cloud.stats.charged
        card.hold = None
        fleet.start("cloud", *how["cloud"])

        ended = {number: await fleet.ended(job_id) for number, job_id in ids.items()}
        for number, job in ended.items():
            graph = there.get(number) or anywhere[number]
            assert color_of(await fleet.file_of(job)) == graph["1"]["inputs"]["color"]
        assert paid == 3.0, "the plan's three jobs at a time were accepted"
        assert {ended[number]["worker_id"] for number in there} == {"cloud"}
        assert {ended[number]["worker_id"] for number in anywhere} <= {"cloud", "gpu"}
        done_there = [number for number, job in ended.items() if job["worker_id"] == "cloud"]
        assert cloud.stats.charged == len(done_there) == len(cloud.stats.jobs_made)
        assert set(cloud.stats.charges.values()) == {1.0}, "each run was paid once"
        assert cloud.stats.cancels == [] and cloud.stats.interrupts == 0
        assert sorted(comfy.stats.prompts_run.values()) == [1] * (len(ended) - len(done_there))
