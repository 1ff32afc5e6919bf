"""Reads what Comfy Cloud offers an account: node classes and models, from v1, because v2 has no such lists."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

from comfyfleet.model.node_classes import NodeCatalog, read_catalog
from comfyfleet.model.worker import Service
from comfyfleet.worker.connectors.comfy_cloud.api import CloudApi
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings
from comfyfleet.worker.connectors.comfyui.api import Unreachable
from comfyfleet.worker.connectors.comfyui.inventory import MAX_FOLDERS, NOT_MODELS, combo_models, is_fake

PROVIDER = "comfy_cloud"
_SHARE_OF_ANSWERS = 2


async def ask(api: CloudApi, settings: ComfyCloudSettings) -> tuple[Service, NodeCatalog, bool]:
    """Raises `Unreachable`. The last value: the server only pretends."""
    left = _SHARE_OF_ANSWERS * settings.max_answer_bytes
    nodes, size = await _read(api, "/api/object_info", settings)
    if not isinstance(nodes, dict):
        raise Unreachable("its answer to /api/object_info is not a list of node classes")
    left -= size
    folders, size = await _read(api, "/api/experiment/models", settings)
    models: set[str] = set()
    for folder in _names(folders)[:MAX_FOLDERS]:
        if folder in NOT_MODELS:
            continue
        answer = await api.get(f"/api/experiment/models/{quote(folder, safe='')}", settings.inventory_s)
        left -= answer.size
        if left < 0:
            raise Unreachable("its lists of nodes and models are too long together")
        # A folder without models is answered with 404.
        models.update(_names(answer.body) if answer.is_ok else ())
    stats = await api.get("/api/system_stats", settings.inventory_s)
    body: dict[str, Any] = stats.body if stats.is_ok and isinstance(stats.body, dict) else {}
    service, catalog = await asyncio.to_thread(_service, nodes, models, _version(body))
    return service, catalog, is_fake(body)


async def _read(api: CloudApi, path: str, settings: ComfyCloudSettings) -> tuple[Any, int]:
    answer = await api.get(path, settings.inventory_s)
    if not answer.is_ok:
        raise Unreachable(f"it answers {answer.status} to {path}", status=answer.status)
    return answer.body, answer.size


def _names(listing: Any) -> list[str]:
    names = [
        each.get("name") if isinstance(each, dict) else each
        for each in (listing if isinstance(listing, list) else [])
    ]
    return [name for name in names if isinstance(name, str) and name]


def _version(stats: dict[str, Any]) -> str | None:
    system = stats.get("system")
    version = system.get("comfyui_version") if isinstance(system, dict) else None
    return version[:100] if isinstance(version, str) else None


def _service(nodes: dict[str, Any], models: set[str], version: str | None) -> tuple[Service, NodeCatalog]:
    catalog = read_catalog(nodes, checks_new_style=True)
    try:
        signature: str | None = catalog.signature()
    except (ValueError, OverflowError):
        signature = None
    service = Service(
        name="comfyui",
        providers=(PROVIDER,),
        version=version,
        models=frozenset(name.replace("\\", "/") for name in models | combo_models(nodes)),
        node_classes=frozenset(nodes),
        signature=signature,
    )
    return service, catalog
