"""What follows from a failure or a release: whether, where and when to retry, and what counts as an attempt.

`TABLE` has a rule for each failure kind; `after_failure` applies it to one dispatch with its limits. `failover.py`
computes the block on the pair (worker, workflow hash). `after_release` limits how often a job is released.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from comfyfleet.model.calls import DECLINED
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import WorkerId
from comfyfleet.policy.acceptance import is_refusal
from comfyfleet.policy.rules import Rules


class CountsAgainst(StrEnum):
    """Which limit of the job an attempt counts against. The names are stored as `charged_to`; credits are not meant."""

    ATTEMPTS = "attempts"
    WORKER_FAULTS = "worker_faults"
    NOTHING = "nothing"


class BlockRule(StrEnum):
    NONE = "none"
    INVENTORY = "inventory"
    AT_ONCE = "at_once"
    COUNTED = "counted"
    REFUSAL = "refusal"


class RetryRule(msgspec.Struct, frozen=True):
    counts_against: CountsAgainst
    block: BlockRule
    is_final: bool = False
    backs_off: bool = False


_CALLERS_FAULT = RetryRule(CountsAgainst.NOTHING, BlockRule.NONE, is_final=True)
_WORKER_CANNOT = RetryRule(CountsAgainst.WORKER_FAULTS, BlockRule.INVENTORY)
_SERVER_REFUSES = RetryRule(CountsAgainst.NOTHING, BlockRule.REFUSAL)
_MAY_WORK_LATER = RetryRule(CountsAgainst.ATTEMPTS, BlockRule.COUNTED, backs_off=True)
_NOBODYS_FAULT = RetryRule(CountsAgainst.ATTEMPTS, BlockRule.NONE, backs_off=True)
_WORKER_IS_GONE = RetryRule(CountsAgainst.WORKER_FAULTS, BlockRule.COUNTED)
_JOBS_OWN_LIMIT = RetryRule(CountsAgainst.NOTHING, BlockRule.NONE, is_final=True)

TABLE: dict[FailureKind, RetryRule] = {
    FailureKind.INVALID_WORKFLOW: _CALLERS_FAULT,
    FailureKind.MISSING_INPUT: _CALLERS_FAULT,
    FailureKind.MISSING_NODE: _WORKER_CANNOT,
    FailureKind.MISSING_MODEL: _WORKER_CANNOT,
    FailureKind.OUT_OF_MEMORY: RetryRule(CountsAgainst.ATTEMPTS, BlockRule.AT_ONCE),
    FailureKind.NODE_ERROR: _MAY_WORK_LATER,
    FailureKind.TRANSIENT: _MAY_WORK_LATER,
    FailureKind.CRASHED: _MAY_WORK_LATER,
    # A person pressed Interrupt, which says nothing about the server or the workflow.
    FailureKind.INTERRUPTED: _NOBODYS_FAULT,
    FailureKind.ACCEPT_TIMEOUT: _MAY_WORK_LATER,
    FailureKind.START_TIMEOUT: _MAY_WORK_LATER,
    FailureKind.STALL_TIMEOUT: _MAY_WORK_LATER,
    FailureKind.UNKNOWN: _MAY_WORK_LATER,
    FailureKind.DEAD_WORKER: _WORKER_IS_GONE,
    FailureKind.LEASE_EXPIRED: _WORKER_IS_GONE,
    FailureKind.TOTAL_TIMEOUT: _JOBS_OWN_LIMIT,
    FailureKind.DEADLINE_PASSED: _JOBS_OWN_LIMIT,
    FailureKind.DEPENDENCY_FAILED: _JOBS_OWN_LIMIT,
    FailureKind.UNRUNNABLE: _JOBS_OWN_LIMIT,
    FailureKind.PAYLOAD_MISMATCH: _NOBODYS_FAULT,
    FailureKind.UNREADABLE: _JOBS_OWN_LIMIT,
    # Only a person may decide to pay a second time.
    FailureKind.OUTCOME_UNKNOWN: _JOBS_OWN_LIMIT,
}


def rule_of(failure: Failure) -> RetryRule:
    """The rule for a failure. An invalid workflow ends the job at once, unless only this server refuses it. A server's
    death is charged to the worker, so even a job with one attempt gets a second try."""
    if failure.server_died is not None:
        return _WORKER_IS_GONE
    return _SERVER_REFUSES if is_refusal(failure) else TABLE[failure.kind]


class RetryChoice(msgspec.Struct, frozen=True):
    """Which workers the job has after the failure."""

    others: int
    """Other live workers that may take the job now."""
    is_blocked_everywhere: bool
    """The workflow is blocked on every compatible worker."""
    is_only_worker: bool = False
    """The worker that failed is the only live one that may take the job; blocks are ignored."""
    may_accept: int = 0
    """After a refusal: live workers that could run the job and have not refused it, free or not."""


class RetryDecision(msgspec.Struct, frozen=True):
    will_retry: bool
    counts_against: CountsAgainst
    charged: int
    worker_faults: int
    failed_on: tuple[WorkerId, ...]
    expired_on: tuple[WorkerId, ...]
    not_before: float | None
    server_deaths: int
    is_poison: bool
    """The workflow kills servers, so no worker may run it any more."""
    keep_off_worker: bool
    """Another worker can run the job, so this one does not get it for a while."""
    why: str


def backoff_s(failures: int, rules: Rules, fraction: float, retry_delay_s: float | None = None) -> float:
    """Exponential backoff with full jitter and a cap. A delay from the caller is used unchanged."""
    if retry_delay_s is not None:
        return retry_delay_s
    return fraction * min(rules.retry_cap_s, rules.retry_base_s * (1 << min(max(failures - 1, 0), 16)))


def after_failure(
    dispatch: Dispatch,
    worker_id: WorkerId,
    failure: Failure,
    choice: RetryChoice,
    *,
    rules: Rules,
    now: float,
    fraction: float,
    retry_delay_s: float | None = None,
) -> RetryDecision:
    rule = rule_of(failure)
    is_refused = rule.block is BlockRule.REFUSAL
    charged = dispatch.charged + (rule.counts_against is CountsAgainst.ATTEMPTS)
    worker_faults = dispatch.worker_faults + (rule.counts_against is CountsAgainst.WORKER_FAULTS)
    # A refusal is not a failure of the worker.
    failed_on = dispatch.failed_on if is_refused else _with(dispatch.failed_on, worker_id)
    expired_on = dispatch.expired_on
    if failure.kind is FailureKind.LEASE_EXPIRED:
        expired_on = _with(expired_on, worker_id)

    server_deaths = dispatch.server_deaths + (failure.server_died is not None)
    is_poison = failure.server_died is not None and server_deaths >= rules.max_server_deaths
    why = ""
    if is_poison:
        why = f"{server_deaths} servers died while they ran it: the workflow is to blame"
    elif rule.is_final or (is_refused and not choice.may_accept):
        why = failure.message
    elif is_refused:
        pass
    elif len(expired_on) >= rules.give_up_workers:
        why = f"its lease expired on {len(expired_on)} different workers: the workflow is to blame"
    elif len(failed_on) >= rules.give_up_workers and choice.is_blocked_everywhere:
        why = f"it failed on {len(failed_on)} different workers and no other can run it: the workflow is to blame"
    elif charged >= dispatch.max_attempts:
        why = f"all {dispatch.max_attempts} attempts failed"
    elif worker_faults >= rules.max_worker_faults:
        why = f"{worker_faults} workers could not run it"

    will_retry = not why
    not_before = None
    if will_retry and rule.backs_off:
        not_before = now + backoff_s(charged, rules, fraction, retry_delay_s)
    return RetryDecision(
        will_retry=will_retry,
        counts_against=rule.counts_against,
        charged=charged,
        worker_faults=worker_faults,
        failed_on=failed_on,
        expired_on=expired_on,
        not_before=not_before,
        server_deaths=server_deaths,
        is_poison=is_poison,
        keep_off_worker=will_retry and (is_refused or choice.others > 0),
        why=why,
    )


class ReleaseDecision(msgspec.Struct, frozen=True):
    releases: int
    """How often the job was released. Declined leases do not count."""
    keep_off_until: float | None = None
    """Until then the worker that released the job does not get it."""
    failure: Failure | None = None
    """Set if the job was released too often: it fails."""


def after_release(dispatch: Dispatch, reason: str, rules: Rules, now: float) -> ReleaseDecision:
    """A release costs no attempt, but only `max_releases` of them are allowed. A worker that declines a job is busy
    with other work: that does not count, and the worker would decline the job again at once."""
    if reason == DECLINED:
        return ReleaseDecision(dispatch.releases, keep_off_until=now + rules.acknowledge_s)
    if dispatch.releases >= rules.max_releases:
        message = f"released {rules.max_releases} times without a result"
        return ReleaseDecision(dispatch.releases, failure=Failure(FailureKind.UNKNOWN, message))
    return ReleaseDecision(dispatch.releases + 1)


def _with(workers: tuple[WorkerId, ...], worker_id: WorkerId) -> tuple[WorkerId, ...]:
    return workers if worker_id in workers else (*workers, worker_id)
