"""What the workers told of their nodes, kept in the store's cabinet, and the conversion of workflows with it.

Any engine on a store converts with what another one was told. How a workflow is converted is `model/conversion.py`'s.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from comfyfleet.engine.context import Context
from comfyfleet.model.conversion import EXPORT, cannot_convert, convert_workflow, node_classes_of
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.model.node_definitions import NodeDefinitions, Widget
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.feasibility import admits
from comfyfleet.ports import Cabinet

DRAWER = "nodes"
MAX_PARTS = 32
_PART_BYTES = 60 * 1024
_MAX_BYTES = 16 * 1024 * 1024
"""Unpacked: ten times what a server with thousands of nodes has to tell."""

_DECODER = msgspec.json.Decoder(dict[str, tuple[Widget, ...]])


class NodeDesk:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._last: tuple[bytes, NodeDefinitions] = (b"", {})
        """What was read last, packed and unpacked: of a batch every workflow needs it."""

    async def describe(self, worker_id: WorkerId, definitions: NodeDefinitions) -> None:
        """Takes the place of what this worker told before."""
        plain = msgspec.json.encode(definitions, order="deterministic")
        packed = zlib.compress(plain) if len(plain) <= _MAX_BYTES else plain
        parts = [packed[start : start + _PART_BYTES] for start in range(0, len(packed), _PART_BYTES)]
        if len(parts) > MAX_PARTS:
            raise Refusal(
                RefusalCode.TOO_LARGE,
                f"what {worker_id!r} tells of its nodes takes {len(plain)} bytes; {_MAX_BYTES} are kept, and "
                f"{MAX_PARTS * _PART_BYTES} when packed",
            )
        for number, part in enumerate(parts):
            body = bytes([len(parts)]) + part
            known = await self._context.store.cabinet.get(DRAWER, _name(worker_id, number))
            if known is None or known.body != body:
                await self._context.store.cabinet.put(DRAWER, _name(worker_id, number), body, version=None)

    async def convert(self, workflow: Mapping[str, Any], tenant: TenantId) -> dict[str, dict[str, Any]]:
        """With the definitions of a live worker that has every node of it, and works for this tenant."""
        needed = node_classes_of(workflow)
        fleet, context = self._context.fleet, self._context
        if context.store.is_shared:
            await fleet.sync(context.clock.now())
        missing = {
            worker.worker_id: sorted(needed - _classes(worker))
            for worker in fleet.workers.values()
            if not worker.is_offline
            and _classes(worker)
            and admits(worker.capabilities.tenant_access, tenant, is_strict=False)
        }
        if not missing:
            raise Refusal(
                RefusalCode.UNWORKABLE,
                "this workflow is as the ComfyUI editor saves it, and no worker is there that could tell how to "
                f"convert it: start one, or {EXPORT}",
            )
        for worker_id, lacks in sorted(missing.items()):
            if not lacks and (definitions := await self._definitions(worker_id)) is not None:
                return convert_workflow(workflow, definitions)
        nearest = min(missing.values(), key=len)
        if nearest:
            raise cannot_convert(nearest)
        raise Refusal(
            RefusalCode.UNWORKABLE,
            "this workflow is as the ComfyUI editor saves it, and no worker that has its nodes has told their inputs "
            f"(older agents do not): {EXPORT}",
        )

    async def _definitions(self, worker_id: WorkerId) -> NodeDefinitions | None:
        cabinet = self._context.store.cabinet
        first = await cabinet.get(DRAWER, _name(worker_id, 0))
        if first is None:
            return None
        parts = [first.body[1:]]
        for number in range(1, first.body[0]):
            part = await cabinet.get(DRAWER, _name(worker_id, number))
            parts.append(b"" if part is None else part.body[1:])
        packed = b"".join(parts)
        if packed != self._last[0]:
            try:
                plain = zlib.decompressobj().decompress(packed, _MAX_BYTES)
                self._last = packed, _DECODER.decode(plain)
            except (zlib.error, msgspec.MsgspecError):
                # Read while it was being replaced.
                return None
        return self._last[1]


async def forget(cabinet: Cabinet, worker_id: WorkerId) -> None:
    number = 0
    while await cabinet.remove(DRAWER, _name(worker_id, number)):
        number += 1


def _name(worker_id: WorkerId, number: int) -> str:
    return f"{worker_id}/{number}"


def _classes(worker: WorkerRecord) -> frozenset[str]:
    return frozenset().union(*(service.node_classes or () for service in worker.capabilities.services))
