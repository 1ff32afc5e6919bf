"""Operators' commands to a worker, to all workers and to the queue. The store has the change before anybody
is notified."""

from __future__ import annotations

import contextlib
from typing import Literal

from comfyfleet.engine.commands import CommandQueue, readmit_worker
from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.worker_operations import WorkerOperations
from comfyfleet.model.block import EVERY_WORKER, Pair
from comfyfleet.model.calls import Command
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import WorkerRecord

FleetAction = Literal["drain", "pause", "resume"]
"""The actions of a `Command` that an operator can also send to all workers."""

_EVENTS: dict[FleetAction, str] = {
    "drain": "workers_draining",
    "pause": "workers_paused",
    "resume": "workers_resumed",
}
"""The fleet event for a command to all workers."""


class OperatorCommands:
    def __init__(
        self, context: EngineContext, matcher: Matcher, workers: WorkerOperations, commands: CommandQueue
    ) -> None:
        self._context = context
        self._matcher = matcher
        self._workers = workers
        self._commands = commands

    async def command(self, worker_id: WorkerId, action: FleetAction) -> WorkerRecord:
        worker = await self._flag(worker_id, action)
        await self._commands.send(Command(action), worker_id)
        return worker

    async def resume(self, worker_id: WorkerId) -> WorkerRecord:
        """Gives work again to a worker that was paused, drained or removed. A removed one then registers by itself."""
        removed = await readmit_worker(self._context.store.documents, worker_id)
        if removed is None or await self._context.fleet.stored_worker(worker_id) is not None:
            return await self.command(worker_id, "resume")
        return removed

    async def command_all(self, action: FleetAction) -> list[WorkerRecord]:
        """Returns the changed workers. Offline workers get no pause and no drain."""
        if self._context.store.is_shared:
            await self._context.fleet.sync()
        changed = []
        for worker in list(self._context.fleet.workers.values()):
            is_stopped = worker.is_paused or worker.is_draining
            if is_stopped if action == "resume" else not worker.is_offline:
                # A worker that left meanwhile needs no command.
                with contextlib.suppress(Refusal):
                    changed.append(await self._flag(worker.worker_id, action))
        await self._commands.send(Command(action), EVERY_WORKER)
        self._context.publish_fleet_event(_EVENTS[action], EVERY_WORKER)
        return changed

    async def pause(self, worker_id: WorkerId, is_paused: bool = True) -> None:
        """Ending a pause does not end a drain."""
        if is_paused:
            await self.command(worker_id, "pause")
            return
        await self._workers.set_flags(worker_id, is_paused=False)
        await self._commands.send(Command("resume"), worker_id)

    async def unblock(self, worker_id: WorkerId, target: str) -> bool:
        """A workflow hash also lifts the blocks of that workflow for single tenants."""
        pairs = [
            block.pair
            for block in await self._context.store.blocks(worker_id)
            if block.workflow_hash == target
        ]
        lifted = await self._context.store.lift(pairs or [Pair(worker_id, target)])
        for block in lifted:
            await self._context.unblocked(block, "by hand")
        if worker_id == EVERY_WORKER:
            self._matcher.everything_changed()
        else:
            self._matcher.worker_freed(worker_id)
        return bool(lifted)

    async def pause_queue(self, is_paused: bool = True) -> None:
        await self._context.store.pause_queue(is_paused)
        if not is_paused:
            self._context.outlook.resumed()
            self._matcher.everything_changed()
        self._context.publish_fleet_event("queue_paused" if is_paused else "queue_resumed", EVERY_WORKER)

    async def _flag(self, worker_id: WorkerId, action: FleetAction) -> WorkerRecord:
        match action:
            case "drain":
                return await self._workers.set_flags(worker_id, is_draining=True)
            case "pause":
                return await self._workers.set_flags(worker_id, is_paused=True)
            case "resume":
                return await self._workers.set_flags(worker_id, is_paused=False, is_draining=False)
