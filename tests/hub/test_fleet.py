"""Operators at the hub: the queue, the workers, the blocks; and the hub's own health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, hub_in_process
from tests.hub.test_jobs import ANYTHING, take

from comfyfleet.model.access import Role
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.calls import Poll, RegisterWorker
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import PollId, WorkerId

GPU = WorkerId("gpu-a")


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


async def test_a_paused_queue_leases_nothing(rig: HubRig) -> None:
    await rig.submit()
    assert (await rig.post("/api/queue/pause")).body == {"is_paused": True}
    await rig.engine.register(RegisterWorker(GPU, ANYTHING))
    assert await rig.engine.poll(Poll(GPU, PollId("1"), 0)) is None
    assert (await rig.get("/api/stats")).body["is_paused"]
    assert (await rig.post("/api/queue/resume")).body == {"is_paused": False}
    assert await rig.engine.poll(Poll(GPU, PollId("2"), 0)) is not None


@pytest.mark.parametrize("path", ["/api/workers", "/workers"])
async def test_workers_are_listed_with_what_they_do(rig: HubRig, path: str) -> None:
    job_id = await rig.submit()
    await take(rig)
    await rig.engine.register(RegisterWorker(WorkerId("gpu-b"), ANYTHING, slots=2))
    found = {worker["id"]: worker for worker in (await rig.get(path)).body["workers"]}
    assert (found["gpu-a"]["status"], found["gpu-a"]["current_jobs"]) == ("busy", [job_id])
    assert (found["gpu-b"]["status"], found["gpu-b"]["slots"]) == ("idle", 2)
    one = (await rig.get(f"{path}/gpu-a")).body
    assert one["capabilities"]["services"] == [{"name": "comfyui"}]
    assert (await rig.get(f"{path}/nobody")).code == "not_found"


@pytest.mark.parametrize("path", ["/api/workers", "/workers"])
async def test_workers_are_listed_by_status_and_those_that_are_active_without_those_that_are_gone(
    rig: HubRig, path: str
) -> None:
    for name in ("gone", "idle", "paused"):
        await rig.engine.register(RegisterWorker(WorkerId(name), ANYTHING))
    await rig.engine.unregister(WorkerId("gone"), "offline")
    await rig.post("/api/workers/paused/pause")

    async def names(query: str) -> list[str]:
        return sorted(each["id"] for each in (await rig.get(path + query)).body["workers"])

    assert await names("") == ["gone", "idle", "paused"]
    assert await names("?status=active") == ["idle", "paused"]
    assert await names("?status=active&limit=1") == ["idle"]
    assert await names("?status=offline") == ["gone"]
    assert await names("?status=busy") == []
    assert (await rig.get(path + "?status=awake")).code == "invalid_request"


async def test_a_worker_is_paused_resumed_drained_and_removed(rig: HubRig) -> None:
    await rig.engine.register(RegisterWorker(GPU, ANYTHING))
    for verb, status in (("pause", "paused"), ("resume", "idle"), ("drain", "draining")):
        assert (await rig.post(f"/api/workers/gpu-a/{verb}")).body["status"] == status
    assert [command.action for command in (await rig.engine.heartbeat(GPU, ())).commands] == ["drain"]
    await rig.engine.unregister(GPU, "drained")
    refused = await rig.post("/api/workers/gpu-a/pause")
    assert (refused.code, refused.body["detail"]) == (
        "not_found",
        "worker 'gpu-a' is offline: start it again where it ran",
    )
    assert (await rig.ask("DELETE", "/api/workers/gpu-a")).status == 204
    assert (await rig.ask("DELETE", "/api/workers/gpu-a")).code == "not_found"
    assert (await rig.get("/api/workers")).body == {"workers": []}
    await rig.engine.register(RegisterWorker(GPU, ANYTHING))


async def test_the_answer_to_each_command_to_a_worker_counts_its_blocks(rig: HubRig) -> None:
    await rig.engine.register(RegisterWorker(GPU, ANYTHING))
    until = rig.engine.now() + 600
    await rig.engine.store.put_block(Block(GPU, "hash", BlockReason.FAILURES, 1, until))
    for verb in ("pause", "resume", "drain"):
        (of_all,) = (await rig.post(f"/api/fleet/{verb}")).body["workers"]
        one = (await rig.post(f"/api/workers/gpu-a/{verb}")).body
        for worker in (one, of_all):
            assert (worker["blocked_workflows"], worker["blocked_until"]) == (1, until), verb


async def test_what_an_operator_says_of_a_worker_lasts_until_an_operator_says_otherwise(rig: HubRig) -> None:
    await rig.engine.register(RegisterWorker(GPU, ANYTHING))
    await rig.post("/api/workers/gpu-a/drain")
    await rig.engine.unregister(GPU, "drained")
    await rig.engine.register(RegisterWorker(GPU, ANYTHING))
    assert (await rig.get("/api/workers/gpu-a")).body["status"] == "paused"
    assert (await rig.post("/api/workers/gpu-a/resume")).body["status"] == "idle"
    assert (await rig.ask("DELETE", "/api/workers/gpu-a")).status == 204
    body = {"worker_id": "gpu-a", "capabilities": {"services": [{"name": "comfyui"}]}}
    refused = await rig.post("/api/worker/register", body)
    assert (refused.status, refused.code) == (403, "not_allowed")
    assert "comfyfleet workers resume gpu-a" in refused.body["detail"]
    resumed = (await rig.post("/api/workers/gpu-a/resume")).body
    assert (resumed["status"], resumed["offline_reason"]) == ("offline", "removed by an operator")
    assert (await rig.post("/api/worker/register", body)).status == 200


async def test_one_name_is_one_agents_while_that_is_heard_of(rig: HubRig) -> None:
    body = {"worker_id": "gpu-a", "capabilities": {"services": [{"name": "comfyui"}]}}
    mine, other = {**body, "instance": "first"}, {**body, "instance": "second"}
    registered = (await rig.post("/api/worker/register", mine)).body
    refused = await rig.post("/api/worker/register", other)
    assert (refused.status, refused.code) == (403, "not_allowed")
    assert "--name" in refused.body["detail"]
    poll = {"worker_id": "gpu-a", "poll_id": "1", "wait_s": 0}
    poll["capabilities_hash"] = registered["capabilities_hash"]
    assert (await rig.post("/api/worker/poll", {**poll, "instance": "first"})).status == 204
    assert (await rig.post("/api/worker/poll", {**poll, "instance": "second"})).code == "not_found"
    assert (await rig.post("/api/worker/register", mine)).status == 200
    assert (await rig.post("/api/worker/register", body)).status == 200, "one that does not say"


async def test_why_a_worker_is_offline_is_listed_and_explained_until_it_is_back(rig: HubRig) -> None:
    job_id = await rig.submit()
    await rig.engine.register(RegisterWorker(GPU, ANYTHING))
    await rig.engine.unregister(GPU, "offline")
    # It knows more by now.
    await rig.engine.unregister(GPU, "its execution thread is dead; restart it")
    one = (await rig.get("/api/workers/gpu-a")).body
    assert (one["status"], one["offline_reason"]) == ("offline", "its execution thread is dead; restart it")
    assert one["disconnects"] == 1
    told = (await rig.get(f"/api/jobs/{job_id}/explain")).body
    assert "its execution thread is dead; restart it" in told["summary"]
    await rig.engine.register(RegisterWorker(GPU, ANYTHING))
    one = (await rig.get("/api/workers/gpu-a")).body
    assert (one["status"], one["offline_reason"]) == ("idle", "")


async def test_a_worker_whose_id_has_a_slash_is_reached(rig: HubRig) -> None:
    odd = WorkerId("rack 1/gpu:8188")
    await rig.engine.register(RegisterWorker(odd, ANYTHING))
    assert (await rig.get(f"/api/workers/{quote(odd, safe='')}")).body["id"] == odd


async def test_a_block_is_seen_and_lifted_by_hand(rig: HubRig) -> None:
    await rig.engine.register(RegisterWorker(GPU, ANYTHING))
    until = await rig.engine.store.now() + 60
    await rig.engine.store.put_block(Block(GPU, "hash", BlockReason.FAILURES, 1, until))
    await rig.engine.store.put_block(Block(GPU, "counting", BlockReason.FAILURES, 1))
    blocks = (await rig.get("/api/blocks")).body["blocks"]
    assert [(block["worker_id"], block["target"], block["reason"]) for block in blocks] == [
        ("gpu-a", "hash", "failures")
    ]
    assert (await rig.ask("DELETE", "/api/blocks/gpu-a/hash")).status == 204
    assert (await rig.ask("DELETE", "/api/blocks/gpu-a/hash")).code == "not_found"
    assert (await rig.get("/api/blocks")).body == {"blocks": []}


async def test_a_stopping_hub_is_not_ready(rig: HubRig) -> None:
    rig.hub.stop()
    answer = await rig.get("/health", role=None)
    assert (answer.status, answer.body["status"]) == (503, "stopping")


async def test_a_fault_is_not_now_and_a_defect_is_an_incident(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away() -> None:
        raise Fault("the store is away")

    async def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.engine, "stats", away)
    answer = await rig.get("/api/stats")
    assert (answer.status, answer.code) == (503, "unavailable")
    assert answer.headers["retry-after"]
    monkeypatch.setattr(rig.engine, "stats", broken)
    answer = await rig.get("/api/stats")
    assert (answer.status, answer.code) == (500, "internal")
    assert answer.body["incident"] in caplog.text and "ZeroDivisionError" in caplog.text
    assert "ZeroDivisionError" not in answer.content.decode()


async def test_a_path_that_is_not_and_a_method_it_has_not(rig: HubRig) -> None:
    for path in ("//", "/api", "/api/jobs/", "/api//jobs", "/api/jobs/1/2/3"):
        answer = await rig.get(path)
        assert answer.code == "not_found"
        assert answer.headers["x-request-id"] == answer.body["request_id"] != ""
    answer = await rig.ask("PUT", "/api/jobs", headers={"x-request-id": "mine"})
    assert answer.status == 405
    assert answer.headers["x-request-id"] == answer.body["request_id"] == "mine"
    assert set(answer.headers["allow"].split(", ")) == {"GET", "POST"}


async def test_one_command_reaches_every_worker_that_is_there(rig: HubRig) -> None:
    for name in ("gpu-a", "gpu-b", "gpu-c"):
        await rig.engine.register(RegisterWorker(WorkerId(name), ANYTHING))
    await rig.engine.unregister(WorkerId("gpu-c"), "stopped")
    for name in ("gpu-a", "gpu-b"):
        assert await rig.engine.commands(WorkerId(name), 0) == ()
    paused = await rig.post("/api/fleet/pause")
    assert [(each["id"], each["status"]) for each in paused.body["workers"]] == [
        ("gpu-a", "paused"),
        ("gpu-b", "paused"),
    ]
    await rig.submit()
    assert await rig.engine.poll(Poll(WorkerId("gpu-a"), PollId("1"), 0)) is None
    resumed = await rig.post("/api/fleet/resume")
    assert [each["status"] for each in resumed.body["workers"]] == ["idle", "idle"]
    assert await rig.engine.poll(Poll(WorkerId("gpu-a"), PollId("2"), 0)) is not None
    await rig.post("/api/fleet/drain", role=Role.OPERATOR)
    for name in ("gpu-a", "gpu-b"):
        assert [each.action for each in await rig.engine.commands(WorkerId(name), 0)] == ["drain"]
    assert (await rig.post("/api/fleet/pause", role=Role.TENANT)).code == "not_allowed"
