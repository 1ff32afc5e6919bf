"""What callers and monitors command over the WebSocket: to a job that runs, and to workers and the queue."""

from __future__ import annotations

import pytest
from tests.hub._hub import HubRig
from tests.hub.test_socket import CAPABILITIES, connected, rig

from comfyfleet.model.access import Role

__all__ = ["rig"]


async def test_the_reason_of_a_cancel_reaches_the_worker_and_whoever_watches(rig: HubRig) -> None:
    async with connected(rig, Role.WORKER) as line, connected(rig) as caller:
        await line.ask("register_worker", worker_id="gpu-a", capabilities=CAPABILITIES)
        job_id = await rig.submit()
        await line.ask("request_job", worker_id="gpu-a")
        await caller.ask("subscribe_progress", job_id=job_id)
        await caller.say("cancel_job", job_id=job_id, reason="the customer left")
        assert (await line.until("job_cancelled"))["reason"] == "the customer left"
        await line.ask("release_job", job_id=job_id, reason="cancelled")
        assert (await caller.until("job_cancelled"))["reason"] == "the customer left"


async def test_a_failed_job_is_told_with_the_number_of_its_attempt(rig: HubRig) -> None:
    async with connected(rig, Role.WORKER) as line, connected(rig) as caller:
        await line.ask("register_worker", worker_id="gpu-a", capabilities=CAPABILITIES)
        job_id = await rig.submit()
        await line.ask("request_job", worker_id="gpu-a")
        await caller.ask("subscribe_progress", job_id=job_id)
        await line.ask("fail_job", job_id=job_id, error="it broke")
        assert (await caller.until("job_failed"))["attempt"] == 1


async def test_a_running_job_is_paused_and_retried_over_the_socket(rig: HubRig) -> None:
    async with connected(rig, Role.WORKER) as line, connected(rig) as caller:
        await line.ask("register_worker", worker_id="gpu-a", capabilities=CAPABILITIES)
        job_id = await rig.submit()
        await line.ask("request_job", worker_id="gpu-a")
        updated = await caller.ask("pause_job", job_id=job_id)
        assert (updated["status"], updated["pause_requested"]) == ("assigned", True)
        told = await line.until("job_cancelled")
        assert (told["job_id"], told["reason"]) == (job_id, "paused")
        released = await line.ask("release_job", job_id=job_id, reason="cancelled")
        assert (released["status"], released["will_retry"]) == ("pending", True)
        assert (await line.ask("request_job", worker_id="gpu-a"))["type"] == "no_job"
        updated = await caller.ask("resume_job", job_id=job_id)
        assert (updated["status"], updated["is_paused"]) == ("pending", False)
        assert (await line.ask("request_job", worker_id="gpu-a"))["job_id"] == job_id
        updated = await caller.ask("retry_job", job_id=job_id)
        assert (updated["status"], updated["retry_requested"]) == ("assigned", True)
        told = await line.until("worker_command")
        assert (told["action"], told["job_id"]) == ("retry", job_id)
        await line.ask("release_job", job_id=job_id, reason="retry")
        assigned = await line.ask("request_job", worker_id="gpu-a")
        assert assigned["job_data"]["attempt"] == 3


@pytest.mark.parametrize("role", [Role.ADMIN, Role.OPERATOR])
async def test_a_monitor_that_may_drains_pauses_and_resumes_workers_and_the_queue(
    rig: HubRig, role: Role
) -> None:
    async with connected(rig, Role.WORKER) as line, connected(rig, role) as monitor:
        for name in ("gpu-a", "gpu-b"):
            await line.ask("register_worker", worker_id=name, capabilities=CAPABILITIES)
        await monitor.ask("subscribe_monitor", kind="queue_paused,queue_resumed,workers_paused")
        await monitor.say("pause_worker", worker_id="gpu-a", request_id="1")
        paused = await monitor.until("workers_updated")
        assert (paused["workers"], paused["request_id"]) == (
            [{"worker_id": "gpu-a", "status": "paused"}],
            "1",
        )
        await monitor.say("resume_worker", worker_id="gpu-a")
        assert (await monitor.until("workers_updated"))["workers"][0]["status"] == "idle"
        await monitor.say("pause_worker", worker_id="*")
        paused = await monitor.until("workers_updated")
        assert {each["worker_id"]: each["status"] for each in paused["workers"]} == {
            "gpu-a": "paused",
            "gpu-b": "paused",
        }
        heard = await monitor.until("monitor_event")
        assert (heard["event"], heard["worker_id"]) == ("workers_paused", "*")
        await monitor.say("pause_queue")
        assert (await monitor.until("queue_updated"))["is_paused"]
        assert (await rig.get("/api/stats")).body["is_paused"]
        await monitor.say("resume_queue")
        assert not (await monitor.until("queue_updated"))["is_paused"]
        await monitor.say("drain_worker", worker_id="*")
        assert {each["status"] for each in (await monitor.until("workers_updated"))["workers"]} == {
            "draining"
        }
        assert (await line.until("worker_command"))["action"] == "drain"
        await monitor.say("drain_worker", worker_id="nobody")
        while (answer := await monitor.next())["type"] == "monitor_event":
            pass
        assert (answer["type"], answer["code"]) == ("error", "not_found")
    noted = (await rig.get("/api/audit")).body["entries"]
    done = [(each["action"], each.get("target", "")) for each in noted if each["outcome"] == "done"]
    assert {("pause_worker", "gpu-a"), ("pause_worker", "*"), ("pause_queue", "")} <= set(done)


@pytest.mark.parametrize("role", [Role.TENANT, Role.VIEWER, Role.WORKER])
async def test_no_other_monitor_commands_workers_or_the_queue(rig: HubRig, role: Role) -> None:
    async with connected(rig, role) as line:
        for message in ({"type_": "pause_queue"}, {"type_": "drain_worker", "worker_id": "*"}):
            assert (await line.ask(**message))["code"] == "not_allowed"
    assert not (await rig.get("/api/stats")).body["is_paused"]
