"""Fair share between tenants: the charge of a lease, its correction, and the order within a matching pass.

Stores order tenants by virtual time and record the charges (`model/tenant.py`). A pass may lease several jobs of one
tenant before any charge is visible, so it needs its own order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import NamedTuple

from comfyfleet.model.dispatch import Candidate, Lease
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.policy.rules import Rules


def charge_s(expected_s: float | None, rules: Rules) -> float:
    """What fair share counts for a lease until its end is known, in GPU-seconds."""
    return rules.charge_s if expected_s is None else expected_s


def used_s(lease: Lease | None, now: float) -> float | None:
    """How long an attempt that did not complete used its worker: 0 if the worker never acknowledged the lease."""
    if lease is None:
        return None
    return max(0.0, now - lease.leased_at) if lease.is_acknowledged else 0.0


class TenantTurn(NamedTuple):
    """The virtual time of a job's tenant before and after its lease, if earlier jobs of the tenant are leased too."""

    start: float
    end: float


def tenant_turns(
    candidates: Iterable[Candidate], seconds_of: Callable[[Candidate], float]
) -> dict[JobId, TenantTurn]:
    """Each job of a tenant moves the next one back. Without charges all turns are equal."""
    spent: dict[TenantId, float] = {}
    found: dict[JobId, TenantTurn] = {}
    for each in sorted(candidates, key=lambda each: (-each.lane.priority, each.sequence)):
        if not each.weight:
            found[each.job_id] = TenantTurn(0.0, 0.0)
            continue
        start = spent.get(each.lane.tenant, each.virtual_time)
        end = spent[each.lane.tenant] = start + seconds_of(each) / each.weight
        found[each.job_id] = TenantTurn(start, end)
    return found


def due_now(
    chosen: Mapping[str, JobId],
    seen: Mapping[JobId, Candidate],
    turn: Mapping[JobId, TenantTurn],
    quantum_s: float,
) -> dict[str, JobId]:
    """The chosen jobs that no unseen job could precede. The others wait for the next pass, after these are charged.

    A pass does not see tenants that are a quantum ahead of the least served one, nor the jobs behind the last seen job
    of a tenant. The first job of each priority is always due.
    """
    ends: dict[tuple[int, TenantId], float] = {}
    for job_id, each in seen.items():
        at = (each.lane.priority, each.lane.tenant)
        ends[at] = max(ends.get(at, 0.0), turn[job_id].end)
    firsts: dict[int, float] = {}
    for job_id in chosen.values():
        priority = seen[job_id].lane.priority
        firsts[priority] = min(firsts.get(priority, inf), turn[job_id].start)
    limits = {
        priority: max(first, min(first + quantum_s, *(end for at, end in ends.items() if at[0] == priority)))
        for priority, first in firsts.items()
    }
    return {
        slot: job_id
        for slot, job_id in chosen.items()
        if turn[job_id].start <= limits[seen[job_id].lane.priority]
    }
