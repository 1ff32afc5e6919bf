"""What a payload of a service is to the engine: its identity and its needs.

A payload is a JSON object: for ComfyUI the graph, for another service what its connector declares. Each service has a
`PayloadFormat`, a pure reader that the hub uses at submit; the connector runs the same payload at the worker. A service
without a format has the `OpaqueFormat`: its jobs run on workers that offer the service, and nothing more is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Protocol

import msgspec

from comfyfleet.model.canonical_json import MAX_NESTING, NotCanonicalError, canonical_json, check_canonical
from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.workflow_graph import InvalidWorkflow

COMFYUI = "comfyui"
"""The service whose payloads are graphs. The engine reads them itself."""
PAYLOAD_HASH_VERSION = 1


class PayloadAmounts(msgspec.Struct, frozen=True):
    """How much a payload asks for, for tenants with limits: the most steps of a run, pixels of a picture and pictures
    at once."""

    steps: float = 0
    pixels: float = 0
    batch: float = 0


class PayloadReading(msgspec.Struct, frozen=True):
    payload: dict[str, Any]
    """As it is stored and sent to the worker."""
    workflow_hash: WorkflowHash
    """Equal for payloads that do the same with other values (another prompt or seed); from `payload_hash`. Statistics,
    blocks and the preference for a worker that ran it last belong to this hash."""
    models: frozenset[str] = frozenset()
    """Names that must be in `Service.models` of the worker: models, or flows."""
    node_classes: frozenset[str] = frozenset()
    """Names that must be in `Service.node_classes` of the worker: node classes, samplers, scripts."""
    seeds: tuple[str, ...] = ()
    """Dotted paths of values that ask for a random seed with -1, such as `body.seed`. The engine draws them once at
    submit, so that a retry makes the same picture. The payload keeps its -1; the lease has the drawn seed."""
    inputs: frozenset[str] | None = frozenset()
    """The places `node.input` that take a file of the hub. None: any. The connector puts the file there."""
    amounts: PayloadAmounts | None = None
    """None: the format cannot tell. A tenant with a limit on them may not submit such a payload."""
    unread: tuple[str, ...] = ()
    """Fields that may name further models in a way that the format cannot read, such as the arguments of a script. A
    tenant with a list of models may not submit such a payload."""


class PayloadFormat(Protocol):
    """How payloads of one service are read. Pure: no I/O, no clock, no randomness."""

    @property
    def service(self) -> str: ...

    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        """Check the payload and read it. Raises `InvalidWorkflow` that names the field, the cause and the next step."""

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the payload, for the OpenAPI document and the documentation."""


def payload_hash(service: str, structure: Any) -> WorkflowHash:
    """The identity of a payload: the hash of what it does, as JSON. A format leaves out prompts, seeds and files."""
    head = b"comfyfleet-payload/%d\n" % PAYLOAD_HASH_VERSION + service.encode("utf-8", "replace") + b"\n"
    return WorkflowHash(sha256(head + canonical_json(structure)).hexdigest())


def check_plain(payload: Mapping[str, Any]) -> None:
    """Raises `InvalidWorkflow` for a part that has no JSON text: NaN, a lone surrogate, nesting without end."""
    for name, value in payload.items():
        if not isinstance(name, str):
            raise InvalidWorkflow(f"The payload has the key {name!r:.100}, which is no text: quote it.")
        try:
            check_canonical(name)
            check_canonical(value, max_nesting=MAX_NESTING - 1)
        except NotCanonicalError as error:
            raise InvalidWorkflow(f"The field {name[:100]!r} of the payload is not JSON: {error}.") from error


def with_drawn_seeds(payload: Mapping[str, Any], seeds: Mapping[str, int]) -> dict[str, Any]:
    """A copy with the drawn seeds at their dotted paths. Parts without a seed are shared with the original, and a path
    whose parents are not there is left out."""
    changed = dict(payload)
    for path, seed in seeds.items():
        place = changed
        *parents, last = path.split(".")
        for name in parents:
            inner = place.get(name)
            if not isinstance(inner, dict):
                break
            place[name] = place = dict(inner)
        else:
            place[last] = seed
    return changed


class OpaqueFormat(msgspec.Struct, frozen=True):
    """Payloads of a service that nobody here can read: any JSON object. Its identity is its keys and types."""

    service: str

    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        check_plain(payload)
        return PayloadReading(dict(payload), payload_hash(self.service, _shape(payload)), inputs=None)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "object"}


def _shape(value: Any) -> Any:
    """Keys and types. A list has the shapes of its items, each once, so that its length does not count."""
    if isinstance(value, Mapping):
        return {name: _shape(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        shapes = {canonical_json(_shape(each)) for each in value}
        return sorted(each.decode() for each in shapes)
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "text" if isinstance(value, str) else "number"
