"""Expected starts: the policy played forward by hand on a few slots."""

from __future__ import annotations

import random

import pytest

from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash
from comfyfleet.policy.demand import ModelSet
from comfyfleet.policy.forecast import (
    MAX_LANES,
    MAX_STARTS,
    LaneAhead,
    Place,
    QueueForecast,
    Situation,
    SlotAhead,
    forecast,
)

ANN, BOB = TenantId("ann"), TenantId("bob")
RED, BLUE = frozenset({"red"}), frozenset({"blue"})
NONE: ModelSet = frozenset()


class Known:
    """Runs take 1 s, or 4 s on a slow card. Loads take 3 s."""

    def run_s(self, _: WorkflowHash, worker_class: str) -> float:
        return 4.0 if worker_class == "slow" else 1.0

    def load_s(self, models: ModelSet, _: str) -> float:
        return 3.0 if models else 0.0

    def gap_s(self, _: ModelSet) -> float:
        return 1.0


def lane(
    waiting: int = 1,
    first: float = 1,
    *,
    last: float | None = None,
    models: ModelSet = NONE,
    priority: int = 0,
    tenant: TenantId = ANN,
    fifo_start: float = 100.0,
) -> LaneAhead:
    newest = first + waiting - 1 if last is None else last
    return LaneAhead(
        priority,
        tenant,
        models,
        WorkflowHash("hash"),
        waiting,
        Place(first, fifo_start),
        Place(newest, fifo_start + newest - first),
        slowest_load_s=3.0 if models else 0.0,
    )


def slot(
    free_at: float = 0.0, loaded: ModelSet = NONE, takes: tuple[int, ...] = (0,), kind: str = "fast"
) -> SlotAhead:
    return SlotAhead(WorkerId(f"{kind}-{free_at}"), kind, loaded, frozenset(takes), free_at)


def played(lanes: list[LaneAhead], slots: list[SlotAhead], **more: object) -> QueueForecast:
    return forecast(Situation(0.0, lanes, slots, 2.0)._replace(**more), Known())  # type: ignore[arg-type]


def starts(found: QueueForecast, number: int, *indexes: float) -> list[float | None]:
    runs = [found.run_at(number, index) for index in indexes]
    return [None if run is None else run.starts_at for run in runs]


def test_jobs_start_one_after_the_other_as_the_slot_becomes_free() -> None:
    found = played([lane(3)], [slot(free_at=2.5)])
    assert starts(found, 0, 0, 1, 2) == [2.5, 3.5, 4.5]
    run = found.run_at(0, 2)
    assert run is not None and run.ends_at == 5.5


def test_an_idle_slot_takes_the_first_job_now() -> None:
    assert starts(played([lane(2)], [slot(), slot(free_at=9)]), 0, 0, 1) == [0, 1]


def test_a_job_waits_for_the_worker_that_has_its_models_as_long_as_that_is_sooner() -> None:
    lanes = [lane(models=RED)]
    waits = played(lanes, [slot(loaded=BLUE), slot(free_at=2, loaded=RED)]).run_at(0, 0)
    assert waits is not None and (waits.starts_at, waits.load_s) == (2, 0)
    loads = played(lanes, [slot(loaded=BLUE), slot(free_at=20, loaded=RED)]).run_at(0, 0)
    assert loads is not None and (loads.starts_at, loads.load_s, loads.ends_at) == (0, 3, 4)


def test_of_many_jobs_for_a_busy_worker_some_go_to_a_cold_one() -> None:
    lanes = [lane(12, models=RED)]
    found = played(lanes, [slot(loaded=BLUE), slot(free_at=1, loaded=RED)])
    runs = [found.run_at(0, index) for index in range(12)]
    assert sum(run.load_s > 0 for run in runs if run is not None) == 1


def test_an_idle_worker_that_has_the_models_goes_before_an_idle_one_that_has_not() -> None:
    found = played([lane(models=RED)], [slot(loaded=BLUE), slot(loaded=RED)]).run_at(0, 0)
    assert found is not None and found.load_s == 0


def test_a_worker_keeps_its_models_while_another_job_is_not_due() -> None:
    lanes = [lane(3, first=2, models=RED), lane(1, first=1, models=BLUE)]
    found = played(lanes, [slot(loaded=RED, takes=(0, 1))])
    assert starts(found, 0, 0, 1, 2) == [0, 1, 2]
    assert starts(found, 1, 0) == [3]


def test_a_job_that_is_due_goes_first() -> None:
    lanes = [lane(20, first=2, models=RED), lane(1, first=1, models=BLUE, fifo_start=-1.5)]
    # It is due two loads after first come, first served would have started it: at 4.5 s.
    assert starts(played(lanes, [slot(loaded=RED, takes=(0, 1))]), 1, 0) == [5]


def test_a_higher_priority_goes_first() -> None:
    lanes = [lane(2, first=9, priority=5), lane(2, first=1)]
    found = played(lanes, [slot(takes=(0, 1))])
    assert starts(found, 0, 0, 1) == [0, 1]
    assert starts(found, 1, 0, 1) == [2, 3]


def test_the_least_served_tenant_goes_first_while_others_are_a_quantum_ahead() -> None:
    lanes = [lane(2, first=1, tenant=ANN), lane(2, first=3, tenant=BOB)]
    times = {ANN: (10.0, 1.0), BOB: (0.0, 1.0)}
    found = played(lanes, [slot(takes=(0, 1))], virtual_times=times, quantum_s=2.0)
    assert starts(found, 1, 0, 1) == [0, 1]
    assert starts(found, 0, 0) == [2]


def test_a_lane_that_no_slot_takes_has_no_start() -> None:
    found = played([lane(2), lane(1, first=9)], [slot()])
    assert starts(found, 1, 0) == [None]
    assert starts(played([lane(2)], []), 0, 0, 1) == [None, None]


def test_behind_the_play_jobs_follow_at_its_pace() -> None:
    found = played([lane(10_000)], [slot(), slot()])
    run = found.run_at(0, 9_999)
    assert run is not None and run.is_extrapolated
    assert run.starts_at == pytest.approx(10_000 / 2, rel=0.05)
    near = found.run_at(0, MAX_STARTS - 1)
    assert near is not None and not near.is_extrapolated


def test_jobs_of_lanes_that_the_play_does_not_reach_are_behind_the_older_ones() -> None:
    lanes = [lane(1, first=number) for number in range(MAX_LANES + 20)]
    found = played(lanes, [slot(takes=tuple(range(len(lanes))))])
    run = found.run_at(len(lanes) - 1, 0)
    assert run is not None and run.is_extrapolated
    assert run.starts_at == pytest.approx(len(lanes) - 1, abs=2)


def test_a_job_between_the_oldest_and_the_newest_has_its_share_of_the_others_before_it() -> None:
    found = lane(11, first=100, last=200)
    assert [found.index_of(each) for each in (100, 150, 200, 201)] == [0, 5, 10, 11]
    assert lane(1).index_of(1) == 0


def test_a_faster_card_ends_its_jobs_sooner() -> None:
    found = played([lane(6)], [slot(kind="fast"), slot(kind="slow")])
    assert starts(found, 0, 0, 1, 2, 3, 4, 5) == [0, 0, 1, 2, 3, 4]


def world(seed: int, lanes: int, slots: int) -> Situation:
    chance = random.Random(seed)
    ahead = []
    for number in range(lanes):
        waiting = chance.randint(1, 40)
        ahead.append(
            lane(
                waiting,
                number,
                last=number + waiting * lanes,
                models=frozenset({f"m{number}"}),
                fifo_start=10 * chance.random(),
            )
        )
    takes = tuple(range(lanes))
    there = [
        slot(
            4 * chance.random() * chance.randint(0, 1),
            frozenset({f"m{chance.randrange(lanes + 8)}"}),
            takes,
        )
        for _ in range(slots)
    ]
    return Situation(0.0, ahead, there, 2.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_play_uses_each_slot_once_at_a_time_and_each_job_once(seed: int) -> None:
    chance = random.Random(seed)
    situation = world(seed, chance.randint(1, 20), chance.randint(1, 30))
    number = {id(each): str(index) for index, each in enumerate(situation.slots)}
    slots = [each._replace(worker_id=WorkerId(number[id(each)])) for each in situation.slots]
    found = forecast(situation._replace(slots=slots), Known())
    busy_until = {each.worker_id: each.free_at for each in slots}
    runs = [
        run
        for index, each in enumerate(situation.lanes)
        for place in range(each.waiting)
        if (run := found.run_at(index, place)) is not None and not run.is_extrapolated
    ]
    assert len(runs) == min(MAX_STARTS, sum(each.waiting for each in situation.lanes))
    for run in sorted(runs, key=lambda each: each.starts_at):
        assert run.starts_at >= busy_until[run.worker_id] - 1e-9
        busy_until[run.worker_id] = run.ends_at
