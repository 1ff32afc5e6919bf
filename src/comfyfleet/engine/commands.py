"""Queues commands for workers, delivers them to agents that listen, forwards them to other engines.

A command is a hint. The store holds its cause (a cancel, a pause, a drain), and each heartbeat repeats it, so
a lost command only costs time. The module also keeps the list of workers that an operator removed."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict

import msgspec

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.matcher import Matcher
from comfyfleet.model.block import EVERY_WORKER
from comfyfleet.model.calls import Command
from comfyfleet.model.dispatch import Dispatch, Stop
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import ProfileKey, WorkerId
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.ports import DocumentStore

_LOG = logging.getLogger(__name__)
# An agent may have moved to another engine and never ask here again.
_MAX_KEPT = 100


class CommandQueue:
    def __init__(self, context: EngineContext, matcher: Matcher) -> None:
        self._context = context
        self._matcher = matcher
        self._pending: dict[WorkerId, list[Command]] = defaultdict(list)
        self._listening: dict[WorkerId, asyncio.Event] = {}
        self._served: set[WorkerId] = set()

    def serve(self, worker_id: WorkerId) -> None:
        """The worker's agent talks to this engine, so its commands queue here."""
        self._served.add(worker_id)

    def dismiss(self, worker_id: WorkerId) -> None:
        self._served.discard(worker_id)
        self._pending.pop(worker_id, None)
        if (listening := self._listening.pop(worker_id, None)) is not None:
            listening.set()

    async def send(self, command: Command, worker_id: WorkerId) -> None:
        self.on_command(worker_id, command)
        try:
            await self._context.store.send_command(worker_id, command)
        except Fault as fault:
            _LOG.info(
                "worker %s gets the command %s only with its next heartbeat: %s",
                worker_id,
                command.action,
                fault,
            )

    async def send_stop(self, dispatch: Dispatch, stop: Stop) -> None:
        assert dispatch.lease is not None
        reason = dispatch.cancel_reason if stop is Stop.CANCEL else ""
        command = Command(stop.value, dispatch.job_id, dispatch.lease.number, reason)
        await self.send(command, dispatch.lease.worker_id)

    def on_command(self, worker_id: WorkerId, command: Command) -> None:
        """Handles a command of any engine. Agents never see a pause: they just get no jobs."""
        if command.action == "pause" and command.job_id is not None:
            # Agents know only one way to stop a run, and old versions would pause the whole worker.
            command = msgspec.structs.replace(command, action="cancel", reason=command.reason or "paused")
        if command.action in ("pause", "resume"):
            if command.action == "resume":
                self._take_back_drain(worker_id)
            self._matcher.reload_workers()
        elif worker_id == EVERY_WORKER:
            for each in tuple(self._served):
                self.on_command(each, command)
        elif worker_id in self._served:
            pending = self._pending[worker_id]
            if command not in pending:
                pending.append(command)
                del pending[:-_MAX_KEPT]
            self.call(worker_id)

    def _take_back_drain(self, worker_id: WorkerId) -> None:
        """Drops a drain that the agent has not fetched. A heartbeat repeats it if the worker still drains."""
        for each in tuple(self._pending) if worker_id == EVERY_WORKER else (worker_id,):
            kept = [command for command in self._pending.pop(each, []) if command.action != "drain"]
            if kept:
                self._pending[each] = kept

    def call(self, worker_id: WorkerId) -> None:
        """Wakes the waiting agent without a command, so that it sends a heartbeat now."""
        if (listening := self._listening.get(worker_id)) is not None:
            listening.set()

    def take(self, worker_id: WorkerId) -> list[Command]:
        return self._pending.pop(worker_id, [])

    async def wait(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        self.serve(worker_id)
        if not self._pending.get(worker_id):
            listening = self._listening.setdefault(worker_id, asyncio.Event())
            listening.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await listening.wait()
            except TimeoutError:
                return ()
        return tuple(self.take(worker_id))


COLLECTION = "removed_workers"


async def check(documents: DocumentStore, worker_id: WorkerId) -> None:
    if await documents.get(COLLECTION, worker_id) is not None:
        raise Refusal(
            RefusalCode.NOT_ALLOWED,
            f"an operator removed worker {worker_id!r}: `comfyfleet workers resume {worker_id}` readmits it",
        )


async def ban_worker(documents: DocumentStore, worker_id: WorkerId, worker: WorkerRecord | None) -> None:
    body = msgspec.json.encode(_removed(worker_id, worker))
    await documents.put(COLLECTION, worker_id, body, version=None)


async def readmit_worker(documents: DocumentStore, worker_id: WorkerId) -> WorkerRecord | None:
    """Readmits a removed worker, which then registers by itself. Returns its old record, if any."""
    document = await documents.get(COLLECTION, worker_id)
    if document is None or not await documents.remove(COLLECTION, worker_id):
        return None
    return msgspec.json.decode(document.body, type=WorkerRecord)


def _removed(worker_id: WorkerId, worker: WorkerRecord | None) -> WorkerRecord:
    """Drops the worker's inventory, which may be long; the worker declares it again when it registers."""
    services = () if worker is None else tuple(Service(each.name) for each in worker.capabilities.services)
    seen_at = 0.0 if worker is None else worker.last_seen_at
    return WorkerRecord(
        worker_id,
        Capabilities(services),
        ProfileKey(""),
        1,
        seen_at,
        seen_at,
        is_offline=True,
        offline_reason="removed by an operator",
    )
