"""Finds the first waiting job for a profile, at a cost independent of how many jobs or classes wait.

Jobs wait in lanes. A profile (workers that may take the same classes) indexes its lanes in two levels:
(priority, tenant), then lanes. An index keeps a *lower bound* of each lane's head. A lease raises the head
and touches no index; a bound that is too low is corrected when it reaches the top. Only a new, lower head (an
empty lane fills, a retried job returns) goes to the profiles, and each sorts it in at its next look: with
hundreds of different workers, most lanes are empty again by then.

The order is (priority, virtual time of the tenant, sequence). Each lease changes its tenant's virtual time,
so that stands above the lanes: one entry per tenant. Virtual time never falls, which keeps the bounds valid.
Entries of a tenant that is held or at its cap are set aside when they reach the top, until the tenant is
back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Generator, Iterable, Set
from contextlib import closing
from heapq import heapify, heappop, heappush, heapreplace

from comfyfleet.model.block import tenant_target
from comfyfleet.model.dispatch import LaneKey
from comfyfleet.model.ids import ClassKey, ProfileKey, TenantId

# Idle classes are kept for a while: the next job of the class finds its eligibility ready.
MAX_IDLE_CLASSES = 4096

_NOTHING: frozenset[str] = frozenset()


class _Lane:
    """Waiting sequence numbers under one key, ascending. Taking the head and putting one back are cheap."""

    __slots__ = ("head", "items", "key", "number")

    def __init__(self, key: LaneKey, number: int) -> None:
        self.key = key
        self.number = number
        self.items: list[int] = []
        self.head = 0

    def __lt__(self, other: _Lane) -> bool:
        return self.number < other.number

    def __len__(self) -> int:
        return len(self.items) - self.head

    @property
    def first(self) -> int:
        return self.items[self.head]

    def add(self, sequence: int) -> bool:
        """Returns True if it became the head."""
        items, head = self.items, self.head
        if len(items) == head or sequence > items[-1]:
            items.append(sequence)
            return len(items) == head + 1
        at = bisect_left(items, sequence, head)
        if head and at - head < 1024:
            # A retried job returns near the front: moving the few before it is cheaper than all behind it.
            items[head - 1 : at - 1] = items[head:at]
            items[at - 1] = sequence
            self.head = head - 1
            return at == head
        items.insert(at, sequence)
        return at == head

    def remove(self, sequence: int) -> None:
        items, head = self.items, self.head
        at = head if items[head] == sequence else bisect_left(items, sequence, head)
        assert items[at] == sequence, "only what stands in a lane is taken out of it"
        if at - head < 1024:
            items[head + 1 : at + 1] = items[head:at]
            self.head = head + 1
            if self.head > 64 and self.head * 2 > len(items):
                del items[: self.head]
                self.head = 0
        else:
            del items[at]


class _Group:
    """The lanes of one (priority, tenant) that one profile may take."""

    __slots__ = ("bounds", "heap", "tidy_at")

    def __init__(self) -> None:
        self.heap: list[tuple[int, _Lane]] = []
        self.bounds: dict[_Lane, int] = {}
        self.tidy_at = 64

    def lower(self, sequence: int, lane: _Lane) -> None:
        known = self.bounds.get(lane)
        if known is None or sequence < known:
            self.bounds[lane] = sequence
            heappush(self.heap, (sequence, lane))
            if len(self.heap) > self.tidy_at:
                self._tidy()

    def _tidy(self) -> None:
        """Removes empty lanes, also for a profile that nobody polls for."""
        self.bounds = {lane: bound for lane, bound in self.bounds.items() if lane}
        self.heap = [(bound, lane) for lane, bound in self.bounds.items()]
        heapify(self.heap)
        self.tidy_at = 64 + 2 * len(self.heap)

    def best(self) -> tuple[int, _Lane] | None:
        """The lane with the first head, its bound corrected. None if nothing waits."""
        heap, bounds = self.heap, self.bounds
        while heap:
            bound, lane = heap[0]
            if bounds.get(lane) != bound:
                heappop(heap)
            elif lane.head == len(lane.items):
                heappop(heap)
                del bounds[lane]
            elif (first := lane.items[lane.head]) != bound:
                bounds[lane] = first
                heapreplace(heap, (first, lane))
            else:
                return heap[0]
        return None

    def set_aside(self) -> tuple[int, _Lane]:
        bound, lane = heappop(self.heap)
        del self.bounds[lane]
        return bound, lane


# (−priority, virtual time, sequence, tenant): the head of a group; all but priority are lower bounds
_Entry = tuple[int, float, int, TenantId]
_Place = tuple[int, TenantId]


class _Tenants:
    __slots__ = ("out", "virtual_times")

    def __init__(self) -> None:
        self.virtual_times: dict[TenantId, float] = {}
        self.out: dict[TenantId, dict[tuple[_Profile, _Place], None]] = {}
        """Excluded tenants, with the entries set aside for them."""


class _Profile:
    __slots__ = ("bounds", "classes", "groups", "heap", "sort_pending_at", "tidy_at", "unsorted")

    def __init__(self, classes: set[ClassKey]) -> None:
        self.classes = classes
        self.unsorted: dict[_Lane, None] = {}
        """Lanes with a new head since this profile's last look."""
        self.sort_pending_at = 64
        self.tidy_at = 64
        self.groups: dict[_Place, _Group] = {}
        self.heap: list[_Entry] = []
        self.bounds: dict[_Place, _Entry] = {}

    def lower(self, lane: _Lane, sequence: int, virtual_time: float) -> None:
        tenant, descending = lane.key.tenant, -lane.key.priority
        at = (descending, tenant)
        group = self.groups.get(at)
        if group is None:
            group = self.groups[at] = _Group()
        group.lower(sequence, lane)
        known = self.bounds.get(at)
        # After an entry was set aside, other lanes of its group may come first.
        entry = (descending, virtual_time, group.heap[0][0] if known is None else sequence, tenant)
        if known is None or entry < known:
            self.bounds[at] = entry
            heappush(self.heap, entry)
            if len(self.heap) > self.tidy_at:
                self._tidy()

    def _tidy(self) -> None:
        self.groups = {at: group for at, group in self.groups.items() if group.best() is not None}
        self.bounds = {at: entry for at, entry in self.bounds.items() if at in self.groups}
        self.heap = list(self.bounds.values())
        heapify(self.heap)
        self.tidy_at = 64 + 2 * len(self.heap)

    def sort_pending(self) -> None:
        """Drops emptied lanes, also for a profile that nobody polls for."""
        self.unsorted = {lane: None for lane in self.unsorted if lane}
        self.sort_pending_at = 64 + 2 * len(self.unsorted)

    def _take_in(self, virtual_times: dict[TenantId, float]) -> None:
        unsorted, self.unsorted = self.unsorted, {}
        for lane in unsorted:
            if lane:
                self.lower(lane, lane.first, virtual_times.get(lane.key.tenant, 0.0))

    def best(self, tenants: _Tenants) -> tuple[_Entry, _Group] | None:
        virtual_times, out = tenants.virtual_times, tenants.out
        if self.unsorted:
            self._take_in(virtual_times)
        heap, bounds = self.heap, self.bounds
        while heap:
            entry = heap[0]
            descending, virtual_time, sequence, tenant = entry
            at = (descending, tenant)
            if bounds.get(at) != entry:
                heappop(heap)
                continue
            if tenant in out:
                heappop(heap)
                del bounds[at]
                out[tenant][self, at] = None
                continue
            group = self.groups[at]
            head = group.best()
            if head is None:
                heappop(heap)
                del bounds[at], self.groups[at]
                continue
            now = virtual_times.get(tenant, 0.0)
            if head[0] == sequence and now == virtual_time:
                return entry, group
            right = bounds[at] = (descending, now, head[0], tenant)
            heapreplace(heap, right)
        return None

    def renew(self, at: _Place, virtual_times: dict[TenantId, float]) -> None:
        """Moves a group's entry to its new head after lanes were set aside."""
        heappop(self.heap)
        del self.bounds[at]
        self.restore(at, virtual_times)

    def restore(self, at: _Place, virtual_times: dict[TenantId, float]) -> None:
        """Gives a group its entry back if anything waits in it."""
        group = self.groups.get(at)
        if group is None or at in self.bounds:
            return
        head = group.best()
        if head is None:
            del self.groups[at]
            return
        entry = self.bounds[at] = (at[0], virtual_times.get(at[1], 0.0), head[0], at[1])
        heappush(self.heap, entry)


class LaneIndex:
    def __init__(self) -> None:
        self._lanes: dict[LaneKey, _Lane] = {}
        self._lanes_of: dict[ClassKey, dict[_Lane, None]] = {}
        self._profiles: dict[ProfileKey, _Profile] = {}
        self._profiles_of: dict[ClassKey, dict[_Profile, None]] = {}
        self._pins: dict[ClassKey, int] = {}
        self._idle_classes: dict[ClassKey, None] = {}
        self._tenants = _Tenants()
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
        profile = self._profiles[key] = _Profile(set(fits))
        for class_key in fits:
            self._profiles_of[class_key][profile] = None
            profile.unsorted.update(self._lanes_of[class_key])
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
            lane = self._lanes[key] = _Lane(key, self._lane_numbers)
            self._lanes_of[key.class_key][lane] = None
        if lane.add(sequence):
            for profile in self._profiles_of[key.class_key]:
                unsorted = profile.unsorted
                unsorted[lane] = None
                if len(unsorted) > profile.sort_pending_at:
                    profile.sort_pending()

    def remove(self, key: LaneKey, sequence: int) -> None:
        lane = self._lanes[key]
        lane.remove(sequence)
        if not lane:
            # An index may still hold the object; it drops an empty lane.
            del self._lanes[key]
            del self._lanes_of[key.class_key][lane]

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
    ) -> list[tuple[LaneKey, int, float]]:
        """Candidates for a matching pass. First as many jobs as there are slots, in order; then heads of
        further lanes, of the same priority and of tenants within a quantum of the least served, for policy to
        choose from.
        """
        found: list[tuple[LaneKey, int, float]] = []
        seen: set[LaneKey] = set()
        level, least = 0, 0.0
        with closing(self._walk(key, skip, skip_jobs, heads_after=slots)) as walk:
            for lane, sequence, virtual_time in walk:
                if len(found) >= slots:
                    if lane.priority != level or len(seen) >= lanes or virtual_time > least + quantum_s:
                        break
                    if lane in seen:
                        continue
                if not found or lane.priority != level:
                    level, least = lane.priority, virtual_time
                    seen = set()
                seen.add(lane)
                found.append((lane, sequence, virtual_time))
        return found

    def _walk(
        self,
        key: ProfileKey,
        skip: Set[str],
        skip_jobs: Container[int],
        heads_after: int = 1,
    ) -> Generator[tuple[LaneKey, int, float], None, None]:
        """Jobs in order. The first `heads_after` may be several of one lane; after that, heads only. Sets
        visited lanes aside and puts them back at the end with corrected bounds.
        """
        profile = self._profiles.get(key)
        if profile is None:
            return
        aside: list[_Lane] = []
        deeper: list[tuple[int, float, int, _Lane, int]] = []
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
                    yield lane.key, sequence, virtual_time
        finally:
            for lane in aside:
                if lane:
                    profile.lower(lane, lane.first, self._tenants.virtual_times.get(lane.key.tenant, 0.0))


def _is_skipped(lane: LaneKey, skip: Set[str]) -> bool:
    """Whether its workflow is skipped, for all tenants or for this one."""
    return lane.workflow_hash in skip or tenant_target(lane.workflow_hash, lane.tenant) in skip
