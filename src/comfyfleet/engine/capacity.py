"""The signal for autoscaling: the waiting work by needs, and the workers that would clear it in time.

Reads the lanes with their lengths, never the jobs. `policy/capacity.py` decides how many workers that makes."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from comfyfleet.engine.context import EngineContext
from comfyfleet.model.estimate import CapacityReport, WaitingWork
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.capacity import SlotGroup, Work, described, wanted_workers
from comfyfleet.policy.demand import ModelSet, RequestKind
from comfyfleet.policy.feasibility import is_feasible
from comfyfleet.policy.quotes import known_run
from comfyfleet.policy.scheduling import left_s, missing
from comfyfleet.ports import LaneBacklog

_MAX_LANES = 1_000
"""Work in further lanes counts as work like that of the shown ones, without its own class."""
_MAX_CLASSES = 100


class _Class(NamedTuple):
    """The lanes with equal needs, of all tenants."""

    cls: RequirementClass
    lanes: list[LaneBacklog]
    takers: frozenset[WorkerId]
    """Workers of the fleet that could take the jobs, present or not."""

    @property
    def waiting(self) -> int:
        return sum(each.waiting for each in self.lanes)


class Capacity:
    def __init__(self, context: EngineContext) -> None:
        self._context = context

    async def report(self, within_s: float) -> CapacityReport:
        context = self._context
        if context.store.is_shared:
            await context.fleet.refresh(context.rules.round_s)
        backlogs = await context.store.waiting_lanes(_MAX_LANES)
        if not backlogs:
            slots = sum(worker.slots for worker in self._present())
            return CapacityReport(within_s, 0, 0.0, slots, (), ())
        if any(each.lane.class_key not in context.fleet.classes for each in backlogs):
            await context.fleet.sync()
        counts = await context.store.counts()
        await context.outlook.refresh()
        found = self._classes(backlogs)
        await context.estimates.read(
            RequestKind(context.outlook.models_of(each.lane.class_key), each.lane.workflow_hash)
            for each in backlogs
        )
        now = context.clock.now()
        present = self._present()
        groups, group_of = self._groups(present, found, now)
        loaded = {context.outlook.kind_of(worker).loaded for worker in present}
        classes, work = [], []
        for each in found:
            needs = described(each.cls.requirements)
            seconds = self._seconds(each, loaded)
            takers = frozenset(group_of[name] for name in each.takers if name in group_of)
            typical = self._seconds_on(each, "", loaded)
            work.append(Work(needs, seconds, takers, typical))
            classes.append(
                WaitingWork(
                    hashlib.sha256(needs.encode()).hexdigest()[:12],
                    needs,
                    each.waiting,
                    round(min(seconds.values(), default=typical), 3),
                    sum(groups[taker].slots for taker in takers),
                    self._is_rough(each),
                )
            )
        listed = sum(each.waiting for each in classes)
        waiting = max(listed, counts.waiting)
        seconds_in_all = sum(each.gpu_seconds for each in classes)
        classes.sort(key=lambda each: (-each.gpu_seconds, each.needs))
        return CapacityReport(
            within_s,
            waiting,
            round(seconds_in_all * waiting / listed if listed else 0.0, 3),
            sum(worker.slots for worker in present),
            tuple(classes[:_MAX_CLASSES]),
            tuple(wanted_workers(work, groups, within_s)),
        )

    def _present(self) -> list[WorkerRecord]:
        fleet, now = self._context.fleet, self._context.clock.now()
        return [worker for worker in fleet.workers.values() if fleet.takes_work(worker, now)]

    def _classes(self, backlogs: Sequence[LaneBacklog]) -> list[_Class]:
        """By needs: tenants and preferences do not tell classes apart, unless other workers may take them."""
        fleet = self._context.fleet
        by_needs: defaultdict[tuple[str, frozenset[WorkerId]], list[LaneBacklog]] = defaultdict(list)
        cls_of: dict[tuple[str, frozenset[WorkerId]], RequirementClass] = {}
        known: dict[str, tuple[str, frozenset[WorkerId]]] = {}
        for each in backlogs:
            key = each.lane.class_key
            cls = fleet.classes.get(key)
            if cls is None:
                continue
            if key not in known:
                able = frozenset(
                    worker.worker_id
                    for worker in fleet.workers.values()
                    if is_feasible(cls, worker.worker_id, worker.capabilities)
                )
                known[key] = (described(cls.requirements), able)
            cls_of.setdefault(known[key], cls)
            by_needs[known[key]].append(each)
        return [_Class(cls_of[key], lanes, key[1]) for key, lanes in by_needs.items()]

    def _groups(
        self, present: Sequence[WorkerRecord], found: Sequence[_Class], now: float
    ) -> tuple[list[SlotGroup], dict[WorkerId, int]]:
        """Workers that may take the same work at the same speed are one group."""
        outlook = self._context.outlook
        numbers: dict[tuple[str, frozenset[int]], int] = {}
        groups: list[SlotGroup] = []
        group_of: dict[WorkerId, int] = {}
        for worker in present:
            may_take = frozenset(
                number for number, each in enumerate(found) if worker.worker_id in each.takers
            )
            worker_class = worker.capabilities.worker_class
            number = numbers.setdefault((worker_class, may_take), len(groups))
            if number == len(groups):
                groups.append(SlotGroup(worker_class, 0, 0.0))
            group_of[worker.worker_id] = number
            busy_s = sum(left_s(run.ends_at, now) for run in outlook.runs_of(worker.worker_id))
            known = groups[number]
            groups[number] = known._replace(slots=known.slots + worker.slots, busy_s=known.busy_s + busy_s)
        return groups, group_of

    def _seconds(self, each: _Class, loaded: set[ModelSet]) -> Mapping[str, float]:
        """By worker class that could take the jobs: the time for all of them."""
        workers = self._context.fleet.workers
        classes = {workers[name].capabilities.worker_class for name in each.takers if name in workers}
        return {name: self._seconds_on(each, name, loaded) for name in classes}

    def _seconds_on(self, each: _Class, worker_class: str, loaded: set[ModelSet]) -> float:
        estimates, models = self._context.estimates, self._context.outlook.models_of(each.cls.key)
        seconds = sum(
            lane.waiting * estimates.run_s(lane.lane.workflow_hash, worker_class) for lane in each.lanes
        )
        if models and all(missing(models, its) for its in loaded):
            seconds += estimates.load_s(models, worker_class)
        return seconds

    def _is_rough(self, each: _Class) -> bool:
        context = self._context
        workers = context.fleet.workers
        classes = {workers[name].capabilities.worker_class for name in each.takers if name in workers}
        return any(
            all(
                known_run(context.known_workflow_stats(lane.lane.workflow_hash), name, 0.0).is_rough
                for name in classes
            )
            for lane in each.lanes
        )
