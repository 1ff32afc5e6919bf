"""Fair share between tenants: what a lease is charged with, what it took in the end, and who comes first in a round.

Stores order tenants by virtual time and keep what is charged (`model/tenant.py`). Here are the numbers they are given,
and the order inside one round, in which several jobs of a tenant may be leased before any charge can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import NamedTuple

from comfyfleet.model.dispatch import Candidate, Lease
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.policy.rules import Rules


def charge_s(expected_s: float | None, rules: Rules) -> float:
    """The estimate a lease is charged with."""
    return rules.charge_s if expected_s is None else expected_s


def used_s(lease: Lease | None, now: float) -> float | None:
    """For how long an attempt that did not complete had its worker. One that was never taken up did not have it."""
    if lease is None:
        return None
    return max(0.0, now - lease.leased_at) if lease.is_acknowledged else 0.0


class TenantTurn(NamedTuple):
    """A job in view of a round: the virtual time of its tenant before and after its lease, if those before it are
    leased too."""

    start: float
    end: float


def turns(
    candidates: Iterable[Candidate], seconds_of: Callable[[Candidate], float]
) -> dict[JobId, TenantTurn]:
    """Each job of a tenant costs the next one its place. Where nobody is charged, all are equal."""
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
    """Of the jobs that were given slots, those that nothing out of view could come before; the others wait until these
    are charged, and the round looks again.

    Out of view are tenants that were served a quantum more than the least, and what stands behind the last job that
    was seen of a tenant. The first of each priority is always due.
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
