"""Workers at the hub, with nothing but HTTP: register, poll, beat, report, hear commands, hang up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.hub._hub import Answer, HubRig, graph, hub_in_process, running_hub
from tests.worker._scripted import until

from comfyfleet.hub.http.server import HubServerSettings
from comfyfleet.model.access import Role
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.fact import ProgressEvent
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.requirement import Requirements
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.policy.rules import Rules
from comfyfleet.wire.websocket import AGENT_PROTOCOL
from comfyfleet.wire.worker import capabilities_hash

OLD_STYLE = {
    "workerId": "gpu-a",
    "services": ["comfyui", "a1111"],
    "hardware": {
        "gpu": {"count": 1, "memory_gb": 24, "model": "RTX 4090"},
        "cpu": {"cores": 8, "threads": 16},
        "memory": {"total_gb": 64, "available_gb": 32},
    },
    "models": {"comfyui": ["flux1-dev.safetensors"]},
    "customer_access": {"isolation": "loose", "allowed_customers": ["default"], "denied_customers": ["evil"]},
    "location": {"region": "eu", "compliance": ["gdpr"]},
    "performance": {"concurrent_jobs": 2, "quality_levels": ["fast"]},
    "cost": {"tier": "economy", "rate_per_hour": 0.5},
}


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process(rules=Rules(max_attempts=1)) as rig:
        yield rig


async def call(rig: HubRig, name: str, **body: Any) -> Answer:
    return await rig.post(f"/api/worker/{name}", body, role=Role.WORKER)


async def register(rig: HubRig, worker_id: str = "gpu-a", **more: Any) -> dict[str, Any]:
    body = {"worker_id": worker_id, "capabilities": {"services": ["comfyui"]}, **more}
    answer = await call(rig, "register", **body)
    assert answer.status == 200, answer.content
    registered: dict[str, Any] = answer.body
    return registered


async def leased(rig: HubRig, poll_id: str = "1") -> dict[str, Any]:
    answer = await call(rig, "poll", worker_id="gpu-a", poll_id=poll_id, wait_s=0)
    assert answer.status == 200, answer.content
    lease: dict[str, Any] = answer.body
    beat = await call(rig, "heartbeat", worker_id="gpu-a", leases=[lease["lease"]])
    assert beat.body["alive"] == [lease["lease"]]
    return lease


# coming


async def test_a_worker_of_the_old_schema_is_understood(rig: HubRig) -> None:
    answer = await call(
        rig, "register", worker_id="gpu-a", environment="cloud", max_concurrency=3, capabilities=OLD_STYLE
    )
    assert answer.status == 200
    assert answer.body["heartbeat_s"] < answer.body["lost_after_s"]
    worker = (await rig.get("/api/workers/gpu-a")).body
    assert (worker["slots"], worker["environment"], worker["services"]) == (3, "cloud", ["comfyui", "a1111"])
    found = worker["capabilities"]
    assert found["services"][0] == {"name": "comfyui", "models": ["flux1-dev.safetensors"]}
    assert found["tenant_access"] == {"isolation": "loose", "allowed": ["default"], "denied": ["evil"]}
    assert found["hardware"]["gpu"]["memory_gb"] == 24
    assert worker["live"]["available_ram_gb"] == 32


async def test_whoever_registers_at_a_hub_has_one(rig: HubRig) -> None:
    for_hubs = Submission(graph(), requirements=Requirements(needs_hub=True))
    for said in ({}, {"has_hub": False}):
        job_id = (await rig.engine.submit(for_hubs)).job_id
        await register(rig, capabilities={"services": ["comfyui"], **said})
        assert (await leased(rig, job_id))["lease"]["job_id"] == job_id
        await rig.engine.remove_worker(WorkerId("gpu-a"))


async def test_a_worker_that_was_admitted_without_a_hub_is_asked_to_register_at_this_one(rig: HubRig) -> None:
    known = await register(rig)
    direct = Capabilities((Service("comfyui"),))
    record = await rig.engine.register(RegisterWorker(WorkerId("gpu-a"), direct))
    poll = {"worker_id": "gpu-a", "poll_id": "1", "wait_s": 0}
    for said in (known["capabilities_hash"], capabilities_hash(record.capabilities)):
        assert (await call(rig, "poll", **poll, capabilities_hash=said)).code == "not_found"
    said = (await register(rig))["capabilities_hash"]
    assert (await call(rig, "poll", **poll, capabilities_hash=said)).status == 204


@pytest.mark.parametrize(
    "capabilities",
    [
        {},
        {"services": []},
        {"services": [7]},
        {"services": ["a", "a"]},
        {"services": ["a"], "hardware": {"gpu": 1}},
    ],
)
async def test_capabilities_that_do_not_parse_match_nobody(rig: HubRig, capabilities: dict[str, Any]) -> None:
    answer = await call(rig, "register", worker_id="gpu-a", capabilities=capabilities)
    assert answer.code == "invalid_request"
    assert (await rig.get("/api/workers")).body == {"workers": []}


async def test_the_first_poll_with_all_capabilities_registers(rig: HubRig) -> None:
    await rig.submit()
    poll = {"worker_id": "gpu-a", "poll_id": "1", "wait_s": 0, "max_concurrency": 2, "current_load": 0}
    answer = await call(rig, "poll", **poll, capabilities=OLD_STYLE, providers=["local"])
    assert answer.status == 200
    worker = (await rig.get("/api/workers/gpu-a")).body
    assert worker["slots"] == 2
    assert worker["capabilities"]["services"][0]["providers"] == ["local"]


async def test_a_full_worker_gets_nothing(rig: HubRig) -> None:
    await rig.submit()
    await register(rig, slots=2)
    full = await call(rig, "poll", worker_id="gpu-a", poll_id="1", wait_s=0, current_load=2)
    assert (full.status, full.content) == (204, b"")
    free = await call(rig, "poll", worker_id="gpu-a", poll_id="2", wait_s=0, current_load=1)
    assert free.status == 200


async def test_a_hash_stands_for_the_capabilities_until_they_change(rig: HubRig) -> None:
    known = (await register(rig))["capabilities_hash"]
    poll = {"worker_id": "gpu-a", "wait_s": 0, "capabilities_hash": known}
    assert (await call(rig, "poll", poll_id="1", **poll)).status == 204
    changed = await register(rig, capabilities={"services": ["comfyui", "a1111"]})
    assert changed["capabilities_hash"] != known
    assert (await call(rig, "poll", poll_id="2", **poll)).code == "not_found"


async def test_a_worker_nobody_knows_is_told_to_register(rig: HubRig) -> None:
    assert (await call(rig, "poll", worker_id="gpu-a", poll_id="1", wait_s=0)).code == "not_found"
    assert (await call(rig, "heartbeat", worker_id="gpu-a")).code == "not_found"


# a job's way


async def test_a_poll_needs_no_id_of_its_own_and_tells_whose_job_it_got(rig: HubRig) -> None:
    needs = {"hardware": {"gpu_memory_gb": 8.0}}
    first = await rig.submit(tenant="acme", priority=5, requirements=needs)
    second = await rig.submit()
    poll = {
        "worker_id": "gpu-a",
        "capabilities": {"services": ["comfyui"], "hardware": {"gpu": {"memory_gb": 24}}},
        "current_load": 0,
        "max_concurrency": 2,
        "providers": ["local"],
    }
    answer = (await call(rig, "poll", **poll)).body
    assert (answer["job"]["id"], answer["job"]["tenant"], answer["job"]["priority"]) == (first, "acme", 5)
    assert answer["job"]["requirements"] == needs
    # Each of them is another poll.
    other = (await call(rig, "poll", **poll)).body
    assert (other["job"]["id"], other["job"]["tenant"]) == (second, "default")
    assert "requirements" not in other["job"]


async def test_a_job_goes_from_poll_to_result(rig: HubRig) -> None:
    job_id = await rig.submit(metadata={"user": "42"}, include_outputs=["2"])
    await register(rig)
    lease = await leased(rig)
    assert lease["job"]["id"] == lease["lease"]["job_id"] == job_id
    assert lease["job"]["payload"]["workflow"] == graph()
    assert lease["job"]["metadata"] == {"user": "42"} and lease["job"]["include_outputs"] == ["2"]
    assert lease["duration_s"] > lease["acknowledge_s"] > 0
    progress: list[ProgressEvent] = []
    rig.engine.bus.listen(lambda event: progress.append(event) if isinstance(event, ProgressEvent) else None)
    report = {"lease": lease["lease"], "kind": "progress", "data": {"value": 1, "max": 2}}
    preview = {"lease": lease["lease"], "kind": "preview", "image": "aGVsbG8="}
    beat = await call(rig, "progress", reports=[report, preview])
    assert beat.body["alive"] == [lease["lease"]]
    assert [(each.kind.value, each.image) for each in progress] == [("progress", None), ("preview", b"hello")]
    done = await call(rig, "complete", lease=lease["lease"], result={"outputs": {"2": {"a": 1}}}, seconds=2)
    assert done.body == {"status": "completed"}
    again = await call(rig, "complete", lease=lease["lease"], result={"outputs": {"2": {"a": 1}}}, seconds=2)
    assert (again.status, again.body) == (200, done.body)
    assert (await rig.get(f"/api/jobs/{job_id}/result")).body["result"]["outputs"] == {"2": {"a": 1}}


async def test_a_heartbeat_may_tell_how_far_a_job_is_and_loses_no_command(rig: HubRig) -> None:
    job_id = await rig.submit()
    await register(rig)
    lease = await leased(rig)
    await rig.post(f"/api/jobs/{job_id}/cancel")
    report = {"lease": lease["lease"], "kind": "progress", "data": {"value": 1, "max": 2}}
    beat = await call(rig, "heartbeat", worker_id="gpu-a", leases=[lease["lease"]], reports=[report])
    assert beat.body["alive"] == [lease["lease"]]
    assert [command["action"] for command in beat.body["commands"]] == ["cancel"]
    progress = await rig.get(f"/api/jobs/{job_id}/progress", headers={"accept": "application/json"})
    assert (progress.body["value"], progress.body["max"]) == (1, 2)


async def test_the_same_poll_gets_the_same_lease_and_another_does_not(rig: HubRig) -> None:
    await rig.submit()
    await register(rig, slots=2)
    lease = await leased(rig, "1")
    again = await call(rig, "poll", worker_id="gpu-a", poll_id="1", wait_s=0)
    assert again.body["lease"] == lease["lease"]
    assert (await call(rig, "poll", worker_id="gpu-a", poll_id="2", wait_s=0)).status == 204


async def test_a_failure_says_whether_it_is_tried_again(rig: HubRig) -> None:
    job_id = await rig.submit()
    await register(rig)
    lease = await leased(rig)
    failure = {"kind": "invalid_workflow", "message": "no such node", "node_id": "1"}
    answer = await call(rig, "fail", lease=lease["lease"], failure=failure)
    assert answer.body == {"status": "failed"}
    assert (await rig.get(f"/api/jobs/{job_id}")).body["error"]["node_id"] == "1"


async def test_a_released_job_waits_again_and_its_old_lease_is_lost(rig: HubRig) -> None:
    await rig.submit()
    await register(rig)
    first = await leased(rig, "1")
    answer = await call(rig, "release", lease=first["lease"], reason="drain")
    assert answer.body == {"status": "queued", "will_retry": True}
    second = await leased(rig, "2")
    assert second["lease"]["number"] == first["lease"]["number"] + 1
    late = await call(rig, "complete", lease=first["lease"])
    assert (late.status, late.code) == (409, "lease_lost")
    beat = await call(rig, "heartbeat", worker_id="gpu-a", leases=[first["lease"], second["lease"]])
    assert (beat.body["alive"], beat.body["lost"]) == ([second["lease"]], [first["lease"]])


async def test_a_lease_with_another_token_is_nobodys(rig: HubRig) -> None:
    job_id = await rig.submit()
    await register(rig)
    lease = await leased(rig)
    forged = {**lease["lease"], "token": "guessed"}
    assert (await call(rig, "complete", lease=forged)).code == "lease_lost"
    assert (await call(rig, "heartbeat", worker_id="gpu-a", leases=[forged])).body["lost"] == [forged]
    assert (await rig.get(f"/api/jobs/{job_id}")).body["status"] == "leased"


async def test_the_end_of_one_lease_may_ask_for_the_next(rig: HubRig) -> None:
    await rig.submit()
    await rig.submit()
    await register(rig)
    lease = await leased(rig, "1")
    done = await call(rig, "complete", lease=lease["lease"], next={"poll_id": "2"})
    following = done.body["next"]
    assert following["job"]["id"] != lease["job"]["id"]
    failure = {"kind": "invalid_workflow", "message": "no"}
    last = await call(rig, "fail", lease=following["lease"], failure=failure, next={"poll_id": "3"})
    assert "next" not in last.body


async def test_a_cancelled_run_hears_of_it_and_confirms(rig: HubRig) -> None:
    job_id = await rig.submit()
    await register(rig)
    lease = await leased(rig)
    waiting = asyncio.create_task(call(rig, "commands", worker_id="gpu-a", wait_s=30))
    await asyncio.sleep(0)
    await rig.post(f"/api/jobs/{job_id}/cancel")
    (command,) = (await asyncio.wait_for(waiting, 60)).body["commands"]
    assert (command["action"], command["job_id"]) == ("cancel", job_id)
    beat = await call(rig, "heartbeat", worker_id="gpu-a", leases=[lease["lease"]])
    assert beat.body["commands"][0]["action"] == "cancel"
    answer = await call(rig, "release", lease=lease["lease"], reason="cancelled")
    assert answer.body == {"status": "cancelled"}


async def test_a_worker_that_unregistered_gets_nothing(rig: HubRig) -> None:
    await register(rig)
    assert (await call(rig, "unregister", worker_id="gpu-a", reason="stop")).status == 204
    assert (await call(rig, "poll", worker_id="gpu-a", poll_id="1", wait_s=0)).code == "not_found"
    assert (await rig.get("/api/workers/gpu-a")).body["status"] == "offline"


# over a connection


async def test_a_parked_poll_is_answered_when_a_job_comes_and_with_nothing_when_its_wait_is_over() -> None:
    async with running_hub() as rig:
        await register(rig)
        none = await call(rig, "poll", worker_id="gpu-a", poll_id="0", wait_s=0.05)
        assert none.status == 204
        parked = asyncio.create_task(call(rig, "poll", worker_id="gpu-a", poll_id="1", wait_s=30))
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        job_id = await rig.submit()
        assert (await asyncio.wait_for(parked, 60)).body["job"]["id"] == job_id


async def test_a_closed_connection_unparks_its_poll_and_strands_no_job() -> None:
    async with running_hub() as rig:
        await register(rig)
        async with aiohttp.ClientSession() as session:
            poll = {"worker_id": "gpu-a", "poll_id": "1", "wait_s": 30}
            headers = {"authorization": f"Bearer {rig.keys[Role.WORKER]}"}
            parked = asyncio.create_task(
                session.post(f"{rig.url}/api/worker/poll", json=poll, headers=headers).__aenter__()
            )
            await until(lambda: rig.engine._matcher.idle_slots == 1)
            parked.cancel()
            await asyncio.gather(parked, return_exceptions=True)
        await until(lambda: rig.engine._matcher.idle_slots == 0)
        job_id = await rig.submit()
        assert (await rig.get(f"/api/jobs/{job_id}")).body["status"] == "queued"
        taken = await call(rig, "poll", worker_id="gpu-a", poll_id="2", wait_s=0)
        assert taken.body["job"]["id"] == job_id


async def test_a_hub_that_stops_answers_what_is_parked() -> None:
    async with running_hub(HubServerSettings(port=0, graceful_s=600)) as rig:
        await register(rig)
        parked = [
            asyncio.create_task(call(rig, "poll", worker_id="gpu-a", poll_id="1", wait_s=60)),
            asyncio.create_task(call(rig, "commands", worker_id="gpu-a", wait_s=60)),
        ]
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        rig.hub.stop()
        for answer in await asyncio.wait_for(asyncio.gather(*parked), 60):
            assert (answer.status, answer.code) == (503, "unavailable")
        assert (await call(rig, "poll", worker_id="gpu-a", poll_id="2", wait_s=60)).code == "unavailable"


async def test_a_key_of_one_worker_does_nothing_with_the_lease_of_another(rig: HubRig) -> None:
    """Whatever it can show: over HTTP, and over the WebSocket in both of its tongues."""
    await register(rig)
    await rig.submit()
    lease = (await leased(rig))["lease"]
    await register(rig, "two")
    _, two = await rig.hub.keys.create(Role.WORKER, worker_id=WorkerId("two"))
    report = {"lease": lease, "kind": "progress", "data": {"percentage": 5}}
    for name, body in (
        ("complete", {"lease": lease}),
        ("fail", {"lease": lease, "failure": {"kind": "unknown", "message": "m"}}),
        ("release", {"lease": lease}),
        ("progress", {"reports": [report]}),
        ("heartbeat", {"worker_id": "two", "leases": [lease]}),
        ("heartbeat", {"worker_id": "two", "reports": [report]}),
    ):
        answer = await rig.post(f"/api/worker/{name}", body, key=two)
        assert answer.code == "not_allowed", name
    view = await rig.engine.get(lease["job_id"])
    assert view.dispatch.lease is not None and view.dispatch.lease.worker_id == "gpu-a"
    # Whose it is may go on, and whoever shows it with a key that names nobody.
    _, own = await rig.hub.keys.create(Role.WORKER, worker_id=WorkerId("gpu-a"))
    assert (await rig.post("/api/worker/progress", {"reports": [report]}, key=own)).status == 200
    assert (await rig.post("/api/worker/complete", {"lease": lease}, key=own)).status == 200


@pytest.mark.parametrize("protocol", [None, AGENT_PROTOCOL])
async def test_a_key_of_one_worker_does_nothing_with_the_lease_of_another_over_a_socket(
    protocol: str | None,
) -> None:
    async with running_hub() as rig:
        await register(rig)
        job_id = await rig.submit()
        lease = (await leased(rig))["lease"]
        _, two = await rig.hub.keys.create(Role.WORKER, worker_id=WorkerId("two"))
        await rig.post(
            "/api/worker/register", {"worker_id": "two", "capabilities": {"services": ["comfyui"]}}, key=two
        )
        said: list[dict[str, Any]] = [
            {"type": "complete_job", "job_id": job_id, "lease": lease},
            {"type": "fail_job", "job_id": job_id, "lease": lease, "error": "x"},
            {"type": "release_job", "job_id": job_id, "lease": lease},
            {"type": "update_progress", "job_id": job_id, "lease": lease, "progress": 5.0},
            {"type": "heartbeat", "worker_id": "two", "leases": [lease]},
        ]
        if protocol is not None:
            said = [
                {"type": "complete_job", "request_id": 1, "body": {"lease": lease}},
                {"type": "release_job", "request_id": 2, "body": {"lease": lease}},
                {"type": "heartbeat", "request_id": 3, "body": {"worker_id": "two", "leases": [lease]}},
            ]
        async with rig.session.ws_connect(
            f"{rig.url}/hub",
            headers={"authorization": f"Bearer {two}"},
            protocols=() if protocol is None else (protocol,),
        ) as line:
            for message in said:
                await line.send_json(message)
                answer = await line.receive_json(timeout=60)
                assert answer["type"] == "error", (message, answer)
                told = answer if protocol is None else answer["body"]
                assert told["code"] == "not_allowed", (message, answer)
        view = await rig.engine.get(JobId(job_id))
        assert view.dispatch.lease is not None and view.dispatch.lease.worker_id == "gpu-a"


async def test_a_command_says_when_it_was_told(rig: HubRig) -> None:
    await register(rig)
    assert (await call(rig, "commands", worker_id="gpu-a", wait_s=0)).body["commands"] == []
    await rig.post("/api/workers/gpu-a/drain")
    told = await call(rig, "commands", worker_id="gpu-a", wait_s=0)
    (command,) = told.body["commands"]
    assert command["action"] == "drain"
    assert command["timestamp"] == pytest.approx(rig.engine.now(), abs=60)
