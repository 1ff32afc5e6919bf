"""Which servers accept a graph: predicted from node signatures, and learned from refusals.

Prediction looks only at node classes in which live servers differ. It objects only where ComfyUI certainly would: a
missing required input, a choice that a core class does not list, a link of another type.

A refusal by one server concerns that server and this workflow, because node versions differ. Only an error of the
graph itself ends the job at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.node_classes import InputSignature, NodeSignature, NodeSignatures
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.model.workflow_graph import is_wire

_MAX_REMEMBERED = 4_096
_encode = msgspec.json.Encoder().encode
_ANY_TYPE = "*"
_DYNAMIC = "COMFY_"
"""Types with this prefix stand for inputs under other names, or for any type."""

Graph = Mapping[str, Mapping[str, Any]]


class Objection(msgspec.Struct, frozen=True):
    """One part of a graph that servers with a certain signature do not accept."""

    node_id: str
    class_type: str
    reason: str


class Differences:
    """The node classes in which live servers differ."""

    def __init__(self, catalogs: Mapping[str, NodeSignatures]) -> None:
        """`catalogs` is keyed by the signature of the service."""
        self._catalogs = catalogs
        self._compared = _choices_compared(catalogs)
        self._remembered: dict[bytes, frozenset[str]] = {}

    @property
    def classes(self) -> frozenset[str]:
        return frozenset(self._compared)

    def refusing(self, graph: Graph) -> frozenset[str]:
        """The signatures that do not accept the graph."""
        compared = self._compared
        if not compared:
            return frozenset()
        differing = {node_id for node_id, node in graph.items() if node["class_type"] in compared}
        if not differing:
            return frozenset()
        # The key covers everything that the check reads. A workflow hash is not enough: it does not tell which of two
        # nodes has which value.
        seen = [(node_id, node["class_type"], self._seen_of(node)) for node_id, node in graph.items()]
        key = sha256(_encode(seen)).digest()
        known = self._remembered.get(key)
        if known is None:
            known = frozenset(
                name
                for name, signatures in self._catalogs.items()
                if next(_objections(graph, signatures, differing), None) is not None
            )
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = known
        return known

    def _seen_of(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """The input names, the links, and the texts whose list of choices may differ."""
        choices = self._compared.get(node["class_type"], ())
        return {
            name: value if is_wire(value) or (name in choices and isinstance(value, str)) else None
            for name, value in _inputs(node).items()
        }


def objections(graph: Graph, signatures: NodeSignatures) -> list[Objection]:
    return list(_objections(graph, signatures, set(graph)))


def first_objection(graph: Graph, signatures: NodeSignatures) -> Objection | None:
    return next(_objections(graph, signatures, set(graph)), None)


def _choices_compared(catalogs: Mapping[str, NodeSignatures]) -> dict[str, tuple[str, ...]]:
    """For each class in which the catalogs differ, the inputs that have choices in one of them."""
    versions: dict[str, list[NodeSignature]] = defaultdict(list)
    for signatures in catalogs.values():
        for name, signature in signatures.items():
            known = versions[name]
            # Equal signatures are mostly one object, so `is` avoids a slow comparison.
            if not any(signature is other or signature == other for other in known):
                known.append(signature)
    return {
        name: tuple(
            sorted(
                {
                    input_name
                    for signature in known
                    for input_name, each in signature.inputs.items()
                    if each.choices is not None
                }
            )
        )
        for name, known in versions.items()
        if len(known) > 1
    }


def _objections(graph: Graph, signatures: NodeSignatures, looked_at: set[str]) -> Iterator[Objection]:
    """Objections to these nodes, and to links that come from them."""
    for node_id in _checked(graph, signatures):
        class_type, inputs = graph[node_id]["class_type"], _inputs(graph[node_id])
        signature = signatures.get(class_type)
        if signature is None:
            # Missing classes are a separate requirement of the job.
            continue
        if node_id in looked_at:
            for name, each in signature.inputs.items():
                if name not in inputs:
                    if each.is_required and not each.kind.startswith(_DYNAMIC):
                        yield Objection(node_id, class_type, f"requires the input '{name}'")
                elif each.choices is not None and _is_unlisted(inputs[name], each):
                    yield Objection(node_id, class_type, f"does not list {inputs[name][:80]!r} for '{name}'")
        for name, value in inputs.items():
            if is_wire(value) and (node_id in looked_at or value[0] in looked_at):
                source = graph.get(value[0])
                offered = None if source is None else signatures.get(source["class_type"])
                if offered is not None and not _fits(offered, value[1], signature, name):
                    yield Objection(node_id, class_type, f"does not accept the link to '{name}'")


def _checked(graph: Graph, signatures: NodeSignatures) -> list[str]:
    """The nodes that a server validates: output nodes and everything that they depend on."""
    waiting = [
        node_id
        for node_id, node in graph.items()
        if (signature := signatures.get(node["class_type"])) is not None and signature.is_output
    ]
    found = dict.fromkeys(waiting)
    while waiting:
        for value in _inputs(graph[waiting.pop()]).values():
            if is_wire(value) and value[0] in graph and value[0] not in found:
                found[value[0]] = None
                waiting.append(value[0])
    return list(found)


def _inputs(node: Mapping[str, Any]) -> Mapping[str, Any]:
    inputs: Mapping[str, Any] = node.get("inputs") or {}
    return inputs


def _is_unlisted(value: Any, signature: InputSignature) -> bool:
    assert signature.choices is not None
    return isinstance(value, str) and value not in signature.choices


def _fits(source: NodeSignature, slot: Any, target: NodeSignature, name: str) -> bool:
    if not (source.is_core and target.is_core):
        # A custom class may check types itself, or accept any.
        return True
    if not isinstance(slot, int) or not source.outputs:
        return True
    if slot >= len(source.outputs):
        return False
    wanted = target.inputs.get(name)
    if wanted is None:
        return True
    given, kind = source.outputs[slot], wanted.kind
    if _is_open(given) or _is_open(kind):
        return True
    return not set(given.split(",")).isdisjoint(kind.split(","))


def _is_open(kind: str) -> bool:
    return kind in ("", _ANY_TYPE, "COMBO") or kind.startswith(_DYNAMIC) or _ANY_TYPE in kind.split(",")


_OF_THE_GRAPH = frozenset({"dependency_cycle", "bad_linked_input"})
"""Error types that every server reports."""

_OF_THE_STRUCTURE = frozenset({"required_input_missing", "return_type_mismatch"})
"""Error types that depend only on classes, links and input names, so on the workflow hash."""

_OF_THE_NODE = _OF_THE_STRUCTURE | {"value_smaller_than_min", "value_bigger_than_max", "invalid_input_type"}
"""Error types that depend only on what the signature of any class contains."""


class NodeComplaint(NamedTuple):
    """One entry of a server's `node_errors`."""

    kind: str
    class_type: str
    input_name: str


def is_refusal(failure: Failure) -> bool:
    """Whether another server may accept the workflow."""
    if failure.kind is not FailureKind.INVALID_WORKFLOW:
        return False
    found = {complaint.kind for complaint in _complaints(failure)}
    return bool(found) and found.isdisjoint(_OF_THE_GRAPH)


def concerns_structure(failure: Failure) -> bool:
    """Whether this server refuses every workflow with the same hash."""
    return all(complaint.kind in _OF_THE_STRUCTURE for complaint in _complaints(failure))


def applies_to_signature(failure: Failure, signatures: NodeSignatures | None) -> bool:
    """Whether every server with the same signature would refuse it too. `signatures` belong to that signature.

    A signature contains neither lists of files on a disk nor the checks that a custom class does itself.
    """
    return all(_is_in_signature(complaint, signatures) for complaint in _complaints(failure))


def _is_in_signature(complaint: NodeComplaint, signatures: NodeSignatures | None) -> bool:
    if complaint.kind in _OF_THE_NODE:
        return True
    node = None if signatures is None else signatures.get(complaint.class_type)
    if node is None or not node.is_core or complaint.kind == "custom_validation_failed":
        return False
    if complaint.kind != "value_not_in_list":
        return True
    named = node.inputs.get(complaint.input_name)
    return named is not None and named.choices is not None


def signature_for(cls: RequirementClass, worker: WorkerRecord) -> str | None:
    """The signature of the service that the class requires."""
    offered = (each for each in worker.capabilities.services if each.name == cls.requirements.service)
    return next((each.signature for each in offered if each.signature is not None), None)


def without_signatures(cls: RequirementClass, refusing: frozenset[str]) -> RequirementClass:
    """The class without the servers that have one of these signatures."""
    needs = cls.requirements
    if refusing.issubset(needs.refused_by):
        return cls
    refused_by = tuple(sorted(refusing.union(needs.refused_by)))
    return msgspec.structs.replace(cls, requirements=msgspec.structs.replace(needs, refused_by=refused_by))


def _complaints(failure: Failure) -> Iterator[NodeComplaint]:
    for entry in (failure.node_errors or {}).values():
        # Errors of our own check have no dependent outputs: only a server knows them.
        if not isinstance(entry, dict) or not entry.get("dependent_outputs"):
            continue
        errors: Any = entry.get("errors")
        for error in errors if isinstance(errors, list) else ():
            if isinstance(error, dict):
                extra = error.get("extra_info")
                name = extra.get("input_name") if isinstance(extra, dict) else None
                yield NodeComplaint(str(error.get("type")), str(entry.get("class_type")), str(name))
