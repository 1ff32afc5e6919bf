"""The connector for ComfyUI servers, from version 0.3.45 on."""

from collections.abc import Mapping
from typing import Any

from comfyfleet.ports import Connector, ConnectorPlugin
from comfyfleet.worker.connectors.comfyui.connector import ComfyUI
from comfyfleet.worker.connectors.comfyui.payload import ComfyUIFormat
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings, server_id
from comfyfleet.worker.connectors.settings import converted_settings

__all__ = ["PLUGIN", "ComfyUI", "ComfyUIFormat", "ComfyUISettings", "server_id"]


def _connect(address: str, settings: Mapping[str, Any]) -> Connector:
    return ComfyUI(address, converted_settings(settings, ComfyUISettings))


PLUGIN = ConnectorPlugin("comfyui", ComfyUIFormat(), _connect)
