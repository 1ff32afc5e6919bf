"""The effective priority of a waiting job, and the time of its next change.

The store orders by this number, higher first. Fair share and the ranking in `assignment.py` break ties.
"""

from __future__ import annotations

from comfyfleet.policy.rules import MAX_PRIORITY, MIN_PRIORITY, Rules


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
