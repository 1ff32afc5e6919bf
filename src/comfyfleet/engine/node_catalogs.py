"""Stores the workers' node catalogs, and converts editor workflows with them.

The name of a catalog is the hash of its content, so workers with equal nodes share one and only the first
sends it. Old agents without a signature have one each. `policy/acceptance.py` compares catalogs;
`model/editor_conversion.py` converts."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from comfyfleet.engine.context import EngineContext
from comfyfleet.model.editor_conversion import (
    EXPORT,
    MAX_GRAPHS,
    WorkflowGraph,
    WorkflowVariant,
    cannot_convert,
    convert_workflow,
    graph_for,
    node_classes_of,
    variant_of,
    with_nodes,
)
from comfyfleet.model.encrypted import in_payload
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.node_classes import NodeCatalog, NodeDefinitions, NodeSignature, Widget
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.model.workflow import GraphNeeds, read_needs
from comfyfleet.policy.acceptance import Differences, Graph, first_objection, objections
from comfyfleet.policy.feasibility import admits
from comfyfleet.ports import DocumentStore

COLLECTION = "nodes"
SHARED_COLLECTION = "catalogs"
MAX_PARTS = 32
_PART_BYTES = 60 * 1024
_MAX_BYTES = 16 * 1024 * 1024
"""Unpacked: ten times the catalog of a server with thousands of nodes."""
_MAX_LOADED = 64
"""Beyond this only the catalogs of live workers stay in memory."""
_MANY_NODES = 100
_MANY_INPUTS = 1_000
_RETRY_S = 5.0
"""Look again for a missing catalog after this time: its worker may be about to send it."""

_OWN = msgspec.json.Decoder(dict[str, tuple[Widget, ...]])
_SHARED = msgspec.json.Decoder(NodeCatalog)
_CLASS = msgspec.msgpack.Encoder(order="sorted")

_Class = tuple[tuple[Widget, ...] | None, NodeSignature | None]
_Parts = list[tuple[str, bytes, _Class]]


class NodeCatalogs:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._loaded: dict[str, NodeCatalog] = {}
        self._missed_at: dict[str, float] = {}
        self._equal: dict[bytes, _Class] = {}
        """Equal classes of all catalogs, held once."""
        self._own: tuple[bytes, NodeDefinitions] = (b"", {})
        """The last catalog read of a worker without a signature, packed and decoded."""
        self._differences: tuple[frozenset[str], Differences] = (frozenset(), Differences({}))
        self._not_outputs: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        """Catalog signatures, and the node classes that none of these catalogs calls an output."""

    async def knows(self, worker: WorkerRecord) -> bool | None:
        """Whether the catalog of this worker's signature is stored. None: the worker has no signature."""
        signature = signature_of(worker)
        if signature is None:
            return None
        return await self._is_kept(signature) and await self.get(signature) is not None

    async def _is_kept(self, signature: str) -> bool:
        """Another engine may have removed it with the last worker that it knew."""
        store = self._context.store
        return (
            not store.is_shared or await store.documents.get(SHARED_COLLECTION, f"{signature}/0") is not None
        )

    async def describe(self, worker_id: WorkerId, nodes: NodeCatalog) -> None:
        """Stores the worker's catalog. A stored catalog of the same signature stays."""
        worker = self._context.fleet.workers.get(worker_id)
        signature = None if worker is None else signature_of(worker)
        if signature is None or not nodes.signatures:
            packed = await asyncio.to_thread(_pack, worker_id, nodes.definitions)
            await self._keep(COLLECTION, worker_id, packed)
            return
        if signature in self._loaded and await self._is_kept(signature):
            return
        packed, found, parts = await asyncio.to_thread(_pack_shared, worker_id, nodes)
        if found != signature:
            # Other workers rely on this catalog.
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"the node catalog of {worker_id!r} has the signature {found}, but the worker declared {signature}",
            )
        await self._keep(SHARED_COLLECTION, signature, packed)
        self._remember(signature, parts)

    async def forget(self, worker_id: WorkerId) -> None:
        """Removes the worker's catalog, unless another worker shares it."""
        await _remove(self._context.store.documents, COLLECTION, worker_id)
        worker = self._context.fleet.workers.get(worker_id)
        if worker is not None:
            await self._drop(signature_of(worker), worker_id)

    async def clean_up_after(self, before: WorkerRecord | None, now: WorkerRecord) -> None:
        """After a registration: removes the worker's previous catalog, unless another worker shares it."""
        if before is not None and (old := signature_of(before)) != signature_of(now):
            await self._drop(old, now.worker_id)

    async def _drop(self, signature: str | None, worker_id: WorkerId) -> None:
        workers = self._context.fleet.workers.values()
        others = {signature_of(worker) for worker in workers if worker.worker_id != worker_id}
        if signature is not None and signature not in others:
            self._loaded.pop(signature, None)
            await _remove(self._context.store.documents, SHARED_COLLECTION, signature)

    async def get(self, signature: str) -> NodeCatalog | None:
        known = self._loaded.get(signature)
        if known is None:
            now = self._context.clock.now()
            if now < self._missed_at.get(signature, float("-inf")) + _RETRY_S:
                return None
            packed = await self._read(SHARED_COLLECTION, signature)
            parts = None if packed is None else await asyncio.to_thread(_unpack_shared, packed)
            if parts is None:
                self._missed_at = {**self._missed_at, signature: now} if len(self._missed_at) < 1000 else {}
                return None
            known = self._remember(signature, parts)
        return known

    async def definitions(self, worker: WorkerRecord) -> NodeDefinitions | None:
        """The widgets of this worker's nodes."""
        signature = signature_of(worker)
        if signature is not None and (catalog := await self.get(signature)) is not None:
            return catalog.definitions
        packed = await self._read(COLLECTION, worker.worker_id)
        if packed is None:
            return None
        if packed != self._own[0]:
            plain = _unpack(packed)
            try:
                self._own = packed, _OWN.decode(plain or b"")
            except msgspec.MsgspecError:
                # Read during a replacement.
                return None
        return self._own[1]

    async def objection(self, payload: Submission, worker: WorkerRecord) -> str | None:
        """Why the worker's nodes do not accept a job; the text follows the worker's name."""
        if payload.requirements.service != COMFYUI:
            return None
        signature = signature_of(worker)
        catalog = None if signature is None else await self.get(signature)
        if catalog is None or in_payload(payload) is not None:
            return None
        graph = graph_for(payload.workflow, payload.variants, signature)
        found = await asyncio.to_thread(first_objection, graph, catalog.signatures)
        if found is None:
            return None
        return f"does not accept this workflow: its {found.class_type} (node {found.node_id}) {found.reason}"

    async def refusing(
        self, graph: dict[str, Any], variants: Sequence[WorkflowVariant] = ()
    ) -> frozenset[str]:
        """The signatures of live workers that do not accept the graph, or the variant for them."""
        found = await self._refusing(graph)
        for variant in variants:
            refused = await self._refusing(with_nodes(graph, variant))
            found = found.difference(variant.signatures) | refused.intersection(variant.signatures)
        return found

    async def needs_of(self, graph: Mapping[str, Any], needs: GraphNeeds) -> GraphNeeds:
        """Drops needs of nodes that no server would run, as far as the catalogs show."""
        not_outputs = await self.not_outputs()
        if needs.last_classes.isdisjoint(not_outputs):
            # Every node leads to an output node or to an unknown one.
            return needs
        if len(graph) > _MANY_NODES:
            return await asyncio.to_thread(read_needs, graph, not_outputs)
        return read_needs(graph, not_outputs)

    async def not_outputs(self) -> frozenset[str]:
        """The node classes that no server calls an output."""
        known = await self._live_catalogs(self._not_outputs[0])
        # Without live workers the last knowledge is the best.
        if known:
            kinds = [
                (name, each.is_output)
                for catalog in known.values()
                for name, each in catalog.signatures.items()
            ]
            outputs = {name for name, is_output in kinds if is_output}
            self._not_outputs = frozenset(known), frozenset(name for name, _ in kinds) - outputs
        return self._not_outputs[1]

    async def _live_catalogs(self, before: frozenset[str]) -> dict[str, NodeCatalog] | None:
        """The catalogs of live workers by signature. None: the same as `before`."""
        live = self._context.fleet.signatures()
        if before == live and all(each in self._loaded for each in live):
            return None
        found = {each: catalog for each in sorted(live) if (catalog := await self.get(each)) is not None}
        return None if before == found.keys() else found

    async def _refusing(self, graph: Graph) -> frozenset[str]:
        live = self._context.fleet.signatures()
        if len(live) < 2:
            return frozenset()
        catalogs = await self._live_catalogs(self._differences[0])
        if catalogs is not None:
            known = {each: catalog.signatures for each, catalog in catalogs.items()}
            self._differences = frozenset(catalogs), Differences(known)
        differences = self._differences[1]
        inputs = sum(len(node.get("inputs") or ()) for node in graph.values())
        if len(graph) > _MANY_NODES or inputs > _MANY_INPUTS:
            # In a thread: thousands of inputs against the catalogs of many releases take long.
            return await asyncio.to_thread(differences.refusing, graph)
        return differences.refusing(graph)

    def _remember(self, signature: str, parts: _Parts) -> NodeCatalog:
        """Keeps the catalog in memory and shares its classes with equal ones."""
        if len(self._loaded) >= _MAX_LOADED:
            live = self._context.fleet.signatures()
            self._loaded = {each: found for each, found in self._loaded.items() if each in live}
            # Catalogs in memory keep what they share.
            self._equal.clear()
        definitions: dict[str, tuple[Widget, ...]] = {}
        signatures: dict[str, NodeSignature] = {}
        for name, text, given in parts:
            widgets, accepted = self._equal.setdefault(text, given)
            if widgets is not None:
                definitions[name] = widgets
            if accepted is not None:
                signatures[name] = accepted
        catalog = self._loaded[signature] = NodeCatalog(definitions, signatures)
        self._missed_at.pop(signature, None)
        return catalog

    async def _keep(self, collection: str, name: str, packed: bytes) -> None:
        documents = self._context.store.documents
        parts = [packed[start : start + _PART_BYTES] for start in range(0, len(packed), _PART_BYTES)]
        # The first part last, so that its reader finds all parts.
        for number, part in reversed(list(enumerate(parts))):
            body = bytes([len(parts)]) + part
            known = await documents.get(collection, f"{name}/{number}")
            if known is None or known.body != body:
                await documents.put(collection, f"{name}/{number}", body, version=None)

    async def _read(self, collection: str, name: str) -> bytes | None:
        documents = self._context.store.documents
        first = await documents.get(collection, f"{name}/0")
        if first is None:
            return None
        parts = [first.body[1:]]
        for number in range(1, first.body[0]):
            part = await documents.get(collection, f"{name}/{number}")
            parts.append(b"" if part is None else part.body[1:])
        return b"".join(parts)


def signature_of(worker: WorkerRecord) -> str | None:
    return next((each.signature for each in worker.capabilities.services if each.signature is not None), None)


async def _remove(documents: DocumentStore, collection: str, name: str) -> None:
    number = 0
    while await documents.remove(collection, f"{name}/{number}"):
        number += 1


def _pack(worker_id: WorkerId, content: Mapping[str, object] | NodeCatalog) -> bytes:
    plain = msgspec.json.encode(content, order="deterministic")
    packed = zlib.compress(plain) if len(plain) <= _MAX_BYTES else plain
    if len(packed) > MAX_PARTS * _PART_BYTES:
        raise Refusal(
            RefusalCode.TOO_LARGE,
            f"the node catalog of {worker_id!r} has {len(plain)} bytes; the limit is {_MAX_BYTES}, and "
            f"{MAX_PARTS * _PART_BYTES} when packed",
        )
    return packed


def _pack_shared(worker_id: WorkerId, nodes: NodeCatalog) -> tuple[bytes, str, _Parts]:
    return _pack(worker_id, nodes), nodes.signature(), _parts(nodes)


def _parts(nodes: NodeCatalog) -> _Parts:
    """Each class with a text that is the same for equal classes."""
    found: _Parts = []
    for name in sorted(nodes.definitions.keys() | nodes.signatures.keys()):
        given = nodes.definitions.get(name), nodes.signatures.get(name)
        found.append((name, _CLASS.encode((name, given)), given))
    return found


def _unpack(packed: bytes) -> bytes | None:
    try:
        return zlib.decompressobj().decompress(packed, _MAX_BYTES)
    except zlib.error:
        # Read during a replacement.
        return None


def _unpack_shared(packed: bytes) -> _Parts | None:
    try:
        return _parts(_SHARED.decode(_unpack(packed) or b""))
    except msgspec.MsgspecError:
        return None


class EditorConverter:
    def __init__(self, context: EngineContext, catalogs: NodeCatalogs) -> None:
        self._context = context
        self._catalogs = catalogs

    async def convert(self, workflow: Mapping[str, Any], tenant: TenantId = DEFAULT_TENANT) -> WorkflowGraph:
        """Converts an editor workflow for the live workers that have all nodes; returns the graph for most of
        them."""
        return (await self.convert_for_all(workflow, tenant))[0]

    async def convert_for_all(
        self, workflow: Mapping[str, Any], tenant: TenantId
    ) -> tuple[WorkflowGraph, tuple[WorkflowVariant, ...]]:
        """The graph, and variants for servers whose nodes have other inputs."""
        able = await self._able(workflow, tenant)
        converted = await self._converted(workflow, able)
        if not converted:
            raise Refusal(
                RefusalCode.UNWORKABLE,
                "this is a workflow of the ComfyUI editor, and no worker that has its nodes has described their inputs "
                f"yet: try again in a moment, or {EXPORT}",
            )
        (graph, _), *others = converted
        variants = [
            await asyncio.to_thread(variant_of, graph, other, signatures) for other, signatures in others
        ]
        return graph, tuple(variant for variant in variants if variant.nodes)

    async def _able(self, workflow: Mapping[str, Any], tenant: TenantId) -> list[WorkerRecord]:
        """The workers that have every node class. Raises `unworkable` with the missing ones."""
        # In a thread: a small file may expand a thousandfold.
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
                "this is a workflow of the ComfyUI editor, and no connected worker can say how to convert it: start a "
                f"worker, or {EXPORT}",
            )
        nearest = min(missing.values(), key=len)
        if nearest:
            raise cannot_convert(nearest)
        return [fleet.workers[worker_id] for worker_id, lacks in sorted(missing.items()) if not lacks]

    async def _converted(
        self, workflow: Mapping[str, Any], able: list[WorkerRecord]
    ) -> list[tuple[WorkflowGraph, list[str]]]:
        """Each different graph with its signatures: accepted graphs first, then by number of workers. The
        order does not depend on the workers' arrival or names."""
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
            # Any agent without a signature will do.
            definitions = await self._catalogs.definitions(worker)
            if definitions is not None:
                return [(await asyncio.to_thread(convert_workflow, workflow, definitions), [])]
        return []


def _are_equal(one: NodeCatalog, other: NodeCatalog, classes: Iterable[str]) -> bool:
    """Whether both catalogs convert a workflow of these classes to the same graph."""
    return all(one.definitions.get(name) == other.definitions.get(name) for name in classes)


def _classes(worker: WorkerRecord) -> frozenset[str]:
    return frozenset().union(*(service.node_classes or () for service in worker.capabilities.services))
