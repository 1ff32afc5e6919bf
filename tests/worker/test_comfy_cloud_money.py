"""What may cost money is done once: lost answers, used keys, restarts, and refusals for lack of credits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.worker._comfy_cloud import (
    QUICK,
    CloudAttempt,
    account,
    again,
    leased,
    picture,
    saved_color,
    slow,
    tuned,
)
from tests.worker._comfyui import eventually

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, ServiceBusy
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.testing.fake_comfy_cloud.settings import ScriptedAnswer
from comfyfleet.worker.connectors.comfy_cloud import ComfyCloud


def mark_of(job: LeasedJob) -> str:
    return prompt_id_of(job.attempt_id)


# a submission without an answer


async def test_a_submission_that_did_not_arrive_is_repeated_and_paid_once(tmp_path: Path) -> None:
    async with account() as (fake, connector):
        fake.faults.lose_before = 2
        result = await CloudAttempt(connector, leased(picture(0x123456))).result()
        assert await saved_color(connector, result.files[0], tmp_path) == 0x123456
        assert fake.stats.submissions == 1 and fake.stats.charged == 1.0


@pytest.mark.parametrize("fault", ["lose_after", "error_after"])
@pytest.mark.parametrize("hides_v2", [False, True], ids=["graph from v2", "graph from v1"])
async def test_a_submission_that_arrived_without_an_answer_is_found_by_its_mark_and_paid_once(
    fault: str, hides_v2: bool, tmp_path: Path
) -> None:
    async with account() as (fake, connector):
        other = fake.submit_as_other(picture(1))
        setattr(fake.faults, fault, 1)
        fake.faults.hides_v2_workflows = hides_v2
        result = await CloudAttempt(connector, leased(picture(0x123456))).result()
        assert await saved_color(connector, result.files[0], tmp_path) == 0x123456
        assert len(fake.stats.jobs_made) == 2 and fake.stats.submissions == 2
        assert fake.stats.charges == {other.job_id: 1.0, fake.stats.jobs_made[1]: 1.0}


async def test_a_job_that_exists_and_cannot_be_found_fails_for_a_person_to_look_and_is_not_submitted_again() -> (
    None
):
    async with account() as (fake, connector):
        fake.faults.lose_after, fake.faults.loses_marks = 1, True
        job = leased(picture())
        failure = await CloudAttempt(connector, job).failure()
        assert failure.kind is FailureKind.OUTCOME_UNKNOWN
        assert mark_of(job) in failure.message and "retry this job" in failure.message
        assert fake.stats.charged == 1.0 and len(fake.stats.jobs_made) == 1


async def test_a_key_that_stays_claimed_without_a_job_is_not_evaded_with_another_key() -> None:
    async with account() as (fake, connector):
        fake.faults.error_before = 1
        failure = await CloudAttempt(connector, leased(picture())).failure()
        assert failure.kind is FailureKind.OUTCOME_UNKNOWN
        assert fake.stats.jobs_made == [] and fake.stats.charged == 0.0


async def test_an_account_that_cannot_be_reached_after_a_lost_answer_leaves_the_outcome_unknown() -> None:
    async with account() as (fake, connector):
        fake.faults.lose_after = 1
        attempt = CloudAttempt(connector, leased(picture()))
        await eventually(lambda: bool(fake.stats.jobs_made))
        fake.faults.drop_paths = ["/api/"]
        assert (await attempt.failure()).kind is FailureKind.OUTCOME_UNKNOWN
        assert fake.stats.submissions == 1


async def test_credits_that_the_lost_submission_used_up_do_not_hide_its_job(tmp_path: Path) -> None:
    no_credits = ScriptedAnswer(
        status=402, body={"error": {"code": "insufficient_credits", "message": "Out of credits."}}
    )
    async with account(tuned(doubt_s=600.0), credits=1.0) as (fake, connector):
        fake.faults.lose_after = 1
        attempt = CloudAttempt(connector, leased(picture(0x010203)))
        await eventually(lambda: bool(fake.stats.jobs_made))
        # A server that looks at the credits before it looks at the key.
        assert fake._jobs is not None
        fake._jobs.claimed_keys.clear()
        fake.faults.answers = [no_credits]
        result = await attempt.result()
        assert await saved_color(connector, result.files[0], tmp_path) == 0x010203
        assert fake.stats.charged == 1.0 and len(fake.stats.jobs_made) == 1


async def test_nothing_is_sent_when_nobody_listens_and_the_lease_is_given_back() -> None:
    async with account() as (fake, connector):
        await fake.stop()
        failed = await CloudAttempt(connector, leased(picture(), timeouts=None)).failed()
        assert isinstance(failed, ServiceBusy)
        assert fake.stats.submissions == 0


# restarts


async def test_another_process_continues_with_the_run_of_the_same_attempt(tmp_path: Path) -> None:
    async with account() as (fake, connector):
        job = leased(slow(12, 0.05))
        first = CloudAttempt(connector, job)
        await first.heard(ProgressKind.STARTED)
        async with ComfyCloud(fake.url, QUICK) as second:
            result = await CloudAttempt(second, job).result()
            assert len(result.files) == 1 and fake.stats.charged == 1.0
            assert len(fake.stats.jobs_made) == 1
        assert (await first.result()).files == result.files


async def test_a_later_lease_of_the_job_uses_the_run_that_an_earlier_one_paid(tmp_path: Path) -> None:
    async with account() as (fake, connector):
        job = leased(picture(0x99AA00))
        await CloudAttempt(connector, job).result()
        async with ComfyCloud(fake.url, QUICK) as other_worker:
            result = await CloudAttempt(other_worker, again(job, number=3)).result()
            assert await saved_color(other_worker, result.files[0], tmp_path) == 0x99AA00
        assert fake.stats.charged == 1.0 and fake.stats.submissions == 1


async def test_a_later_lease_after_a_failed_run_is_a_new_run() -> None:
    async with account() as (fake, connector):
        fake.faults.run_errors = [{"code": "node_execution_error", "message": "it broke", "node_id": "1"}]
        job = leased(picture())
        assert (await CloudAttempt(connector, job).failure()).kind is FailureKind.NODE_ERROR
        await CloudAttempt(connector, again(job, number=2)).result()
        assert len(fake.stats.jobs_made) == 2


async def test_a_later_lease_waits_while_nobody_can_tell_whether_an_earlier_one_ran() -> None:
    async with account() as (fake, connector):
        fake.faults.garbage_paths = ["/api/jobs"]
        failed = await CloudAttempt(connector, again(leased(picture()), number=2)).failed()
        assert isinstance(failed, ServiceBusy) and fake.stats.submissions == 0
        assert "could be paid again" in str(connector.defect)


async def test_of_several_jobs_with_our_mark_the_oldest_is_ours(tmp_path: Path) -> None:
    async with account() as (fake, connector):
        job = leased(picture(0x00FF00))
        await CloudAttempt(connector, job).result()
        copied = dict(next(iter(fake.jobs.values())).graph)
        copied["1"] = {**copied["1"], "inputs": {**copied["1"]["inputs"], "color": 0xFF0000}}
        fake.submit_as_other(copied)
        async with ComfyCloud(fake.url, QUICK) as second:
            result = await CloudAttempt(second, job).result()
            assert await saved_color(second, result.files[0], tmp_path) == 0x00FF00


async def test_our_job_is_found_among_many_and_each_graph_is_read_once(tmp_path: Path) -> None:
    async with account(plan="pro", queue_limit=200) as (fake, connector):
        job = leased(picture(0x0A0B0C))
        await CloudAttempt(connector, job).result()
        for number in range(130):
            fake.submit_as_other(picture(number))
        async with ComfyCloud(fake.url, QUICK) as second:
            for _ in range(2):
                result = await CloudAttempt(second, job).result()
                assert await saved_color(second, result.files[0], tmp_path) == 0x0A0B0C
        read = {name: count for name, count in fake.stats.requests.items() if name.endswith("/workflow")}
        assert len(read) == 131 and set(read.values()) == {1}
        async with ComfyCloud(fake.url, tuned(find_jobs=130)) as third:
            failure = await CloudAttempt(third, job).failure()
            assert failure.kind is FailureKind.OUTCOME_UNKNOWN and "newest 130" in failure.message


async def test_an_orphan_of_an_earlier_process_is_found_and_stopped() -> None:
    async with account() as (fake, connector):
        job = leased(slow(400, 0.05))
        attempt = CloudAttempt(connector, job)
        await attempt.heard(ProgressKind.STARTED)
        async with ComfyCloud(fake.url, QUICK) as second:
            await second.cancel_job(job)
            assert (await second.reconcile(job)).state == "interrupted"
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED
        assert fake.stats.submissions == 1


async def test_reconcile_tells_every_state_and_the_result() -> None:
    async with account() as (fake, connector):
        job = leased(picture())
        assert (await connector.reconcile(job)).state == "unknown"
        fake.faults.never_starts = True
        attempt = CloudAttempt(connector, job)
        await attempt.heard(ProgressKind.ACCEPTED)
        assert (await connector.reconcile(job)).state == "waiting"
        fake.let_start()
        result = await attempt.result()
        async with ComfyCloud(fake.url, QUICK) as second:
            found = await second.reconcile(job)
        assert found.state == "completed" and found.result == result


async def test_a_cancel_during_a_submission_without_an_answer_stops_the_job_that_was_made() -> None:
    async with account(tuned(doubt_s=20.0, find_s=5.0)) as (fake, connector):
        fake.faults.lose_after = 1
        fake.faults.drop_paths = ["/api/jobs"]
        attempt = CloudAttempt(connector, leased(slow(400, 0.05)))
        await eventually(lambda: bool(fake.stats.jobs_made))
        cancel = asyncio.create_task(connector.cancel_job(attempt.job))
        await eventually(lambda: fake.stats.requests.get("GET /api/jobs", 0) > 1)
        fake.faults.drop_paths = []
        await asyncio.wait_for(cancel, 60)
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED
        assert [job.status for job in fake.jobs.values()] == ["canceled"]


async def test_a_cancelled_run_that_is_torn_off_during_its_submission_is_stopped() -> None:
    async with account() as (fake, connector):
        fake.faults.slow_s = 0.2
        attempt = CloudAttempt(connector, leased(slow(400, 0.05)))
        await eventually(lambda: bool(connector._submissions))
        cancel = asyncio.create_task(connector.cancel_job(attempt.job))
        await asyncio.sleep(0)
        # The agent waits only so long for a cancel.
        cancel.cancel()
        attempt.task.cancel()
        await eventually(lambda: [job.status for job in fake.jobs.values()] == ["canceled"])


async def test_a_run_that_an_agent_leaves_during_its_submission_is_continued_by_the_next(
    tmp_path: Path,
) -> None:
    async with account() as (fake, connector):
        fake.faults.slow_s = 0.2
        job = leased(picture(0x771100))
        attempt = CloudAttempt(connector, job)
        await eventually(lambda: fake.stats.requests.get("POST /api/v2/jobs", 0) == 1)
        attempt.task.cancel()
        await eventually(lambda: not connector._submissions)
        result = await CloudAttempt(connector, again(job, number=2)).result()
        assert await saved_color(connector, result.files[0], tmp_path) == 0x771100
        assert fake.stats.charged == 1.0 and fake.stats.cancels == []


# money and rights

PAYMENT: list[tuple[int, dict[str, Any], str]] = [
    (402, {"error": {"code": "insufficient_credits", "message": "Out of credits."}}, "cannot pay"),
    (429, {"error": {"type": "PAYMENT_REQUIRED", "message": "User has not paid."}}, "cannot pay"),
    (429, {"error": {"type": "FREE_TIER_LIMIT", "message": "Upgrade."}}, "cannot pay"),
    (429, {"error": {"type": "PARTNER_NODE_PAYMENT_REQUIRED", "message": "Pay."}}, "cannot pay"),
    (429, {"error": {"message": "Subscription inactive"}}, "cannot pay"),
    (401, {"error": {"code": "unauthorized", "message": "Wrong key."}}, "does not accept the key"),
    (403, {"error": {"code": "forbidden", "message": "PARTNER_NODE_DISABLED"}}, "PARTNER_NODE_DISABLED"),
]


@pytest.mark.parametrize(("status", "body", "why"), PAYMENT)
async def test_an_account_that_cannot_pay_is_paused_and_the_lease_is_given_back(
    status: int, body: dict[str, Any], why: str
) -> None:
    async with account() as (fake, connector):
        heard: list[bool] = []
        connector.on_connection = heard.append
        assert await connector.check_health()
        fake.faults.answers = [ScriptedAnswer(status=status, body=body)]
        failed = await CloudAttempt(connector, leased(picture())).failed()
        assert isinstance(failed, ServiceBusy)
        assert heard == [False] and not await connector.check_health()
        assert connector.defect is not None and why in connector.defect
        # Further jobs are not tried during the pause.
        assert isinstance(await CloudAttempt(connector, leased(picture())).failed(), ServiceBusy)
        assert fake.stats.submissions == 1 and fake.stats.charged == 0.0


async def test_the_account_is_used_again_when_it_can_pay() -> None:
    async with account(credits=0.5) as (fake, connector):
        job = leased(picture())
        assert isinstance(await CloudAttempt(connector, job).failed(), ServiceBusy)
        assert not await connector.check_health()
        fake.give_credits(1.0)
        await eventually(connector.check_health)
        await CloudAttempt(connector, again(job, number=2)).result()
        assert fake.stats.charged == 1.0 and connector.defect is None


async def test_a_run_that_fails_for_lack_of_money_is_not_the_fault_of_its_job() -> None:
    async with account() as (fake, connector):
        fake.faults.run_errors = [{"code": "InsufficientFundsError", "message": "Balance too low."}]
        failed = await CloudAttempt(connector, leased(picture())).failed()
        assert isinstance(failed, ServiceBusy) and "lack of money" in str(connector.defect)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": "queue_full", "message": "Full."}},
        {"error": {"type": "QUEUE_LIMIT", "message": "Limit."}},
        {"error": {"code": "rate_limited", "message": "Slow down."}},
    ],
)
async def test_a_full_queue_and_a_rate_limit_are_waited_for(body: dict[str, Any]) -> None:
    async with account() as (fake, connector):
        fake.faults.answers = [ScriptedAnswer(status=429, body=body, retry_after=0)] * 2
        await CloudAttempt(connector, leased(picture())).result()
        assert fake.stats.submissions == 3 and fake.stats.charged == 1.0
        assert connector.defect is None


async def test_a_queue_that_stays_full_gives_the_lease_back_and_pauses_nothing() -> None:
    full = {"error": {"code": "queue_full", "message": "Full."}}
    async with account() as (fake, connector):
        fake.faults.answers = [ScriptedAnswer(status=429, body=full, retry_after=600)]
        failed = await CloudAttempt(connector, leased(picture())).failed()
        assert isinstance(failed, ServiceBusy) and "queue_full" in failed.failure.message
        assert connector.defect is None and fake.stats.submissions == 1


async def test_the_free_plan_has_no_interface_for_programs() -> None:
    async with account(plan="free") as (fake, connector):
        assert isinstance(await CloudAttempt(connector, leased(picture())).failed(), ServiceBusy)
        assert "Subscription inactive" in str(connector.defect) and fake.stats.jobs_made == []
