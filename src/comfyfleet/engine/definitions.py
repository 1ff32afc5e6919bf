"""Workflows of the editor made into graphs, with what the workers told of their nodes (`catalogs.py`).

Any engine on a store converts with what another one was told. How a workflow is converted is `model/conversion.py`'s.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from comfyfleet.engine.catalogs import NodeCatalogs, signature_of
from comfyfleet.engine.context import Context
from comfyfleet.model.conversion import EXPORT, cannot_convert, convert_workflow, node_classes_of
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.node_signatures import NodeCatalog
from comfyfleet.model.variants import MAX_GRAPHS, Graph, WorkflowVariant, variant_of
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.acceptance import objections
from comfyfleet.policy.feasibility import admits


class NodeDesk:
    def __init__(self, context: Context, catalogs: NodeCatalogs) -> None:
        self._context = context
        self._catalogs = catalogs

    async def convert(self, workflow: Mapping[str, Any], tenant: TenantId) -> Graph:
        """With the definitions of live workers that have every node of it, and work for this tenant: the graph that
        most of them run."""
        return (await self.convert_for_all(workflow, tenant))[0]

    async def convert_for_all(
        self, workflow: Mapping[str, Any], tenant: TenantId
    ) -> tuple[Graph, tuple[WorkflowVariant, ...]]:
        """The graph, and what differs for servers whose nodes have other inputs."""
        able = await self._able(workflow, tenant)
        converted = await self._converted(workflow, able)
        if not converted:
            raise Refusal(
                RefusalCode.UNWORKABLE,
                "this workflow is as the ComfyUI editor saves it, and no worker that has its nodes has told their "
                f"inputs (older agents do not): {EXPORT}",
            )
        (graph, _), *others = converted
        variants = [
            await asyncio.to_thread(variant_of, graph, other, signatures) for other, signatures in others
        ]
        return graph, tuple(variant for variant in variants if variant.nodes)

    async def _able(self, workflow: Mapping[str, Any], tenant: TenantId) -> list[WorkerRecord]:
        """Those that have every node of it, by name. Raises `unworkable`, with what is missing."""
        # A small file may unfold to a thousand times its size.
        needed = await asyncio.to_thread(node_classes_of, workflow)
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
        nearest = min(missing.values(), key=len)
        if nearest:
            raise cannot_convert(nearest)
        return [fleet.workers[worker_id] for worker_id, lacks in sorted(missing.items()) if not lacks]

    async def _converted(
        self, workflow: Mapping[str, Any], able: list[WorkerRecord]
    ) -> list[tuple[Graph, list[str]]]:
        """Each different graph with the signatures it is for. First one that is accepted where it is for, then by the
        number of workers: the order in which workers came, and their names, make no difference."""
        workers = Counter(signature for worker in able if (signature := signature_of(worker)) is not None)
        needed = sorted(await asyncio.to_thread(node_classes_of, workflow))
        groups: list[tuple[NodeCatalog, list[str]]] = []
        for signature in sorted(workers, key=lambda each: (-workers[each], each)):
            catalog = await self._catalogs.get(signature)
            if catalog is None:
                continue
            same = next((group for known, group in groups if _are_equal(known, catalog, needed)), None)
            if same is not None:
                same.append(signature)
            elif len(groups) < MAX_GRAPHS:
                groups.append((catalog, [signature]))
        found = []
        for catalog, signatures in groups:
            graph = await asyncio.to_thread(convert_workflow, workflow, catalog.definitions)
            objected = await asyncio.to_thread(objections, graph, catalog.signatures)
            found.append((bool(objected), graph, signatures))
        if found:
            found.sort(key=lambda each: each[0])
            return [(graph, signatures) for _, graph, signatures in found]
        for worker in able:
            # Of agents that declare no signature, any will do.
            definitions = await self._catalogs.definitions(worker)
            if definitions is not None:
                return [(await asyncio.to_thread(convert_workflow, workflow, definitions), [])]
        return []


def _are_equal(one: NodeCatalog, other: NodeCatalog, classes: Iterable[str]) -> bool:
    """Whether both convert a workflow with these classes to the same graph."""
    return all(one.definitions.get(name) == other.definitions.get(name) for name in classes)


def _classes(worker: WorkerRecord) -> frozenset[str]:
    return frozenset().union(*(service.node_classes or () for service in worker.capabilities.services))
