"""How often each set of models is asked for, and the mix of requests."""

from __future__ import annotations

import random
from math import inf

import pytest

from comfyfleet.model.ids import WorkflowHash
from comfyfleet.policy.demand import DemandTracker, RequestKind

OFTEN, SELDOM, PLAIN = (
    RequestKind(frozenset(models), WorkflowHash(name))
    for models, name in ((("often",), "o"), (("seldom",), "s"), ((), "p"))
)


def test_a_gap_is_the_mean_time_between_requests_or_the_time_since_the_last_one() -> None:
    demand = DemandTracker()
    demand.record(OFTEN, -10.0, 1)
    assert demand.gap_s(OFTEN.models, 0.0) == inf, "one request says nothing"
    for at in range(0, 400, 10):
        demand.record(OFTEN, float(at), 1)
    assert demand.gap_s(OFTEN.models, 390.0) == pytest.approx(10.0, rel=0.01)
    assert demand.gap_s(OFTEN.models, 1390.0) == 1000.0


def test_shares_are_those_of_the_last_requests() -> None:
    demand = DemandTracker()
    for _ in range(1000):
        demand.record(SELDOM, 0.0, 1)
    for _ in range(200):
        demand.record(OFTEN, 0.0, 1)
    shares = {share.kind: share.requested for share in demand.shares()}
    assert shares[OFTEN] > 0.95
    assert sum(shares.values()) == pytest.approx(1.0)


def test_first_come_first_served_loads_where_the_server_had_another_model_before() -> None:
    demand = DemandTracker()
    for _ in range(50):
        demand.record(OFTEN, 0.0, 2)
        demand.record(SELDOM, 0.0, 2)
    cold = {share.kind: share.cold for share in demand.shares()}
    assert cold[OFTEN] < 0.05, "two servers: each takes the same model again and again"
    demand = DemandTracker()
    for _ in range(50):
        demand.record(OFTEN, 0.0, 1)
        demand.record(SELDOM, 0.0, 1)
    assert {share.kind: share.cold for share in demand.shares()}[OFTEN] == pytest.approx(0.5, abs=0.02)


def test_what_needs_no_models_is_never_cold() -> None:
    demand = DemandTracker()
    demand.record(PLAIN, 0.0, 1)
    demand.record(OFTEN, 0.0, 1)
    demand.record(PLAIN, 0.0, 1)
    assert {share.kind: share.cold for share in demand.shares()}[PLAIN] == 0.0


def test_after_a_restart_the_waiting_jobs_say_what_is_asked_for() -> None:
    demand = DemandTracker()
    demand.seed([(OFTEN, 30), (SELDOM, 10)])
    shares = {share.kind: share for share in demand.shares()}
    assert shares[OFTEN].requested == pytest.approx(0.75)
    assert shares[OFTEN].cold == pytest.approx(0.75 * 0.25)


def test_ten_thousand_kinds_of_requests_take_bounded_memory_and_the_frequent_ones_stay() -> None:
    demand, chance = DemandTracker(), random.Random(1)
    for number in range(10_000):
        demand.record(
            OFTEN if chance.random() < 0.5 else RequestKind(frozenset({f"m{number}"}), OFTEN[1]), 0.0, 4
        )
    shares = list(demand.shares())
    assert len(shares) <= 64
    assert max(shares, key=lambda share: share.requested).kind == OFTEN
