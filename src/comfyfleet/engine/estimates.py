"""What an engine believes about times: the learned durations of runs and loads, and the demand that it counts.

The store keeps the durations, shared by all engines; this is a copy, read when a workflow or a set of models is first
met. Policy says what a run teaches (`policy/run_times.py`) and uses the figures (`policy/scheduling.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from statistics import fmean

from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.ids import JobId, WorkflowHash
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta
from comfyfleet.policy.demand import DemandTracker, ModelSet, RequestKind, Share
from comfyfleet.policy.run_times import (
    ANY_MODELS,
    DEFAULT_LOAD_S,
    DEFAULT_RUN_S,
    RunTimes,
    is_load_key,
    load_key,
)
from comfyfleet.policy.workflow_stats import expected_s, of_run
from comfyfleet.ports import Clock

_READ_AGAIN_S = 10.0
"""How long an unknown figure stays unknown here while another engine may learn it."""
_MAX_READ = 10_000
_MAX_COUNTED = 10_000
_RUN_WEIGHT = 0.2

_key_of = lru_cache(maxsize=4096)(load_key)


class TimeEstimates:
    """`Estimates` for policy."""

    def __init__(
        self,
        known: Callable[[WorkflowHash], WorkflowStats | None],
        read: Callable[[WorkflowHash], Awaitable[WorkflowStats | None]],
        clock: Clock,
    ) -> None:
        self._known = known
        self._read = read
        self._clock = clock
        self._demand = DemandTracker()
        self._read_at: dict[WorkflowHash, float] = {}
        self._counted: dict[JobId, None] = {}
        self._typical: dict[str, float] = {}
        """The mean run of all workflows by worker class, for workflows that never ran."""
        self._loads: dict[tuple[ModelSet, str], float] = {}
        """Load times that were looked up, until one of them changes."""
        self.overhead_s = 0.0
        """The mean time that a lease takes beside its run: answers on their way, files, other jobs on the server."""
        self.learned = 0
        """How many runs taught something: figures derived from estimates are outdated after that."""

    # policy asks

    def run_s(self, workflow_hash: WorkflowHash, worker_class: str) -> float:
        known = expected_s(self._known(workflow_hash), worker_class)
        if known is not None:
            return known
        typical = self._typical
        if not typical:
            return DEFAULT_RUN_S
        return typical[worker_class] if worker_class in typical else fmean(typical.values())

    def load_s(self, models: ModelSet, worker_class: str) -> float:
        if not models:
            return 0.0
        known = self._loads.get((models, worker_class))
        if known is None:
            if len(self._loads) >= _MAX_READ:
                self._loads.clear()
            known = self._loads[models, worker_class] = self._find_load_s(models, worker_class)
        return known

    def _find_load_s(self, models: ModelSet, worker_class: str) -> float:
        these, every = self._known(_key_of(models)), self._known(ANY_MODELS)
        for stats in (these, every):
            if stats is not None and worker_class in stats.durations:
                return stats.durations[worker_class].mean_s
        # The same models on other cards, then any models on any card.
        for stats in (these, every):
            if (known := expected_s(stats, worker_class)) is not None:
                return known
        return DEFAULT_LOAD_S

    def gap_s(self, models: ModelSet) -> float:
        return self._demand.gap_s(models, self._clock.now())

    # the copy

    def stats_changed(self, workflow_hash: WorkflowHash) -> None:
        if is_load_key(workflow_hash):
            self._loads.clear()

    async def read(self, kinds: Iterable[RequestKind]) -> None:
        """Reads what the store knows about these, unless that was done lately."""
        now = self._clock.monotonic()
        wanted = {ANY_MODELS}
        for kind in kinds:
            wanted |= {kind.workflow_hash, _key_of(kind.models)}
        for key in wanted:
            if self._known(key) is None and now >= self._read_at.get(key, float("-inf")) + _READ_AGAIN_S:
                if len(self._read_at) >= _MAX_READ:
                    self._read_at.clear()
                self._read_at[key] = now
                await self._read(key)

    # demand

    @property
    def requests(self) -> int:
        return self._demand.requests

    def shares(self) -> list[Share]:
        return list(self._demand.shares())

    def count_request(self, kind: RequestKind, job_id: JobId, slots: int) -> None:
        """Counts a job that this engine enqueued, or leased although another one enqueued it."""
        if job_id in self._counted:
            return
        self._counted[job_id] = None
        if len(self._counted) > _MAX_COUNTED:
            del self._counted[next(iter(self._counted))]
        self._demand.record(kind, self._clock.now(), slots)

    def seed(self, waiting: Iterable[tuple[RequestKind, int]]) -> None:
        if not self._demand.requests:
            self._demand.seed(waiting)

    # learning

    def count_overhead(self, seconds: float) -> None:
        self.overhead_s += _RUN_WEIGHT * (max(0.0, seconds) - self.overhead_s)

    def deltas(self, dispatch: Dispatch, worker_class: str, times: RunTimes) -> list[WorkflowStatsDelta]:
        """What these add in the store."""
        self.learned += 1
        found: list[WorkflowStatsDelta] = []
        if times.run_s is not None:
            typical = self._typical.get(worker_class, times.run_s)
            self._typical[worker_class] = typical + _RUN_WEIGHT * (times.run_s - typical)
            found.append(of_run(dispatch.workflow_hash, worker_class, times.run_s))
        if times.load_s is not None and times.models:
            found += [of_run(key, worker_class, times.load_s) for key in (_key_of(times.models), ANY_MODELS)]
        return found
