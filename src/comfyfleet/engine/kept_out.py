"""Workers that an operator removed while they were there: not admitted until one lets them back."""

from __future__ import annotations

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import ProfileKey, WorkerId
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.ports import Cabinet

DRAWER = "removed_workers"


async def check(cabinet: Cabinet, worker_id: WorkerId) -> None:
    if await cabinet.get(DRAWER, worker_id) is not None:
        raise Refusal(
            RefusalCode.NOT_ALLOWED,
            f"an operator removed worker {worker_id!r}: `comfyfleet workers resume {worker_id}` lets it back",
        )


async def keep_out(cabinet: Cabinet, worker_id: WorkerId, worker: WorkerRecord | None) -> None:
    body = msgspec.json.encode(_removed(worker_id, worker))
    await cabinet.put(DRAWER, worker_id, body, version=None)


async def let_back(cabinet: Cabinet, worker_id: WorkerId) -> WorkerRecord | None:
    """As it was when it was removed; it registers by itself. None: it was not kept out."""
    document = await cabinet.get(DRAWER, worker_id)
    if document is None or not await cabinet.remove(DRAWER, worker_id):
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
