"""Workflows of the editor made into graphs, with what the workers told of their nodes (`catalogs.py`).

Any engine on a store converts with what another one was told. How a workflow is converted is `model/conversion.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfyfleet.engine.catalogs import NodeCatalogs
from comfyfleet.engine.context import Context
from comfyfleet.model.conversion import EXPORT, cannot_convert, convert_workflow, node_classes_of
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.feasibility import admits


class NodeDesk:
    def __init__(self, context: Context, catalogs: NodeCatalogs) -> None:
        self._context = context
        self._catalogs = catalogs

    async def convert(self, workflow: Mapping[str, Any], tenant: TenantId) -> dict[str, dict[str, Any]]:
        """With the definitions of a live worker that has every node of it, and works for this tenant."""
        needed = node_classes_of(workflow)
        fleet, context = self._context.fleet, self._context
        if context.store.is_shared:
            await fleet.sync()
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
            worker = fleet.workers.get(worker_id)
            if lacks or worker is None:
                continue
            if (definitions := await self._catalogs.definitions(worker)) is not None:
                return convert_workflow(workflow, definitions)
        nearest = min(missing.values(), key=len)
        if nearest:
            raise cannot_convert(nearest)
        raise Refusal(
            RefusalCode.UNWORKABLE,
            "this workflow is as the ComfyUI editor saves it, and no worker that has its nodes has told their inputs "
            f"(older agents do not): {EXPORT}",
        )


def _classes(worker: WorkerRecord) -> frozenset[str]:
    return frozenset().union(*(service.node_classes or () for service in worker.capabilities.services))
