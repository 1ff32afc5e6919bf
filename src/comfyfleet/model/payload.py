"""What a payload of a service is to the engine: its identity and its needs.

A payload is a JSON object: for ComfyUI the graph, for another service what its connector declares. Each service has a
`PayloadFormat`, a pure reader that the hub uses at submit; the connector runs the same payload at the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from comfyfleet.model.ids import WorkflowHash


class PayloadReading(msgspec.Struct, frozen=True):
    payload: dict[str, Any]
    """As it is stored and sent to the worker."""
    workflow_hash: WorkflowHash
    """Equal for payloads that do the same with other values (another prompt or seed). Statistics, blocks and the
    preference for a worker that ran it last belong to this hash."""
    models: frozenset[str] = frozenset()
    """Names that must be in `Service.models` of the worker: models, or flows."""
    node_classes: frozenset[str] = frozenset()
    """Names that must be in `Service.node_classes` of the worker: node classes, samplers, scripts."""
    seeds: tuple[str, ...] = ()
    """Dotted paths of values that ask for a random seed with -1, such as `body.seed`. The engine draws them once at
    submit, so that a retry makes the same picture."""
    inputs: frozenset[str] | None = frozenset()
    """The places `node.input` that take a file of the hub. None: any."""


class PayloadFormat(Protocol):
    """How payloads of one service are read. Pure: no I/O, no clock, no randomness."""

    @property
    def service(self) -> str: ...

    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        """Check the payload and read it. Raises `InvalidWorkflow` that names the field, the cause and the next step."""

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the payload, for the OpenAPI document and the documentation."""
