"""A server that validates a workflow and refuses it: what depends on that server, and for whom else its word counts.

ComfyUI checks a prompt against the node classes that it has. An input that one version requires is unknown to another,
and a sampler that one version offers is missing from the other. So a refusal is about a pair of server and workflow;
only what is wrong with the graph itself ends the job at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.node_signatures import NodeSignatures
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord

_OF_THE_GRAPH = frozenset({"dependency_cycle", "bad_linked_input"})
"""Types of complaints that every server would make."""

_OF_THE_STRUCTURE = frozenset({"required_input_missing", "return_type_mismatch"})
"""Types of complaints that follow from classes, wires and names of inputs alone, so all that has one workflow hash."""

_OF_THE_NODE = _OF_THE_STRUCTURE | {"value_smaller_than_min", "value_bigger_than_max", "invalid_input_type"}
"""Types of complaints that follow from what a signature holds of any class."""


class Complaint(NamedTuple):
    """One entry of a server's `node_errors`."""

    kind: str
    class_type: str
    input_name: str


def is_refusal(failure: Failure) -> bool:
    """Whether another server may accept what this one has refused."""
    if failure.kind is not FailureKind.INVALID_WORKFLOW:
        return False
    found = {complaint.kind for complaint in _complaints(failure)}
    return bool(found) and found.isdisjoint(_OF_THE_GRAPH)


def concerns_structure(failure: Failure) -> bool:
    """Whether every workflow of the same hash is refused there too, whatever its values."""
    return all(complaint.kind in _OF_THE_STRUCTURE for complaint in _complaints(failure))


def speaks_for_equals(failure: Failure, signatures: NodeSignatures | None) -> bool:
    """Whether every server with the same signature would refuse it too. `signatures`: what that one stands for.

    Lists of what lies on a disk are no part of a signature, nor are rules by which a class checks values itself.
    """
    return all(_is_in_signature(complaint, signatures) for complaint in _complaints(failure))


def _is_in_signature(complaint: Complaint, signatures: NodeSignatures | None) -> bool:
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
    """Of the service that the class asks for."""
    offered = (each for each in worker.capabilities.services if each.name == cls.requirements.service)
    return next((each.signature for each in offered if each.signature is not None), None)


def without_signatures(cls: RequirementClass, refusing: frozenset[str]) -> RequirementClass:
    """The class without the servers that have one of these signatures."""
    needs = cls.requirements
    if refusing.issubset(needs.refused_by):
        return cls
    refused_by = tuple(sorted(refusing.union(needs.refused_by)))
    return msgspec.structs.replace(cls, requirements=msgspec.structs.replace(needs, refused_by=refused_by))


def _complaints(failure: Failure) -> Iterator[Complaint]:
    for entry in (failure.node_errors or {}).values():
        # What our own check finds names no outputs that depend on it: only a server knows them.
        if not isinstance(entry, dict) or not entry.get("dependent_outputs"):
            continue
        errors: Any = entry.get("errors")
        for error in errors if isinstance(errors, list) else ():
            if isinstance(error, dict):
                extra = error.get("extra_info")
                name = extra.get("input_name") if isinstance(extra, dict) else None
                yield Complaint(str(error.get("type")), str(entry.get("class_type")), str(name))
