"""The connector for Comfy Cloud: paid runs at an account, held to its documented interface."""

from collections.abc import Mapping
from typing import Any

from comfyfleet.ports import Connector, ConnectorPlugin
from comfyfleet.worker.connectors.comfy_cloud.connector import ComfyCloud
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings, read_settings
from comfyfleet.worker.connectors.comfyui.payload import ComfyUIFormat

__all__ = ["PLUGIN", "ComfyCloud", "ComfyCloudSettings"]


def _connect(address: str, settings: Mapping[str, Any]) -> Connector:
    return ComfyCloud(address, read_settings(settings))


PLUGIN = ConnectorPlugin("comfy_cloud", ComfyUIFormat(), _connect)
