"""Finds what the idle slots of a matching pass may take. It asks the store for candidates, shows further ones to slots
that leave all they see to others, and has them ranked (`pass_ranks.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.pass_ranks import ParkedPoll, PassRanks, Plan, Seen, lane_lengths
from comfyfleet.engine.slot_sample import SlotSample
from comfyfleet.model.block import Pair
from comfyfleet.model.dispatch import Candidate
from comfyfleet.model.ids import ClassKey, PollId, ProfileKey, WorkerId
from comfyfleet.policy.demand import RequestKind
from comfyfleet.policy.failover import SmartFailover
from comfyfleet.policy.scheduling import missing
from comfyfleet.ports import Peek

_MAX_LOOKS = 8
"""How often a slot that leaves everything to others is shown more of the queue."""


class MatchingWindow:
    def __init__(self, context: EngineContext, parked: Mapping[WorkerId, int]) -> None:
        """`parked`: how many polls of each worker are parked."""
        self._context = context
        self._parked = parked
        self._sample = SlotSample(context, parked)
        # A custom strategy may treat equal workers differently.
        self._asks_for_each = type(context.strategy).should_skip is not SmartFailover.should_skip

    def sample(self, slots: Iterable[ParkedPoll], jobs: int, class_key: ClassKey) -> Iterable[ParkedPoll]:
        """Enough of these slots for so many jobs of a class."""
        if self._asks_for_each:
            return slots
        fleet = self._context.fleet
        return self._sample.of(
            slots, jobs, fleet.with_blocks.union(fleet.classes[class_key].preferences.workers)
        )

    async def plan(self, slots: Mapping[PollId, ParkedPoll], now: float) -> Plan | None:
        """None: nothing waits for these slots."""
        fleet = self._context.fleet
        alike: dict[tuple[ProfileKey, WorkerId | None], list[ParkedPoll]] = defaultdict(list)
        for slot in slots.values():
            profile = fleet.workers[slot.worker_id].profile
            is_single = self._asks_for_each or slot.worker_id in fleet.with_blocks
            alike[profile, slot.worker_id if is_single else None].append(slot)
        groups, keys = list(alike.values()), list(alike)
        seen = Seen(groups)
        for number, (profile, _) in enumerate(keys):
            seen.add(number, await self._peek(profile, groups[number], len(slots), now))
        await self._know_classes(seen)
        if not seen.jobs:
            return None
        if len(slots) == 1 == len(seen.jobs) and (only := self._only(seen)) is not None:
            return only
        models = self._models(seen)
        seen.groups = self._picked(groups, seen)
        if not models:
            return PassRanks(self._context, seen, len(slots), now, models, self._parked).plan()
        await self._read_estimates(seen)
        hungry = frozenset(range(len(keys)))
        for look in range(_MAX_LOOKS):
            found = PassRanks(
                self._context, seen, len(slots), now, models, self._parked, await self._blocks()
            )
            plan = found.plan()
            hungry &= found.hungry()
            if not hungry or look == _MAX_LOOKS - 1:
                break
            # All that these slots see is left to others: show them what comes after it.
            before = len(seen.jobs), sum(map(len, seen.takers.values()))
            for number in hungry:
                group, skip = groups[number], frozenset(seen.targets[number])
                seen.add(number, await self._peek(keys[number][0], group, len(slots), now, skip))
            if before == (len(seen.jobs), sum(map(len, seen.takers.values()))):
                break
            await self._know_classes(seen)
            models = self._models(seen)
            seen.groups = self._picked(groups, seen)
            await self._read_estimates(seen)
        self._sample.tell_mates((slot for group in seen.groups for slot in group), plan.left)
        return plan

    def _picked(self, groups: list[list[ParkedPoll]], seen: Seen) -> list[list[ParkedPoll]]:
        """The slots that are compared. Workers that somebody prefers by name are."""
        if max(map(len, groups)) <= len(seen.jobs):
            return groups
        classes, named = self._context.fleet.classes, set[WorkerId]()
        for key in {each.lane.class_key for each in seen.jobs.values()}:
            named.update(classes[key].preferences.workers)
        return self._sample.groups(groups, len(seen.jobs), named)

    def _only(self, seen: Seen) -> Plan | None:
        """One job for one slot, with nothing to load: there is nothing to compare."""
        outlook, slot = self._context.outlook, seen.groups[0][0]
        worker = self._context.fleet.workers.get(slot.worker_id)
        ((job_id, candidate),) = seen.jobs.items()
        models = outlook.models_of(candidate.lane.class_key)
        if worker is None or (models and missing(models, outlook.kind_of(worker).loaded)):
            return None
        return Plan({slot.poll_id: job_id}, seen.jobs, False, {}, inf)

    async def _peek(
        self,
        profile: ProfileKey,
        group: list[ParkedPoll],
        slots: int,
        now: float,
        skip: frozenset[str] = frozenset(),
    ) -> list[Candidate]:
        """The store's candidates without those that the failover strategy refuses."""
        context = self._context
        rules, strategy, worker_id = context.rules, context.strategy, group[0].worker_id
        # Older lanes must not hide one whose models a worker has loaded.
        warm = context.outlook.warm_classes(slot.worker_id for slot in group)
        while True:
            query = Peek(profile, worker_id, slots, rules.window_lanes, rules.quantum_s, skip, warm)
            found = await context.store.peek(query)
            hashes = {candidate.lane.workflow_hash for candidate in found}
            refused = {each for each in hashes if strategy.should_skip(worker_id, each, now)}
            if not refused:
                return found
            skip |= refused

    async def _know_classes(self, seen: Seen) -> None:
        """Another engine's class must be known before it can be ranked."""
        fleet = self._context.fleet
        if any(each.lane.class_key not in fleet.classes for each in seen.jobs.values()):
            await fleet.sync()
            for job_id, each in list(seen.jobs.items()):
                if each.lane.class_key not in fleet.classes:
                    del seen.jobs[job_id], seen.takers[job_id]

    def _models(self, seen: Seen) -> bool:
        """Whether models matter in this pass."""
        models_of = self._context.outlook.models_of
        return any(models_of(key) for key in {each.lane.class_key for each in seen.jobs.values()})

    async def _read_estimates(self, seen: Seen) -> None:
        estimates, models_of = self._context.estimates, self._context.outlook.models_of
        waiting: dict[RequestKind, int] = {}
        for lane, count in lane_lengths(seen.jobs.values()).items():
            kind = RequestKind(models_of(lane.class_key), lane.workflow_hash)
            waiting[kind] = waiting.get(kind, 0) + count
        await estimates.read(waiting)
        estimates.seed(waiting.items())
        await self._context.outlook.refresh()

    async def _blocks(self) -> frozenset[Pair]:
        """The pairs of worker and workflow that are blocked."""
        context, now = self._context, self._context.clock.now()
        if not context.fleet.with_blocks:
            return frozenset()
        return frozenset(each.pair for each in await context.store.blocks() if each.is_in_force(now))
