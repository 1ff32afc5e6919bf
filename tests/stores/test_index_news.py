"""Profiles hear of new heads when they next look: nothing is missed by then, and nothing piles up until then."""

from __future__ import annotations

from tests.stores._index import first

from comfyfleet.model.dispatch import LaneKey
from comfyfleet.model.ids import DEFAULT_TENANT, ClassKey, ProfileKey, WorkflowHash
from comfyfleet.stores.inprocess.lane_index import LaneIndex

CLASS = ClassKey("class")
POLLED, UNPOLLED = ProfileKey("polled"), ProfileKey("unpolled")


def lane(number: int) -> LaneKey:
    return LaneKey(CLASS, DEFAULT_TENANT, 0, WorkflowHash(f"hash-{number}"))


def index() -> LaneIndex:
    made = LaneIndex()
    for profile in (POLLED, UNPOLLED):
        made.add_profile(profile, [])
    made.add_class(CLASS, [POLLED, UNPOLLED])
    return made


def test_a_profile_that_looks_late_finds_the_oldest_of_all_that_came_meanwhile() -> None:
    lanes = index()
    for sequence in range(1, 501):
        lanes.add(lane(sequence), sequence)
    for sequence in range(1, 401):
        assert first(lanes, POLLED) == (lane(sequence), sequence)
        lanes.remove(lane(sequence), sequence)

    assert first(lanes, UNPOLLED) == (lane(401), 401)


def test_a_job_that_returns_to_its_lane_is_first_again_for_everybody() -> None:
    lanes = index()
    for sequence in (1, 2, 3):
        lanes.add(lane(0), sequence)
    lanes.remove(lane(0), 1)
    assert first(lanes, UNPOLLED) == (lane(0), 2)

    lanes.add(lane(0), 1)

    assert first(lanes, UNPOLLED) == (lane(0), 1)
    assert first(lanes, POLLED) == (lane(0), 1)


def test_a_profile_nobody_polls_for_does_not_collect_lanes_that_came_and_went() -> None:
    lanes = index()
    for sequence in range(1, 10_001):
        lanes.add(lane(sequence), sequence)
        lanes.remove(lane(sequence), sequence)

    assert len(lanes._profiles[UNPOLLED].unsorted) < 200


def test_a_profile_nobody_polls_for_keeps_the_lanes_in_which_somebody_waits() -> None:
    lanes = index()
    for sequence in range(1, 1001):
        lanes.add(lane(sequence), sequence)
        if sequence % 2:
            lanes.remove(lane(sequence), sequence)

    found = lanes.window(UNPOLLED, slots=1000, lanes=1000, quantum_s=30)

    assert [sequence for _, sequence, *_ in found] == list(range(2, 1001, 2))
