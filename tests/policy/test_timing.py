"""Everything a dispatch waits for comes by itself, once, and then waits for the next."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._examples import examples

from comfyfleet.model.dispatch import Dispatch, Lease, Phase, Readiness
from comfyfleet.model.ids import ClassKey, JobId, LeaseToken, PollId, WorkerId, WorkflowHash
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.timers import DueAction, due_action, requeued, wake_at

RULES = Rules()
NOW = 10_000.0


def job(**fields: Any) -> Dispatch:
    return Dispatch(JobId("j"), ClassKey("c"), WorkflowHash("h"), fields.pop("priority", 0), **fields)


def leased(lease_ends_at: float, /, **fields: Any) -> Dispatch:
    lease = Lease(WorkerId("a"), 1, 1, LeaseToken("t"), PollId("p"), NOW - 1, lease_ends_at)
    return job(phase=Phase.LEASED, lease=lease, **fields)


moments = st.none() | st.sampled_from(
    [NOW + offset for offset in (-700, -3, -0.5, 0, 0.5, 3, 59, 60, 599, 601)]
)


@st.composite
def dispatches(draw: st.DrawFn) -> Dispatch:
    relax_at = draw(moments)
    fields: dict[str, Any] = {
        "expires_at": draw(moments),
        "deadline_at": draw(moments),
        "fails_at_deadline": draw(st.booleans()),
        "relax_at": relax_at,
        "relaxed_class": None if relax_at is None else ClassKey("relaxed"),
        "base_priority": draw(st.integers(-1000, 1000)),
        "priority": draw(st.integers(-1000, 1000)),
    }
    if draw(st.booleans()):
        ends_at = draw(moments.filter(lambda at: at is not None))
        assert ends_at is not None
        return leased(ends_at, **fields, cancel_requested_at=draw(moments))
    standing = draw(st.sampled_from(Readiness))
    not_before = draw(moments)
    if standing is Readiness.DELAYED and not_before is None:
        not_before = NOW + 1
    return job(**fields, standing=standing, not_before=not_before)


@settings(max_examples=examples(500))
@given(dispatches())
def test_after_a_review_the_next_moment_is_in_the_future_or_the_job_or_its_lease_has_ended(
    dispatch: Dispatch,
) -> None:
    found = due_action(dispatch, NOW, RULES)
    if found.action in (DueAction.NOTHING, DueAction.DEADLINE_FLAGGED):
        assert found.change is not None
        after = found.change.apply(dispatch)
        assert after.due_at is None or after.due_at > NOW
        assert after.wake_at == wake_at(after, NOW, RULES)
        again = due_action(after, NOW, RULES)
        assert again.action is DueAction.NOTHING
        assert again.change is not None
        settled = again.change.apply(after)
        assert msgspec.structs.replace(settled, revision=after.revision) == after
    else:
        ends = {
            DueAction.TOTAL_OVER: dispatch.expires_at,
            DueAction.DEADLINE_OVER: dispatch.deadline_at,
            DueAction.LEASE_EXPIRED: dispatch.lease.expires_at if dispatch.lease else None,
            DueAction.STOP_OVERDUE: (dispatch.cancel_requested_at or 0.0) + RULES.cancel_grace_s,
        }
        end = ends[found.action]
        assert end is not None
        assert end <= NOW


@settings(max_examples=examples(300))
@given(dispatches())
def test_nothing_is_due_before_the_time_it_names(dispatch: Dispatch) -> None:
    fresh = msgspec.structs.replace(dispatch, wake_at=wake_at(dispatch, NOW - 2000, RULES))
    if fresh.due_at is None or fresh.due_at > NOW:
        assert due_action(fresh, NOW, RULES).action is DueAction.NOTHING


def test_a_delayed_job_steps_into_its_lane_at_exactly_not_before() -> None:
    waiting = job(standing=Readiness.DELAYED, not_before=NOW)
    early = due_action(waiting, NOW - 0.001, RULES).change
    on_time = due_action(waiting, NOW, RULES).change
    assert early is not None
    assert early.apply(waiting).standing is Readiness.DELAYED
    assert on_time is not None
    assert on_time.apply(waiting).standing is Readiness.IN_LANE


def test_a_paused_job_stays_paused_whatever_it_was_waiting_for() -> None:
    waiting = job(standing=Readiness.PAUSED, not_before=NOW - 1)
    change = due_action(waiting, NOW, RULES).change
    assert change is not None
    assert change.apply(waiting).standing is Readiness.PAUSED


def test_a_preference_relaxes_into_its_class_at_exactly_its_time() -> None:
    waiting = job(relax_at=NOW, relaxed_class=ClassKey("relaxed"))
    change = due_action(waiting, NOW, RULES).change
    assert change is not None
    after = change.apply(waiting)
    assert (after.class_key, after.relax_at, after.relaxed_class) == ("relaxed", None, None)


def test_a_priority_rises_towards_its_deadline_in_steps() -> None:
    waiting = job(deadline_at=NOW + 600, base_priority=5, priority=5)
    seen = []
    at: float | None = NOW
    while at is not None and at < NOW + 600:
        change = due_action(waiting, at, RULES).change
        assert change is not None
        waiting = change.apply(waiting)
        seen.append(waiting.priority)
        at = waiting.wake_at
    assert seen == [5 + 10 * step for step in range(1, 11)]
    assert due_action(waiting, NOW + 600, RULES).action is DueAction.DEADLINE_OVER


def test_no_deadline_lifts_a_priority_above_its_ceiling_and_no_timer_is_set_for_what_it_cuts_off() -> None:
    waiting = job(deadline_at=NOW + 600, base_priority=5, priority=5, priority_ceiling=28)
    seen = []
    at: float | None = NOW
    while at is not None and at < NOW + 600:
        change = due_action(waiting, at, RULES).change
        assert change is not None
        waiting = change.apply(waiting)
        seen.append(waiting.priority)
        at = waiting.wake_at
    assert seen == [15, 25, 28]


def test_a_job_flagged_late_keeps_what_its_deadline_had_added() -> None:
    waiting = job(deadline_at=NOW, fails_at_deadline=False, base_priority=5, priority=95)
    found = due_action(waiting, NOW, RULES)
    assert found.action is DueAction.DEADLINE_FLAGGED
    assert found.change is not None
    late = found.change.apply(waiting)
    assert (late.priority, late.deadline_at) == (105, None)
    later = due_action(late, NOW + 1000, RULES).change
    assert later is not None
    assert later.apply(late).priority == 105


def test_a_lease_runs_through_a_deadline_but_not_through_the_end_of_its_total_time() -> None:
    assert due_action(leased(NOW + 60, deadline_at=NOW - 1), NOW, RULES).action is DueAction.NOTHING
    assert due_action(leased(NOW + 60, expires_at=NOW), NOW, RULES).action is DueAction.TOTAL_OVER


def test_an_unconfirmed_cancel_is_overdue_after_exactly_its_grace() -> None:
    asked = leased(NOW + 60, cancel_requested_at=NOW - 30)
    assert due_action(asked, NOW - 0.001, RULES).action is DueAction.NOTHING
    assert due_action(asked, NOW, RULES).action is DueAction.STOP_OVERDUE


def test_what_comes_back_from_a_lease_catches_up_with_the_time_that_passed() -> None:
    """While it ran nobody looked at its deadline or its preference; both must be waited for again."""
    running = leased(
        NOW + 60, deadline_at=NOW + 300, relax_at=NOW - 1, relaxed_class=ClassKey("relaxed"), wake_at=None
    )
    back = requeued(running, Phase.QUEUED, None, NOW, RULES).apply(running)
    assert (back.phase, back.lease, back.standing) == (Phase.QUEUED, None, Readiness.IN_LANE)
    assert back.class_key == "relaxed"
    assert back.priority == 60
    assert back.wake_at == NOW + 60
