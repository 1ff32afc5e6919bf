"""The fake Comfy Cloud beside the recording of the vendor's own proxy of v2, and beside the documentation of v1."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.acceptance._process import read_until, started
from tests.worker._comfy_cloud import KEY
from tests.worker._comfyui import eventually, picture, slow, trace

from comfyfleet.testing.fake_comfy_cloud import FakeCloudSettings, FakeComfyCloud
from comfyfleet.testing.fake_comfy_cloud.jobs import CloudJob

V2 = {"Authorization": f"Bearer {KEY}"}
V1 = {"X-API-Key": KEY}
OF_THE_PROXY = {"outputs_reused"}
"""The documentation of Comfy Cloud does not have it."""
Reply = tuple[int, Any]


class Client:
    def __init__(self, fake: FakeComfyCloud, session: aiohttp.ClientSession) -> None:
        self.fake = fake
        self.session = session

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        given = {**(V2 if path.startswith("/api/v2") else V1), **headers}
        async with self.session.request(
            method, self.fake.url + path, json=body, headers=given, allow_redirects=False
        ) as response:
            text = await response.text()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, dict(response.headers)

    async def events(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        async with self.session.get(self.fake.url + path, headers=V2) as response:
            frames = (await response.text()).strip().split("\n\n")
        found = []
        for frame in frames:
            name, data = frame.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return found


@asynccontextmanager
async def client(**settings: Any) -> AsyncIterator[Client]:
    async with FakeComfyCloud(FakeCloudSettings(**settings)) as fake, aiohttp.ClientSession() as session:
        yield Client(fake, session)


def recorded() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The recorded HTTP requests with their answers."""
    lines = [line for line in trace("24") if line.get("channel") == "http"]
    return list(zip(lines[::2], lines[1::2], strict=True))


async def reaches(job: CloudJob, status: str) -> None:
    await eventually(lambda: job.status == status)


async def is_at_a_node(job: CloudJob) -> None:
    await eventually(lambda: bool(job.progress and job.progress.get("current_node")))


async def test_every_recorded_request_gets_an_answer_of_the_same_form() -> None:
    ids: dict[str, str] = {}
    async with client() as cloud:
        for request, answer in recorded():
            path = request["path"]
            for theirs, ours in ids.items():
                path = path.replace(theirs, ours)
            expected = answer["body"]
            if request["method"] == "GET" and expected.get("status") in ("succeeded", "failed", "canceled"):
                await reaches(cloud.fake.jobs[path.rpartition("/")[2]], expected["status"])
            if path.endswith("/cancel") and expected["status"] == "canceling":
                await is_at_a_node(cloud.fake.jobs[path.split("/")[-2]])
            status, body = await cloud.ask(
                request["method"], path, request.get("body"), **request.get("headers", {})
            )
            assert status == answer["status"], (request, body)
            if "error" in expected and expected["error"] is not None and "id" not in expected:
                assert body["error"].keys() == expected["error"].keys()
                assert body["error"]["code"] == expected["error"]["code"]
                theirs, ours = expected["error"]["message"], body["error"]["message"]
                assert (
                    ours.partition("'")[0].split(".")[0][:12] == theirs.partition("'")[0].split(".")[0][:12]
                )
                continue
            ids[expected["id"]] = body["id"]
            assert body.keys() == expected.keys() - OF_THE_PROXY
            if status != 201:
                assert body["status"] == expected["status"]
            assert [output.keys() for output in body["outputs"]] == [
                output.keys() for output in expected["outputs"]
            ]
            if expected["error"] is not None:
                assert body["error"].keys() == expected["error"].keys()
                assert body["error"]["message"].startswith("lab: Allocation on device")
        assert len(ids) == 3 == len(cloud.fake.stats.jobs_made)


async def test_the_events_have_the_recorded_names_and_fields() -> None:
    lines = [line for line in trace("24") if line.get("channel") == "sse" and "data" in line]
    fields: dict[str, set[str]] = {}
    for line in lines:
        fields.setdefault(line["event"], set()).update(line["data"])
    async with client() as cloud:
        _, job = await cloud.ask("POST", "/api/v2/jobs", {"workflow": slow(3, 0.02, preview=True)})
        found = await cloud.events(job["urls"]["events"])
    names = [name for name, _ in found]
    assert names[0] == "status" and found[-1] == ("status", {"status": "succeeded"})
    assert set(names) == fields.keys()
    for name, data in found:
        extra = {"current_node_class"} if name == "progress" else set()
        assert data.keys() <= fields[name] | extra, name


async def test_a_key_is_claimed_by_the_job_that_it_made_and_by_nothing_else() -> None:
    key = {"Idempotency-Key": "0b7c7e0e-0000-4000-8000-000000000001"}
    async with client(credits=1.0) as cloud:
        fake = cloud.fake
        wrong = await cloud.ask("POST", "/api/v2/jobs", {"workflow": {"1": {"class_type": "Nope"}}}, **key)
        assert wrong[0] == 422 and wrong[1]["error"]["code"] == "invalid_workflow"
        fake.give_credits(-1.0)
        assert (await cloud.ask("POST", "/api/v2/jobs", {"workflow": picture()}, **key))[0] == 402
        fake.give_credits(1.0)
        assert (await cloud.ask("POST", "/api/v2/jobs", {"workflow": picture()}, **key))[0] == 201
        used = await cloud.ask("POST", "/api/v2/jobs", {"workflow": picture(9)}, **key)
        assert used[0] == 422 and used[1]["error"]["code"] == "idempotency_key_reuse"
        assert len(fake.stats.jobs_made) == 1


async def test_both_interfaces_show_the_same_jobs_and_need_their_own_header() -> None:
    async with client(plan="standard") as cloud:
        first = cloud.fake.submit_as_other(slow(100, 0.05))
        _, second = await cloud.ask("POST", "/api/v2/jobs", {"workflow": picture()})
        listed = (await cloud.ask("GET", "/api/jobs?limit=1&offset=0"))[1]
        assert [entry["id"] for entry in listed["jobs"]] == [second["id"]]
        assert (
            listed["jobs"][0].keys() >= {"id", "status", "create_time"}
            and "workflow" not in listed["jobs"][0]
        )
        assert listed["pagination"] == {"offset": 0, "limit": 1, "total": 2, "has_more": True}
        assert (await cloud.ask("GET", f"/api/jobs/{first.job_id}"))[1]["status"] == "in_progress"
        assert (await cloud.ask("GET", f"/api/jobs/{second['id']}"))[1]["status"] == "pending"
        assert (await cloud.ask("GET", "/api/features"))[1]["max_concurrent_jobs"] == 1
        for path, headers in (("/api/user", V2), (f"/api/v2/jobs/{second['id']}", V1)):
            async with cloud.session.get(cloud.fake.url + path, headers=headers) as response:
                assert response.status == 401


async def test_outputs_lead_to_a_storage_that_refuses_the_key() -> None:
    async with client() as cloud:
        _, job = await cloud.ask("POST", "/api/v2/jobs", {"workflow": picture(0x123456)})
        made = cloud.fake.jobs[job["id"]]
        await eventually(lambda: made.status == "succeeded")
        name = made.outputs[0]["name"]
        for path in (f"/api/v2/assets/{made.outputs[0]['id']}/content", f"/api/view?filename={name}"):
            status, headers = await cloud.ask("GET", path)
            assert status == 302 and not headers["Location"].startswith(cloud.fake.url)
            async with cloud.session.get(headers["Location"]) as response:
                assert (await response.read()).startswith(b"\x89PNG")
            async with cloud.session.get(headers["Location"], headers=V1) as response:
                assert response.status == 400
        assert cloud.fake.stats.keys_at_storage == 2


async def test_v1s_interrupt_hits_every_running_job_of_the_account() -> None:
    async with client(plan="creator") as cloud:
        jobs = [cloud.fake.submit_as_other(slow(400, 0.05, seed=seed)) for seed in range(3)]
        await cloud.ask("POST", "/api/interrupt")
        await eventually(lambda: {job.status for job in jobs} == {"canceled"})
        assert cloud.fake.stats.interrupts == 1


async def test_a_plan_runs_so_many_jobs_at_a_time_and_each_is_charged_when_it_starts() -> None:
    async with client(plan="creator", price=2.0) as cloud:
        jobs = [cloud.fake.submit_as_other(slow(400, 0.05, seed=seed)) for seed in range(5)]
        assert sorted(job.status for job in jobs) == ["queued"] * 2 + ["running"] * 3
        assert cloud.fake.stats.charged == 6.0 and cloud.fake.credits == 994.0
        for job in jobs:
            cloud.fake.cancel_as_other(job.job_id)
        await eventually(lambda: {job.status for job in jobs} == {"canceled"})
        assert cloud.fake.stats.charged == 6.0, "those that waited cost nothing"


def test_it_can_be_started_by_hand() -> None:
    program = (sys.executable, "-m", "comfyfleet.testing.fake_comfy_cloud", "--port", "0", "--credits", "3")
    with started(*program) as process:
        (line,) = read_until(process, lambda line: "fake Comfy Cloud" in line)
        assert line.endswith("plan creator, 3 credits, key comfyui-fake-key")
    wrong = subprocess.run([*program, "--plan", "none"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "invalid choice" in wrong.stderr


@pytest.mark.parametrize("asked", ["missing", "full"])
async def test_streams_may_be_missing_or_too_many(asked: str) -> None:
    async with client() as cloud:
        cloud.fake.faults.streams = asked  # type: ignore[assignment]
        _, job = await cloud.ask("POST", "/api/v2/jobs", {"workflow": picture()})
        status, body = await cloud.ask("GET", f"/api/v2/jobs/{job['id']}/events")
        expected = {"missing": (501, "not_implemented"), "full": (429, "too_many_streams")}[asked]
        assert (status, body["error"]["code"]) == expected
