"""The lanes that one profile may take, in the store's order, and the lane itself.

A profile (workers that may take the same classes) indexes its lanes in two levels: (priority, tenant), then
lanes. `lane_index.py` says why its bounds are lower bounds, and owns the lanes of all profiles.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush, heapreplace

from comfyfleet.model.dispatch import LaneKey
from comfyfleet.model.ids import ClassKey, TenantId


class Lane:
    """Waiting sequence numbers under one key, ascending. Taking the head and putting one back are cheap."""

    __slots__ = ("head", "items", "key", "number")

    def __init__(self, key: LaneKey, number: int) -> None:
        self.key = key
        self.number = number
        self.items: list[int] = []
        self.head = 0

    def __lt__(self, other: Lane) -> bool:
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


class LaneGroup:
    """The lanes of one (priority, tenant) that one profile may take."""

    __slots__ = ("bounds", "heap", "tidy_at")

    def __init__(self) -> None:
        self.heap: list[tuple[int, Lane]] = []
        self.bounds: dict[Lane, int] = {}
        self.tidy_at = 64

    def lower(self, sequence: int, lane: Lane) -> None:
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

    def best(self) -> tuple[int, Lane] | None:
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

    def set_aside(self) -> tuple[int, Lane]:
        bound, lane = heappop(self.heap)
        del self.bounds[lane]
        return bound, lane


# (−priority, virtual time, sequence, tenant): the head of a group; all but priority are lower bounds
IndexEntry = tuple[int, float, int, TenantId]
GroupKey = tuple[int, TenantId]


class TenantTimes:
    __slots__ = ("out", "virtual_times")

    def __init__(self) -> None:
        self.virtual_times: dict[TenantId, float] = {}
        self.out: dict[TenantId, dict[tuple[ProfileLanes, GroupKey], None]] = {}
        """Excluded tenants, with the entries set aside for them."""


class ProfileLanes:
    __slots__ = ("bounds", "classes", "groups", "heap", "sort_pending_at", "tidy_at", "unsorted")

    def __init__(self, classes: set[ClassKey]) -> None:
        self.classes = classes
        self.unsorted: dict[Lane, None] = {}
        """Lanes with a new head since this profile's last look."""
        self.sort_pending_at = 64
        self.tidy_at = 64
        self.groups: dict[GroupKey, LaneGroup] = {}
        self.heap: list[IndexEntry] = []
        self.bounds: dict[GroupKey, IndexEntry] = {}

    def lower(self, lane: Lane, sequence: int, virtual_time: float) -> None:
        tenant, descending = lane.key.tenant, -lane.key.priority
        at = (descending, tenant)
        group = self.groups.get(at)
        if group is None:
            group = self.groups[at] = LaneGroup()
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

    def best(self, tenants: TenantTimes) -> tuple[IndexEntry, LaneGroup] | None:
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

    def renew(self, at: GroupKey, virtual_times: dict[TenantId, float]) -> None:
        """Moves a group's entry to its new head after lanes were set aside."""
        heappop(self.heap)
        del self.bounds[at]
        self.restore(at, virtual_times)

    def restore(self, at: GroupKey, virtual_times: dict[TenantId, float]) -> None:
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
