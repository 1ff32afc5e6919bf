"""Who runs what where models are expensive to change: the figures by hand, and what always holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.ids import WorkerId, WorkflowHash
from comfyfleet.policy.demand import ModelSet, RequestKind, Share
from comfyfleet.policy.scheduling import (
    Backlog,
    BusySlot,
    Offer,
    Rival,
    SlotKind,
    cost_step,
    displaced,
    fifo_starts,
    is_behind,
    is_left_to_others,
    left_s,
    look_again_at,
    missing,
    offer_of,
    pace,
    reached,
    reload_chance,
    rivals_of,
    start_by,
    wait_reason,
)

HASH = WorkflowHash("h")
FLUX, SDXL, LORA = (frozenset({name}) for name in ("flux", "sdxl", "lora"))
NONE: ModelSet = frozenset()
CARD, FAST = "card", "fast"


@dataclass
class Known:
    """Estimates that are all given."""

    runs: Mapping[str, float] = field(default_factory=lambda: {CARD: 1.0, FAST: 0.25})
    loads: Mapping[ModelSet, float] = field(default_factory=dict)
    gaps: Mapping[ModelSet, float] = field(default_factory=dict)

    def run_s(self, workflow_hash: WorkflowHash, worker_class: str) -> float:
        return self.runs[worker_class]

    def load_s(self, models: ModelSet, worker_class: str) -> float:
        return self.loads.get(models, 3.0) if models else 0.0

    def gap_s(self, models: ModelSet) -> float:
        return self.gaps.get(models, inf)


def busy(name: str, loaded: ModelSet, left: float, worker_class: str = CARD) -> BusySlot:
    return BusySlot(WorkerId(name), SlotKind(worker_class, loaded), left)


def warm(*lefts: float, run_s: float = 1.0) -> list[Rival]:
    return [Rival(busy(f"warm-{number}", SDXL, left), run_s, 0.0) for number, left in enumerate(lefts)]


def backlog(waiting: int = 1, starts: float = inf) -> Backlog:
    return Backlog(SDXL, HASH, waiting, starts)


COLD = Offer(load_s=3.0, price_s=3.0, run_s=1.0, displaces=True)


# the promise


def test_first_come_first_served_moves_on_by_the_pace_of_all_slots() -> None:
    sdxl, flux = (Share(RequestKind(models, HASH), 0.5, 0.25) for models in (SDXL, FLUX))
    estimates = Known(loads={SDXL: 2.0, FLUX: 6.0})
    # A card needs 1 s for each job, and 0.25 * 2 + 0.25 * 6 for loads; the fast one 0.25 s and the same loads.
    assert pace({CARD: 3, FAST: 1}, [sdxl, flux], estimates) == pytest.approx(1 / (3 / 3.0 + 1 / 2.25))
    assert pace({}, [sdxl], estimates) == inf
    assert pace({CARD: 2}, [], estimates) == 0.5


def test_nobody_is_due_later_than_those_behind_him() -> None:
    # The second came when fewer were left before it: others were cancelled meanwhile.
    assert fifo_starts([(0.0, 100), (50.0, 2), (60.0, 30)], 1.0) == [52.0, 52.0, 90.0]
    assert start_by(52.0, 2.0, 3.0) == 58.0


def test_without_a_live_slot_only_those_are_due_that_found_nobody_before_them() -> None:
    assert fifo_starts([(5.0, 0), (6.0, 3)], inf) == [5.0, inf]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1000))), st.floats(0, 100))
def test_the_moments_keep_the_order_of_the_queue(line: list[tuple[float, int]], pace_s: float) -> None:
    starts = fifo_starts(line, pace_s)
    assert starts == sorted(starts)
    assert all(start <= at + place * pace_s for start, (at, place) in zip(starts, line, strict=True))


def test_a_tenant_that_is_served_less_waits_for_loaded_models_only_for_the_patience_in_service() -> None:
    assert not is_behind(10.0, 15.9, patience=2.0, load_s=3.0)
    assert is_behind(10.0, 16.0, patience=2.0, load_s=3.0)
    assert is_behind(10.0, 10.1, patience=2.0, load_s=0.0)
    assert not is_behind(10.0, 10.0, patience=0.0, load_s=3.0), "equals are ordered by other reasons"
    assert not is_behind(10.0, -inf, patience=0.0, load_s=0.0)


# models


def test_a_loaded_file_counts_with_and_without_its_folder() -> None:
    assert missing(frozenset({"base", "vae"}), frozenset({"sd/base"})) == {"vae"}
    assert missing(frozenset({"sd/base"}), frozenset({"sd\\base"})) == NONE
    assert missing(frozenset({"sd/base"}), frozenset({"other/base"})) == {"sd/base"}
    assert missing(NONE, NONE) == NONE


def test_a_load_displaces_what_is_not_needed_too() -> None:
    assert displaced(SDXL, FLUX | LORA) == FLUX | LORA
    assert displaced(SDXL | LORA, SDXL) == NONE, "a style is added to the checkpoint that is there"
    assert displaced(SDXL | LORA, SDXL | FLUX) == FLUX
    assert displaced(SDXL, SDXL | LORA) == NONE, "nothing has to be loaded"
    assert displaced(frozenset({"base", "vae"}), frozenset({"sd/base"})) == NONE


# price


def test_a_price_is_the_load_and_the_likely_load_of_what_goes() -> None:
    estimates = Known(loads={SDXL: 3.0, FLUX: 8.0}, gaps={SDXL: 30.0, FLUX: 10.0})

    def price(loaded: ModelSet, copies: int) -> float:
        return offer_of(SDXL, HASH, SlotKind(CARD, loaded), copies, estimates).price_s

    assert price(SDXL, 1) == 0.0
    assert price(NONE, 0) == 3.0
    # Of four requests three are for what goes.
    assert price(FLUX, 1) == 3.0 + 8.0 * 0.75
    assert price(FLUX, 3) == 3.0 + 8.0 * 0.75 / 3
    assert offer_of(SDXL, HASH, SlotKind(CARD, FLUX), 1, estimates) == Offer(3.0, 9.0, 1.0, True)
    assert not offer_of(SDXL, HASH, SlotKind(CARD, NONE), 0, estimates).displaces


def test_of_a_server_that_keeps_several_sets_only_the_oldest_goes() -> None:
    estimates = Known(loads={SDXL: 3.0, FLUX: 8.0, LORA: 1.0})
    both = FLUX | LORA
    assert offer_of(SDXL, HASH, SlotKind(CARD, both, LORA), 1, estimates).price_s == 3.0 + 1.0 / 2
    assert offer_of(SDXL, HASH, SlotKind(CARD, both, NONE), 1, estimates) == Offer(3.0, 3.0, 1.0, False)
    assert offer_of(FLUX, HASH, SlotKind(CARD, both, LORA), 1, estimates).is_warm


def test_the_chance_of_a_reload_follows_from_how_often_each_is_asked_for() -> None:
    assert reload_chance(inf, inf) == 0.5
    assert reload_chance(5.0, inf) == 0.0
    assert reload_chance(inf, 5.0) == 1.0
    assert reload_chance(1.0, 3.0) == 0.25
    assert reload_chance(0.0, 0.0) == 0.5


def test_costs_within_a_tenth_count_as_equal() -> None:
    assert cost_step(1.01) == cost_step(1.05)
    assert cost_step(1.0) < cost_step(1.3)
    assert cost_step(0.0) < cost_step(0.01)


# what is left to others


def test_others_have_reached_as_many_as_they_finish_in_the_time() -> None:
    # Three servers: 4 - 0.5 leaves time for 3, 4 - 2 for 2, and 4 - 5 for none.
    assert reached(4.0, warm(0.5, 2.0, 5.0), 99) == 5
    assert reached(4.0, warm(0.5, 2.0, 5.0, run_s=2.0), 99) == 2
    assert reached(4.0, warm(3.0), 99) == 1, "exactly in time"
    assert reached(4.0, [], 99) == 0


def test_a_server_that_overruns_is_expected_to_take_as_long_again() -> None:
    assert [left_s(10.0, now) for now in (8.0, 10.0, 11.0, 19.0)] == [2.0, 0.0, 1.0, 9.0]


@pytest.mark.parametrize(
    ("left", "waiting", "is_left"), [(0.5, 1, True), (8.0, 1, False), (0.5, 5, False), (0.5, 3, True)]
)
def test_a_job_waits_for_a_warm_server_that_is_soon_free_unless_too_many_wait(
    left: float, waiting: int, is_left: bool
) -> None:
    assert is_left_to_others(COLD, backlog(waiting), warm(left), [], now=0.0) == is_left


def test_a_job_that_is_due_is_left_to_nobody() -> None:
    assert is_left_to_others(COLD, backlog(starts=100.1), warm(0.5), [], now=100.0)
    assert not is_left_to_others(COLD, backlog(starts=100.0), warm(0.5), [], now=100.0)


def test_a_slot_with_nothing_to_lose_leaves_nothing() -> None:
    empty = Offer(3.0, 3.0, 1.0, displaces=False)
    assert not is_left_to_others(empty, backlog(), warm(0.0), [], now=0.0)


def test_a_better_card_that_is_soon_free_takes_one_job() -> None:
    loose = [Rival(busy("big", FLUX, 0.5, FAST), 0.25, 1.0)]
    assert is_left_to_others(COLD, backlog(1), [], loose, now=0.0)
    assert not is_left_to_others(COLD, backlog(2), [], loose, now=0.0)
    slower = [Rival(busy("small", FLUX, 0.0), 2.0, 3.0)]
    assert not is_left_to_others(COLD, backlog(1), [], slower, now=0.0)
    late = [Rival(busy("big", FLUX, 3.0, FAST), 0.25, 1.0)]
    assert not is_left_to_others(COLD, backlog(1), [], late, now=0.0)


def test_rivals_have_the_models_or_nothing_of_their_own_to_go_on_with() -> None:
    slots = [busy("same", SDXL, 1.0), busy("idle-soon", FLUX, 1.0, FAST), busy("wanted", LORA, 1.0, FAST)]
    table = {slot.kind: [slot] for slot in slots}
    warm_ones, loose = rivals_of(backlog(), table, lambda _: True, [SDXL, LORA], Known())
    assert [each.slot.worker_id for each in warm_ones] == ["same"]
    assert [(each.slot.worker_id, each.load_s) for each in loose] == [("idle-soon", 3.0)]
    # A blocked worker is none.
    assert rivals_of(backlog(), table, lambda _: False, [SDXL], Known()) == ([], [])


def test_the_reason_names_the_worker_that_is_free_first() -> None:
    rivals = warm(2.0, 0.5)
    assert wait_reason(COLD, backlog(starts=99.0), rivals, [], now=0.0) == (
        WorkerId("warm-1"),
        0.5,
        3.0,
        99.0,
    )
    assert wait_reason(COLD, backlog(starts=0.0), rivals, [], now=0.0) is None


def test_a_slot_looks_again_when_the_first_job_is_due_and_at_the_latest_after_a_round() -> None:
    assert look_again_at([backlog(starts=10.4), backlog(starts=10.2)], 10.0, 1.0) == 10.2
    assert look_again_at([backlog(starts=99.0)], 10.0, 1.0) == 11.0


times = st.floats(0.01, 100)
rivals = st.lists(st.builds(lambda left, run: warm(left, run_s=run)[0], st.floats(0, 100), times), max_size=5)
offers = st.builds(
    lambda load, more, run: Offer(load, load + more, run, True), times, st.floats(0, 50), times
)


@given(offers, rivals, st.integers(1, 20), st.floats(0, 100))
def test_more_jobs_and_a_nearer_promise_never_make_a_slot_leave_them(
    offer: Offer, others: list[Rival], waiting: int, starts: float
) -> None:
    if not is_left_to_others(offer, backlog(waiting, starts), others, [], now=50.0):
        assert not is_left_to_others(offer, backlog(waiting + 1, starts), others, [], now=50.0)
        assert not is_left_to_others(offer, backlog(waiting, starts - 10), others, [], now=50.0)
        assert not is_left_to_others(offer, backlog(waiting, starts), others[1:], [], now=50.0)
