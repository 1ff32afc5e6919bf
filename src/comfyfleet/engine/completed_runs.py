"""Learns from completed runs: durations and load times into the store, and what the worker has loaded now.

Policy says what a run teaches (`policy/run_times.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.outlook import Running
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.workflow import loaders_and_samplers
from comfyfleet.policy.kept_models import had_models
from comfyfleet.policy.run_times import RunReport, RunTimes, times_of
from comfyfleet.policy.scheduling import NO_MODELS
from comfyfleet.policy.workflow_stats import warmed


class CompletedRun(NamedTuple):
    """A completed run, as far as the engine knows it."""

    seconds: float
    result: JobResult
    graph: Mapping[str, Any] | None
    lease: Running | None
    """None: another engine leased it, and this one has not read of it."""

    def report(self, mean_s: float | None) -> RunReport:
        loaders: Mapping[str, frozenset[str]] = {}
        samplers: frozenset[str] = frozenset()
        if self.graph is not None and (self.result.timings or self.result.cached_nodes):
            loaders, samplers = loaders_and_samplers(self.graph)
        lease = self.lease
        return RunReport(
            self.seconds,
            self.result,
            loaders,
            samplers,
            NO_MODELS if lease is None else lease.loads,
            0.0 if lease is None else lease.load_s,
            mean_s,
        )


async def learn(context: EngineContext, dispatch: Dispatch, worker_id: WorkerId, run: CompletedRun) -> None:
    worker = context.fleet.workers.get(worker_id)
    if worker is None:
        return
    worker_class = worker.capabilities.worker_class
    models = context.outlook.models_of(dispatch.class_key)
    times, loaded = RunTimes(run.seconds), models
    if models:
        stats = context.known_workflow_stats(dispatch.workflow_hash)
        if stats is None:
            stats = await context.stats(dispatch.workflow_hash)
        known = None if stats is None else stats.durations.get(worker_class)
        report = run.report(None if known is None else known.mean_s)
        times, loaded = times_of(report), context.outlook.ran(worker_id, models, had_models(report, models))
    for delta in context.estimates.deltas(dispatch, worker_class, times):
        await context.add_workflow_stats(delta)
    # Not the worker as it was before: another run of it may have ended meanwhile.
    worker = context.fleet.workers.get(worker_id, worker)
    await context.fleet.record_run(
        worker_id, run.seconds, warmed(worker.live, loaded, dispatch.workflow_hash)
    )
