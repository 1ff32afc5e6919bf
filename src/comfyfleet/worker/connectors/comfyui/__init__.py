"""The connector for ComfyUI servers, from version 0.3.45 on."""

from comfyfleet.worker.connectors.comfyui.connector import ComfyUI
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings, server_id

__all__ = ["ComfyUI", "ComfyUISettings", "server_id"]
