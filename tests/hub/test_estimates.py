"""Estimates, quotes and capacity as callers of a hub see them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, graph, hub_in_process, running_hub, submission

from comfyfleet.client.client import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service

WORKER = WorkerId("gpu-a")


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub() as rig:
        await rig.engine.register(RegisterWorker(WORKER, Capabilities((Service("comfyui"),)), 1))
        yield rig


async def take(rig: HubRig, number: int) -> LeasedJob:
    leased = await rig.engine.poll(Poll(WORKER, PollId(f"p{number}"), 0))
    assert leased is not None
    return leased


async def run(rig: HubRig, times: int, seconds: float = 50.0) -> None:
    for number in range(times):
        await rig.submit()
        leased = await take(rig, number)
        await rig.engine.complete(Completion(leased.ref, JobResult(), seconds))


async def test_a_job_and_a_list_show_when_it_should_start_and_end(rig: HubRig) -> None:
    await run(rig, 5)
    running = await rig.submit()
    await take(rig, 9)
    waiting = await rig.submit()
    one = (await rig.get(f"/api/jobs/{waiting}")).body["estimate"]
    assert one["ends_at"] - one["starts_at"] == pytest.approx(50)
    assert one["is_rough"] is False
    listed = {job["id"]: job["estimate"] for job in (await rig.get("/api/jobs")).body["jobs"]}
    assert listed[waiting]["starts_at"] == pytest.approx(listed[running]["ends_at"], abs=2)
    assert [each for job_id, each in listed.items() if job_id not in (running, waiting)] == [None] * 5


async def test_a_quote_takes_the_body_of_a_submission_and_submits_nothing(rig: HubRig) -> None:
    await run(rig, 6)
    answer = await rig.post("/api/jobs/quote", submission(priority=5))
    assert answer.status == 200
    found = answer.body
    assert (found["run_s"]["expected"], found["runs"]) == (50, 6)
    assert found["estimate"]["is_rough"] is False and "credits" not in found
    assert (await rig.get("/api/stats")).body["waiting"] == 0


async def test_a_tenant_learns_its_cost_and_not_how_often_others_ran_the_workflow(tmp_path: Path) -> None:
    price = {"by": "gpu_second", "credits_per_second": 2, "most_seconds": 600, "base": 1}
    async with hub_in_process(databases={"default": f"sqlite:///{tmp_path}/default.db"}) as rig:
        capabilities = Capabilities((Service("comfyui"),), has_hub=True, moves_files=True)
        await rig.engine.register(RegisterWorker(WORKER, capabilities, 1))
        await run(rig, 9)
        assert (await rig.post("/api/tenants", {"id": "acme", "price": price})).status == 201
        found = (await rig.post("/api/jobs/quote", submission(), role=Role.TENANT)).body
    assert found["runs"] == 5, "five or more"
    assert found["credits"] == {"expected": 101, "low": 101, "high": 1201}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"payload": {"workflow": {}}}, "invalid_workflow"),
        ({"payload": {"workflow": {"1": {"inputs": {}}}}}, "invalid_workflow"),
        ({"payload": {"workflow": graph()}, "priority": 10**9}, "invalid_request"),
        ({}, "invalid_request"),
        ([], "invalid_request"),
    ],
)
async def test_a_quote_refuses_a_body_as_a_submission_does(rig: HubRig, body: Any, code: str) -> None:
    quoted, submitted = await rig.post("/api/jobs/quote", body), await rig.post("/api/jobs", body)
    assert quoted.code == code
    assert (quoted.status, quoted.body["detail"]) == (submitted.status, submitted.body["detail"])


async def test_the_capacity_tells_operators_what_is_missing(rig: HubRig) -> None:
    await run(rig, 5)
    for _ in range(20):
        await rig.submit()
    found = (await rig.get("/api/capacity?within=100")).body
    assert (found["waiting"], found["gpu_seconds"], found["within_s"]) == (20, 1000, 100)
    assert [each["workers"] for each in found["wanted"]] == [9]
    assert (await rig.get("/api/capacity", role=Role.TENANT)).status == 403
    for within in ("0", "-1", "nan", "inf", "1e9", "x"):
        assert (await rig.get(f"/api/capacity?within={within}")).status == 400


async def test_a_client_asks_for_quotes_and_for_the_capacity(rig: HubRig) -> None:
    await run(rig, 5)
    await rig.submit()
    async with FleetClient(rig.url, rig.keys[Role.ADMIN]) as client:
        quote = await client.quote(graph(), priority=3)
        assert quote.estimate is not None and quote.run_s.expected == 50
        job = (await client.jobs(status="queued")).jobs[0]
        assert job.estimate is not None
        assert (await client.capacity(60)).waiting == 1


async def test_metrics_tell_the_waiting_work_by_class_with_few_labels(rig: HubRig) -> None:
    await run(rig, 5)
    for number in range(30):
        await rig.submit(requirements={"models": [f"model-{number}"]})
    text = (await rig.get("/metrics")).content.decode()
    lines = [line for line in text.splitlines() if line.startswith("comfyfleet_waiting_gpu_seconds{")]
    assert len(lines) == 11 and any('class="other"' in line for line in lines)
    assert sum(float(line.rpartition(" ")[2]) for line in lines) > 0
    wanted = [line for line in text.splitlines() if line.startswith("comfyfleet_workers_wanted{")]
    assert 0 < len(wanted) <= 11
