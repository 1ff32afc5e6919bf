"""How urgent a waiting job is, as one integer, and when that will change by itself.

The store orders by this number (higher first) and a timer is set for its next change; ties are for fairness and the
ranking in `assignment.py` to break.
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
    """The job's own priority, plus its tenant's tier, its urgency and what a near deadline adds.

    The tenant's ceiling bounds the sum, the deadline's part included: a near deadline lifts nobody above it. An urgency
    to which the rules give no points changes nothing.
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
    """The first time after now at which the effective priority differs from now's. None: it stays for ever."""
    if deadline_at is None:
        return None
    current = effective_priority(base, tier, urgency, deadline_at, now, rules, ceiling)
    for step in range(rules.deadline_steps):
        time = _step_at(step, deadline_at, rules)
        # A bound, or fewer points than steps, can make a step change nothing; no timer need go off for it.
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
    """Step 0 is taken as the window opens and the last one a step's length before the deadline: points that came
    with the deadline itself would help nobody.

    Every comparison with the clock uses this one expression, so a timer set for a step never goes off beside it.
    """
    return deadline_at - rules.deadline_window_s * (rules.deadline_steps - step) / rules.deadline_steps
