"""Handlers for operators: queue, dead letter, workers, blocks.

A viewer's key for one tenant sees the workers that serve it and counts of its own newest jobs. Stores count
all tenants together, so `TenantQueueStats` counts from the tenant's job list, up to a bound and at most every
few seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.job_list import records_of
from comfyfleet.engine.operator_commands import FleetAction
from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.hub.http.router import page_of
from comfyfleet.model.access import Caller
from comfyfleet.model.block import UNTIL_LIFTED, Block
from comfyfleet.model.calls import JobFilter
from comfyfleet.model.dispatch import Dispatch, Phase, Readiness
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId, WorkerId
from comfyfleet.model.recent import RecentDict
from comfyfleet.model.worker import TenantAccess, WorkerRecord, WorkerStatus
from comfyfleet.policy.feasibility import admits
from comfyfleet.policy.tenants import is_known_to
from comfyfleet.tracing import in_background
from comfyfleet.wire import answers, bodies
from comfyfleet.wire.answers import StatsBody
from comfyfleet.wire.views import view_of


async def workers_seen(
    engine: Engine, caller: Caller, workers: list[WorkerRecord] | None = None
) -> list[answers.WorkerDetails]:
    """Those of the workers that the caller may see, with their leases and blocks. Default: all workers."""
    if workers is None:
        workers = await engine.workers()
    leases = await engine.leases(workers)
    ends = await _block_ends(engine, caller)
    return [
        _with_blocks(_details_for(worker, leases[worker.worker_id], caller), ends.get(worker.worker_id, []))
        for worker in workers
        if _may_see_worker(worker, leases[worker.worker_id], caller)
    ]


async def _block_ends(engine: Engine, caller: Caller) -> dict[WorkerId, list[float]]:
    """For each worker the end times of the blocks that the caller may see."""
    now = engine.now()
    ends: dict[WorkerId, list[float]] = {}
    for block in await engine.blocks():
        is_seen = caller.scope is None or block.tenant is None or caller.sees(block.tenant)
        if is_seen and not block.names_job and block.is_in_force(now) and block.blocked_until is not None:
            ends.setdefault(block.worker_id, []).append(block.blocked_until)
    return ends


def _with_blocks(found: answers.WorkerDetails, ends: list[float]) -> answers.WorkerDetails:
    first = min((end for end in ends if end != UNTIL_LIFTED), default=None)
    return msgspec.structs.replace(found, blocked_workflows=len(ends), blocked_until=first)


def _may_see_worker(worker: WorkerRecord, leases: list[Dispatch], caller: Caller) -> bool:
    """A tenant also sees a worker that runs its job: the job names the worker."""
    is_known = is_known_to(worker.capabilities.tenant_access, caller.scope)
    return is_known or any(caller.sees(lease.tenant) for lease in leases)


def _details_for(worker: WorkerRecord, leases: list[Dispatch], caller: Caller) -> answers.WorkerDetails:
    found = answers.worker_details(worker, leases)
    if caller.scope is None:
        return found
    # A viewer of one tenant sees that a worker is busy, but not the jobs and names of other tenants.
    alone = TenantAccess(worker.capabilities.tenant_access.isolation)
    return msgspec.structs.replace(
        found,
        current_jobs=tuple(str(lease.job_id) for lease in leases if caller.sees(lease.tenant)),
        capabilities=msgspec.structs.replace(worker.capabilities, tenant_access=alone),
    )


NEWEST = 500
_GOOD_FOR_S = 5.0
_MAX_COUNTS = 1_000


class _Counted(msgspec.Struct, frozen=True):
    phases: Counter[Phase]
    standings: Counter[Readiness]
    payload_bytes: int
    jobs: int


class TenantQueueStats:
    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        """`now` is a monotonic clock."""
        self._engine = engine
        self._now = now
        self._counts: RecentDict[TenantId, tuple[float, asyncio.Task[_Counted]]] = RecentDict(_MAX_COUNTS)

    async def of(self, scope: TenantId | None) -> StatsBody:
        """`scope`: the only tenant that the caller sees; None for all tenants."""
        engine = self._engine
        is_paused = await engine.reader.is_queue_paused()
        if scope is None:
            return view_of(StatsBody, await engine.stats(), is_paused=is_paused, counted=None)
        counted = await self._counted(scope)
        workers = [
            worker
            for worker in await engine.workers()
            if not worker.is_offline and admits(worker.capabilities.tenant_access, scope, is_strict=False)
        ]
        return StatsBody(
            waiting=counted.standings[Readiness.IN_LANE],
            delayed=counted.standings[Readiness.DELAYED],
            paused=counted.standings[Readiness.PAUSED],
            leased=counted.phases[Phase.LEASED],
            completed=counted.phases[Phase.COMPLETED],
            failed=counted.phases[Phase.FAILED],
            cancelled=counted.phases[Phase.CANCELLED],
            workers=len(workers),
            idle_slots=engine.idle_slots,
            payload_bytes=counted.payload_bytes,
            is_paused=is_paused,
            counted=counted.jobs,
        )

    async def _counted(self, tenant: TenantId) -> _Counted:
        until, counting = self._counts.get(tenant, (0.0, None))
        if counting is None or self._now() >= until:
            counting = in_background(self._count(tenant), name="stats")
            until = self._now() + _GOOD_FOR_S
        self._counts[tenant] = (until, counting)
        try:
            # Shielded: other requests await the same count.
            return await asyncio.shield(counting)
        except Exception:
            self._counts.pop(tenant, None)
            raise

    async def _count(self, tenant: TenantId) -> _Counted:
        page = await self._engine.listing(JobFilter(tenant), NEWEST, newest_first=True)
        is_open = [job.job_id for job in page.jobs if not job.phase.is_final]
        found = [each for each in await self._engine.reader.load_many(is_open) if each is not None]
        phases = Counter(job.phase for job in page.jobs if job.phase.is_final)
        phases.update(each.phase for each in found)
        waiting = Counter(each.standing for each in found if each.phase is Phase.QUEUED)
        size = sum(each.payload_bytes for each in found if not each.phase.is_final)
        return _Counted(phases, waiting, size, len(page.jobs))


class FleetHandlers:
    def __init__(self, engine: Engine, stats: TenantQueueStats) -> None:
        self._engine = engine
        self._stats = stats

    async def stats(self, call: HubRequest[None]) -> Reply:
        return Reply(200, await self._stats.of(call.caller.scope))

    async def capacity(self, call: HubRequest[bodies.CapacityQuery]) -> Reply:
        if call.caller.scope is not None:
            raise Refusal(
                RefusalCode.NOT_ALLOWED,
                "the capacity is that of the whole fleet, and this key sees one tenant only: use GET /api/stats",
            )
        return Reply(200, await self._engine.capacity(call.data.within))

    async def pause_queue(self, call: HubRequest[None]) -> Reply:
        await self._engine.pause_queue(True)
        return Reply(200, answers.QueueBody(True))

    async def resume_queue(self, call: HubRequest[None]) -> Reply:
        await self._engine.pause_queue(False)
        return Reply(200, answers.QueueBody(False))

    async def list_dead(self, call: HubRequest[bodies.PageQuery]) -> Reply:
        limit, after = call.data.limit, call.data.cursor
        dead = await self._engine.dead_letter(limit, None if after is None else JobId(after))
        records = await records_of(self._engine.reader.records, [dispatch.job_id for dispatch in dead])
        jobs = [answers.job_body(record) for record in records if call.caller.sees(record.tenant)]
        return Reply(200, answers.JobList(tuple(jobs), dead[-1].job_id if len(dead) == limit else None))

    async def retry_dead(self, call: HubRequest[None]) -> Reply:
        return Reply(200, answers.submitted_body(await self._engine.retry(JobId(call.parameters["job_id"]))))

    async def purge_dead(self, call: HubRequest[bodies.PurgeBody]) -> Reply:
        before = bodies.seconds_of(call.data.before)
        return Reply(200, answers.PurgeAnswer(await self._engine.purge_dead_letter(before, call.data.limit)))

    async def list_services(self, call: HubRequest[bodies.OptionalPageQuery]) -> Reply:
        scope = call.caller.scope
        workers = Counter(
            name
            for worker in await self._engine.workers()
            if not worker.is_offline and is_known_to(worker.capabilities.tenant_access, scope)
            for name in {service.name for service in worker.capabilities.services}
        )
        schemas = {name: each.json_schema() for name, each in self._engine.payloads.formats.items()}
        found = [
            answers.ServiceBody(name, workers[name], schemas.get(name))
            for name in sorted(schemas.keys() | workers)
        ]
        page, cursor = page_of(found, call.data, lambda service: service.name)
        return Reply(200, answers.ServiceList(tuple(page), cursor))

    async def list_workers(self, call: HubRequest[bodies.WorkersQuery]) -> Reply:
        found = await workers_seen(self._engine, call.caller)
        wanted = call.data.status
        if wanted == "active":
            found = [each for each in found if each.status is not WorkerStatus.OFFLINE]
        elif wanted is not None:
            found = [each for each in found if each.status == wanted]
        page, cursor = page_of(found, call.data, lambda worker: worker.id)
        return Reply(200, answers.WorkerList(tuple(map(answers.worker_summary, page)), cursor))

    async def get_worker(self, call: HubRequest[None]) -> Reply:
        return await self._answer(await self._find_worker(call), call)

    async def drain_worker(self, call: HubRequest[None]) -> Reply:
        await self._engine.drain_worker((await self._find_worker(call)).worker_id)
        return await self.get_worker(call)

    async def pause_worker(self, call: HubRequest[None]) -> Reply:
        await self._engine.pause_worker((await self._find_worker(call)).worker_id, True)
        return await self.get_worker(call)

    async def resume_worker(self, call: HubRequest[None]) -> Reply:
        worker = await self._engine.resume_worker(WorkerId(call.parameters["worker_id"]))
        return await self._answer(worker, call)

    async def refresh_worker(self, call: HubRequest[None]) -> Reply:
        worker = await self._find_worker(call)
        if worker.is_offline:
            raise Refusal(
                RefusalCode.NOT_FOUND,
                f"worker {worker.worker_id!r} is offline; it refreshes when it reconnects",
            )
        await self._engine.refresh_worker(worker.worker_id)
        return await self.get_worker(call)

    async def drain_workers(self, call: HubRequest[None]) -> Reply:
        return await self._command_all("drain", call)

    async def pause_workers(self, call: HubRequest[None]) -> Reply:
        return await self._command_all("pause", call)

    async def resume_workers(self, call: HubRequest[None]) -> Reply:
        return await self._command_all("resume", call)

    async def _command_all(self, action: FleetAction, call: HubRequest[None]) -> Reply:
        changed = await self._engine.command_workers(action)
        found = await workers_seen(self._engine, call.caller, changed)
        return Reply(200, answers.WorkerList(tuple(map(answers.worker_summary, found))))

    async def remove_worker(self, call: HubRequest[None]) -> Reply:
        worker = await self._find_worker(call)
        await self._engine.remove_worker(worker.worker_id, is_banned=not worker.is_offline)
        return Reply(204)

    async def list_blocks(self, call: HubRequest[bodies.OptionalPageQuery]) -> Reply:
        now = self._engine.now()
        found = [
            block
            for block in await self._engine.blocks()
            if block.is_in_force(now) and await self._may_see(block, call.caller)
        ]
        page, cursor = page_of(found, call.data, lambda block: f"{block.worker_id}/{block.target}")
        return Reply(200, answers.BlockList(tuple(map(answers.block_body, page)), cursor))

    async def lift_block(self, call: HubRequest[None]) -> Reply:
        worker_id, target = call.parameters["worker_id"], call.parameters["target"]
        if not await self._engine.unblock(WorkerId(worker_id), target):
            raise Refusal(RefusalCode.NOT_FOUND, f"worker {worker_id!r} has no block on {target!r}")
        return Reply(204)

    async def _answer(self, worker: WorkerRecord, call: HubRequest[None]) -> Reply:
        found = await workers_seen(self._engine, call.caller, [worker])
        if not found:
            raise _no_worker(worker.worker_id)
        return Reply(200, found[0])

    async def _find_worker(self, call: HubRequest[None]) -> WorkerRecord:
        worker_id = call.parameters["worker_id"]
        for worker in await self._engine.workers():
            if worker.worker_id == worker_id:
                return worker
        raise _no_worker(worker_id)

    async def _may_see(self, block: Block, caller: Caller) -> bool:
        """A block on one job names the job; only its tenant may see it."""
        if caller.scope is None:
            return True
        if not block.names_job:
            return block.tenant is None or caller.sees(block.tenant)
        dispatch = await self._engine.reader.load(JobId(block.target))
        return dispatch is not None and caller.sees(dispatch.tenant)


def _no_worker(worker_id: str) -> Refusal:
    return Refusal(RefusalCode.NOT_FOUND, f"there is no worker {worker_id!r}")
