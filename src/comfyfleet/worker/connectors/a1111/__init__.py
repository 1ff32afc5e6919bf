"""The connector for servers of the A1111 family: the web UI of AUTOMATIC1111, Forge, reForge and SD.Next."""

from collections.abc import Mapping
from typing import Any

from comfyfleet.ports import Connector, ConnectorPlugin
from comfyfleet.worker.connectors.a1111.connector import A1111
from comfyfleet.worker.connectors.a1111.payload import SERVICE, A1111Format
from comfyfleet.worker.connectors.a1111.settings import A1111Settings
from comfyfleet.worker.connectors.settings import converted_settings

__all__ = ["A1111", "PLUGIN", "A1111Format", "A1111Settings"]


def _connect(address: str, settings: Mapping[str, Any]) -> Connector:
    return A1111(address, converted_settings(settings, A1111Settings))


PLUGIN = ConnectorPlugin(SERVICE, A1111Format(), _connect)
