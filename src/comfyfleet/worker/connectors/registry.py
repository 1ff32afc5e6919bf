"""Which services there are connectors for: the one place where a new one is entered.

A connector is made from an address alone, and whatever headers go with it, so that a command line can name any of them:
`--service NAME=ADDRESS`. What a service does with its address is its connector's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from comfyfleet.ports import Connector
from comfyfleet.worker.connectors.comfyui import ComfyUI, ComfyUISettings
from comfyfleet.worker.connectors.simulated import SimulatedConnector

Factory = Callable[[str, Mapping[str, str]], Connector]
"""From an address and headers. Raises `ValueError` where the address will not do."""


def _comfyui(address: str, headers: Mapping[str, str]) -> Connector:
    return ComfyUI(address, msgspec.structs.replace(ComfyUISettings(), headers=dict(headers)))


def _simulated(address: str, _headers: Mapping[str, str]) -> Connector:
    try:
        seconds = float(address)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"a simulated service has no address but the seconds a run takes, not {address!r}")
    return SimulatedConnector("simulated", behaviour=seconds)


CONNECTORS: Mapping[str, Factory] = {"comfyui": _comfyui, "simulated": _simulated}


def connect(service: str, address: str, headers: Mapping[str, str] | None = None) -> Connector:
    """Raises `ValueError` with the services there are, or with what is wrong with the address."""
    factory = CONNECTORS.get(service)
    if factory is None:
        raise ValueError(f"there is no connector for {service!r}; there are: {', '.join(CONNECTORS)}")
    return factory(address, headers or {})
