"""What a completed run teaches about times: how long the workflow runs with its models loaded, and how long its models
take to load. Pure.

Runs with and without a load are told apart by the nodes that name model files: a server that had the models takes these
nodes from its cache. Load times are kept as workflow statistics under reserved keys (`load_key`), with durations by
worker class: stores need nothing new for them, and engines share them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.job import JobResult
from comfyfleet.policy.demand import ModelSet
from comfyfleet.policy.scheduling import NO_MODELS

_PREFIX = "load:"
ANY_MODELS = WorkflowHash(f"{_PREFIX}any")
"""The key of the mean load time over all models. A workflow hash has no colon."""
DEFAULT_LOAD_S = 3.0
"""Until the first load was seen."""
DEFAULT_RUN_S = 1.0
"""Until the first run was seen."""


def load_key(models: ModelSet) -> WorkflowHash:
    """The key under which the load time of this set of models is kept."""
    digest = hashlib.sha256("\n".join(sorted(models)).encode()).hexdigest()
    return WorkflowHash(f"{_PREFIX}{digest[:32]}")


def is_load_key(key: WorkflowHash) -> bool:
    return key.startswith(_PREFIX)


class RunReport(msgspec.Struct, frozen=True):
    """What is known about a completed run."""

    seconds: float
    result: JobResult
    loaders: Mapping[str, ModelSet]
    """By node: the model files that it names."""
    samplers: frozenset[str]
    """The nodes that do the main work."""
    expected: ModelSet
    """The models that the lease expected to be loaded first. Empty: the worker had them."""
    expected_load_s: float
    mean_s: float | None
    """The known duration of this workflow on this worker class."""


class RunTimes(msgspec.Struct, frozen=True):
    run_s: float | None
    """The duration without loads. None: the run is not typical."""
    models: ModelSet = NO_MODELS
    """What was loaded."""
    load_s: float | None = None


def times_of(report: RunReport) -> RunTimes:
    result = report.result
    if any(node in report.samplers for node in result.cached_nodes):
        # The server knew the outcome already, or most of it.
        return RunTimes(None)
    if not result.timings:
        return _without_timings(report)
    spent = {timing.node_id: timing.seconds for timing in result.timings if timing.node_id in report.loaders}
    ran = frozenset[str]().union(*(report.loaders[node] for node in spent))
    if not ran:
        return RunTimes(report.seconds)
    # A lower estimate: weights also travel to the card when the first node uses them.
    load_s = min(sum(spent.values()), report.seconds)
    if report.mean_s is not None:
        load_s = max(load_s, report.seconds - report.mean_s)
    # A job may also require models that its workflow does not name.
    models = ran | (report.expected - frozenset[str]().union(*report.loaders.values()))
    return RunTimes(report.seconds - load_s, models, load_s)


def _without_timings(report: RunReport) -> RunTimes:
    """Workers that report no timings: the lease says whether models had to be loaded."""
    if not report.expected:
        return RunTimes(report.seconds)
    if report.mean_s is None:
        # Neither is known yet. At most half counts as load, or an unknown workflow would take no time at all.
        return RunTimes(report.seconds - min(report.expected_load_s, report.seconds / 2))
    load_s = report.seconds - report.mean_s
    return RunTimes(report.mean_s, report.expected, load_s) if load_s > 0 else RunTimes(None)
