"""The payload of the service `simulated`: how long a run takes, what comes out, and how it fails.

It is a small service with everything that a payload format can have, so tests and first steps need no other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from comfyfleet.model.failure import FailureKind
from comfyfleet.model.payload import PayloadReading, check_plain, payload_hash
from comfyfleet.model.workflow_graph import InvalidWorkflow

SERVICE = "simulated"
Name = Annotated[str, Meta(min_length=1, max_length=300)]
SimulatedKind = Literal[
    "invalid_workflow", "missing_input", "missing_node", "missing_model", "out_of_memory",
    "node_error", "transient", "crashed", "interrupted", "unknown",
]  # fmt: skip
_PLACE = re.compile(r" - at `\$\.?(.*)`$")


class SimulatedFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: SimulatedKind = "node_error"
    message: str = "The payload asks for this failure."
    times: Annotated[int, Meta(ge=1)] = 1_000_000
    """How many attempts fail; a later one completes."""

    @property
    def failure_kind(self) -> FailureKind:
        return FailureKind(self.kind)


class SimulatedPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None
    """How long a run takes. None: as the address of the worker says."""
    steps: Annotated[int, Meta(ge=0, le=1_000)] = 4
    """How many progress reports it makes."""
    outputs: dict[Name, dict[str, Any]] = {}
    """The outputs of the result."""
    models: Annotated[list[Name], Meta(max_length=1_000)] = []
    """The models that the worker must have."""
    seed: int | None = None
    """-1 asks for a random one. The result tells it."""
    inputs: dict[Name, Any] = {}
    """Places for files of the hub: the input `{"node": "inputs", "input": NAME, "file": …}`. The result tells their
    SHA-256."""
    fail: SimulatedFailure | None = None


def read_simulated(payload: Mapping[str, Any]) -> SimulatedPayload:
    """Raises `InvalidWorkflow`."""
    check_plain(payload)
    try:
        return msgspec.convert(payload, SimulatedPayload)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        name = f"payload.{place[1]}" if place is not None and place[1] else "payload"
        cause = _PLACE.sub("", str(error))
        raise InvalidWorkflow(
            f"The field {name[:200]!r} of a simulated job is not valid: {cause[:300]}. Correct it and submit again."
        ) from error


class SimulatedFormat(msgspec.Struct, frozen=True):
    service: str = SERVICE

    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        read = read_simulated(payload)
        structure = {
            "seconds": read.seconds,
            "steps": read.steps,
            "outputs": sorted(read.outputs),
            "models": sorted(set(read.models)),
            "inputs": sorted(read.inputs),
            "fail": None if read.fail is None else read.fail.kind,
        }
        return PayloadReading(
            dict(payload),
            payload_hash(SERVICE, structure),
            frozenset(read.models),
            seeds=("seed",) if read.seed == -1 else (),
            inputs=frozenset(f"inputs.{name}" for name in read.inputs),
        )

    def json_schema(self) -> dict[str, Any]:
        (schema,), components = msgspec.json.schema_components(
            [SimulatedPayload], ref_template="#/$defs/{name}"
        )
        defined = dict(components)
        found = defined.pop("SimulatedPayload", schema)
        return {**found, "$defs": defined} if defined else found
