"""By when each job of a matching pass must go before others: the promise of `policy/scheduling.py` with what the engine
knows at this moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import inf

from comfyfleet.engine.context import EngineContext
from comfyfleet.model.dispatch import Candidate
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.policy.fair_share import TenantTurn
from comfyfleet.policy.scheduling import fifo_starts, is_behind, start_by


def start_times(
    context: EngineContext,
    jobs: Mapping[JobId, Candidate],
    turns: Mapping[JobId, TenantTurn],
    now: float,
    *,
    has_models: bool,
) -> dict[JobId, float]:
    """Empty where only age decides, which is the usual case without models."""
    if not has_models and not _has_ranks(context, jobs):
        return {}
    lines: defaultdict[tuple[int, TenantId | None], list[Candidate]] = defaultdict(list)
    for each in jobs.values():
        # Age does not order the jobs of tenants with fair shares.
        lines[each.lane.priority, each.lane.tenant if each.weight else None].append(each)
    pace_s, since = context.outlook.pace(), context.outlook.moving_since
    patience = context.rules.patience
    loads = {
        key: context.outlook.slowest_load_s(key) for key in {each.lane.class_key for each in jobs.values()}
    }
    starts: dict[JobId, float] = {}
    for line in lines.values():
        line.sort(key=lambda each: each.sequence)
        fifo = fifo_starts([(max(each.queued_at, since), each.place) for each in line], pace_s)
        for each, at in zip(line, fifo, strict=True):
            starts[each.job_id] = start_by(at, patience, loads[each.lane.class_key])
    if turns:
        furthest = _virtual_times(jobs)
        for job_id, each in jobs.items():
            others = max((ahead for at, ahead in furthest.items() if _competes(at, each)), default=-inf)
            if each.weight and is_behind(turns[job_id].start, others, patience, loads[each.lane.class_key]):
                # Between tenants neither age nor place says who is late.
                starts[job_id] = min(starts[job_id], now)
    return starts


def _has_ranks(context: EngineContext, jobs: Mapping[JobId, Candidate]) -> bool:
    """Whether anything but age orders jobs without models: a preferred worker, or few workers that can run them."""
    fleet, classes = context.fleet, {each.lane.class_key for each in jobs.values()}
    if any(fleet.classes[key].preferences.workers for key in classes):
        return True
    return len(classes) > 1 and len({fleet.selectivity(key) for key in classes}) > 1


def _virtual_times(jobs: Mapping[JobId, Candidate]) -> dict[tuple[int, TenantId], float]:
    return {
        (each.lane.priority, each.lane.tenant): each.virtual_time for each in jobs.values() if each.weight
    }


def _competes(at: tuple[int, TenantId], candidate: Candidate) -> bool:
    priority, tenant = at
    return priority == candidate.lane.priority and tenant != candidate.lane.tenant
