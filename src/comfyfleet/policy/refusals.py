"""A server that validates a workflow and refuses it: what depends on that server, and for whom else its word counts.

ComfyUI checks a prompt against the node classes that it has. An input that one version requires is unknown to another,
and a sampler that one version offers is missing from the other. So a refusal is about a pair of server and workflow;
only what is wrong with the graph itself ends the job at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord

_OF_THE_GRAPH = frozenset({"dependency_cycle", "bad_linked_input"})
"""Types of complaints that every server would make."""

_OF_THE_STRUCTURE = frozenset({"required_input_missing", "return_type_mismatch"})
"""Types of complaints that follow from classes, wires and names of inputs alone, so all that has one workflow hash."""

_OF_THE_DISK = frozenset({"custom_validation_failed"})
"""Types of complaints that may be about files of that machine, which equal servers need not share."""


def is_refusal(failure: Failure) -> bool:
    """Whether another server may accept what this one has refused."""
    if failure.kind is not FailureKind.INVALID_WORKFLOW:
        return False
    found = set(_complaints(failure))
    return bool(found) and found.isdisjoint(_OF_THE_GRAPH)


def concerns_structure(failure: Failure) -> bool:
    """Whether every workflow of the same hash is refused there too, whatever its values."""
    return all(complaint in _OF_THE_STRUCTURE for complaint in _complaints(failure))


def speaks_for_equals(failure: Failure) -> bool:
    """Whether every server with the same signature would refuse it too."""
    return not any(complaint in _OF_THE_DISK for complaint in _complaints(failure))


def refusing_signatures(failure: Failure, service: str, worker: WorkerRecord | None) -> frozenset[str]:
    """Those for which this worker's refusal speaks: its own, where it is known and the reason lies in the nodes."""
    if worker is None or not speaks_for_equals(failure):
        return frozenset()
    offered = worker.capabilities.services
    return frozenset(
        each.signature for each in offered if each.name == service and each.signature is not None
    )


def without_signatures(cls: RequirementClass, refusing: frozenset[str]) -> RequirementClass:
    """The class without the servers that have one of these signatures."""
    needs = cls.requirements
    if refusing.issubset(needs.refused_by):
        return cls
    refused_by = tuple(sorted(refusing.union(needs.refused_by)))
    return msgspec.structs.replace(cls, requirements=msgspec.structs.replace(needs, refused_by=refused_by))


def _complaints(failure: Failure) -> Iterator[str]:
    """The type of each complaint of a server."""
    for entry in (failure.node_errors or {}).values():
        # What our own check finds names no outputs that depend on it: only a server knows them.
        if not isinstance(entry, dict) or not entry.get("dependent_outputs"):
            continue
        errors: Any = entry.get("errors")
        for error in errors if isinstance(errors, list) else ():
            if isinstance(error, dict):
                yield str(error.get("type"))
