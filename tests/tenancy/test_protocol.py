"""The protocol between two databases, explored whole: every interleaving and every crash, for small bounds.

It must be safe and live as it stands, and each guard that is removed must be found, with the steps that lead there.
Some guards stand behind others: those are removed alone, where nothing may happen, and together, where it must.
"""

from __future__ import annotations

import pytest
from tests.tenancy._protocol import STUCK, System, explore

# Two relays in each direction, two workers, three attempts.
HUB = System(attempts=3)
DIRECT = System(attempts=3, is_direct=True)
FAILOVER = System(has_reconciler=True, losses=1)
# A retry by hand, and what is left of the first round beside it: relays that come late on one way or the other.
TWO_ROUNDS = System(rounds=2, attempts=1, relays=1, workers=1)


@pytest.mark.parametrize(
    ("system", "at_least"),
    [
        pytest.param(HUB, 6_000, id="hub leases"),
        pytest.param(DIRECT, 5_000, id="direct leases, without L2"),
        pytest.param(FAILOVER, 5_000, id="a central store that fails over"),
        pytest.param(FAILOVER._replace(is_direct=True), 4_000, id="the same with direct leases"),
        pytest.param(TWO_ROUNDS, 7_000, id="two rounds and late settlements"),
        pytest.param(TWO_ROUNDS._replace(relays=2, settlers=1), 9_000, id="two rounds and late dispatches"),
        pytest.param(TWO_ROUNDS._replace(is_direct=True), 5_000, id="two rounds and direct leases"),
    ],
)
def test_the_protocol_is_safe_and_comes_to_rest_whatever_dies_when(system: System, at_least: int) -> None:
    verdict = explore(system)
    assert verdict.problem is None, verdict.trace
    # A model that cannot move is safe too.
    assert verdict.states > at_least


TWICE = "settled twice"
STALE = "a report under an old lease changed the round"
REFUNDED = "runs while its hold is refunded"
CONSUMED = "runs while its hold is consumed"
NONE = "runs while its hold is none"

FOUND: list[tuple[System, tuple[str, ...], str, str]] = [
    (HUB, ("unique settlement",), TWICE, "T1 refund 1"),
    (HUB, ("fencing",), STALE, "a worker fails 1"),
    (HUB, ("outbox dispatch",), STUCK, "relay of 1 dies"),
    (HUB, ("outbox settle",), STUCK, "relay of refund 1 dies"),
    (HUB, ("commit point",), CONSUMED, "T1 before K 1"),
    (HUB, ("tenant first",), STUCK, "S1 round 1"),
    (DIRECT, ("tenant first",), NONE, "L1 1 by a worker"),
    (HUB, ("tombstone",), REFUNDED, "T1 refund 1"),
    (HUB, ("confirmation",), REFUNDED, "T1 refund 1"),
    (HUB, ("closing",), STUCK, "S1 round 1"),
    (HUB, ("staging",), "consumed, and its result is lost", "T1 consume 1"),
    (HUB, ("lease-time check", "relay's life"), REFUNDED, "L2 1"),
    (DIRECT, ("relay's life",), REFUNDED, "L1 1 by a worker"),
    (FAILOVER._replace(has_reconciler=False), (), STUCK, "S3 1"),
    (TWO_ROUNDS, ("rounds",), REFUNDED, "T1 refund 1"),
]


@pytest.mark.parametrize(
    ("system", "guards", "problem", "last"),
    FOUND,
    ids=[
        f"{'direct' if system.is_direct else 'hub'} without {' and '.join(guards) or 'a reconciler'}"
        for system, guards, _, _ in FOUND
    ],
)
def test_a_guard_that_is_removed_is_found_with_the_steps_that_lead_there(
    system: System, guards: tuple[str, ...], problem: str, last: str
) -> None:
    verdict = explore(system.without(*guards))
    assert (verdict.problem, verdict.trace[-1]) == (problem, last), verdict.trace


def test_without_rounds_a_late_copy_of_the_first_refund_settles_the_second_hold() -> None:
    trace = explore(TWO_ROUNDS.without("rounds")).trace
    first, second = (place for place, step in enumerate(trace) if step == "T1 refund 1")
    assert first < trace.index("S1 round 2") < trace.index("L2 2") < second == len(trace) - 1


def test_a_relay_that_outlives_the_tombstone_brings_a_closed_round_back() -> None:
    trace = explore(DIRECT.without("relay's life")).trace
    read, purged = trace.index("relay reads 1"), trace.index("purge 1")
    brought_back = len(trace) - 1 - trace[::-1].index("S2 1")
    assert read < purged < brought_back


@pytest.mark.parametrize(
    ("system", "guard"),
    [
        (HUB, "lease-time check"),
        (HUB, "relay's life"),
        (HUB._replace(has_reconciler=True), "outbox dispatch"),
        (HUB._replace(has_reconciler=True), "outbox settle"),
    ],
    ids=["L2", "a relay's life", "the dispatch entry", "the settle entry"],
)
def test_what_another_guard_stands_behind_may_fail_alone(system: System, guard: str) -> None:
    verdict = explore(system.without(guard))
    assert verdict.problem is None, verdict.trace
