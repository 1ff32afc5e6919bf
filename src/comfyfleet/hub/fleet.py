"""The operators' handlers: the queue, the dead letter, the workers, the blocks."""

from __future__ import annotations

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.listing import records_of
from comfyfleet.engine.operators import Action
from comfyfleet.hub.door import Call, Handler, Reply
from comfyfleet.hub.queries import page_of
from comfyfleet.hub.scoped_stats import StatsDesk
from comfyfleet.hub.seen_workers import blocks_of, details, may_see, with_blocks, workers_seen
from comfyfleet.model.access import Caller
from comfyfleet.model.block import Block
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.worker import WorkerRecord, WorkerStatus
from comfyfleet.wire import answers, bodies


class FleetHandlers:
    def __init__(self, engine: Engine, stats: StatsDesk) -> None:
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

    # the queue

    async def stats(self, call: Call[None]) -> Reply:
        return Reply(200, await self._stats.of(call.caller.scope))

    async def pause_queue(self, call: Call[None]) -> Reply:
        await self._engine.pause_queue(True)
        return Reply(200, answers.QueueBody(True))

    async def resume_queue(self, call: Call[None]) -> Reply:
        await self._engine.pause_queue(False)
        return Reply(200, answers.QueueBody(False))

    # the dead letter

    async def list_dead(self, call: Call[bodies.PageQuery]) -> Reply:
        limit, after = call.given.limit, call.given.cursor
        dead = await self._engine.dead_letter(limit, None if after is None else JobId(after))
        records = await records_of(self._engine.store.records, [dispatch.job_id for dispatch in dead])
        jobs = [answers.job(record) for record in records if call.caller.sees(record.tenant)]
        return Reply(200, answers.JobList(tuple(jobs), dead[-1].job_id if len(dead) == limit else None))

    async def retry_dead(self, call: Call[None]) -> Reply:
        return Reply(200, answers.submitted(await self._engine.retry(JobId(call.parameters["job_id"]))))

    async def purge_dead(self, call: Call[bodies.PurgeBody]) -> Reply:
        before = bodies.seconds_of(call.given.before)
        return Reply(200, answers.PurgeAnswer(await self._engine.purge_dead_letter(before, call.given.limit)))

    # workers

    async def list_workers(self, call: Call[bodies.WorkersQuery]) -> Reply:
        found = await workers_seen(self._engine, call.caller)
        wanted = call.given.status
        if wanted == "active":
            found = [each for each in found if each.status is not WorkerStatus.OFFLINE]
        elif wanted is not None:
            found = [each for each in found if each.status == wanted]
        page, cursor = page_of(found, call.given, lambda worker: worker.id)
        return Reply(200, answers.WorkerList(tuple(map(answers.summary, page)), cursor))

    async def get_worker(self, call: Call[None]) -> Reply:
        worker = await self._known(call)
        leases = await self._engine.store.leases_of(worker.worker_id)
        if not may_see(worker, leases, call.caller):
            raise _no_worker(worker.worker_id)
        ends = await blocks_of(self._engine, call.caller, worker.worker_id)
        return Reply(200, with_blocks(details(worker, leases, call.caller), ends))

    async def drain(self, call: Call[None]) -> Reply:
        await self._engine.drain_worker((await self._known(call)).worker_id)
        return await self.get_worker(call)

    async def pause(self, call: Call[None]) -> Reply:
        await self._engine.pause_worker((await self._known(call)).worker_id, True)
        return await self.get_worker(call)

    async def resume(self, call: Call[None]) -> Reply:
        worker = await self._engine.resume_worker(WorkerId(call.parameters["worker_id"]))
        leases = await self._engine.store.leases_of(worker.worker_id)
        return Reply(200, details(worker, leases, call.caller))

    async def refresh(self, call: Call[None]) -> Reply:
        worker = await self._known(call)
        if worker.is_offline:
            raise Refusal(
                RefusalCode.NOT_FOUND,
                f"worker {worker.worker_id!r} is offline: it looks when it is back",
            )
        await self._engine.refresh_worker(worker.worker_id)
        return await self.get_worker(call)

    async def drain_all(self, call: Call[None]) -> Reply:
        return await self._command_all("drain", call)

    async def pause_all(self, call: Call[None]) -> Reply:
        return await self._command_all("pause", call)

    async def resume_all(self, call: Call[None]) -> Reply:
        return await self._command_all("resume", call)

    async def _command_all(self, action: Action, call: Call[None]) -> Reply:
        changed = await self._engine.command_workers(action)
        leases = await self._engine.leases(changed)
        found = (details(worker, leases[worker.worker_id], call.caller) for worker in changed)
        return Reply(200, answers.WorkerList(tuple(map(answers.summary, found))))

    async def remove(self, call: Call[None]) -> Reply:
        worker = await self._known(call)
        await self._engine.remove_worker(worker.worker_id, is_kept_out=not worker.is_offline)
        return Reply(204)

    # blocks

    async def list_blocks(self, call: Call[bodies.WholeQuery]) -> Reply:
        now = await self._engine.store.now()
        found = [
            block
            for block in await self._engine.blocks()
            if block.is_in_force(now) and await self._may_see(block, call.caller)
        ]
        page, cursor = page_of(found, call.given, lambda block: f"{block.worker_id}/{block.target}")
        return Reply(200, answers.BlockList(tuple(map(answers.block, page)), cursor))

    async def lift_block(self, call: Call[None]) -> Reply:
        worker_id, target = call.parameters["worker_id"], call.parameters["target"]
        if not await self._engine.unblock(WorkerId(worker_id), target):
            raise Refusal(RefusalCode.NOT_FOUND, f"worker {worker_id!r} is not kept from {target!r}")
        return Reply(204)

    async def _known(self, call: Call[None]) -> WorkerRecord:
        worker_id = call.parameters["worker_id"]
        for worker in await self._engine.workers():
            if worker.worker_id == worker_id:
                return worker
        raise _no_worker(worker_id)

    async def _may_see(self, block: Block, caller: Caller) -> bool:
        """A block that keeps one job off a worker names the job, and what one tenant's jobs met is that tenant's."""
        if caller.scope is None:
            return True
        if not block.names_job:
            return block.tenant is None or caller.sees(block.tenant)
        dispatch = await self._engine.store.load(JobId(block.target))
        return dispatch is not None and caller.sees(dispatch.tenant)


def _no_worker(worker_id: str) -> Refusal:
    return Refusal(RefusalCode.NOT_FOUND, f"there is no worker {worker_id!r}")
