"""When a dispatch needs attention (`wake_at`), what to do then (`due_action`), and its effective priority.

A dispatch has one `wake_at`: the earliest of its delay, preference, rising priority, deadline, total timeout and an
unconfirmed stop. The sweeper calls `due_action` at that time, and when the lease expires. The store orders by the
effective priority, higher first; fair share and the ranking in `assignment.py` break ties. Also here: when a job that
no known worker can run fails.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from comfyfleet.model.dispatch import Change, Dispatch, Phase, Readiness, Stop
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy.lifecycle import readiness_at
from comfyfleet.policy.rules import MAX_PRIORITY, MIN_PRIORITY, Rules


class DueAction(StrEnum):
    NOTHING = "nothing"
    """At most the place of the dispatch changes."""
    LEASE_EXPIRED = "lease_expired"
    STOP_OVERDUE = "stop_overdue"
    TOTAL_OVER = "total_over"
    DEADLINE_OVER = "deadline_over"
    DEADLINE_FLAGGED = "deadline_flagged"


class DueReview(msgspec.Struct, frozen=True):
    action: DueAction
    change: Change | None = None


def wake_at(dispatch: Dispatch, now: float, rules: Rules) -> float | None:
    """The next time at which policy must review this dispatch. The timers of a paused job keep running."""
    moments = [dispatch.expires_at]
    if dispatch.phase is Phase.QUEUED:
        moments += [dispatch.deadline_at, dispatch.relax_at]
        moments.append(
            next_priority_change(
                dispatch.base_priority,
                0,
                "normal",
                dispatch.deadline_at,
                now,
                rules,
                dispatch.priority_ceiling,
            )
        )
        if dispatch.awaits_jobs:
            moments.append(next_check(dispatch, now, rules))
        elif dispatch.standing is Readiness.DELAYED:
            moments.append(dispatch.not_before)
    elif (asked_at := dispatch.stop_requested_at) is not None:
        moments.append(asked_at + rules.cancel_grace_s)
    return min((moment for moment in moments if moment is not None), default=None)


def next_check(dispatch: Dispatch, now: float, rules: Rules) -> float:
    """The next check of a job that waits for others, in case a notification is lost: after half its age."""
    age_s = max(0.0, now - dispatch.queued_at)
    return now + min(rules.held_look_cap_s, max(rules.held_look_s, age_s / 2))


def dependencies_met(dispatch: Dispatch, now: float, rules: Rules) -> Change:
    """All awaited jobs completed. The wait for a preference starts now."""
    standing = dispatch.standing
    if standing is Readiness.DELAYED:
        standing = readiness_at(dispatch.not_before, now)
    relax_at = None if dispatch.relaxed_class is None else now + rules.affinity_wait_s
    free = msgspec.structs.replace(dispatch, awaits_jobs=False, standing=standing, relax_at=relax_at)
    return msgspec.structs.replace(_placed(free, now, rules), awaits_jobs=False)


def due_action(dispatch: Dispatch, now: float, rules: Rules) -> DueReview:
    """What is due now. The first event that ends the job or the lease wins; otherwise the job's place is updated."""
    if dispatch.phase.is_final:
        return DueReview(DueAction.NOTHING)
    if dispatch.expires_at is not None and dispatch.expires_at <= now:
        return DueReview(DueAction.TOTAL_OVER)
    if dispatch.phase is Phase.LEASED:
        assert dispatch.lease is not None
        asked_at = dispatch.stop_requested_at
        if asked_at is not None and asked_at + rules.cancel_grace_s <= now:
            return DueReview(DueAction.STOP_OVERDUE)
        if dispatch.lease.expires_at <= now:
            return DueReview(DueAction.LEASE_EXPIRED)
        return DueReview(DueAction.NOTHING, Change(wake_at=wake_at(dispatch, now, rules)))
    if dispatch.deadline_at is not None and dispatch.deadline_at <= now:
        if dispatch.fails_at_deadline:
            return DueReview(DueAction.DEADLINE_OVER)
        # The bonus of the deadline stays: a late job must not fall behind again.
        raised = _priority(dispatch, now, rules)
        flagged = msgspec.structs.replace(dispatch, deadline_at=None, base_priority=raised)
        placed = _placed(flagged, now, rules)
        change = msgspec.structs.replace(placed, deadline_at=None, base_priority=raised)
        return DueReview(DueAction.DEADLINE_FLAGGED, change)
    return DueReview(DueAction.NOTHING, _placed(dispatch, now, rules))


def requeued(dispatch: Dispatch, phase: Phase, not_before: float | None, now: float, rules: Rules) -> Change:
    """Back to the queue after a lease, or paused if requested. Timers that passed during the run take effect."""
    standing = readiness_at(not_before, now) if dispatch.pause_requested_at is None else Readiness.PAUSED
    waiting = msgspec.structs.replace(
        dispatch, phase=phase, lease=None, standing=standing, not_before=not_before
    )
    placed = msgspec.structs.replace(
        _placed(waiting, now, rules), phase=phase, lease=None, not_before=not_before
    )
    if dispatch.pause_requested_at is None and dispatch.retry_requested_at is None:
        return placed
    return msgspec.structs.replace(placed, pause_requested_at=None, retry_requested_at=None)


def request_stop(dispatch: Dispatch, stop: Stop, now: float, rules: Rules) -> Change:
    """Request a stop. The phase does not change: the lease goes on until the worker confirms or the grace ends."""
    # A repeated request does not give the worker more time.
    since = dispatch.stop_requested_at or now
    change = Change(
        cancel_requested_at=now if stop is Stop.CANCEL else None,
        pause_requested_at=since if stop is Stop.PAUSE else None,
        retry_requested_at=since if stop is Stop.RETRY else None,
    )
    return msgspec.structs.replace(change, wake_at=wake_at(change.apply(dispatch), now, rules))


def _priority(dispatch: Dispatch, now: float, rules: Rules) -> int:
    return effective_priority(
        dispatch.base_priority, 0, "normal", dispatch.deadline_at, now, rules, dispatch.priority_ceiling
    )


def _placed(dispatch: Dispatch, now: float, rules: Rules) -> Change:
    relaxes = dispatch.relax_at is not None and dispatch.relax_at <= now
    class_key = dispatch.class_key
    if relaxes:
        assert dispatch.relaxed_class is not None, "relax_at needs a relaxed_class"
        class_key = dispatch.relaxed_class
    standing = dispatch.standing
    if standing is Readiness.DELAYED and not dispatch.awaits_jobs and (dispatch.not_before or 0.0) <= now:
        standing = Readiness.IN_LANE
    placed = msgspec.structs.replace(
        dispatch,
        priority=_priority(dispatch, now, rules),
        class_key=class_key,
        standing=standing,
        relax_at=None if relaxes else dispatch.relax_at,
        relaxed_class=None if relaxes else dispatch.relaxed_class,
    )
    return Change(
        priority=placed.priority,
        class_key=placed.class_key,
        standing=placed.standing,
        relax_at=placed.relax_at,
        relaxed_class=placed.relaxed_class,
        wake_at=wake_at(placed, now, rules),
    )


def unrunnable_after(tenant: Tenant | None, rules: Rules) -> float:
    """The tenant's own value, else the hub's setting."""
    own = None if tenant is None else tenant.unrunnable_after
    return rules.unrunnable_after if own is None else own


def fails_at(dispatch: Dispatch, since: float, after_s: float) -> float | None:
    """`since`: when no worker could run its class for the first time. None: the job does not wait for a worker."""
    if dispatch.phase is not Phase.QUEUED or dispatch.awaits_jobs or dispatch.standing is Readiness.PAUSED:
        return None
    if dispatch.relaxed_class is not None:
        # Its requirements relax soon.
        return None
    return max(since, dispatch.queued_at, dispatch.not_before or 0.0) + after_s


def failure_of(after_s: float, lacking: str | None) -> Failure:
    nearest = "no worker is known" if lacking is None else f"the nearest: {lacking}"
    return Failure(
        FailureKind.UNRUNNABLE,
        f"no known worker could run it for {_duration(after_s)}; {nearest}. "
        "Start a worker that can, and retry it",
    )


def _duration(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def effective_priority(
    base: int,
    tier: int,
    urgency: str,
    deadline_at: float | None,
    now: float,
    rules: Rules,
    ceiling: int | None = None,
) -> int:
    """The sum of the job's priority, its tenant's tier, its urgency and a bonus for a near deadline.

    The tenant's ceiling limits the whole sum. An urgency without points in the rules adds nothing.
    """
    own = base + tier + rules.urgency_points.get(urgency, 0)
    raised = own + _deadline_points(deadline_at, now, rules)
    highest = MAX_PRIORITY if ceiling is None else min(ceiling, MAX_PRIORITY)
    return max(MIN_PRIORITY, min(raised, highest))


def next_priority_change(
    base: int,
    tier: int,
    urgency: str,
    deadline_at: float | None,
    now: float,
    rules: Rules,
    ceiling: int | None = None,
) -> float | None:
    """The first time after now at which the effective priority changes. None: never."""
    if deadline_at is None:
        return None
    current = effective_priority(base, tier, urgency, deadline_at, now, rules, ceiling)
    for step in range(rules.deadline_steps):
        time = _step_at(step, deadline_at, rules)
        # A step may change nothing, because of a limit or because there are fewer points than steps.
        if time > now and (
            effective_priority(base, tier, urgency, deadline_at, time, rules, ceiling) != current
        ):
            return time
    return None


def _deadline_points(deadline_at: float | None, now: float, rules: Rules) -> int:
    if deadline_at is None or rules.deadline_steps <= 0:
        return 0
    taken = sum(_step_at(step, deadline_at, rules) <= now for step in range(rules.deadline_steps))
    return rules.deadline_points * taken // rules.deadline_steps


def _step_at(step: int, deadline_at: float, rules: Rules) -> float:
    """Step 0 is at the start of the window, and the last one is a step's length before the deadline.

    Every comparison with the clock uses this expression, so a timer for a step fires exactly at it.
    """
    return deadline_at - rules.deadline_window_s * (rules.deadline_steps - step) / rules.deadline_steps
