"""Workers as a caller sees them: all of them with everything, or to a key of one tenant those that work for it."""

from __future__ import annotations

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.access import Caller
from comfyfleet.model.block import UNTIL_LIFTED
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import TenantAccess, WorkerRecord
from comfyfleet.policy.visibility import is_known_to
from comfyfleet.wire import answers


async def workers_seen(engine: Engine, caller: Caller) -> list[answers.WorkerDetails]:
    workers = await engine.workers()
    held = await engine.leases(workers)
    ends = await _block_ends(engine, caller)
    return [
        with_blocks(details(worker, held[worker.worker_id], caller), ends.get(worker.worker_id, []))
        for worker in workers
        if may_see(worker, held[worker.worker_id], caller)
    ]


async def blocks_of(engine: Engine, caller: Caller, worker_id: WorkerId) -> list[float]:
    """When each block of a workflow on this worker ends, of those that the caller may know."""
    return (await _block_ends(engine, caller)).get(worker_id, [])


async def _block_ends(engine: Engine, caller: Caller) -> dict[WorkerId, list[float]]:
    now = await engine.store.now()
    ends: dict[WorkerId, list[float]] = {}
    for block in await engine.blocks():
        is_seen = caller.scope is None or block.tenant is None or caller.sees(block.tenant)
        if is_seen and not block.names_job and block.is_in_force(now) and block.blocked_until is not None:
            ends.setdefault(block.worker_id, []).append(block.blocked_until)
    return ends


def with_blocks(found: answers.WorkerDetails, ends: list[float]) -> answers.WorkerDetails:
    first = min((end for end in ends if end != UNTIL_LIFTED), default=None)
    return msgspec.structs.replace(found, blocked_workflows=len(ends), blocked_until=first)


def may_see(worker: WorkerRecord, leases: list[Dispatch], caller: Caller) -> bool:
    """One that runs a job of the tenant stands in that job by its name."""
    is_known = is_known_to(worker.capabilities.tenant_access, caller.scope)
    return is_known or any(caller.sees(lease.tenant) for lease in leases)


def details(worker: WorkerRecord, leases: list[Dispatch], caller: Caller) -> answers.WorkerDetails:
    found = answers.worker(worker, leases)
    if caller.scope is None:
        return found
    # A viewer of one tenant sees that a worker is busy, not with whose jobs, nor whom else it serves.
    alone = TenantAccess(worker.capabilities.tenant_access.isolation)
    return msgspec.structs.replace(
        found,
        current_jobs=tuple(str(lease.job_id) for lease in leases if caller.sees(lease.tenant)),
        capabilities=msgspec.structs.replace(worker.capabilities, tenant_access=alone),
    )
