"""Speaks to ComfyUI servers from 0.3.45 on: runs an attempt, stops it, finds out what became of it."""

from comfyfleet.worker.connectors.comfyui.connector import ComfyUI
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings, server_id

__all__ = ["ComfyUI", "ComfyUISettings", "server_id"]
