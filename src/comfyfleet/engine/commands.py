"""What workers are told: kept until their agent asks, told at once to one that listens, and passed on to other engines.

A command is a hint. What it is about stands in the store (a cancel with its job, a pause or a drain with its worker)
and is told again with every heartbeat, so one that is lost on its way to another engine costs time and nothing else.

Workers that an operator removed while they were there: not admitted until one lets them back.
"""

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
# An agent may have gone over to another engine, and never ask here again.
_MAX_KEPT = 100


class CommandQueue:
    def __init__(self, context: EngineContext, matcher: Matcher) -> None:
        self._context = context
        self._matcher = matcher
        self._told: dict[WorkerId, list[Command]] = defaultdict(list)
        self._listening: dict[WorkerId, asyncio.Event] = {}
        self._served: set[WorkerId] = set()

    def serve(self, worker_id: WorkerId) -> None:
        """Its agent talks to this engine, so what is told to it is kept here."""
        self._served.add(worker_id)

    def dismiss(self, worker_id: WorkerId) -> None:
        self._served.discard(worker_id)
        self._told.pop(worker_id, None)
        if (listening := self._listening.pop(worker_id, None)) is not None:
            listening.set()

    async def tell(self, command: Command, worker_id: WorkerId) -> None:
        self.hear(worker_id, command)
        try:
            await self._context.store.tell(worker_id, command)
        except Fault as fault:
            _LOG.info("worker %s may hear of a %s only later: %s", worker_id, command.action, fault)

    async def tell_to_stop(self, dispatch: Dispatch, stop: Stop) -> None:
        assert dispatch.lease is not None
        reason = dispatch.cancel_reason if stop is Stop.CANCEL else ""
        command = Command(stop.value, dispatch.job_id, dispatch.lease.number, reason)
        await self.tell(command, dispatch.lease.worker_id)

    def hear(self, worker_id: WorkerId, command: Command) -> None:
        """From here or from another engine. A pause is an engine's to keep: its agents are simply given nothing."""
        if command.action == "pause" and command.job_id is not None:
            # Agents stop a run in one way, and one of an older version would pause itself.
            command = msgspec.structs.replace(command, action="cancel", reason=command.reason or "paused")
        if command.action in ("pause", "resume"):
            if command.action == "resume":
                self._take_back_drain(worker_id)
            self._matcher.look_again()
        elif worker_id == EVERY_WORKER:
            for each in tuple(self._served):
                self.hear(each, command)
        elif worker_id in self._served:
            told = self._told[worker_id]
            if command not in told:
                told.append(command)
                del told[:-_MAX_KEPT]
            self.call(worker_id)

    def _take_back_drain(self, worker_id: WorkerId) -> None:
        """One that has not heard of it yet stays. Where the drain still stands, a heartbeat tells it again."""
        for each in tuple(self._told) if worker_id == EVERY_WORKER else (worker_id,):
            kept = [command for command in self._told.pop(each, []) if command.action != "drain"]
            if kept:
                self._told[each] = kept

    def call(self, worker_id: WorkerId) -> None:
        """Its agent is answered at once, with no command: there is news for it with a heartbeat."""
        if (listening := self._listening.get(worker_id)) is not None:
            listening.set()

    def take(self, worker_id: WorkerId) -> list[Command]:
        return self._told.pop(worker_id, [])

    async def wait(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        self.serve(worker_id)
        if not self._told.get(worker_id):
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
            f"an operator removed worker {worker_id!r}: `comfyfleet workers resume {worker_id}` lets it back",
        )


async def keep_out(documents: DocumentStore, worker_id: WorkerId, worker: WorkerRecord | None) -> None:
    body = msgspec.json.encode(_removed(worker_id, worker))
    await documents.put(COLLECTION, worker_id, body, version=None)


async def let_back(documents: DocumentStore, worker_id: WorkerId) -> WorkerRecord | None:
    """As it was when it was removed; it registers by itself. None: it was not kept out."""
    document = await documents.get(COLLECTION, worker_id)
    if document is None or not await documents.remove(COLLECTION, worker_id):
        return None
    return msgspec.json.decode(document.body, type=WorkerRecord)


def _removed(worker_id: WorkerId, worker: WorkerRecord | None) -> WorkerRecord:
    """Without what it offered, which may be long: it says so again when it is let back."""
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
