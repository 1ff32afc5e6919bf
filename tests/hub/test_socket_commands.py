"""What callers and monitors command over the WebSocket: to a job that runs, and to workers and the queue."""

from __future__ import annotations

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
