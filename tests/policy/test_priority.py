"""Effective priority: what it adds up, that it never falls, and that its timer goes off exactly at each change."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.policy.rules import MAX_PRIORITY, MIN_PRIORITY, Rules
from comfyfleet.policy.timers import effective_priority, next_priority_change

RULES = Rules()
times = st.floats(0, 4e9)
rules = st.builds(
    Rules,
    deadline_window_s=st.floats(0, 1e5),
    deadline_points=st.integers(0, 300),
    deadline_steps=st.integers(0, 20),
)
jobs = st.fixed_dictionaries(
    {
        "base": st.integers(-1200, 1200),
        "tier": st.integers(-100, 100),
        "urgency": st.sampled_from(("low", "normal", "high", "critical")),
        "deadline_at": st.none() | times,
        "rules": rules,
        "ceiling": st.none() | st.integers(-1000, 1500),
    }
)


@given(jobs, times, times)
def test_it_never_falls_as_time_passes(job: dict[str, Any], one: float, other: float) -> None:
    early, late = sorted((one, other))
    assert effective_priority(now=early, **job) <= effective_priority(now=late, **job)


@given(jobs, times)
def test_it_stays_within_its_bounds(job: dict[str, Any], now: float) -> None:
    priority = effective_priority(now=now, **job)
    assert MIN_PRIORITY <= priority <= MAX_PRIORITY
    if job["ceiling"] is not None:
        assert priority <= job["ceiling"]


@given(jobs, st.floats(-2e5, 1e5), st.floats(0, 1, exclude_max=True))
def test_it_changes_at_the_time_foretold_and_not_before(
    job: dict[str, Any], offset: float, share: float
) -> None:
    now = (job["deadline_at"] or 0.0) + offset
    current = effective_priority(now=now, **job)
    change = next_priority_change(now=now, **job)
    if change is None:
        assert effective_priority(now=now + 1e7, **job) == current
        return
    assert change > now
    assert effective_priority(now=change, **job) > current
    assert effective_priority(now=math.nextafter(change, -math.inf), **job) == current
    between = now + share * (change - now)
    if between < change:
        assert effective_priority(now=between, **job) == current


def test_tier_and_urgency_are_added() -> None:
    assert effective_priority(5, 20, "high", None, 0.0, RULES) == 35
    assert effective_priority(5, -20, "low", None, 0.0, RULES) == -25
    assert next_priority_change(5, 20, "high", None, 0.0, RULES) is None


def test_no_ceiling_and_no_debt_leads_out_of_the_bounds_every_store_knows() -> None:
    assert effective_priority(990, 50, "critical", None, 0.0, RULES, ceiling=5_000) == MAX_PRIORITY
    assert effective_priority(-990, -50, "low", None, 0.0, RULES) == MIN_PRIORITY
    assert effective_priority(0, 0, "normal", None, 0.0, RULES, ceiling=-5_000) == MIN_PRIORITY
    assert effective_priority(70, 20, "normal", None, 0.0, RULES, ceiling=80) == 80


def test_a_deadline_raises_it_in_equal_steps_that_are_all_taken_before_it_passes() -> None:
    deadline = 10_000.0
    now = 0.0
    seen = [(now, effective_priority(0, 0, "normal", deadline, now, RULES))]
    while (change := next_priority_change(0, 0, "normal", deadline, now, RULES)) is not None:
        now = change
        seen.append((now, effective_priority(0, 0, "normal", deadline, now, RULES)))
    assert seen == [(0.0, 0), *((9_400.0 + 60.0 * step, 10 * (step + 1)) for step in range(10))]


@given(jobs)
def test_at_the_deadline_all_points_are_there(job: dict[str, Any]) -> None:
    if job["deadline_at"] is None or job["rules"].deadline_steps == 0:
        return
    without = {**job, "deadline_at": None, "base": job["base"] + job["rules"].deadline_points}
    at = job["deadline_at"]
    assert effective_priority(now=at, **job) == effective_priority(now=at, **without)


def test_no_timer_is_set_for_a_step_that_a_ceiling_hides() -> None:
    assert next_priority_change(50, 0, "normal", 10_000.0, 0.0, RULES, ceiling=50) is None
    assert next_priority_change(35, 0, "normal", 10_000.0, 9_460.0, RULES, ceiling=50) is None
    assert next_priority_change(-1100, 0, "normal", 10_000.0, 0.0, RULES) is None
