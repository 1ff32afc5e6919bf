"""Rules that no fleet can live by are found before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from comfyfleet.policy.rules import IDLE_HEARTBEAT_S, Rules, problem_of
from comfyfleet.worker.settings import AgentSettings


def test_the_rules_as_they_are_will_do() -> None:
    assert problem_of(Rules()) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_lost_s", 29.9),
        ("worker_lost_s", -1.0),
        ("worker_lost_s", float("nan")),
        ("lease_ttl_s", 0.0),
        ("acknowledge_s", -5.0),
        ("sweep_s", float("nan")),
        ("round_s", 0.0),
        ("max_attempts", 0),
        ("patience", -1.0),
        ("patience", float("nan")),
    ],
)
def test_a_rule_that_will_not_do_is_named(name: str, value: Any) -> None:
    problem = problem_of(Rules(**{name: value}))
    assert problem is not None and problem[0] == name


def test_an_idle_agent_is_heard_of_twice_before_it_counts_as_lost() -> None:
    """The agent knows nothing of rules, so both have the number."""
    settings = AgentSettings()
    assert settings.heartbeat_s == IDLE_HEARTBEAT_S
    longest_s = settings.heartbeat_s * (1 + settings.heartbeat_jitter) + settings.heartbeat_timeout_s
    assert problem_of(Rules(worker_lost_s=longest_s)) is not None, "with one beat lost it would flap"
    assert problem_of(Rules(worker_lost_s=30.0)) is None
