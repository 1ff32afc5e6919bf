"""Handlers for operators: queue, dead letter, workers, blocks.

A key of one tenant sees the workers that serve it and counts of its own newest jobs. Stores count all tenants
together, so `TenantQueueStats` counts from the tenant's job list, up to a bound and at most every few
seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.job_list import records_of
from comfyfleet.engine.operator_commands import Action
from comfyfleet.hub.http.pipeline import Handler, HubRequest, Reply
from comfyfleet.hub.http.router import page_of
from comfyfleet.model.access import Caller
from comfyfleet.model.block import UNTIL_LIFTED, Block
from comfyfleet.model.calls import JobFilter
from comfyfleet.model.dispatch import Dispatch, Phase, Readiness
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId, WorkerId
from comfyfleet.model.worker import TenantAccess, WorkerRecord, WorkerStatus
from comfyfleet.policy.feasibility import admits
from comfyfleet.policy.tenants import is_known_to
from comfyfleet.tracing import in_background
from comfyfleet.wire import answers, bodies
from comfyfleet.wire.answers import StatsBody


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
    """The end times of the blocks on this worker that the caller may see."""
    return (await _block_ends(engine, caller)).get(worker_id, [])


async def _block_ends(engine: Engine, caller: Caller) -> dict[WorkerId, list[float]]:
    now = engine.now()
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
    """A tenant also sees a worker that runs its job: the job names the worker."""
    is_known = is_known_to(worker.capabilities.tenant_access, caller.scope)
    return is_known or any(caller.sees(lease.tenant) for lease in leases)


def details(worker: WorkerRecord, leases: list[Dispatch], caller: Caller) -> answers.WorkerDetails:
    found = answers.worker(worker, leases)
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
_MAX_KNOWN = 1_000


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
        self._known: dict[TenantId, tuple[float, asyncio.Task[_Counted]]] = {}

    async def of(self, scope: TenantId | None) -> StatsBody:
        """`scope`: the only tenant that the caller sees; None for all tenants."""
        engine = self._engine
        is_paused = await engine.store.is_queue_paused()
        if scope is None:
            stats = await engine.stats()
            return StatsBody(
                **{name: getattr(stats, name) for name in stats.__struct_fields__}, is_paused=is_paused
            )
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
        until, counting = self._known.pop(tenant, (0.0, None))
        if counting is None or self._now() >= until:
            counting = in_background(self._count(tenant), name="stats")
            until = self._now() + _GOOD_FOR_S
        self._known[tenant] = (until, counting)
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        try:
            # Shielded: other requests await the same count.
            return await asyncio.shield(counting)
        except Exception:
            self._known.pop(tenant, None)
            raise

    async def _count(self, tenant: TenantId) -> _Counted:
        page = await self._engine.listing(JobFilter(tenant), NEWEST, newest_first=True)
        is_open = [job.job_id for job in page.jobs if not job.phase.is_final]
        found = [each for each in await self._engine.store.load_many(is_open) if each is not None]
        phases = Counter(job.phase for job in page.jobs if job.phase.is_final)
        phases.update(each.phase for each in found)
        waiting = Counter(each.standing for each in found if each.phase is Phase.QUEUED)
        size = sum(each.payload_bytes for each in found if not each.phase.is_final)
        return _Counted(phases, waiting, size, len(page.jobs))


class FleetHandlers:
    def __init__(self, engine: Engine, stats: TenantQueueStats) -> None:
        self._engine = engine
        self._stats = stats

    def bound(self) -> dict[str, Handler]:
        return {
            "stats": self.stats,
            "pause_queue": self.pause_queue,
            "resume_queue": self.resume_queue,
            "list_dead": self.list_dead,
            "retry_dead": self.retry_dead,
            "purge_dead": self.purge_dead,
            "list_workers": self.list_workers,
            "get_worker": self.get_worker,
            "drain_worker": self.drain,
            "pause_worker": self.pause,
            "resume_worker": self.resume,
            "refresh_worker": self.refresh,
            "remove_worker": self.remove,
            "drain_workers": self.drain_all,
            "pause_workers": self.pause_all,
            "resume_workers": self.resume_all,
            "list_blocks": self.list_blocks,
            "lift_block": self.lift_block,
        }

    async def stats(self, call: HubRequest[None]) -> Reply:
        return Reply(200, await self._stats.of(call.caller.scope))

    async def pause_queue(self, call: HubRequest[None]) -> Reply:
        await self._engine.pause_queue(True)
        return Reply(200, answers.QueueBody(True))

    async def resume_queue(self, call: HubRequest[None]) -> Reply:
        await self._engine.pause_queue(False)
        return Reply(200, answers.QueueBody(False))

    async def list_dead(self, call: HubRequest[bodies.PageQuery]) -> Reply:
        limit, after = call.given.limit, call.given.cursor
        dead = await self._engine.dead_letter(limit, None if after is None else JobId(after))
        records = await records_of(self._engine.store.records, [dispatch.job_id for dispatch in dead])
        jobs = [answers.job(record) for record in records if call.caller.sees(record.tenant)]
        return Reply(200, answers.JobList(tuple(jobs), dead[-1].job_id if len(dead) == limit else None))

    async def retry_dead(self, call: HubRequest[None]) -> Reply:
        return Reply(200, answers.submitted(await self._engine.retry(JobId(call.parameters["job_id"]))))

    async def purge_dead(self, call: HubRequest[bodies.PurgeBody]) -> Reply:
        before = bodies.seconds_of(call.given.before)
        return Reply(200, answers.PurgeAnswer(await self._engine.purge_dead_letter(before, call.given.limit)))

    async def list_workers(self, call: HubRequest[bodies.WorkersQuery]) -> Reply:
        found = await workers_seen(self._engine, call.caller)
        wanted = call.given.status
        if wanted == "active":
            found = [each for each in found if each.status is not WorkerStatus.OFFLINE]
        elif wanted is not None:
            found = [each for each in found if each.status == wanted]
        page, cursor = page_of(found, call.given, lambda worker: worker.id)
        return Reply(200, answers.WorkerList(tuple(map(answers.summary, page)), cursor))

    async def get_worker(self, call: HubRequest[None]) -> Reply:
        worker = await self._known(call)
        leases = (await self._engine.leases([worker]))[worker.worker_id]
        if not may_see(worker, leases, call.caller):
            raise _no_worker(worker.worker_id)
        ends = await blocks_of(self._engine, call.caller, worker.worker_id)
        return Reply(200, with_blocks(details(worker, leases, call.caller), ends))

    async def drain(self, call: HubRequest[None]) -> Reply:
        await self._engine.drain_worker((await self._known(call)).worker_id)
        return await self.get_worker(call)

    async def pause(self, call: HubRequest[None]) -> Reply:
        await self._engine.pause_worker((await self._known(call)).worker_id, True)
        return await self.get_worker(call)

    async def resume(self, call: HubRequest[None]) -> Reply:
        worker = await self._engine.resume_worker(WorkerId(call.parameters["worker_id"]))
        leases = (await self._engine.leases([worker]))[worker.worker_id]
        return Reply(200, details(worker, leases, call.caller))

    async def refresh(self, call: HubRequest[None]) -> Reply:
        worker = await self._known(call)
        if worker.is_offline:
            raise Refusal(
                RefusalCode.NOT_FOUND,
                f"worker {worker.worker_id!r} is offline; it refreshes when it reconnects",
            )
        await self._engine.refresh_worker(worker.worker_id)
        return await self.get_worker(call)

    async def drain_all(self, call: HubRequest[None]) -> Reply:
        return await self._command_all("drain", call)

    async def pause_all(self, call: HubRequest[None]) -> Reply:
        return await self._command_all("pause", call)

    async def resume_all(self, call: HubRequest[None]) -> Reply:
        return await self._command_all("resume", call)

    async def _command_all(self, action: Action, call: HubRequest[None]) -> Reply:
        changed = await self._engine.command_workers(action)
        leases = await self._engine.leases(changed)
        found = (details(worker, leases[worker.worker_id], call.caller) for worker in changed)
        return Reply(200, answers.WorkerList(tuple(map(answers.summary, found))))

    async def remove(self, call: HubRequest[None]) -> Reply:
        worker = await self._known(call)
        await self._engine.remove_worker(worker.worker_id, is_kept_out=not worker.is_offline)
        return Reply(204)

    async def list_blocks(self, call: HubRequest[bodies.WholeQuery]) -> Reply:
        now = self._engine.now()
        found = [
            block
            for block in await self._engine.blocks()
            if block.is_in_force(now) and await self._may_see(block, call.caller)
        ]
        page, cursor = page_of(found, call.given, lambda block: f"{block.worker_id}/{block.target}")
        return Reply(200, answers.BlockList(tuple(map(answers.block, page)), cursor))

    async def lift_block(self, call: HubRequest[None]) -> Reply:
        worker_id, target = call.parameters["worker_id"], call.parameters["target"]
        if not await self._engine.unblock(WorkerId(worker_id), target):
            raise Refusal(RefusalCode.NOT_FOUND, f"worker {worker_id!r} has no block on {target!r}")
        return Reply(204)

    async def _known(self, call: HubRequest[None]) -> WorkerRecord:
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
        dispatch = await self._engine.store.load(JobId(block.target))
        return dispatch is not None and caller.sees(dispatch.tenant)


def _no_worker(worker_id: str) -> Refusal:
    return Refusal(RefusalCode.NOT_FOUND, f"there is no worker {worker_id!r}")
