"""What operators command over the WebSocket, monitors among them: workers, one or all, and the queue."""

from __future__ import annotations

from typing import Any

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.operators import Action
from comfyfleet.model.block import EVERY_WORKER
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.wire import socket
from comfyfleet.wire.answers import worker_status

_ACTIONS: dict[str, Action] = {
    "drain_worker": "drain",
    "pause_worker": "pause",
    "resume_worker": "resume",
}
COMMANDS = frozenset({*_ACTIONS, "pause_queue", "resume_queue"})


async def obey(engine: Engine, name: str, body: Any) -> dict[str, Any]:
    if name in ("pause_queue", "resume_queue"):
        await engine.pause_queue(name == "pause_queue")
        return {"type": "queue_updated", "is_paused": name == "pause_queue"}
    assert isinstance(body, socket.OfWorker)
    changed = await _command(engine, _ACTIONS[name], WorkerId(body.worker_id))
    leases = await engine.leases(changed)
    workers = [
        {"worker_id": each.worker_id, "status": worker_status(each, leases[each.worker_id]).value}
        for each in changed
    ]
    return {"type": "workers_updated", "workers": workers}


async def _command(engine: Engine, action: Action, worker_id: WorkerId) -> list[WorkerRecord]:
    if worker_id == EVERY_WORKER:
        return await engine.command_workers(action)
    if action == "resume":
        return [await engine.resume_worker(worker_id)]
    await (engine.drain_worker(worker_id) if action == "drain" else engine.pause_worker(worker_id))
    found = engine.known_worker(worker_id)
    if found is None:
        raise Refusal(RefusalCode.NOT_FOUND, f"there is no worker {worker_id!r}")
    return [found]
