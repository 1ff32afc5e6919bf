"""Routes about the server itself: statistics, features, models and node classes.

Numbers come from the settings and the simulated card; paths are invented, because clients should not depend
on them.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from aiohttp import web

from comfyfleet.testing.fake_comfyui.machine import FakeMachine
from comfyfleet.testing.fake_comfyui.settings import GIGABYTE, FakeSettings

_HOME = "/srv/comfyui"
_ALSO_IN_OUTPUT = {
    "checkpoints": "checkpoints",
    "loras": "loras",
    "vae": "vae",
    "text_encoders": "clip",
    "diffusion_models": "diffusion_models",
}
_FOLDERS: dict[str, tuple[str, ...]] = {
    "checkpoints": ("checkpoints",),
    "configs": ("configs",),
    "loras": ("loras",),
    "vae": ("vae",),
    "text_encoders": ("text_encoders", "clip"),
    "diffusion_models": ("unet", "diffusion_models"),
    "clip_vision": ("clip_vision",),
    "style_models": ("style_models",),
    "embeddings": ("embeddings",),
    "diffusers": ("diffusers",),
    "vae_approx": ("vae_approx",),
    "controlnet": ("controlnet", "t2i_adapter"),
    "gligen": ("gligen",),
    "upscale_models": ("upscale_models",),
    "latent_upscale_models": ("latent_upscale_models",),
    "custom_nodes": (),
    "hypernetworks": ("hypernetworks",),
    "photomaker": ("photomaker",),
    "classifiers": ("classifiers",),
    "model_patches": ("model_patches",),
    "audio_encoders": ("audio_encoders",),
}
_NOT_MODELS = ("configs", "custom_nodes")


class InfoRoutes:
    """Handlers that only read."""

    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine

    def aliased_routes(self) -> list[web.RouteDef]:
        """Routes that also exist below `/api`."""
        routes = [
            web.get("/system_stats", self.system_stats),
            web.get("/object_info", self.object_info),
            web.get("/object_info/{node_class}", self.object_info_of),
            web.get("/models", self.models),
            web.get("/models/{folder}", self.models_in),
            web.get("/experiment/models", self.experiment_models),
            web.get("/embeddings", self.embeddings),
            web.get("/users", self.users),
        ]
        if self._machine.behaviour.negotiates_features:
            routes.append(web.get("/features", self.features))
        return routes

    def others(self) -> list[web.RouteDef]:
        """Routes that do not exist below `/api`; the last one is the fallback."""
        return [
            web.get("/internal/folder_paths", self.folder_paths),
            web.get("/", self.front_page),
            web.get("/{path:.*}", self.nothing_here),
        ]

    async def system_stats(self, _request: web.Request) -> web.Response:
        settings = self._machine.settings
        vram = round(settings.vram_gb * GIGABYTE)
        vram_free = round(self._machine.gpu.free_gb * GIGABYTE)
        ram = round(settings.ram_gb * GIGABYTE)
        system = {
            "os": "linux",
            "ram_total": ram,
            "ram_free": ram * 3 // 4,
            "comfyui_version": settings.version,
            "required_frontend_version": "1.35.9",
            "installed_templates_version": None,
            "required_templates_version": "0.7.65",
            "python_version": "3.11.7 (main, fake) [GCC 12.2.0]",
            "pytorch_version": "2.9.1+cu128",
            "embedded_python": False,
            "argv": ["main.py", "--listen", "127.0.0.1", *_cache_flags(settings)],
        }
        device = {
            "name": settings.device_name,
            "type": settings.device_type,
            "index": None if settings.device_type == "cpu" else 0,
            "vram_total": vram,
            "vram_free": vram_free,
            "torch_vram_total": vram,
            "torch_vram_free": vram_free,
        }
        return web.json_response({"system": system, "devices": [device]})

    async def features(self, _request: web.Request) -> web.Response:
        return web.json_response(self._machine.features())

    async def object_info(self, _request: web.Request) -> web.Response:
        machine = self._machine
        printed = {name: known.printed(machine.list_names) for name, known in machine.catalogue.items()}
        return web.json_response(printed)

    async def object_info_of(self, request: web.Request) -> web.Response:
        name = request.match_info["node_class"]
        known = self._machine.catalogue.get(name)
        return web.json_response({} if known is None else {name: known.printed(self._machine.list_names)})

    async def models(self, _request: web.Request) -> web.Response:
        extra = [folder for folder in self._machine.models() if folder not in _FOLDERS]
        return web.json_response([*_FOLDERS, *extra])

    async def models_in(self, request: web.Request) -> web.Response:
        folder = request.match_info["folder"]
        if folder not in _FOLDERS and folder not in self._machine.models():
            return web.Response(status=404)
        return web.json_response(self._machine.list_names(folder))

    async def experiment_models(self, _request: web.Request) -> web.Response:
        folders = [
            {"name": name, "folders": paths} for name, paths in _paths().items() if name not in _NOT_MODELS
        ]
        return web.json_response(folders)

    async def embeddings(self, _request: web.Request) -> web.Response:
        names = self._machine.list_names("embeddings")
        return web.json_response([str(PurePosixPath(name).with_suffix("")) for name in names])

    async def users(self, _request: web.Request) -> web.Response:
        return web.json_response({"storage": "server", "migrated": False})

    async def folder_paths(self, _request: web.Request) -> web.Response:
        return web.json_response(_paths())

    async def front_page(self, _request: web.Request) -> web.Response:
        name = self._machine.settings.name
        page = f"<!doctype html><title>ComfyUI</title><p>This is a fake ComfyUI server named {name}.</p>"
        return web.Response(text=page, content_type="text/html")

    async def nothing_here(self, _request: web.Request) -> web.Response:
        return web.Response(status=404, headers={"Content-Type": "application/octet-stream"})


def _paths() -> dict[str, Any]:
    paths = {name: [f"{_HOME}/models/{part}" for part in parts] for name, parts in _FOLDERS.items()}
    for name, part in _ALSO_IN_OUTPUT.items():
        paths[name].append(f"{_HOME}/output/{part}")
    paths["custom_nodes"] = [f"{_HOME}/custom_nodes"]
    return paths


def _cache_flags(settings: FakeSettings) -> list[str]:
    match settings.cache_mode:
        case "classic":
            return []
        case "lru":
            return ["--cache-lru", str(settings.lru_size)]
        case "none":
            return ["--cache-none"]
