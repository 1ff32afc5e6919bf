"""What a lease costs its tenant, who starts where, and who comes first in a round of many slots."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.dispatch import Candidate, LaneKey, Lease
from comfyfleet.model.ids import (
    ClassKey,
    JobId,
    LeaseToken,
    PollId,
    TenantId,
    WorkerId,
    WorkflowHash,
)
from comfyfleet.model.tenant import TenantShare, TenantTerms, start_among
from comfyfleet.policy.fair_share import charge_s, due_now, tenant_turns, used_s
from comfyfleet.policy.rules import Rules

ANN, BOB = TenantId("ann"), TenantId("bob")
LEASE = Lease(WorkerId("w"), 1, 1, LeaseToken("t"), PollId("p"), 100.0, 160.0, is_acknowledged=True)


def candidate(
    name: str, tenant: TenantId, sequence: int, virtual_time: float, weight: float = 1.0
) -> Candidate:
    lane = LaneKey(ClassKey("class"), tenant, 0, WorkflowHash("hash"))
    return Candidate(JobId(name), lane, sequence, 0.0, virtual_time, weight)


def test_a_lease_is_charged_with_what_is_expected_else_with_the_rule() -> None:
    rules = Rules(charge_s=12.0)
    assert (charge_s(None, rules), charge_s(3.0, rules), charge_s(0.0, rules)) == (12.0, 3.0, 0.0)


def test_a_lease_that_nobody_took_up_used_nothing() -> None:
    unheard = Lease(WorkerId("w"), 1, 1, LeaseToken("t"), PollId("p"), 100.0, 110.0)
    assert (used_s(LEASE, 130.0), used_s(unheard, 130.0), used_s(None, 130.0)) == (30.0, 0.0, None)


@given(st.lists(st.floats(-100, 100)))
def test_virtual_time_never_falls_and_nothing_is_lost(charges: list[float]) -> None:
    share, total = TenantShare(ANN), 0.0
    for by in charges:
        after = share.charged(by)
        assert after.virtual_time >= share.virtual_time
        assert after.credit >= 0
        share, total = after, total + by
        assert share.virtual_time - share.credit == pytest.approx(total)


def test_who_begins_starts_with_the_least_served_that_is_being_served() -> None:
    running, waiting = TenantShare(ANN, 50.0, leased=1), TenantShare(BOB, 10.0, waiting=3)
    kept_out = TenantShare(TenantId("eve"), 1.0, waiting=1, leased=2, is_behind=True)
    gone = TenantShare(TenantId("old"), 900.0)
    assert start_among([running, waiting, kept_out, gone], 900.0) == 50.0
    assert start_among([waiting, kept_out, gone], 900.0) == 10.0
    assert start_among([kept_out, gone], 900.0) == 1.0
    assert start_among([gone], 900.0) == 900.0


def test_terms_say_who_is_out() -> None:
    share = TenantShare(ANN, leased=2, terms=TenantTerms(ANN, max_leased=2))
    assert share.is_excluded(0.0)
    assert not TenantShare(ANN, leased=1, terms=TenantTerms(ANN, max_leased=2)).is_excluded(0.0)
    held = TenantShare(ANN, terms=TenantTerms(ANN, held_until=5.0))
    assert [held.is_excluded(now) for now in (4.9, 5.0)] == [True, False]
    assert TenantShare(ANN, terms=TenantTerms(ANN, held_until=inf)).is_excluded(1e12)
    assert not TenantShare(ANN, leased=99).is_excluded(0.0)


def test_each_job_of_a_tenant_in_view_costs_the_next_one_its_place() -> None:
    seen = [candidate(f"a{number}", ANN, number, 5.0, weight=2.0) for number in range(3)]
    seen += [candidate("b", BOB, 9, 7.0)]
    found = tenant_turns(seen, lambda _: 10.0)
    assert found == {"a0": (5.0, 10.0), "a1": (10.0, 15.0), "a2": (15.0, 20.0), "b": (7.0, 17.0)}


def test_where_nobody_is_charged_all_are_equal() -> None:
    seen = [candidate("a", ANN, 1, 40.0, weight=0.0), candidate("b", BOB, 2, 0.0, weight=0.0)]
    assert set(tenant_turns(seen, lambda _: 10.0).values()) == {(0.0, 0.0)}


def due(*seen: Candidate, seconds: float = 10.0) -> set[str]:
    by_id = {each.job_id: each for each in seen}
    chosen = {f"slot of {job_id}": job_id for job_id in by_id}
    return set(due_now(chosen, by_id, tenant_turns(seen, lambda _: seconds), 30.0).values())


def test_of_a_round_what_is_beyond_a_quantum_waits_until_the_first_are_charged() -> None:
    """A tenant that was served more than a quantum more is not in view, and its turn may come before that."""
    seen = [candidate(f"a{number}", ANN, number, 5.0) for number in range(9)]
    assert due(*seen) == {"a0", "a1", "a2", "a3"}


def test_of_a_round_what_comes_behind_the_last_seen_of_another_waits() -> None:
    seen = [candidate(f"a{number}", ANN, number, 5.0) for number in range(3)]
    assert due(*seen, candidate("b", BOB, 9, 5.0, weight=2.0)) == {"a0", "b"}


def test_the_first_of_each_priority_is_always_due() -> None:
    urgent = msgspec.structs.replace(
        candidate("urgent", BOB, 9, 500.0), lane=LaneKey(ClassKey("c"), BOB, 7, WorkflowHash("h"))
    )
    assert due(urgent, candidate("a", ANN, 1, 0.0)) == {"urgent", "a"}
