"""The services that have a connector. A new connector is entered here.

A connector needs only an address and headers, so the command line can name any: `--service NAME=ADDRESS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from comfyfleet.ports import Connector
from comfyfleet.worker.connectors.comfyui import ComfyUI, ComfyUISettings
from comfyfleet.worker.connectors.simulated import SimulatedConnector

Factory = Callable[[str, Mapping[str, str]], Connector]
"""Takes an address and headers. Raises `ValueError` for an invalid address."""


def _comfyui(address: str, headers: Mapping[str, str]) -> Connector:
    return ComfyUI(address, msgspec.structs.replace(ComfyUISettings(), headers=dict(headers)))


def _simulated(address: str, _headers: Mapping[str, str]) -> Connector:
    try:
        seconds = float(address)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"the address of a simulated service is the seconds that a run takes, not {address!r}"
        )
    return SimulatedConnector("simulated", behaviour=seconds)


CONNECTORS: Mapping[str, Factory] = {"comfyui": _comfyui, "simulated": _simulated}


def connect(service: str, address: str, headers: Mapping[str, str] | None = None) -> Connector:
    """Raises `ValueError` for an unknown service or an invalid address."""
    factory = CONNECTORS.get(service)
    if factory is None:
        raise ValueError(f"there is no connector for {service!r}; choose one of: {', '.join(CONNECTORS)}")
    return factory(address, headers or {})
