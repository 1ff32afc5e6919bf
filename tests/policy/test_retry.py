"""What follows from each kind of failure, and where the limits are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import ClassKey, JobId, WorkerId, WorkflowHash
from comfyfleet.policy.retry import (
    TABLE,
    BlockRule,
    CountsAgainst,
    RetryChoice,
    RetryDecision,
    after_failure,
    after_release,
    backoff_s,
)
from comfyfleet.policy.rules import Rules

RULES = Rules()
NOW = 1000.0
JOB = Dispatch(JobId("job"), ClassKey("class"), WorkflowHash("hash"), 0)
OTHERS = RetryChoice(others=2, is_blocked_everywhere=False)
ALONE = RetryChoice(others=0, is_blocked_everywhere=True)
A, B, C, D = (WorkerId(name) for name in "abcd")

FINAL = {
    FailureKind.INVALID_WORKFLOW,
    FailureKind.MISSING_INPUT,
    FailureKind.TOTAL_TIMEOUT,
    FailureKind.DEADLINE_PASSED,
    FailureKind.DEPENDENCY_FAILED,
    FailureKind.UNRUNNABLE,
    FailureKind.UNREADABLE,
    FailureKind.OUTCOME_UNKNOWN,
}
WORKER_CANNOT = {FailureKind.MISSING_NODE, FailureKind.MISSING_MODEL}
NOBODYS_FAULT = {FailureKind.PAYLOAD_MISMATCH, FailureKind.INTERRUPTED}
WORKER_GONE = {FailureKind.DEAD_WORKER, FailureKind.LEASE_EXPIRED}
MAY_WORK_LATER = {
    FailureKind.NODE_ERROR,
    FailureKind.TRANSIENT,
    FailureKind.CRASHED,
    FailureKind.ACCEPT_TIMEOUT,
    FailureKind.START_TIMEOUT,
    FailureKind.STALL_TIMEOUT,
    FailureKind.UNKNOWN,
}


def verdict(
    kind: FailureKind,
    dispatch: Dispatch = JOB,
    worker: WorkerId = A,
    choice: RetryChoice = OTHERS,
    fraction: float = 0.5,
    retry_delay_s: float | None = None,
) -> RetryDecision:
    return after_failure(
        dispatch,
        worker,
        Failure(kind, "it broke"),
        choice,
        rules=RULES,
        now=NOW,
        fraction=fraction,
        retry_delay_s=retry_delay_s,
    )


def test_every_kind_of_failure_has_its_row() -> None:
    assert set(TABLE) == set(FailureKind)
    assert {
        *FINAL,
        *WORKER_CANNOT,
        *WORKER_GONE,
        *MAY_WORK_LATER,
        *NOBODYS_FAULT,
        FailureKind.OUT_OF_MEMORY,
    } == set(FailureKind)


@pytest.mark.parametrize("kind", sorted(FINAL))
def test_what_can_run_nowhere_or_never_fails_at_once_and_blames_no_worker(kind: FailureKind) -> None:
    found = verdict(kind)
    assert not found.will_retry
    assert found.counts_against is CountsAgainst.NOTHING
    assert (found.charged, found.worker_faults) == (0, 0)
    assert not found.keep_off_worker
    assert TABLE[kind].block is BlockRule.NONE


@pytest.mark.parametrize("kind", sorted(WORKER_CANNOT))
def test_what_a_worker_lacks_is_its_fault_and_the_job_goes_elsewhere_at_once(kind: FailureKind) -> None:
    found = verdict(kind)
    assert found.will_retry
    assert (found.charged, found.worker_faults) == (0, 1)
    assert found.not_before is None
    assert TABLE[kind].block is BlockRule.INVENTORY


def test_out_of_memory_is_charged_to_the_job_blocks_at_once_and_does_not_wait() -> None:
    found = verdict(FailureKind.OUT_OF_MEMORY)
    assert found.will_retry
    assert (found.charged, found.worker_faults) == (1, 0)
    assert found.not_before is None
    assert TABLE[FailureKind.OUT_OF_MEMORY].block is BlockRule.AT_ONCE


@pytest.mark.parametrize("kind", sorted(MAY_WORK_LATER))
def test_what_may_work_later_is_charged_to_the_job_and_backs_off(kind: FailureKind) -> None:
    found = verdict(kind)
    assert found.will_retry
    assert (found.charged, found.worker_faults) == (1, 0)
    assert found.not_before == NOW + 0.5 * RULES.retry_base_s
    assert TABLE[kind].block is BlockRule.COUNTED


@pytest.mark.parametrize("kind", sorted(NOBODYS_FAULT))
def test_what_is_nobodys_fault_is_tried_again_in_bounds_and_blocks_nobody(kind: FailureKind) -> None:
    found = verdict(kind)
    assert found.will_retry
    assert (found.charged, found.worker_faults) == (1, 0)
    assert found.not_before == NOW + 0.5 * RULES.retry_base_s
    assert TABLE[kind].block is BlockRule.NONE
    assert not verdict(kind, msgspec.structs.replace(JOB, charged=JOB.max_attempts - 1)).will_retry


@pytest.mark.parametrize("kind", sorted(WORKER_GONE))
def test_a_worker_that_is_gone_is_charged_itself_and_the_job_does_not_wait(kind: FailureKind) -> None:
    found = verdict(kind)
    assert found.will_retry
    assert (found.charged, found.worker_faults) == (0, 1)
    assert found.not_before is None
    assert TABLE[kind].block is BlockRule.COUNTED


def test_the_third_charged_attempt_is_the_last() -> None:
    for charged, is_last in ((0, False), (1, False), (2, True)):
        job = msgspec.structs.replace(JOB, charged=charged)
        assert verdict(FailureKind.NODE_ERROR, job).will_retry is not is_last


def test_a_job_with_one_attempt_has_no_second() -> None:
    job = msgspec.structs.replace(JOB, max_attempts=1)
    assert not verdict(FailureKind.NODE_ERROR, job).will_retry
    assert verdict(FailureKind.MISSING_MODEL, job).will_retry


def test_the_fifth_worker_fault_is_the_last() -> None:
    for faults, is_last in ((3, False), (4, True)):
        job = msgspec.structs.replace(JOB, worker_faults=faults)
        assert verdict(FailureKind.DEAD_WORKER, job).will_retry is not is_last


def test_leases_that_expired_on_three_workers_blame_the_workflow() -> None:
    job = msgspec.structs.replace(JOB, expired_on=(A, B))
    found = verdict(FailureKind.LEASE_EXPIRED, job, C)
    assert not found.will_retry
    assert found.expired_on == (A, B, C)
    assert "expired on 3 different workers" in found.why
    assert verdict(FailureKind.LEASE_EXPIRED, job, B).will_retry
    assert verdict(FailureKind.DEAD_WORKER, job, C).will_retry


def test_failing_on_three_workers_ends_a_job_only_when_it_is_blocked_on_every_compatible_one() -> None:
    job = msgspec.structs.replace(JOB, failed_on=(A, B), worker_faults=2)
    assert verdict(FailureKind.MISSING_MODEL, job, C).will_retry
    ended = verdict(FailureKind.MISSING_MODEL, job, C, ALONE)
    assert not ended.will_retry
    assert ended.failed_on == (A, B, C)
    twice = msgspec.structs.replace(JOB, failed_on=(A, B))
    assert verdict(FailureKind.MISSING_MODEL, twice, B, ALONE).will_retry


def test_a_job_is_kept_off_the_worker_that_failed_it_only_while_another_can_run_it() -> None:
    assert verdict(FailureKind.NODE_ERROR).keep_off_worker
    assert not verdict(FailureKind.NODE_ERROR, choice=ALONE).keep_off_worker


def test_a_delay_the_caller_chose_is_taken_as_it_is() -> None:
    assert verdict(FailureKind.NODE_ERROR, retry_delay_s=7).not_before == NOW + 7
    assert verdict(FailureKind.NODE_ERROR, retry_delay_s=0).not_before == NOW


@given(st.integers(0, 200), st.floats(0, 1, exclude_max=True), st.floats(0.01, 10), st.floats(0.01, 600))
def test_backoff_is_full_jitter_within_its_bounds(
    failures: int, fraction: float, base_s: float, cap_s: float
) -> None:
    rules = Rules(retry_base_s=base_s, retry_cap_s=cap_s)
    highest = min(cap_s, base_s * 2 ** min(max(failures - 1, 0), 16))
    assert 0 <= backoff_s(failures, rules, fraction) <= highest
    assert backoff_s(failures, rules, 0.0) == 0
    assert backoff_s(failures, rules, 0.5) == pytest.approx(highest / 2)


def test_a_job_that_was_given_back_too_often_fails() -> None:
    job = JOB
    for count in range(1, RULES.max_releases + 1):
        decision = after_release(job, "drain", RULES, NOW)
        assert (decision.releases, decision.keep_off_until, decision.failure) == (count, None, None)
        job = msgspec.structs.replace(job, releases=decision.releases)
    failure = after_release(job, "drain", RULES, NOW).failure
    assert failure == Failure(FailureKind.UNKNOWN, "released 20 times without a result")


@pytest.mark.parametrize("releases", [0, RULES.max_releases])
def test_a_declined_job_does_not_count_as_given_back_and_is_kept_off_the_worker(releases: int) -> None:
    job = msgspec.structs.replace(JOB, releases=releases)
    decision = after_release(job, "declined", RULES, NOW)
    assert (decision.releases, decision.failure) == (releases, None)
    assert decision.keep_off_until == NOW + RULES.acknowledge_s
