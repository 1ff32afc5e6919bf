"""What is known of one job: the range of its duration, and of its cost."""

from __future__ import annotations

import random

from comfyfleet.model.estimate import CreditRange, Range
from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.ledger import FlatPrice, GpuPrice, OutputPrice
from comfyfleet.model.workflow_stats import MeanDuration, WorkflowStats, WorkflowStatsDelta
from comfyfleet.policy.quotes import expected_credits, known_run

HASH = WorkflowHash("hash")


def stats(**durations: MeanDuration) -> WorkflowStats:
    return WorkflowStats(HASH, durations)


def learned(*seconds: float) -> WorkflowStats:
    found: WorkflowStats | None = None
    for each in seconds:
        found = WorkflowStatsDelta(HASH, "card", each, 0.2, 8).apply(found)
    assert found is not None
    return found


def test_a_workflow_that_never_ran_is_a_guess_with_a_wide_range() -> None:
    known = known_run(None, "card", 3.0)
    assert known.is_rough and known.seconds == Range(3.0, 1.0, 9.0)


def test_a_workflow_that_ran_on_other_cards_only_is_a_guess() -> None:
    known = known_run(stats(other=MeanDuration(2.0, 50)), "card", 2.0)
    assert known.is_rough and known.runs == 0
    assert known.seconds.low < 2.0 < known.seconds.high


def test_five_runs_make_an_expectation() -> None:
    assert known_run(learned(2, 2, 2, 2), "card", 2.0).is_rough
    known = known_run(learned(2, 2, 2, 2, 2), "card", 2.0)
    assert not known.is_rough and known.seconds == Range(2.0, 2.0, 2.0)


def test_the_spread_is_the_mean_distance_of_the_runs() -> None:
    assert learned(2.0).durations["card"].spread_s == 0
    assert learned(2.0, 4.0).durations["card"].spread_s == 2
    steady, wild = learned(*[2.0, 2.1] * 20), learned(*[1.0, 3.0] * 20)
    assert steady.durations["card"].spread_s < 0.1 < 0.9 < wild.durations["card"].spread_s


def test_nine_of_ten_runs_are_within_the_range() -> None:
    chance = random.Random(7)
    runs = [max(0.1, chance.gauss(10, 2)) for _ in range(400)]
    good = 0
    for at in range(20, 400):
        seconds = known_run(learned(*runs[max(0, at - 40) : at]), "card", 10).seconds
        good += seconds.low <= runs[at] <= seconds.high
    assert good > 0.9 * 380


def test_a_flat_price_is_the_cost() -> None:
    assert expected_credits(FlatPrice(5), "comfyui", Range(1, 1, 1)) == CreditRange(5, 5, 5)


def test_a_price_by_the_second_follows_the_duration_up_to_what_is_held() -> None:
    price = GpuPrice(credits_per_second=2, most_seconds=60, base=1)
    assert expected_credits(price, "comfyui", Range(10.0, 5.0, 15.0)) == CreditRange(21, 11, 121)
    assert expected_credits(price, "comfyui", Range(900.0, 300.0, 9e9)) == CreditRange(121, 121, 121)


def test_a_price_by_outputs_costs_at_most_what_is_held() -> None:
    price = OutputPrice(credits_each=3, most_outputs=4, base=1)
    assert expected_credits(price, "comfyui", Range(1, 1, 1)) == CreditRange(13, 1, 13)
