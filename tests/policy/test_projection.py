"""Profiles: workers with one key must be interchangeable for every live class, and equal workers must share one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._examples import examples
from tests.policy._fleets import DECIDED_BY, alike, capabilities, classes, worker_ids

from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.model.requirement import HardwareNeed, RequirementClass, Requirements
from comfyfleet.model.worker import Capabilities, Gpu, Hardware, Service, TenantAccess
from comfyfleet.policy.feasibility import is_feasible
from comfyfleet.policy.projection import Vocabulary, profile_key

NORTH, SOUTH = WorkerId("north"), WorkerId("south")


@pytest.mark.parametrize("need", sorted(DECIDED_BY))
@settings(max_examples=examples(60))
@given(data=st.data(), first_id=worker_ids, second_id=worker_ids)
def test_workers_with_one_key_agree_on_every_class_of_the_vocabulary(
    need: str, data: st.DataObject, first_id: WorkerId, second_id: WorkerId
) -> None:
    first, second = data.draw(alike(need))
    live = data.draw(st.lists(classes(need, most_others=1), min_size=1, max_size=3))
    vocabulary = Vocabulary.of(live)
    if profile_key(first_id, first, vocabulary) == profile_key(second_id, second, vocabulary):
        for cls in live:
            assert is_feasible(cls, first_id, first) == is_feasible(cls, second_id, second)


@pytest.mark.parametrize("need", sorted(DECIDED_BY))
@settings(max_examples=examples(60))
@given(data=st.data(), first_id=worker_ids, second_id=worker_ids)
def test_a_key_made_with_another_vocabulary_never_grants_a_class(
    need: str, data: st.DataObject, first_id: WorkerId, second_id: WorkerId
) -> None:
    first, second = data.draw(alike(need))
    live = data.draw(st.lists(classes(need, most_others=0), min_size=1, max_size=2))
    others = data.draw(st.lists(classes(need, most_others=0), max_size=2))
    if profile_key(first_id, first, Vocabulary.of(live)) == profile_key(
        second_id, second, Vocabulary.of(others)
    ):
        for cls in live:
            if is_feasible(cls, first_id, first):
                assert is_feasible(cls, second_id, second)


@given(st.lists(classes(), max_size=3), classes())
def test_a_vocabulary_covers_what_it_was_made_of_and_what_it_was_extended_by(
    live: list[RequirementClass], new: RequirementClass
) -> None:
    vocabulary = Vocabulary.of(live)
    assert all(vocabulary.covers(cls) for cls in live)
    assert vocabulary.extended(new).covers(new)
    assert vocabulary.extended(new) == Vocabulary.of([*live, new])
    assert vocabulary.covers(new) == (vocabulary.extended(new) == vocabulary)


@given(worker_ids, capabilities(), st.lists(classes(), max_size=3), classes())
def test_a_covered_class_leaves_every_key_as_it_is(
    worker_id: WorkerId, worker: Capabilities, live: list[RequirementClass], new: RequirementClass
) -> None:
    vocabulary = Vocabulary.of(live)
    if vocabulary.covers(new):
        before = profile_key(worker_id, worker, vocabulary)
        assert profile_key(worker_id, worker, vocabulary.extended(new)) == before


def wants(**needs: object) -> RequirementClass:
    return RequirementClass(msgspec.structs.replace(Requirements(), **needs))


def card(memory_gb: float, model: str = "") -> Capabilities:
    return Capabilities((Service("comfyui"),), Hardware(Gpu(1, memory_gb, model)))


def test_workers_that_no_class_can_tell_apart_share_a_profile() -> None:
    vocabulary = Vocabulary.of(
        [wants(hardware=HardwareNeed(gpu_memory_gb=24)), wants(node_classes=("KSampler",))]
    )
    first = msgspec.structs.replace(
        card(8, "3070"),
        services=(
            Service("comfyui", node_classes=frozenset({"KSampler", "Extra"}), models=frozenset("ab")),
            Service("langflow"),
        ),
    )
    second = msgspec.structs.replace(
        card(16, "A4000"),
        services=(Service("comfyui", node_classes=frozenset({"KSampler"}), models=frozenset("c")),),
    )
    assert profile_key(NORTH, first, vocabulary) == profile_key(SOUTH, second, vocabulary)


def test_a_bound_between_two_workers_parts_them() -> None:
    vocabulary = Vocabulary.of([wants(hardware=HardwareNeed(gpu_memory_gb=12))])
    assert profile_key(NORTH, card(8), vocabulary) != profile_key(NORTH, card(12), vocabulary)
    assert profile_key(NORTH, card(12), vocabulary) == profile_key(NORTH, card(12.5), vocabulary)
    strictly = Vocabulary.of([wants(hardware=HardwareNeed(gpu_memory_above_gb=12))])
    assert profile_key(NORTH, card(8), strictly) == profile_key(NORTH, card(12), strictly)
    assert profile_key(NORTH, card(12), strictly) != profile_key(NORTH, card(12.5), strictly)


def test_only_a_worker_that_is_named_has_a_profile_of_its_own() -> None:
    vocabulary = Vocabulary.of([wants(workers=(NORTH,))])
    keys = [profile_key(WorkerId(name), card(8), vocabulary) for name in ("north", "south", "west")]
    assert keys[0] != keys[1] == keys[2]


def test_a_new_tenant_gives_nobody_a_new_profile() -> None:
    worker = msgspec.structs.replace(
        card(8), tenant_access=TenantAccess("loose", denied=(TenantId("globex"),))
    )
    before = Vocabulary.of([wants()])
    globex = RequirementClass(Requirements(), tenant=TenantId("globex"))
    assert before.covers(globex)
    assert profile_key(NORTH, worker, before) != profile_key(NORTH, card(8), before)


def test_a_class_of_workers_that_is_too_slow_for_some_job_parts_from_the_others() -> None:
    unlimited = Vocabulary.of([wants(max_processing_s=5.0)])
    limited = Vocabulary.of([wants(max_processing_s=5.0, slow_worker_classes=(card(8).worker_class,))])
    assert profile_key(NORTH, card(8), unlimited) == profile_key(NORTH, card(24), unlimited)
    assert profile_key(NORTH, card(8), limited) != profile_key(NORTH, card(24), limited)
    assert profile_key(NORTH, card(48), limited) == profile_key(NORTH, card(24), limited)


def test_the_order_of_services_does_not_matter() -> None:
    vocabulary = Vocabulary.of([wants(), wants(service="a1111")])
    services = (Service("comfyui"), Service("a1111"))
    assert profile_key(NORTH, Capabilities(services), vocabulary) == profile_key(
        NORTH, Capabilities(services[::-1]), vocabulary
    )
