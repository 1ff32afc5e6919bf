"""The lazy index against the plain truth: the best of all waiting jobs, found by looking at every one."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests._examples import examples
from tests.stores._index import first

from comfyfleet.model.dispatch import LaneKey
from comfyfleet.model.ids import ClassKey, ProfileKey, TenantId, WorkflowHash
from comfyfleet.stores.inprocess.lane_index import MAX_IDLE_CLASSES, LaneIndex

CLASSES = [ClassKey(f"class-{number}") for number in range(5)]
PROFILES = [ProfileKey(f"profile-{number}") for number in range(4)]
TENANTS = [TenantId(name) for name in ("ann", "bob", "eve")]
HASHES = [WorkflowHash(f"hash-{number}") for number in range(3)]

lane_keys = st.builds(
    LaneKey,
    st.sampled_from(CLASSES),
    st.sampled_from(TENANTS),
    st.sampled_from([-5, 0, 0, 10]),
    st.sampled_from(HASHES),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), lane_keys),
        st.tuples(st.just("take"), st.sampled_from(PROFILES), st.sets(st.sampled_from(HASHES), max_size=2)),
        st.tuples(st.just("take_keeping_off"), st.sampled_from(PROFILES), st.integers(0, 10)),
        st.tuples(st.just("remove"), st.integers(0, 100)),
        st.tuples(st.just("put_back"), st.integers(0, 100)),
        st.tuples(st.just("charge"), st.sampled_from(TENANTS), st.sampled_from([0.0, 1.0, 40.0])),
        st.tuples(st.just("advance"), st.sampled_from(TENANTS), st.sampled_from([0.0, 7.0, 90.0])),
        st.tuples(st.just("take_out"), st.sampled_from(TENANTS)),
        st.tuples(st.just("bring_back"), st.sampled_from(TENANTS)),
        st.tuples(
            st.just("window"),
            st.sampled_from(PROFILES),
            st.integers(1, 6),
            st.integers(1, 4),
            st.sets(st.sampled_from(CLASSES), max_size=2),
            st.sets(st.sampled_from(HASHES), max_size=1),
        ),
        st.tuples(st.just("new_profile"), st.integers(0, 3)),
    ),
    max_size=80,
)
fits_table = st.lists(st.sets(st.sampled_from(CLASSES)), min_size=4, max_size=4)


class Plain:
    """All waiting jobs in one dictionary; every question is answered by sorting."""

    def __init__(self, fits: dict[ProfileKey, set[ClassKey]]) -> None:
        self.fits = fits
        self.waiting: dict[int, LaneKey] = {}
        self.virtual: dict[TenantId, float] = {}
        self.out: set[TenantId] = set()

    def order(
        self, profile: ProfileKey, skip: set[WorkflowHash], off: set[int]
    ) -> list[tuple[LaneKey, int, float, int]]:
        lengths = Counter(self.waiting.values())
        mine = [
            (lane, sequence, self.virtual.get(lane.tenant, 0.0), lengths[lane])
            for sequence, lane in self.waiting.items()
            if lane.class_key in self.fits[profile] and lane.workflow_hash not in skip and sequence not in off
            if lane.tenant not in self.out
        ]
        return sorted(mine, key=lambda job: (-job[0].priority, job[2], job[1]))

    def window(
        self, profile: ProfileKey, slots: int, lanes: int, skip: set[WorkflowHash], warm: set[ClassKey]
    ) -> list[tuple[LaneKey, int, float, int]]:
        order = self.order(profile, skip, set())
        found = order[:slots]
        if len(found) < slots:
            return found
        level = found[-1][0].priority
        same = [job for job in order if job[0].priority == level]
        seen = {job[0] for job in found if job[0].priority == level}
        heads: dict[LaneKey, tuple[LaneKey, int, float, int]] = {}
        for job in same:
            if job[0] not in seen and job[2] <= same[0][2] + 30:
                heads.setdefault(job[0], job)
        warm_first = sorted(heads.values(), key=lambda job: job[0].class_key not in warm)
        chosen = warm_first[: max(0, lanes - len(seen))]
        return found + [job for job in order if job in chosen]


@settings(max_examples=examples(300))
@given(fits_table, steps)
def test_the_index_always_chooses_what_looking_at_every_job_would(
    fits: list[set[ClassKey]], play: list[tuple[object, ...]]
) -> None:
    index = LaneIndex()
    plain = Plain(dict(zip(PROFILES, fits, strict=True)))
    for each in PROFILES:
        index.add_profile(each, [])
    for class_key in CLASSES:
        index.add_class(class_key, [profile for profile in PROFILES if class_key in plain.fits[profile]])
    taken: list[tuple[LaneKey, int]] = []
    sequence = 0
    for step in play:
        match step:
            case ("add", LaneKey() as lane):
                sequence += 1
                index.add(lane, sequence)
                plain.waiting[sequence] = lane
            case ("take", str() as profile, set() as skip):
                expected = plain.order(ProfileKey(profile), skip, set())
                chosen = first(index, ProfileKey(profile), skip)
                assert chosen == (expected[0][:2] if expected else None)
                if chosen is not None:
                    index.remove(*chosen)
                    taken.append(chosen)
                    del plain.waiting[chosen[1]]
            case ("take_keeping_off", str() as profile, int() as count):
                off = {job[1] for job in plain.order(ProfileKey(profile), set(), set())[:count]}
                expected = plain.order(ProfileKey(profile), set(), off)
                chosen = first(index, ProfileKey(profile), skip_jobs=off)
                assert chosen == (expected[0][:2] if expected else None)
            case ("remove", int() as at) if plain.waiting:
                number = sorted(plain.waiting)[at % len(plain.waiting)]
                index.remove(plain.waiting.pop(number), number)
            case ("put_back", int() as at) if taken:
                lane, number = taken.pop(at % len(taken))
                index.add(lane, number)
                plain.waiting[number] = lane
            case ("charge", str() as tenant, float() as seconds):
                index.charge(TenantId(tenant), seconds)
                plain.virtual[TenantId(tenant)] = plain.virtual.get(TenantId(tenant), 0.0) + seconds
            case ("advance", str() as tenant, float() as virtual_time):
                raised = max(virtual_time, plain.virtual.get(TenantId(tenant), 0.0))
                index.advance(TenantId(tenant), raised)
                plain.virtual[TenantId(tenant)] = raised
            case ("take_out", str() as tenant):
                index.hide_tenant(TenantId(tenant))
                plain.out.add(TenantId(tenant))
            case ("bring_back", str() as tenant):
                index.unhide_tenant(TenantId(tenant))
                plain.out.discard(TenantId(tenant))
            case ("window", str() as profile, int() as slots, int() as lanes, set() as warm, set() as skip):
                key = ProfileKey(profile)
                seen = index.window(key, slots=slots, lanes=lanes, quantum_s=30, skip=skip, warm=warm)
                assert seen == plain.window(key, slots, lanes, skip, warm)
            case ("new_profile", int() as which):
                index.drop_profile(PROFILES[which])
                index.add_profile(PROFILES[which], plain.fits[PROFILES[which]])
        for priority in (-1000, -5, 0, 10, 1000):
            ahead = [lane for lane in plain.waiting.values() if lane.priority >= priority]
            assert index.waiting_from(priority) == len(ahead)
    for each in PROFILES:
        expected = plain.order(each, set(), set())
        assert index.window(each, slots=len(expected) + 1, lanes=1, quantum_s=0) == expected


def test_the_window_shows_the_heads_of_further_lanes_of_the_same_priority() -> None:
    index = LaneIndex()
    index.add_profile(PROFILES[0], [])
    index.add_class(CLASSES[0], PROFILES[:1])
    lanes = [LaneKey(CLASSES[0], TENANTS[0], 0, WorkflowHash(f"hash-{number}")) for number in range(40)]
    for number in range(200):
        index.add(lanes[number % 40], number)
    seen = index.window(PROFILES[0], slots=1, lanes=32, quantum_s=30)
    assert [sequence for _, sequence, *_ in seen] == list(range(32))


def test_the_window_leaves_out_tenants_served_a_quantum_more() -> None:
    index = LaneIndex()
    index.add_profile(PROFILES[0], [])
    index.add_class(CLASSES[0], PROFILES[:1])
    for number, tenant in enumerate(TENANTS):
        index.add(LaneKey(CLASSES[0], tenant, 0, HASHES[0]), number)
    index.charge(TENANTS[0], 31)
    index.charge(TENANTS[1], 30)
    seen = index.window(PROFILES[0], slots=1, lanes=32, quantum_s=30)
    assert [lane.tenant for lane, *_ in seen] == [TENANTS[2], TENANTS[1]]


def test_a_profile_nobody_polls_for_does_not_collect_what_others_took() -> None:
    index = LaneIndex()
    for profile in PROFILES[:2]:
        index.add_profile(profile, [])
    index.add_class(CLASSES[0], PROFILES[:2])
    for number in range(20_000):
        index.add(LaneKey(CLASSES[0], TENANTS[0], 0, WorkflowHash(f"hash-{number}")), number)
        chosen = first(index, PROFILES[0])
        assert chosen is not None
        index.remove(*chosen)
    quiet = index._profiles[PROFILES[1]]
    assert sum(len(group.heap) for group in quiet.groups.values()) < 500
    assert len(quiet.heap) < 500


def test_idle_classes_are_bounded_and_the_longest_idle_goes_first() -> None:
    index = LaneIndex()
    index.add_profile(PROFILES[0], [])
    for number in range(MAX_IDLE_CLASSES):
        assert index.add_class(ClassKey(f"idle-{number}"), PROFILES[:1]) == []
    assert index.add_class(ClassKey("one more"), PROFILES[:1]) == ["idle-0"]
    assert not index.has_class(ClassKey("idle-0"))


def test_a_tenant_that_is_out_is_looked_at_once_however_much_of_it_waits() -> None:
    index = LaneIndex()
    index.add_profile(PROFILES[0], [])
    index.add_class(CLASSES[0], PROFILES[:1])
    for number in range(1_000):
        index.add(LaneKey(CLASSES[0], TENANTS[0], 0, WorkflowHash(f"hash-{number}")), number)
    index.add(LaneKey(CLASSES[0], TENANTS[1], 0, HASHES[0]), 5_000)
    index.hide_tenant(TENANTS[0])
    assert first(index, PROFILES[0]) == (LaneKey(CLASSES[0], TENANTS[1], 0, HASHES[0]), 5_000)
    assert len(index._profiles[PROFILES[0]].heap) == 1
    index.unhide_tenant(TENANTS[0])
    assert first(index, PROFILES[0]) == (LaneKey(CLASSES[0], TENANTS[0], 0, WorkflowHash("hash-0")), 0)


def test_what_comes_while_a_tenant_is_out_does_not_hide_what_stood_before_it() -> None:
    index = LaneIndex()
    index.add_profile(PROFILES[0], [])
    index.add_class(CLASSES[0], PROFILES[:1])
    ann, later, bob = (
        LaneKey(CLASSES[0], TENANTS[0], 0, HASHES[0]),
        LaneKey(CLASSES[0], TENANTS[0], 0, HASHES[1]),
        LaneKey(CLASSES[0], TENANTS[1], 0, HASHES[0]),
    )
    index.add(ann, 1)
    index.add(bob, 5)
    index.hide_tenant(TENANTS[0])
    assert first(index, PROFILES[0]) == (bob, 5)
    index.add(later, 9)
    assert first(index, PROFILES[0]) == (bob, 5)
    index.unhide_tenant(TENANTS[0])
    assert first(index, PROFILES[0]) == (ann, 1)
