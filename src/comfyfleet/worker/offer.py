"""What a worker offers: what its operator declared, joined with what its connectors found. Pure.

A declaration fills gaps and overrides; it never adds a service that no connector of the worker can run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from comfyfleet.model.worker import Capabilities, Hardware, LiveState, Service
from comfyfleet.ports import Inventory

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_NOTHING = Capabilities(services=())


class Offer(msgspec.Struct, frozen=True):
    capabilities: Capabilities
    live: LiveState
    boots: dict[str, str]
    """By the name of the service: which start of its server this was seen at."""

    def differs_from(self, other: Offer | None) -> bool:
        """Live values may differ: they rank, they are not worth a registration."""
        return other is None or self.capabilities != other.capabilities or self.boots != other.boots


def join(
    declared: Capabilities | None, found: Mapping[str, Inventory], *, moves_files: bool = False
) -> Offer:
    """`found` is by the name of the service. Whether files are moved follows from the door, whatever is declared."""
    sources = [declared or _NOTHING, *(inventory.capabilities for inventory in found.values())]
    own = {service.name: service for service in sources[0].services}
    services = tuple(
        _join_service(own.get(service.name), service)
        for capabilities in sources[1:]
        for service in capabilities.services
    )
    return Offer(
        Capabilities(
            services=services,
            hardware=_hardware(sources[0].hardware, [source.hardware for source in sources[1:]]),
            tenant_access=_first([source.tenant_access for source in sources], _NOTHING.tenant_access),
            location=_first([source.location for source in sources], _NOTHING.location),
            performance=_over(
                sources[0].performance,
                _first([source.performance for source in sources[1:]], _NOTHING.performance),
            ),
            cost=_first([source.cost for source in sources], _NOTHING.cost),
            environment=_first([source.environment for source in sources], _NOTHING.environment),
            moves_files=moves_files,
            is_fake=sources[0].is_fake or bool(sources[1:] and all(source.is_fake for source in sources[1:])),
            works_beside_real=sources[0].works_beside_real,
        ),
        _live([inventory.live for inventory in found.values()]),
        {name: inventory.boot for name, inventory in found.items()},
    )


def _join_service(declared: Service | None, found: Service) -> Service:
    if declared is None:
        return found
    return Service(
        found.name,
        declared.providers or found.providers,
        declared.version or found.version,
        _union(declared.models, found.models),
        _union(declared.node_classes, found.node_classes),
        found.signature,
    )


def _union(declared: frozenset[str] | None, found: frozenset[str] | None) -> frozenset[str] | None:
    if declared is None or found is None:
        return found if declared is None else declared
    return declared | found


def _hardware(declared: Hardware, found: Sequence[Hardware]) -> Hardware:
    nothing = Hardware()
    return Hardware(
        _over(declared.gpu, _first([each.gpu for each in found], nothing.gpu)),
        _over(declared.cpu, _first([each.cpu for each in found], nothing.cpu)),
        _over(declared.memory, _first([each.memory for each in found], nothing.memory)),
    )


def _over(declared: S, found: S) -> S:
    """What was declared, each field for itself: whoever says how much memory a card has does not unsay its model."""
    nothing = type(declared)()
    said = {
        name: value
        for name in declared.__struct_fields__
        if (value := getattr(declared, name)) != getattr(nothing, name)
    }
    return msgspec.structs.replace(found, **said)


def _live(sources: Sequence[LiveState]) -> LiveState:
    if len(sources) == 1:
        return sources[0]
    return LiveState(
        _first([source.free_vram_gb for source in sources], None),
        _first([source.available_ram_gb for source in sources], None),
    )


def _first(values: Sequence[T], nothing: T) -> T:
    return next((value for value in values if value != nothing), nothing)
