"""Finds the first waiting job for a profile, at a cost independent of how many jobs or classes wait.

Jobs wait in lanes. A profile (workers that may take the same classes) indexes its lanes in two levels:
(priority, tenant), then lanes. An index keeps a *lower bound* of each lane's head. A lease raises the head
and touches no index; a bound that is too low is corrected when it reaches the top. Only a new, lower head (an
empty lane fills, a retried job returns) goes to the profiles, and each sorts it in at its next look: with
hundreds of different workers, most lanes are empty again by then.

The order is (priority, virtual time of the tenant, sequence). Each lease changes its tenant's virtual time,
so that stands above the lanes: one entry per tenant. Virtual time never falls, which keeps the bounds valid.
Entries of a tenant that is held or at its cap are set aside when they reach the top, until the tenant is
back. Lanes of warm classes are found by class and priority, beside this order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Generator, Iterable, Set
from contextlib import closing
from heapq import heappop, heappush
from itertools import islice

from comfyfleet.model.block import tenant_target
from comfyfleet.model.dispatch import LaneKey
from comfyfleet.model.ids import ClassKey, ProfileKey, TenantId
from comfyfleet.ports.queue import MAX_WARM_LANES
from comfyfleet.stores.inprocess.profile_lanes import Lane, ProfileLanes, TenantTimes

# Idle classes are kept for a while: the next job of the class finds its eligibility ready.
MAX_IDLE_CLASSES = 4096

_NOTHING: frozenset[str] = frozenset()
_NO_CLASSES: frozenset[ClassKey] = frozenset()


class LaneIndex:
    def __init__(self) -> None:
        self._lanes: dict[LaneKey, Lane] = {}
        self._lanes_of: dict[ClassKey, dict[int, dict[Lane, None]]] = {}
        """By class and priority."""
        self._lanes_at: dict[int, dict[Lane, None]] = {}
        """By priority."""
        self._waiting: dict[int, int] = {}
        """How many jobs wait at each priority."""
        self._profiles: dict[ProfileKey, ProfileLanes] = {}
        self._profiles_of: dict[ClassKey, dict[ProfileLanes, None]] = {}
        self._pins: dict[ClassKey, int] = {}
        self._idle_classes: dict[ClassKey, None] = {}
        self._tenants = TenantTimes()
        self._lane_numbers = 0

    # eligibility matrix

    def has_class(self, class_key: ClassKey) -> bool:
        return class_key in self._profiles_of

    def may_take(self, key: ProfileKey, class_key: ClassKey) -> bool:
        profile = self._profiles.get(key)
        return profile is not None and class_key in profile.classes

    def add_class(self, class_key: ClassKey, fits: Collection[ProfileKey]) -> list[ClassKey]:
        """Returns the classes evicted for it: idle ones, longest idle first."""
        if class_key in self._profiles_of:
            return []
        profiles = dict.fromkeys(self._profiles[key] for key in fits if key in self._profiles)
        self._profiles_of[class_key] = profiles
        self._lanes_of[class_key] = {}
        for profile in profiles:
            profile.classes.add(class_key)
        self._idle_classes[class_key] = None
        dropped = []
        while len(self._idle_classes) > MAX_IDLE_CLASSES:
            oldest = next(iter(self._idle_classes))
            del self._idle_classes[oldest], self._lanes_of[oldest]
            for profile in self._profiles_of.pop(oldest):
                profile.classes.discard(oldest)
            dropped.append(oldest)
        return dropped

    def pin(self, class_key: ClassKey) -> None:
        """Keeps the class of an open job in the table, even if no job waits in its lanes."""
        pins = self._pins.get(class_key, 0)
        self._pins[class_key] = pins + 1
        if not pins:
            del self._idle_classes[class_key]

    def unpin(self, class_key: ClassKey) -> None:
        pins = self._pins[class_key] - 1
        if pins:
            self._pins[class_key] = pins
        else:
            del self._pins[class_key]
            self._idle_classes[class_key] = None

    def add_profile(self, key: ProfileKey, fits: Collection[ClassKey]) -> None:
        if key in self._profiles:
            return
        profile = self._profiles[key] = ProfileLanes(set(fits))
        for class_key in fits:
            self._profiles_of[class_key][profile] = None
            for lanes in self._lanes_of[class_key].values():
                profile.unsorted.update(lanes)
        profile.sort_pending()

    def drop_profile(self, key: ProfileKey) -> None:
        profile = self._profiles.pop(key, None)
        if profile is None:
            return
        for class_key in profile.classes:
            del self._profiles_of[class_key][profile]

    def profiles(self) -> Iterable[ProfileKey]:
        return self._profiles.keys()

    # jobs

    def add(self, key: LaneKey, sequence: int) -> None:
        lane = self._lanes.get(key)
        if lane is None:
            self._lane_numbers += 1
            lane = self._lanes[key] = Lane(key, self._lane_numbers)
            self._lanes_of[key.class_key].setdefault(key.priority, {})[lane] = None
            self._lanes_at.setdefault(key.priority, {})[lane] = None
        self._waiting[key.priority] = self._waiting.get(key.priority, 0) + 1
        if lane.add(sequence):
            for profile in self._profiles_of[key.class_key]:
                unsorted = profile.unsorted
                unsorted[lane] = None
                if len(unsorted) > profile.sort_pending_at:
                    profile.sort_pending()

    def remove(self, key: LaneKey, sequence: int) -> None:
        lane = self._lanes[key]
        lane.remove(sequence)
        priority = key.priority
        left = self._waiting[priority] = self._waiting[priority] - 1
        if not lane:
            # An index may still hold the object; it drops an empty lane.
            del self._lanes[key]
            del self._lanes_at[priority][lane]
            if not self._lanes_at[priority]:
                del self._lanes_at[priority]
            by_priority = self._lanes_of[key.class_key]
            del by_priority[priority][lane]
            if not by_priority[priority]:
                del by_priority[priority]
                if not left:
                    del self._waiting[priority]

    def waiting_from(self, priority: int) -> int:
        """How many jobs of this priority or a higher one wait."""
        return sum(count for each, count in self._waiting.items() if each >= priority)

    def waiting_lanes(self, limit: int) -> list[tuple[LaneKey, int, int, int]]:
        """By descending priority: the lane, how many jobs wait in it, its first and its last sequence number."""
        lanes = (
            lane for priority in sorted(self._lanes_at, reverse=True) for lane in self._lanes_at[priority]
        )
        return [(lane.key, len(lane), lane.first, lane.items[-1]) for lane in islice(lanes, limit)]

    def position(self, key: LaneKey, sequence: int) -> int:
        """How many waiting jobs come before this one, by priority and age."""
        ahead = 0
        for other, lane in self._lanes.items():
            if other.priority > key.priority:
                ahead += len(lane)
            elif other.priority == key.priority:
                ahead += bisect_left(lane.items, sequence, lane.head) - lane.head
        return ahead

    # tenants

    def charge(self, tenant: TenantId, seconds: float) -> None:
        assert seconds >= 0, "virtual time never falls; an overcharge is deducted from the next charge"
        self._tenants.virtual_times[tenant] = self.virtual_time(tenant) + seconds

    def advance(self, tenant: TenantId, virtual_time: float) -> None:
        assert virtual_time >= self.virtual_time(tenant), "virtual time never falls"
        self._tenants.virtual_times[tenant] = virtual_time

    def virtual_time(self, tenant: TenantId) -> float:
        return self._tenants.virtual_times.get(tenant, 0.0)

    def greatest_virtual_time(self) -> float:
        return max(self._tenants.virtual_times.values(), default=0.0)

    def is_hidden(self, tenant: TenantId) -> bool:
        return tenant in self._tenants.out

    def hide_tenant(self, tenant: TenantId) -> None:
        """Hides the tenant's jobs until `unhide_tenant`."""
        self._tenants.out.setdefault(tenant, {})

    def unhide_tenant(self, tenant: TenantId) -> None:
        for profile, at in self._tenants.out.pop(tenant, ()):
            profile.restore(at, self._tenants.virtual_times)

    # choosing

    def window(
        self,
        key: ProfileKey,
        *,
        slots: int,
        lanes: int,
        quantum_s: float,
        skip: Set[str] = _NOTHING,
        skip_jobs: Container[int] = (),
        warm: Set[ClassKey] = _NO_CLASSES,
    ) -> list[tuple[LaneKey, int, float, int]]:
        """Candidates for a matching pass, each with the length of its lane. First as many jobs as there are
        slots, in order; then heads of further lanes, of the same priority and of tenants within a quantum of
        the least served, for policy to choose from. Among these, lanes of warm classes precede older ones.
        """
        found: list[tuple[LaneKey, int, float, int]] = []
        seen: set[LaneKey] = set()
        level, least, is_warm = 0, 0.0, False
        with closing(self._walk(key, skip, skip_jobs, heads_after=slots)) as walk:
            for lane, sequence, virtual_time, waiting in walk:
                if len(found) >= slots:
                    if warm and found and not is_warm:
                        is_warm = True
                        added = self._warm_heads(
                            key, warm, level, least + quantum_s, skip, skip_jobs, seen, lanes
                        )
                        found += added
                        seen.update(each[0] for each in added)
                    if lane.priority != level or len(seen) >= lanes or virtual_time > least + quantum_s:
                        break
                    if lane in seen:
                        continue
                if not found or lane.priority != level:
                    level, least = lane.priority, virtual_time
                    seen = set()
                seen.add(lane)
                found.append((lane, sequence, virtual_time, waiting))
        if is_warm:
            found[slots:] = sorted(found[slots:], key=_by_virtual_time)
        return found

    def _warm_heads(
        self,
        key: ProfileKey,
        warm: Set[ClassKey],
        priority: int,
        latest: float,
        skip: Set[str],
        skip_jobs: Container[int],
        seen: Set[LaneKey],
        lanes: int,
    ) -> list[tuple[LaneKey, int, float, int]]:
        """The first heads of lanes of warm classes that are not seen yet, until `lanes` lanes are seen."""
        room = lanes - len(seen)
        if room <= 0:
            return []
        found = []
        virtual_times, hidden = self._tenants.virtual_times, self._tenants.out
        for class_key in self._profiles[key].classes.intersection(warm):
            of_class = self._lanes_of[class_key].get(priority, ())
            for lane in islice(of_class, max(1, MAX_WARM_LANES // len(warm))):
                tenant = lane.key.tenant
                virtual_time = virtual_times.get(tenant, 0.0)
                if lane.key in seen or tenant in hidden or virtual_time > latest:
                    continue
                if skip and _is_skipped(lane.key, skip):
                    continue
                items, at = lane.items, lane.head
                while at < len(items) and items[at] in skip_jobs:
                    at += 1
                if at < len(items):
                    found.append((lane.key, items[at], virtual_time, len(lane)))
        found.sort(key=_by_virtual_time)
        return found[:room]

    def _walk(
        self,
        key: ProfileKey,
        skip: Set[str],
        skip_jobs: Container[int],
        heads_after: int = 1,
    ) -> Generator[tuple[LaneKey, int, float, int], None, None]:
        """Jobs in order. The first `heads_after` may be several of one lane; after that, heads only. Sets
        visited lanes aside and puts them back at the end with corrected bounds.
        """
        profile = self._profiles.get(key)
        if profile is None:
            return
        aside: list[Lane] = []
        deeper: list[tuple[int, float, int, Lane, int]] = []
        count = 0
        try:
            while True:
                best = profile.best(self._tenants)
                if deeper and (best is None or deeper[0][:3] < best[0][:3]):
                    descending, virtual_time, sequence, lane, at = heappop(deeper)
                elif best is None:
                    return
                else:
                    (descending, virtual_time, _, tenant), group = best
                    _, lane = group.set_aside()
                    aside.append(lane)
                    profile.renew((descending, tenant), self._tenants.virtual_times)
                    if skip and _is_skipped(lane.key, skip):
                        continue
                    at = lane.head
                    sequence = lane.items[at]
                skipped = sequence in skip_jobs
                if (count < heads_after or skipped) and at + 1 < len(lane.items):
                    heappush(deeper, (descending, virtual_time, lane.items[at + 1], lane, at + 1))
                if not skipped:
                    count += 1
                    yield lane.key, sequence, virtual_time, len(lane.items) - lane.head
        finally:
            for lane in aside:
                if lane:
                    profile.lower(lane, lane.first, self._tenants.virtual_times.get(lane.key.tenant, 0.0))


def _by_virtual_time(found: tuple[LaneKey, int, float, int]) -> tuple[float, int]:
    return found[2], found[1]


def _is_skipped(lane: LaneKey, skip: Set[str]) -> bool:
    """Whether its workflow is skipped, for all tenants or for this one."""
    return lane.workflow_hash in skip or tenant_target(lane.workflow_hash, lane.tenant) in skip
