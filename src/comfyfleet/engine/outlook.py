"""What an engine knows about its fleet from moment to moment: which models each worker has loaded, when each busy slot
is expected to be free, and how fast the queue moves.

Its own leases and their ends are known at once. Those of other engines are read from the store when a matching pass
needs them, at most every `round_s`. A lease counts as a load from its start, so that a second worker does not load the
same model while the first still does; if the run fails, the worker's record says what is loaded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from math import inf
from typing import NamedTuple

from comfyfleet.engine.estimates import TimeEstimates
from comfyfleet.engine.fleet import Fleet
from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import ClassKey, JobId, ProfileKey, WorkerId
from comfyfleet.model.worker import Capabilities, LiveState, WorkerRecord
from comfyfleet.policy.demand import ModelSet, RequestKind
from comfyfleet.policy.feasibility import model_aliases, normal_model
from comfyfleet.policy.kept_models import KeptModels
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.scheduling import NO_MODELS, BusySlot, SlotKind, left_s, missing, pace
from comfyfleet.ports import Clock, Store

_BATCH = 500
_POLLS_HERE_S = 60.0
"""A worker whose last poll here is longer ago may poll another engine."""
_MAX_CLASSES = 10_000
_MAX_WARM = 32
"""So many classes with the same models are asked for by name."""
_TABLE_S = 5.0
"""How old the table of live slots may be while no worker changes. A quarantine ends by itself."""


_PACE_NEWS = 8
"""After so many requests and runs the pace is worked out again."""


class Running(NamedTuple):
    """A leased job."""

    job_id: JobId
    worker_id: WorkerId
    models: ModelSet
    loads: ModelSet
    """What was not loaded when it was leased."""
    leased_at: float
    run_s: float
    load_s: float

    @property
    def ends_at(self) -> float:
        return self.leased_at + self.run_s + self.load_s


class LiveSlots(NamedTuple):
    """The slots of workers that take work."""

    by_class: Mapping[str, int]
    classes_of: Mapping[ProfileKey, frozenset[str]]
    """The worker classes of each profile."""
    since: float
    """Since when at least one of them has been there."""

    @property
    def total(self) -> int:
        return sum(self.by_class.values())


class _Known(NamedTuple):
    """A value of a worker, and from what it was made."""

    capabilities: Capabilities
    live: LiveState
    newest: JobId | None
    kept: KeptModels | None
    kind: SlotKind


class FleetOutlook:
    def __init__(
        self, store: Store, clock: Clock, fleet: Fleet, rules: Rules, estimates: TimeEstimates
    ) -> None:
        self._store = store
        self._clock = clock
        self._fleet = fleet
        self._rules = rules
        self._estimates = estimates
        self._models: dict[ClassKey, ModelSet] = {}
        self._classes_with: dict[ModelSet, list[ClassKey]] = {}
        self._sets_with: dict[str, list[ModelSet]] = {}
        """Each set of models, by one of its models."""
        self._warm_classes: dict[ModelSet, frozenset[ClassKey]] = {}
        self._indexed = 0
        """So many classes of the fleet are in the tables above."""
        self._running: dict[WorkerId, dict[JobId, Running]] = {}
        self._worker_of: dict[JobId, WorkerId] = {}
        self._read_at = -inf
        self._changed: set[JobId] | None = None
        """Jobs that were leased or ended here while leases are read."""
        self._freed_at: dict[WorkerId, float] = {}
        self._polled_at: dict[WorkerId, float] = {}
        self._kinds: dict[WorkerId, _Known] = {}
        self._kept: dict[WorkerId, KeptModels] = {}
        self._live: tuple[float, int, LiveSlots] | None = None
        """With its time, and the changes of the fleet until then."""
        self._pace: tuple[int, float, float] | None = None
        self._resumed_at = -inf

    # models

    def models_of(self, class_key: ClassKey) -> ModelSet:
        """The models that jobs of a class need."""
        known = self._models.get(class_key)
        if known is None:
            cls = self._fleet.classes.get(class_key)
            if cls is None:
                return NO_MODELS
            if len(self._models) > _MAX_CLASSES:
                self._models.clear()
            known = self._models[class_key] = frozenset(map(normal_model, cls.requirements.models))
        return known

    def kind_of(self, worker: WorkerRecord) -> SlotKind:
        """The worker's class and what it has loaded, or is loading."""
        runs = self._running.get(worker.worker_id)
        newest = None
        if runs:
            newest = next((run for run in reversed(runs.values()) if run.models), None)
        known, newest_id = self._kinds.get(worker.worker_id), newest and newest.job_id
        kept = self._kept.get(worker.worker_id)
        if (
            known is not None
            and known.capabilities is worker.capabilities
            and known.live is worker.live
            and known.newest == newest_id
            and known.kept is kept
        ):
            return known.kind
        goes: ModelSet | None = None
        loaded = newest.models if newest else frozenset(map(normal_model, worker.live.loaded_models))
        if kept is not None and kept.size > 1:
            now = kept.while_running(newest.models) if newest else kept
            if newest or loaded <= now.loaded:
                loaded, goes = now.loaded, now.goes
        if known is not None and known.capabilities is worker.capabilities:
            worker_class = known.kind.worker_class
        else:
            worker_class = worker.capabilities.worker_class
        kind = SlotKind(worker_class, loaded, goes)
        self._kinds[worker.worker_id] = _Known(worker.capabilities, worker.live, newest_id, kept, kind)
        return kind

    def ran(self, worker_id: WorkerId, models: ModelSet, had_them: bool | None) -> ModelSet:
        """A run has ended. Returns what the worker has loaded now."""
        known = self._kept.get(worker_id, KeptModels())
        kept = self._kept[worker_id] = known.after_run(models, had_them)
        if kept.size > known.size and (worker := self._fleet.workers.get(worker_id)) is not None:
            # Its equals are probably set up like it. Whichever is not corrects that with its next load.
            worker_class = self.kind_of(worker).worker_class
            for other_id, its in self._kept.items():
                other = self._fleet.workers.get(other_id)
                if other is not None and self.kind_of(other).worker_class == worker_class:
                    self._kept[other_id] = its._replace(size=max(its.size, kept.size))
        return kept.loaded

    def warm_classes(self, worker_ids: Iterable[WorkerId]) -> frozenset[ClassKey]:
        """The classes whose models one of these workers has loaded."""
        workers = self._fleet.workers
        sets = {self.kind_of(workers[each]).loaded for each in worker_ids if each in workers}
        if not any(sets):
            return frozenset()
        self._index_classes()
        found: set[ClassKey] = set()
        for loaded in sets:
            known = self._warm_classes.get(loaded)
            if known is None:
                names = loaded | model_aliases(loaded)
                known = self._warm_classes[loaded] = frozenset(
                    key
                    for name in names
                    for models in self._sets_with.get(name, ())
                    if models <= names
                    for key in self._classes_with[models][-_MAX_WARM:]
                )
            found |= known
        return frozenset(found)

    def _index_classes(self) -> None:
        """Sorts new classes by their models."""
        classes = self._fleet.classes
        if len(classes) == self._indexed:
            return
        if len(classes) < self._indexed:
            self._indexed = 0
            self._classes_with.clear()
            self._sets_with.clear()
        for key in islice(classes, self._indexed, None):
            if not (models := self.models_of(key)):
                continue
            if models not in self._classes_with:
                # Many sets have the same checkpoint, so each is found by its rarest model.
                rarest = min(models, key=lambda name: len(self._sets_with.get(name, ())))
                self._sets_with.setdefault(rarest, []).append(models)
            self._classes_with.setdefault(models, []).append(key)
        self._indexed = len(classes)
        self._warm_classes.clear()

    def loaded_sets(self) -> Counter[ModelSet]:
        """How many live workers have each set of models loaded."""
        now = self._clock.now()
        return Counter(
            loaded
            for worker in self._fleet.workers.values()
            if worker.takes_work(now) and (loaded := self.kind_of(worker).loaded)
        )

    # leases

    def polled(self, worker_id: WorkerId) -> None:
        self._polled_at[worker_id] = self._clock.monotonic()

    def leased(self, dispatch: Dispatch, run_s: float, load_s: float) -> Running:
        """A job was leased here."""
        assert dispatch.lease is not None, "a leased job has a lease"
        worker_id, models = dispatch.lease.worker_id, self.models_of(dispatch.class_key)
        worker = self._fleet.workers.get(worker_id)
        loads = missing(models, self.kind_of(worker).loaded) if worker is not None and models else NO_MODELS
        run = Running(
            dispatch.job_id,
            worker_id,
            models,
            loads,
            dispatch.lease.leased_at,
            run_s,
            load_s if loads else 0.0,
        )
        self._add(run)
        if self._changed is not None:
            self._changed.add(run.job_id)
        self._estimates.count_request(
            RequestKind(models, dispatch.workflow_hash), dispatch.job_id, self.live().total
        )
        return run

    def enqueued(self, dispatch: Dispatch) -> None:
        """A job was enqueued here."""
        kind = RequestKind(self.models_of(dispatch.class_key), dispatch.workflow_hash)
        self._estimates.count_request(kind, dispatch.job_id, self.live().total)

    def written(self, dispatch: Dispatch) -> Running | None:
        """The engine changed a job. Returns what it ran if the lease has ended."""
        if dispatch.phase is Phase.LEASED:
            return None
        if self._changed is not None:
            self._changed.add(dispatch.job_id)
        return self._remove(dispatch.job_id)

    def run_of(self, job_id: JobId) -> Running | None:
        worker_id = self._worker_of.get(job_id)
        return None if worker_id is None else self._running[worker_id][job_id]

    def runs_of(self, worker_id: WorkerId) -> Iterable[Running]:
        return self._running.get(worker_id, {}).values()

    def _add(self, run: Running) -> None:
        self._remove(run.job_id)
        self._worker_of[run.job_id] = run.worker_id
        self._running.setdefault(run.worker_id, {})[run.job_id] = run

    def _remove(self, job_id: JobId) -> Running | None:
        worker_id = self._worker_of.pop(job_id, None)
        if worker_id is None:
            return None
        runs = self._running[worker_id]
        run = runs.pop(job_id)
        if not runs:
            del self._running[worker_id]
        self._freed_at[worker_id] = self._clock.monotonic()
        return run

    async def refresh(self) -> None:
        """Reads the leases of other engines; of a store that nobody else uses only once, after the start."""
        now = self._clock.monotonic()
        if now < self._read_at + (self._rules.round_s if self._store.is_shared else inf):
            return
        if self._changed is not None:
            # Another pass reads them now, and the store is slow.
            return
        self._read_at = now
        names = list(self._fleet.workers)
        self._changed = set()
        found: list[Dispatch] = []
        try:
            for start in range(0, len(names), _BATCH):
                found += await self._store.leases_of(*names[start : start + _BATCH])
        finally:
            changed, self._changed = self._changed, None
        held = {dispatch.job_id for dispatch in found}
        for job_id in self._worker_of.keys() - held - changed:
            self._remove(job_id)
        for dispatch in sorted(found, key=lambda each: each.lease.leased_at if each.lease else 0.0):
            lease, known = dispatch.lease, self.run_of(dispatch.job_id)
            if lease is None or dispatch.job_id in changed:
                continue
            if known is None or known.leased_at != lease.leased_at or known.worker_id != lease.worker_id:
                self._add(self._of_other_engine(dispatch))

    def _of_other_engine(self, dispatch: Dispatch) -> Running:
        """A lease of another engine, with its expected times. Direct workers tell none."""
        lease = dispatch.lease
        assert lease is not None, "a leased job has a lease"
        models = self.models_of(dispatch.class_key)
        worker = self._fleet.workers.get(lease.worker_id)
        worker_class = "" if worker is None else worker.capabilities.worker_class
        run_s = lease.run_s or self._estimates.run_s(dispatch.workflow_hash, worker_class)
        loads = models if lease.load_s else NO_MODELS
        return Running(dispatch.job_id, lease.worker_id, models, loads, lease.leased_at, run_s, lease.load_s)

    # slots

    def busy(self, parked: Mapping[WorkerId, int]) -> dict[SlotKind, list[BusySlot]]:
        """All slots that run a job or look for one elsewhere. One whose job has just ended is about to poll."""
        now, at = self._clock.now(), self._clock.monotonic()
        found: defaultdict[SlotKind, list[BusySlot]] = defaultdict(list)
        for worker in self._fleet.workers.values():
            worker_id = worker.worker_id
            runs = self._running.get(worker_id)
            rest = worker.slots - (len(runs) if runs else 0) - parked.get(worker_id, 0)
            if (not runs and rest <= 0) or not self._fleet.takes_work(worker, now):
                continue
            slots = [left_s(run.ends_at, now) for run in runs.values()] if runs else []
            if rest > 0 and self._looks_for_itself(worker_id, at):
                slots += [0.0] * rest
            if slots:
                kind = self.kind_of(worker)
                found[kind] += [BusySlot(worker_id, kind, left) for left in slots]
        return dict(found)

    def _looks_for_itself(self, worker_id: WorkerId, at: float) -> bool:
        if self._freed_at.get(worker_id, -inf) + self._rules.round_s > at:
            return True
        return self._store.is_shared and self._polled_at.get(worker_id, -inf) + _POLLS_HERE_S <= at

    def live(self) -> LiveSlots:
        """The slots that take work, at most a quarter of a second old."""
        at = self._clock.monotonic()
        if self._live is not None:
            made_at, changes, live = self._live
            if changes == self._fleet.changes and made_at <= at < made_at + _TABLE_S:
                return live
        self._forget_removed()
        now, since = self._clock.now(), inf
        by_class: Counter[str] = Counter()
        classes_of: defaultdict[ProfileKey, set[str]] = defaultdict(set)
        for worker in self._fleet.workers.values():
            if self._fleet.takes_work(worker, now):
                worker_class = self.kind_of(worker).worker_class
                by_class[worker_class] += worker.slots
                classes_of[worker.profile].add(worker_class)
                since = min(since, worker.connected_at)
        live = LiveSlots(by_class, {each: frozenset(its) for each, its in classes_of.items()}, since)
        self._live = (at, self._fleet.changes, live)
        return live

    def slowest_load_s(self, class_key: ClassKey) -> float:
        """The time to load the models of a class on the slowest worker class that may take it."""
        models, live = self.models_of(class_key), self.live()
        if not models:
            return 0.0
        profiles = self._fleet.profiles_for(class_key)
        kinds = frozenset[str]().union(*(live.classes_of.get(each, frozenset()) for each in profiles))
        # The table of live slots may be older than a profile.
        return max(self._estimates.load_s(models, each) for each in kinds or live.by_class or ("",))

    def _forget_removed(self) -> None:
        for table in (self._kinds, self._kept, self._freed_at, self._polled_at):
            if len(table) > 2 * len(self._fleet.workers) + 64:
                for worker_id in table.keys() - self._fleet.workers.keys():
                    del table[worker_id]

    def resumed(self) -> None:
        """The queue was paused until now, so nobody is late because of others."""
        self._resumed_at = self._clock.now()

    @property
    def moving_since(self) -> float:
        """Since when the queue has moved: some worker was there, and the queue was not paused."""
        since = self.live().since
        return max(self._resumed_at, since if since < inf else -inf)

    def pace(self) -> float:
        """The seconds in which first come, first served moves the queue on by one job."""
        estimates, at = self._estimates, self._clock.monotonic()
        events = estimates.requests + estimates.learned
        if self._pace is not None:
            known_at, made_at, known = self._pace
            news = events - known_at
            # What is learned first counts at once. Later each run changes little.
            if at < made_at + self._rules.round_s and (not news or news < min(_PACE_NEWS, events // 16)):
                return known
        self._pace = (
            events,
            at,
            pace(self.live().by_class, estimates.shares(), estimates, estimates.overhead_s),
        )
        return self._pace[2]
