"""A round against brute force, the specialist and the generalist in both orders, and the ranks that break ties."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests._examples import examples

from comfyfleet.model.ids import JobId
from comfyfleet.policy.assignment import RankKey, SlotKey, WaitingJob, assign, rank_key, slot_key


def rank(
    sequence: int,
    *,
    is_due: bool = False,
    is_preferred: bool = False,
    is_cold: bool = False,
    copies: int = 0,
    selectivity: int = 1,
) -> RankKey:
    return rank_key(
        is_due=is_due,
        is_preferred=is_preferred,
        is_cold=is_cold,
        copies=copies,
        selectivity=selectivity,
        sequence=sequence,
    )


def waiting(name: str, sequence: int, slots: str, priority: int = 0) -> WaitingJob:
    return WaitingJob(JobId(name), priority, rank(sequence), tuple(slots))


@st.composite
def rounds(draw: st.DrawFn, most_slots: int = 7) -> list[WaitingJob]:
    names = "ABCDEFG"[: draw(st.integers(1, most_slots))]
    choices = st.lists(st.sampled_from(names), unique=True).map(tuple)
    # Lanes share their tuple, as the engine has it; and some tuples are equal without being the same.
    lanes = draw(st.lists(choices, min_size=1, max_size=4))
    count = draw(st.integers(0, 7))
    return [
        WaitingJob(
            JobId(f"job-{index}"),
            draw(st.integers(0, 2)),
            rank(index, selectivity=draw(st.integers(1, 2))),
            draw(st.sampled_from(lanes) | choices),
        )
        for index in draw(st.permutations(range(count)))
    ]


def can_all_run(jobs: tuple[WaitingJob, ...]) -> bool:
    """Whether distinct slots can be found for these jobs, by trying."""

    def place(index: int, used: frozenset[str]) -> bool:
        return index == len(jobs) or any(
            place(index + 1, used | {slot}) for slot in jobs[index].slots if slot not in used
        )

    return place(0, frozenset())


def best_by_brute_force(jobs: list[WaitingJob]) -> tuple[int, list[int]]:
    """How many can run at most, and the best priorities any such set has, highest first."""
    runnable = [
        sorted((job.priority for job in chosen), reverse=True)
        for size in range(len(jobs) + 1)
        for chosen in itertools.combinations(jobs, size)
        if can_all_run(chosen)
    ]
    return max(map(len, runnable)), max(runnable)


@settings(max_examples=examples(300))
@given(rounds())
def test_a_round_is_a_maximum_matching_with_the_best_possible_priorities(jobs: list[WaitingJob]) -> None:
    by_id = {job.job_id: job for job in jobs}
    assigned = assign(jobs)
    assert len(set(assigned.values())) == len(assigned), "a job got two slots"
    assert all(slot in by_id[job_id].slots for slot, job_id in assigned.items())
    count, priorities = best_by_brute_force(jobs)
    assert len(assigned) == count
    assert sorted((by_id[job_id].priority for job_id in assigned.values()), reverse=True) == priorities


@settings(max_examples=examples(200))
@given(rounds())
def test_no_job_is_left_out_for_a_later_one_on_a_slot_it_could_have_had(jobs: list[WaitingJob]) -> None:
    by_id = {job.job_id: job for job in jobs}
    assigned = assign(jobs)
    for job in jobs:
        if job.job_id not in assigned.values():
            for slot in job.slots:
                assert by_id[assigned[slot]].order < job.order


@settings(max_examples=examples(200))
@given(rounds())
def test_the_order_in_which_jobs_are_given_does_not_matter(jobs: list[WaitingJob]) -> None:
    assert assign(jobs) == assign(jobs[::-1])


@given(rounds(most_slots=1))
def test_one_slot_is_given_as_it_would_be_among_many(jobs: list[WaitingJob]) -> None:
    elsewhere = WaitingJob(JobId("elsewhere"), 0, rank(99), ("Z",))
    among_many = assign([*jobs, elsewhere])
    assert among_many.pop("Z") == "elsewhere"
    assert assign(jobs) == among_many


def test_a_specialist_and_a_generalist_are_both_busy_whatever_the_order() -> None:
    """A runs X; B runs X and Y."""
    for first, second in (("Y", "X"), ("X", "Y")):
        jobs = [
            waiting(first, 0, {"X": "AB", "Y": "B"}[first]),
            waiting(second, 1, {"X": "BA", "Y": "B"}[second]),
        ]
        assert assign(jobs) == {"A": "X", "B": "Y"}


def test_a_job_gives_way_to_a_later_one_only_by_moving() -> None:
    jobs = [
        waiting("first", 0, "AB", priority=9),
        waiting("second", 1, "BC", priority=5),
        waiting("third", 2, "A"),
    ]
    assert assign(jobs) == {"A": "third", "B": "first", "C": "second"}
    assert assign([*jobs, waiting("fourth", 3, "ABC")]) == {"A": "third", "B": "first", "C": "second"}


def test_each_job_takes_its_best_free_slot() -> None:
    assert assign([waiting("first", 0, "BA"), waiting("second", 1, "BAC")]) == {"B": "first", "A": "second"}


def test_a_higher_priority_wins_the_only_slot_although_it_came_later() -> None:
    assert assign([waiting("early", 0, "A"), waiting("urgent", 1, "A", priority=1)]) == {"A": "urgent"}


def test_equals_are_served_in_the_order_they_came() -> None:
    jobs = [waiting(f"job-{n}", n, "ABC") for n in range(6)]
    random.Random(7).shuffle(jobs)
    assert assign(jobs) == {"A": "job-0", "B": "job-1", "C": "job-2"}


def test_nothing_to_give_is_an_empty_round() -> None:
    assert assign([]) == {}
    assert assign([waiting("nowhere", 0, "")]) == {}
    assert assign([waiting("nowhere", 0, ""), waiting("somewhere", 1, "A")]) == {"A": "somewhere"}


def test_ranks_compare_line_by_line() -> None:
    earlier_first = [
        rank(8, is_due=True, is_cold=True, copies=7, selectivity=9),
        rank(9, is_due=True),
        rank(8, is_preferred=True, is_cold=True, selectivity=8),
        rank(7, copies=5, selectivity=6),
        rank(6, selectivity=7),
        rank(5, is_cold=True, copies=0, selectivity=9),
        rank(3, is_cold=True, copies=1, selectivity=1),
        rank(2, is_cold=True, copies=1, selectivity=2),
        rank(4, is_cold=True, copies=1, selectivity=2),
    ]
    assert sorted(earlier_first) == earlier_first


def key(
    *,
    is_preferred: bool = False,
    is_cold: bool = False,
    cost: int = 0,
    ran_it_last: bool = False,
    score: float = 0.0,
    wants_score: bool = False,
) -> SlotKey:
    return slot_key(
        is_preferred=is_preferred,
        is_cold=is_cold,
        cost=cost,
        ran_it_last=ran_it_last,
        score=score,
        wants_score=wants_score,
    )


def test_a_job_takes_its_preferred_worker_then_the_one_that_costs_least_then_the_best_score() -> None:
    better_first = [
        key(is_preferred=True, cost=9, is_cold=True),
        key(cost=1, ran_it_last=True),
        key(cost=1, score=5),
        key(cost=1, score=4),
        key(cost=2, score=9),
    ]
    assert sorted(better_first) == better_first


def test_a_job_with_preferences_takes_the_best_score_of_those_that_need_no_load() -> None:
    better_first = [
        key(cost=2, score=9, wants_score=True),
        key(cost=1, score=4, wants_score=True),
        key(cost=5, score=99, is_cold=True, wants_score=True),
    ]
    assert sorted(better_first) == better_first


def test_every_one_of_three_hundred_slots_gets_a_job_when_enough_wait() -> None:
    chance = random.Random(3)
    slots = [f"slot-{n}" for n in range(300)]
    lanes = [tuple(chance.sample(slots, chance.randint(5, 300))) for _ in range(32)]
    jobs = [
        WaitingJob(JobId(f"{lane}-{n}"), 0, rank(n * 32 + lane), choices)
        for lane, choices in enumerate(lanes)
        for n in range(60)
    ]
    assert len(assign(jobs)) == 300
