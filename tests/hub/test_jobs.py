"""Callers at the hub: submitting, looking, changing, over plain HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.hub._hub import TENANT, HubRig, graph, hub_in_process, submission
from tests.hub._watching import lease, register, report

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, Poll, RegisterWorker, Release
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.policy.rules import Rules

ANYTHING = Capabilities((Service("comfyui"),))


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process(rules=Rules(max_attempts=1)) as rig:
        yield rig


async def take(rig: HubRig, worker: str = "gpu-a") -> LeasedJob:
    worker_id = WorkerId(worker)
    await rig.engine.register(RegisterWorker(worker_id, ANYTHING))
    leased = await rig.engine.poll(Poll(worker_id, PollId("1"), 0))
    assert leased is not None
    await rig.engine.heartbeat(worker_id, [leased.ref])
    return leased


# submit


async def test_a_job_is_made_with_its_place_and_both_names_of_its_id(rig: HubRig) -> None:
    answer = await rig.post("/api/jobs", submission())
    assert answer.status == 201
    assert answer.body["id"] == answer.body["jobId"]
    assert answer.body["status"] == "queued"
    assert answer.headers["location"] == f"/api/jobs/{answer.body['id']}"


@pytest.mark.parametrize("path", ["/api/jobs", "/jobs", "/api/ai-jobs"])
async def test_every_door_leads_to_the_same_room(rig: HubRig, path: str) -> None:
    made = await rig.post(path, submission())
    assert made.status == 201
    for look in ("/api/jobs/", "/jobs/"):
        assert (await rig.get(look + made.body["id"])).body["status"] == "queued"


async def test_a_status_is_asked_for_in_every_spelling_and_answered_in_one(rig: HubRig) -> None:
    await register(rig)
    running = await rig.submit()
    await lease(rig)
    waiting = await rig.submit()
    for path in ("/api/jobs", "/jobs"):
        for status in ("leased", "running", "assigned", "active"):
            (found,) = (await rig.get(f"{path}?status={status}")).body["jobs"]
            assert (found["id"], found["status"]) == (running, "leased")
        for status in ("queued", "pending"):
            (found,) = (await rig.get(f"{path}?status={status}")).body["jobs"]
            assert (found["id"], found["status"]) == (waiting, "queued")
        assert (await rig.get(f"{path}/{running}")).body["status"] == "leased"


async def test_a_list_shows_no_start_of_a_job_that_waits_again(rig: HubRig) -> None:
    await register(rig)
    job_id = await rig.submit()
    leased = await lease(rig)
    await report(rig, leased, ProgressKind.ACCEPTED)
    await report(rig, leased, ProgressKind.STARTED)
    (found,) = (await rig.get("/api/jobs")).body["jobs"]
    assert found["started_at"] is not None and found["prompt_id"] is not None
    await rig.engine.release(Release(leased.ref, "drain"))
    (found,) = (await rig.get("/api/jobs")).body["jobs"]
    shown = (await rig.get(f"/api/jobs/{job_id}")).body
    assert (found["status"], found["started_at"], found["prompt_id"]) == ("queued", None, None)
    assert (shown["started_at"], shown["prompt_id"]) == (None, None)


async def test_the_whole_submission_of_the_documentation_is_taken(rig: HubRig) -> None:
    body: dict[str, Any] = {
        "service": "comfyui",
        "provider": None,
        "payload": {"workflow": graph()},
        "inputs": [],
        "priority": 5,
        "urgency": "normal",
        "not_before": None,
        "deadline": None,
        "after": [],
        "requirements": {
            "hardware": {
                "gpu_count": 1,
                "gpu_memory_gb": 24,
                "gpu_model": None,
                "cpu_cores": 4,
                "ram_gb": 16,
            },
            "models": ["flux1-dev.safetensors"],
            "isolation": "strict",
            "location": {"region": "eu", "compliance": ["gdpr"]},
            "max_processing_s": 600,
            "environment": None,
            "workers": None,
            "exclude_workers": [],
        },
        "preferences": {
            "workers": ["gpu-a"],
            "models": [],
            "quality": "balanced",
            "region": "eu",
            "cost_tier": "standard",
        },
        "metadata": {"user": "42"},
        "max_attempts": 3,
        "timeouts": {"start_s": 60, "stall_s": 300, "total_s": 1800},
        "include_outputs": [],
        "webhook": None,
    }
    made = await rig.post("/api/jobs", body)
    assert made.status == 201
    view = await rig.engine.get(made.body["id"])
    needs = view.job.payload.requirements
    assert (needs.hardware.gpu_memory_gb, needs.isolation, needs.location.region) == (24, "strict", "eu")
    assert needs.max_processing_s == 600
    assert view.job.payload.preferences.workers == ("gpu-a",)
    assert view.job.payload.timeouts.total_s == 1800


@pytest.mark.parametrize("name", ["service", "service_type", "job_type", "service_required"])
async def test_a_service_is_understood_in_every_spelling(rig: HubRig, name: str) -> None:
    payload = {"route": "txt2img", "body": {"prompt": "a fox"}}
    made = await rig.post("/api/jobs", {name: "a1111", "payload": payload})
    assert made.status == 201, made.content
    assert (await rig.get(f"/api/jobs/{made.body['id']}")).body["service"] == "a1111"


async def test_a_graph_alone_is_a_payload_too(rig: HubRig) -> None:
    nested = await rig.post("/api/jobs", {"payload": {"workflow": graph()}})
    bare = await rig.post("/api/jobs", {"payload": graph()})
    assert nested.body["workflow_hash"] == bare.body["workflow_hash"]


async def test_times_are_seconds_or_dates(rig: HubRig) -> None:
    for given in (4102444800, "2100-01-01T00:00:00Z", "2100-01-01T00:00:00", "2100-01-01T01:00:00+01:00"):
        job_id = await rig.submit(not_before=given)
        assert (await rig.get(f"/api/jobs/{job_id}")).body["not_before"] == 4102444800


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"priority": 1001}, "invalid_request"),
        ({"priority": "high"}, "invalid_request"),
        ({"prioritty": 1}, "invalid_request"),
        ({"urgency": "very"}, "invalid_request"),
        ({"requirements": {"gpu": 1}}, "invalid_request"),
        ({"requirements": {"hardware": {"gpu_memory_gb": -1}}}, "invalid_request"),
        ({"max_attempts": 0}, "invalid_request"),
        ({"not_before": -1}, "invalid_request"),
        ({"metadata": {"text": "x" * 70_000}}, "too_large"),
        ({"payload": {}}, "invalid_workflow"),
        (
            {"payload": {"workflow": {"1": {"class_type": "A", "inputs": {"a": ["9", 0]}}}}},
            "invalid_workflow",
        ),
        ({"payload": []}, "invalid_request"),
        ({"require_workable": True}, "unworkable"),
        ({"reference": "idempotency-key:x"}, "invalid_request"),
        ({"webhook": "http://127.0.0.1/"}, "invalid_request"),
        ({"webhook": {"url": "http://169.254.169.254/"}}, "invalid_request"),
        ({"webhook": {"url": "https://example.com/", "events": ["progress"]}}, "invalid_request"),
    ],
)
async def test_what_cannot_be_taken_is_refused_by_its_name(
    rig: HubRig, change: dict[str, Any], code: str
) -> None:
    answer = await rig.post("/api/jobs", submission() | change)
    assert 400 <= answer.status < 500
    assert answer.code == code
    assert (await rig.get("/api/stats")).body["waiting"] == 0


async def test_a_refused_workflow_says_which_node_is_wrong(rig: HubRig) -> None:
    answer = await rig.post("/api/jobs", {"payload": {"workflow": {"1": {"inputs": {}}}}})
    assert answer.status == 422
    assert "1" in answer.body["node_errors"]


FULL = (Rules(max_waiting=1), Rules(max_open_bytes=400))


@pytest.mark.parametrize("rules", FULL, ids=["jobs", "bytes"])
async def test_a_full_queue_says_when_to_come_back_and_knows_what_it_took(rules: Rules) -> None:
    key = {"Idempotency-Key": "order-1"}
    async with hub_in_process(rules=rules) as rig:
        first = await rig.post("/api/jobs", submission(), headers=key)
        assert first.status == 201
        answer = await rig.post("/api/jobs", submission())
        assert (answer.status, answer.code) == (503, "queue_full")
        assert int(answer.headers["retry-after"]) > 0
        again = await rig.post("/api/jobs", submission(), headers=key)
        assert (again.status, again.body["id"]) == (200, first.body["id"])
        await rig.post(f"/api/jobs/{first.body['id']}/cancel")
        assert (await rig.post("/api/jobs", submission())).status == 201


async def test_a_payload_that_can_never_fit_is_too_large() -> None:
    async with hub_in_process(rules=Rules(max_open_bytes=100)) as rig:
        assert (await rig.post("/api/jobs", submission())).code == "too_large"


# twice


async def test_the_same_key_and_body_is_the_same_job(rig: HubRig) -> None:
    key = {"Idempotency-Key": "order-1"}
    first = await rig.post("/api/jobs", submission(), headers=key)
    again = await rig.post("/api/jobs", submission(), headers=key)
    assert (first.status, again.status) == (201, 200)
    assert again.body["id"] == first.body["id"] and again.body["is_repeat"]
    assert (await rig.get("/api/stats")).body["waiting"] == 1


async def test_the_same_key_with_another_body_is_refused(rig: HubRig) -> None:
    key = {"Idempotency-Key": "order-1"}
    await rig.post("/api/jobs", submission(), headers=key)
    answer = await rig.post("/api/jobs", submission(priority=1), headers=key)
    assert (answer.status, answer.code) == (409, "duplicate_differs")


async def test_many_at_once_under_one_key_are_one_job(rig: HubRig) -> None:
    key = {"Idempotency-Key": "order-1"}
    found = await asyncio.gather(*(rig.post("/api/jobs", submission(), headers=key) for _ in range(20)))
    assert len({answer.body["id"] for answer in found}) == 1
    assert sorted(answer.status for answer in found) == [200] * 19 + [201]


async def test_two_tenants_may_use_the_same_key(rig: HubRig) -> None:
    key = {"Idempotency-Key": "order-1"}
    first = await rig.post("/api/jobs", submission(), headers=key)
    other = await rig.post("/api/jobs", submission(), headers=key, role=Role.TENANT)
    assert other.status == 201 and other.body["id"] != first.body["id"]


async def test_a_key_and_a_reference_do_not_meet(rig: HubRig) -> None:
    first = await rig.post("/api/jobs", submission(), headers={"Idempotency-Key": "order-1"})
    other = await rig.post("/api/jobs", submission(reference="order-1"))
    assert other.status == 201 and other.body["id"] != first.body["id"]
    assert (await rig.post("/api/jobs", submission(reference="order-1"))).body["id"] == other.body["id"]
    both = await rig.post("/api/jobs", submission(reference="x"), headers={"Idempotency-Key": "y"})
    assert both.code == "invalid_request"


@pytest.mark.parametrize("key", ["", "a b", "x" * 201, "ä"])
async def test_a_key_is_short_and_plain(rig: HubRig, key: str) -> None:
    answer = await rig.post("/api/jobs", submission(), headers={"Idempotency-Key": key})
    assert answer.code == "invalid_request"


# change


async def test_the_retry_of_a_running_job_answers_that_it_was_asked_for(rig: HubRig) -> None:
    await register(rig)
    job_id = await rig.submit()
    await lease(rig)
    for _ in range(2):
        answer = (await rig.post(f"/api/jobs/{job_id}/retry")).body
        assert (answer["id"], answer["status"], answer["retry_requested"]) == (job_id, "leased", True)


async def test_a_waiting_job_is_cancelled_at_once_and_can_be_tried_again(rig: HubRig) -> None:
    job_id = await rig.submit()
    cancelled = await rig.post(f"/api/jobs/{job_id}/cancel")
    assert cancelled.body == {"id": job_id, "status": "cancelled", "cancel_requested": False}
    assert (await rig.post(f"/api/jobs/{job_id}/cancel")).body["status"] == "cancelled"
    assert (await rig.post(f"/api/jobs/{job_id}/retry")).body["status"] == "queued"
    again = await rig.post(f"/api/jobs/{job_id}/retry")
    assert again.code == "wrong_phase"
    assert (
        again.body["detail"]
        == "cannot retry a job that is queued: only one that runs, failed or was cancelled"
    )


async def test_a_running_job_is_asked_to_stop(rig: HubRig) -> None:
    job_id = await rig.submit()
    await take(rig)
    answer = await rig.post(f"/jobs/{job_id}/cancel")
    assert answer.body == {"id": job_id, "status": "leased", "cancel_requested": True}
    assert (await rig.get(f"/api/jobs/{job_id}")).body["cancel_requested"]


@pytest.mark.parametrize("asked", ["pause", "retry"])
async def test_a_running_job_is_paused_or_tried_again_once_its_worker_has_stopped_it(
    rig: HubRig, asked: str
) -> None:
    job_id = await rig.submit()
    lease = msgspec.to_builtins((await take(rig)).ref)
    assert (await rig.post(f"/api/jobs/{job_id}/{asked}")).body["status"] == "leased"
    assert (await rig.get(f"/api/jobs/{job_id}")).body[f"{asked}_requested"]
    beat = await rig.post(
        "/api/worker/heartbeat", {"worker_id": "gpu-a", "leases": [lease]}, role=Role.WORKER
    )
    assert [command["job_id"] for command in beat.body["commands"]] == [job_id]
    settled = await rig.post("/api/worker/release", {"lease": lease, "reason": "cancelled"}, role=Role.WORKER)
    assert settled.body["status"] == "queued"
    seen = (await rig.get(f"/api/jobs/{job_id}")).body
    assert (seen["is_paused"], seen[f"{asked}_requested"]) == (asked == "pause", False)
    assert [attempt["outcome"] for attempt in seen["history"]] == ["cancelled"]


async def test_a_paused_job_waits_until_it_is_resumed(rig: HubRig) -> None:
    job_id = await rig.submit()
    assert (await rig.post(f"/api/jobs/{job_id}/pause")).body["is_paused"]
    assert (await rig.get("/api/stats")).body["paused"] == 1
    assert not (await rig.post(f"/api/jobs/{job_id}/resume")).body["is_paused"]


async def test_the_priority_of_a_waiting_job_changes(rig: HubRig) -> None:
    job_id = await rig.submit()
    assert (await rig.ask("PATCH", f"/api/jobs/{job_id}", {"priority": 9})).body["priority"] == 9
    assert (await rig.ask("PATCH", f"/api/jobs/{job_id}", {"priority": 9999})).code == "invalid_request"
    await take(rig)
    assert (await rig.ask("PATCH", f"/api/jobs/{job_id}", {"priority": 8})).code == "wrong_phase"


async def test_a_result_comes_with_the_end(rig: HubRig) -> None:
    job_id = await rig.submit()
    early = await rig.get(f"/api/jobs/{job_id}/result")
    assert (early.status, early.body["result"]) == (202, None)
    leased = await take(rig)
    await rig.engine.complete(Completion(leased.ref, JobResult(outputs={"2": {"images": []}})))
    late = await rig.get(f"/api/jobs/{job_id}/result")
    assert (late.status, late.body["status"]) == (200, "completed")
    assert late.body["result"]["outputs"] == {"2": {"images": []}}
    assert (await rig.get(f"/api/jobs/{job_id}")).body["history"][0]["worker_id"] == "gpu-a"


async def test_a_dead_job_is_seen_retried_and_purged(rig: HubRig) -> None:
    for _ in range(2):
        await rig.submit()
        leased = await take(rig)
        failure = Failure(FailureKind.INVALID_WORKFLOW, "no such node", traceback=("line 1",))
        await rig.engine.fail(FailureReport(leased.ref, failure))
    page = (await rig.get("/api/dead-letter?limit=1")).body
    rest = (await rig.get(f"/api/dead-letter?cursor={page['cursor']}")).body
    dead = [*page["jobs"], *rest["jobs"]]
    assert len(dead) == 2 and rest["cursor"] is None
    assert dead[0]["error"]["message"] == "no such node" and dead[0]["error"]["traceback"] == ["line 1"]
    assert (await rig.post(f"/api/dead-letter/{dead[0]['id']}/retry")).body["status"] == "queued"
    assert (await rig.post("/api/dead-letter/purge")).body == {"purged": 1}
    assert (await rig.get("/api/dead-letter")).body["jobs"] == []
    assert (await rig.get(f"/api/jobs/{dead[1]['id']}")).code == "not_found"


async def test_explain_says_what_is_missing(rig: HubRig) -> None:
    job_id = await rig.submit()
    assert "no worker is connected" in (await rig.get(f"/api/jobs/{job_id}/explain")).body["summary"]


@pytest.mark.parametrize("verb", ["cancel", "retry", "pause", "resume"])
async def test_there_is_nothing_to_do_to_a_job_that_is_not(rig: HubRig, verb: str) -> None:
    answer = await rig.post(f"/api/jobs/nobody/{verb}")
    assert (answer.status, answer.code) == (404, "not_found")


# whose


async def test_another_tenants_job_is_not_there(rig: HubRig) -> None:
    job_id = await rig.submit()
    _, stranger = await rig.hub.keys.create(Role.TENANT, tenant=TENANT)
    missing = await rig.get("/api/jobs/nobody", key=stranger)
    for method, path in (
        ("GET", ""),
        ("GET", "/result"),
        ("GET", "/explain"),
        ("POST", "/cancel"),
        ("POST", "/retry"),
        ("POST", "/pause"),
        ("POST", "/resume"),
    ):
        answer = await rig.ask(method, f"/api/jobs/{job_id}{path}", key=stranger)
        assert (answer.status, answer.code) == (404, "not_found")
        # Not even the words tell it from a job that never was.
        assert answer.body["detail"].replace(job_id, "nobody") == missing.body["detail"]
    changed = await rig.ask("PATCH", f"/api/jobs/{job_id}", {"priority": 1}, key=stranger)
    assert changed.code == "not_found"
    assert (await rig.get("/api/jobs", key=stranger)).body["jobs"] == []
    assert (await rig.get("/api/jobs?tenant=default", key=stranger)).body["jobs"] == []
    assert (await rig.get(f"/api/jobs/{job_id}")).body["status"] == "queued"


async def test_a_viewer_of_one_tenant_sees_that_tenants_jobs(rig: HubRig) -> None:
    mine = await rig.submit(role=Role.TENANT)
    await rig.submit()
    _, key = await rig.hub.keys.create(Role.VIEWER, tenant=TENANT)
    assert [job["id"] for job in (await rig.get("/api/jobs", key=key)).body["jobs"]] == [mine]
    assert len((await rig.get("/api/jobs", role=Role.VIEWER)).body["jobs"]) == 2


async def test_answers_are_plain_json_with_a_request_id(rig: HubRig) -> None:
    answer = await rig.get("/api/stats", headers={"x-request-id": "from-the-caller"})
    assert answer.headers["x-request-id"] == "from-the-caller"
    assert answer.headers["content-type"] == "application/json"
    other = await rig.get("/api/stats", headers={"x-request-id": "not a good one!"})
    assert other.headers["x-request-id"] not in ("", "not a good one!")
    problem = await rig.get("/api/jobs/nobody", headers={"x-request-id": "lost"})
    assert problem.body["request_id"] == "lost"
    assert msgspec.json.decode(problem.content)


async def test_a_job_waits_for_another_of_its_tenant_and_for_nobody_elses(rig: HubRig) -> None:
    first = await rig.submit(role=Role.TENANT)
    second = await rig.submit(role=Role.TENANT, after=[first])
    assert first in (await rig.get(f"/api/jobs/{second}/explain")).body["summary"]
    refused = await rig.post("/api/jobs", submission(after=[first]), role=Role.ADMIN)
    assert refused.code == "invalid_request" and refused.body["field"] == "after"
    await rig.post(f"/api/jobs/{first}/cancel", role=Role.TENANT)
    async with asyncio.timeout(60):
        while (answer := await rig.get(f"/api/jobs/{second}/result")).status == 202:
            await asyncio.sleep(0.01)
    assert answer.body["error"]["kind"] == "dependency_failed"


async def test_a_reference_that_only_some_databases_keep_is_refused(rig: HubRig) -> None:
    answer = await rig.post("/api/jobs", submission(reference="order\0seven"))
    assert (answer.status, answer.code) == (400, "invalid_request")


async def test_the_reason_of_a_cancel_is_shown_with_the_job(rig: HubRig) -> None:
    job_id = await rig.submit()
    leased = await take(rig)
    await rig.post(f"/api/jobs/{job_id}/cancel", {"reason": "the customer left"})
    assert (await rig.get(f"/api/jobs/{job_id}")).body["cancel_reason"] == "the customer left"
    commands = await rig.post("/api/worker/commands", {"worker_id": "gpu-a", "wait_s": 0}, role=Role.WORKER)
    assert [each["reason"] for each in commands.body["commands"]] == ["the customer left"]
    await rig.engine.release(Release(leased.ref, "cancelled"))
    seen = (await rig.get(f"/api/jobs/{job_id}")).body
    assert (seen["status"], seen["cancel_reason"]) == ("cancelled", "the customer left")
    assert (await rig.post(f"/api/jobs/{job_id}/cancel", {"why": "?"})).code == "invalid_request"
