"""A worker whose key is revoked is offline from that moment on, and what it ran is somebody else's."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.hub._delivering import until
from tests.hub._hub import HubRig, hub_in_process, running_hub

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.access import Role
from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.policy.rules import Rules


async def enrolled(rig: HubRig, worker_id: str) -> dict[str, Any]:
    token = (await rig.post("/api/enrolments", {"replace": True})).body["token"]
    made = await rig.post("/api/worker/enrol", {"token": token, "worker_id": worker_id}, role=None)
    assert made.status == 201
    found: dict[str, Any] = made.body
    return found


async def leased(rig: HubRig, worker_id: str, key: str) -> dict[str, Any]:
    """A job that runs there."""
    body = {"worker_id": worker_id, "capabilities": {"services": ["comfyui"]}}
    assert (await rig.post("/api/worker/register", body, key=key)).status == 200
    poll = {"worker_id": worker_id, "poll_id": key[-20:], "wait_s": 30}
    answer = await rig.post("/api/worker/poll", poll, key=key)
    assert answer.status == 200, answer.content
    beat = {"worker_id": worker_id, "leases": [answer.body["lease"]]}
    assert (await rig.post("/api/worker/heartbeat", beat, key=key)).status == 200
    found: dict[str, Any] = answer.body
    return found


async def status_of(rig: HubRig, worker_id: str) -> str:
    return str((await rig.get(f"/api/workers/{worker_id}")).body["status"])


async def test_a_worker_is_offline_at_once_and_its_job_waits_for_another() -> None:
    async with hub_in_process(rules=Rules(max_attempts=1)) as rig:
        key = await enrolled(rig, "gpu-1")
        job_id = await rig.submit()
        lease = await leased(rig, "gpu-1", key["key"])
        assert (await rig.ask("DELETE", f"/api/keys/{key['id']}")).status == 200
        worker = (await rig.get("/api/workers/gpu-1")).body
        assert (worker["status"], worker["current_jobs"]) == ("offline", [])
        assert "key" in worker["offline_reason"]
        job = (await rig.get(f"/api/jobs/{job_id}")).body
        # Not the job's fault: with one attempt allowed it has it still.
        assert (job["status"], [each["outcome"] for each in job["history"]]) == ("queued", ["released"])
        fact = (await rig.engine.store.facts(JobId(job_id)))[-1]
        assert fact.kind is FactKind.RELEASED and "key was revoked" in (fact.data or {})["reason"]
        late = {"lease": lease["lease"], "result": {}}
        assert (await rig.post("/api/worker/complete", late, key=key["key"])).code == "unauthenticated"
        other = await enrolled(rig, "gpu-2")
        assert (await leased(rig, "gpu-2", other["key"]))["job"]["id"] == job_id
        # Its old lease is over for everybody, whoever has seen it.
        assert (await rig.post("/api/worker/complete", late)).code == "lease_lost"


async def test_a_job_that_was_to_be_cancelled_there_is_cancelled() -> None:
    async with hub_in_process() as rig:
        key = await enrolled(rig, "gpu-1")
        job_id = await rig.submit()
        await leased(rig, "gpu-1", key["key"])
        assert (await rig.post(f"/api/jobs/{job_id}/cancel")).body["status"] == "leased"
        await rig.ask("DELETE", f"/api/keys/{key['id']}")
        assert (await rig.get(f"/api/jobs/{job_id}")).body["status"] == "cancelled"


async def test_of_a_key_that_names_no_worker_those_go_that_used_it() -> None:
    async with hub_in_process() as rig:
        keys = [(await rig.post("/api/keys", {"role": "worker"})).body for _ in range(2)]
        jobs = [await rig.submit() for _ in range(2)]
        for number, key in enumerate(keys):
            await leased(rig, f"gpu-{number}", key["key"])
        await rig.ask("DELETE", f"/api/keys/{keys[0]['id']}")
        assert [await status_of(rig, f"gpu-{number}") for number in range(2)] == ["offline", "busy"]
        found = [(await rig.get(f"/api/jobs/{job_id}")).body["status"] for job_id in jobs]
        assert sorted(found) == ["leased", "queued"]


async def test_a_key_that_the_worker_does_not_use_takes_nothing_from_it() -> None:
    async with hub_in_process() as rig:
        body = {"role": "worker", "worker_id": "gpu-1"}
        old, new = [(await rig.post("/api/keys", body)).body for _ in range(2)]
        await rig.submit()
        await leased(rig, "gpu-1", new["key"])
        await rig.ask("DELETE", f"/api/keys/{old['id']}")
        assert await status_of(rig, "gpu-1") == "busy"


async def test_a_name_that_is_enrolled_anew_begins_anew() -> None:
    async with hub_in_process() as rig:
        first = await enrolled(rig, "gpu-1")
        job_id = await rig.submit()
        await leased(rig, "gpu-1", first["key"])
        second = await enrolled(rig, "gpu-1")
        assert await status_of(rig, "gpu-1") == "offline"
        assert (await leased(rig, "gpu-1", second["key"]))["job"]["id"] == job_id


async def test_a_key_that_ends_elsewhere_or_by_itself_takes_its_worker_along_soon() -> None:
    async with running_hub(limits=HubLimits(beat_s=0.05)) as rig:
        key = await enrolled(rig, "gpu-1")
        await rig.submit()
        # Busy, it has no connection that could be closed.
        await leased(rig, "gpu-1", key["key"])
        await rig.hub.keys.revoke(key["id"])

        async def is_gone() -> bool:
            return await status_of(rig, "gpu-1") == "offline"

        await until(is_gone)
        assert await rig.engine.leases(await rig.engine.workers()) == {WorkerId("gpu-1"): []}


async def test_a_worker_over_the_websocket_is_told_by_its_connection() -> None:
    async with running_hub() as rig, asyncio.timeout(60):
        key = await enrolled(rig, "gpu-1")
        headers = {"authorization": f"Bearer {key['key']}"}
        async with rig.session.ws_connect(rig.url + "/hub", headers=headers) as line:
            capabilities = {"services": ["comfyui"]}
            await line.send_json(
                {"type": "register_worker", "worker_id": "gpu-1", "capabilities": capabilities}
            )
            assert (await line.receive_json())["type"] == "worker_registered"
            await rig.ask("DELETE", f"/api/keys/{key['id']}", role=Role.ADMIN)
            assert (await line.receive()).data == 1008
            assert await status_of(rig, "gpu-1") == "offline"
