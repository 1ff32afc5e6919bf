"""How many more workers are wanted, counted by hand."""

from __future__ import annotations

from comfyfleet.model.estimate import WantedWorkers
from comfyfleet.model.requirement import HardwareNeed, Requirements
from comfyfleet.policy.capacity import SlotGroup, Work, described, wanted_workers


def work(seconds: dict[str, float], *takers: int, needs: str = "comfyui", otherwise_s: float = 0.0) -> Work:
    return Work(needs, seconds, frozenset(takers), otherwise_s)


def test_no_worker_is_wanted_where_the_present_ones_do_the_work_in_time() -> None:
    assert wanted_workers([work({"big": 200.0}, 0)], [SlotGroup("big", 2, 0.0)], 100.0) == []


def test_the_work_that_is_left_is_divided_by_the_time() -> None:
    found = wanted_workers([work({"big": 450.0}, 0)], [SlotGroup("big", 2, 0.0)], 100.0)
    assert found == [WantedWorkers(3, "big", "big", 250.0)]


def test_slots_that_are_busy_have_less_time() -> None:
    found = wanted_workers([work({"big": 200.0}, 0)], [SlotGroup("big", 2, 150.0)], 100.0)
    assert found == [WantedWorkers(2, "big", "big", 150.0)]


def test_work_that_few_slots_may_take_goes_first() -> None:
    groups = [SlotGroup("big", 1, 0.0), SlotGroup("small", 1, 0.0)]
    anywhere = work({"big": 100.0, "small": 100.0}, 0, 1, needs="anywhere")
    found = wanted_workers([anywhere, work({"big": 100.0}, 0, needs="big only")], groups, 100.0)
    assert found == []


def test_the_class_that_does_the_work_fastest_is_wanted() -> None:
    found = wanted_workers([work({"big": 300.0, "small": 900.0}, 0)], [SlotGroup("small", 1, 0.0)], 300.0)
    assert found == [WantedWorkers(1, "big", "big", 200.0)]


def test_work_that_no_worker_of_the_fleet_could_take_wants_a_worker_with_what_it_needs() -> None:
    unknown = work({}, needs="comfyui, at least 80 GB", otherwise_s=130.0)
    found = wanted_workers([unknown], [SlotGroup("small", 9, 0.0)], 100.0)
    assert found == [WantedWorkers(2, "comfyui, at least 80 GB", None, 130.0)]


def test_classes_that_want_workers_of_one_kind_are_added_up() -> None:
    away = [work({"big": 60.0}, needs="one"), work({"big": 30.0}, needs="other")]
    assert wanted_workers(away, [], 100.0) == [WantedWorkers(1, "big", "big", 90.0)]


def test_a_description_names_service_memory_and_models() -> None:
    needs = Requirements(hardware=HardwareNeed(gpu_memory_gb=24), models=("a", "b", "c", "d"))
    assert described(needs) == "comfyui, at least 24 GB, a, b, c and 1 more models"
    after = Requirements(hardware=HardwareNeed(gpu_memory_gb=8, gpu_memory_above_gb=24))
    assert described(after) == "comfyui, more than 24 GB"
