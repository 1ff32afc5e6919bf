"""The routes of the fake A1111 server that tell something, and those that set its flags.

They answer from the memory of the process. `generation.py` has the routes that make pictures.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web

from comfyfleet.testing.fake_a1111.answers import run_error
from comfyfleet.testing.fake_a1111.faults import A1111Faults
from comfyfleet.testing.fake_a1111.settings import VERSIONS, FakeA1111Settings
from comfyfleet.testing.fake_a1111.tasks import FakeProcess

_GIGABYTE = 1024**3
_LATENT_MODES = ("Latent", "Latent (antialiased)")


class FakeInfoRoutes:
    def __init__(self, settings: FakeA1111Settings, faults: A1111Faults, process: FakeProcess) -> None:
        self._settings = settings
        self._faults = faults
        self._process = process

    def routes(self) -> list[web.RouteDef]:
        is_next = self._settings.flavour == "sdnext"
        found: list[web.RouteDef] = []
        if self._settings.has_api:
            found += self._api_routes(is_next)
        if self._settings.has_web_ui:
            found.append(web.post("/internal/progress", self.task_progress))
            if not is_next:
                found.append(web.get("/internal/pending-tasks", self.pending_tasks))
                found.append(web.get("/internal/ping", _telling(dict)))
        return found

    def _api_routes(self, is_next: bool) -> list[web.RouteDef]:
        settings = self._settings
        found = [
            web.get("/sdapi/v1/progress", self.progress),
            web.post("/sdapi/v1/interrupt", self.interrupt),
            web.post("/sdapi/v1/skip", self.skip),
            web.get("/sdapi/v1/options", _telling(self._options)),
            web.post("/sdapi/v1/options", self.set_options),
            web.get("/sdapi/v1/memory", _telling(self._memory)),
            web.get("/sdapi/v1/sd-models", _telling(self._checkpoints)),
            web.get("/sdapi/v1/samplers", _telling(lambda: self._named(settings.samplers, aliases=True))),
            web.get("/sdapi/v1/upscalers", _telling(lambda: self._named(settings.upscalers))),
            web.get("/sdapi/v1/latent-upscale-modes", _telling(lambda: self._named(_LATENT_MODES))),
            web.get("/sdapi/v1/loras", _telling(lambda: self._named(settings.loras, alias=True))),
            web.get("/sdapi/v1/scripts", _telling(self._scripts)),
            web.get("/sdapi/v1/embeddings", _telling(lambda: {"loaded": {}, "skipped": {}})),
            web.get("/sdapi/v1/cmd-flags", _telling(self._flags)),
        ]
        if settings.flavour != "forge":
            found.append(web.get("/sdapi/v1/sd-vae", _telling(self._vaes)))
        else:
            found.append(web.get("/sdapi/v1/sd-modules", _telling(self._vaes)))
        if settings.flavour != "forge-classic":
            listed = [{"name": name.lower(), "label": name, "aliases": None} for name in settings.schedulers]
            found.append(web.get("/sdapi/v1/schedulers", _telling(lambda: listed)))
        if is_next:
            version = {"app": "sd.next", "updated": VERSIONS["sdnext"], "hash": "058a7f0c"}
            found.append(web.get("/sdapi/v1/version", _telling(lambda: version)))
            found.append(web.get("/sdapi/v1/status", _telling(lambda: {"status": "idle"})))
        return found

    # progress

    async def progress(self, _request: web.Request) -> web.Response:
        flags = self._process.flags
        share = eta = 0.0
        if flags.job_count:
            share = min(0.01 + flags.share(), 1.0)
            elapsed = flags.elapsed_s()
            eta = elapsed / share - elapsed
        state = flags.listed()
        body: dict[str, Any] = {
            "progress": share,
            "eta_relative": eta,
            "state": state,
            "current_image": None,
            "textinfo": None,
        }
        if self._settings.flavour == "sdnext":
            body["id"] = "0"
        return web.json_response(body)

    async def task_progress(self, request: web.Request) -> web.Response:
        asked = await request.json()
        task_id = str(asked.get("id_task"))
        flags, tasks = self._process.flags, self._process.tasks
        is_active, waiting = tasks.current == task_id, tasks.waiting()
        body: dict[str, Any] = {
            "active": is_active,
            "queued": task_id in waiting,
            "completed": task_id in tasks.finished,
            "progress": None,
            "eta": None,
            "live_preview": None,
            "id_live_preview": -1,
            "textinfo": None,
        }
        if not is_active:
            body["textinfo"] = "Waiting..."
            if task_id in waiting:
                body["textinfo"] = f"In queue: {waiting.index(task_id) + 1}/{len(waiting)}"
            return web.json_response(body)
        share, elapsed = flags.share(), flags.elapsed_s()
        body["progress"] = share
        body["eta"] = elapsed / share - elapsed if share else None
        last_seen = asked.get("id_live_preview", -1)
        if asked.get("live_preview", True) and flags.preview is not None:
            if flags.preview_id != last_seen:
                picture = base64.b64encode(flags.preview).decode()
                body["live_preview"] = f"data:image/png;base64,{picture}"
            body["id_live_preview"] = flags.preview_id
        else:
            body["id_live_preview"] = last_seen
        return web.json_response(body)

    async def pending_tasks(self, _request: web.Request) -> web.Response:
        waiting = self._process.tasks.waiting()
        return web.json_response({"size": len(waiting), "tasks": waiting})

    # flags

    async def interrupt(self, _request: web.Request) -> web.Response:
        self._process.flags.interrupted = True
        self._process.changed.set()
        if self._settings.flavour == "sdnext":
            return web.Response(status=204)
        return web.json_response({})

    async def skip(self, _request: web.Request) -> web.Response:
        self._process.flags.skipped = True
        return web.json_response(None)

    # lists

    def _options(self) -> dict[str, Any]:
        return {
            "sd_model_checkpoint": self._process.option,
            "sd_vae": "Automatic",
            "samples_format": self._settings.image_format,
            # No real server has it: its worker is known as a fake.
            "comfyfleet_fake": True,
        }

    async def set_options(self, request: web.Request) -> web.Response:
        flavour = self._settings.flavour
        for name, value in (await request.json()).items():
            if name not in self._options():
                return run_error(flavour, "KeyError", repr(name))
            if name == "sd_model_checkpoint":
                found = next((each for each in self._settings.checkpoints if value in each.aliases), None)
                if found is None:
                    return run_error(flavour, "RuntimeError", f"model {value!r} not found")
                self._process.option = found.title
        return web.json_response(None)

    def _memory(self) -> dict[str, Any]:
        ram = {"free": 25219231744.0, "used": 57286656, "total": 25276518400.0}
        if self._settings.gpu_gb is None:
            return {"ram": ram, "cuda": {"error": "No module named 'torch'"}}
        total = int(self._settings.gpu_gb * _GIGABYTE) - (256 << 20)
        system = {"free": total // 2, "used": total - total // 2, "total": total}
        return {"ram": ram, "cuda": {"system": system, "events": {"retries": 0, "oom": 0}}}

    def _checkpoints(self) -> list[dict[str, Any]]:
        if self._faults.is_starting:
            return []
        return [
            {
                "title": each.title,
                "model_name": each.model_name,
                "hash": each.hash,
                "sha256": (each.hash * 64)[:64],
                "filename": f"/srv/webui/models/Stable-diffusion/{each.file}",
                "config": None,
            }
            for each in self._settings.checkpoints
            if each.file not in self._faults.missing_checkpoints
        ]

    def _vaes(self) -> list[dict[str, Any]]:
        return [
            {"model_name": name, "filename": f"/srv/webui/models/VAE/{name}"} for name in self._settings.vaes
        ]

    def _scripts(self) -> dict[str, Any]:
        both = [*self._settings.scripts, *self._settings.always_on_scripts]
        return {"txt2img": both, "img2img": both}

    def _flags(self) -> dict[str, Any]:
        auth = f"{self._settings.user}:{self._settings.password}" if self._settings.user else None
        return {"api": True, "nowebui": not self._settings.has_web_ui, "api_auth": auth}

    @staticmethod
    def _named(names: Iterable[str], **more: bool) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name in names:
            entry: dict[str, Any] = {"name": name}
            if more.get("aliases"):
                entry |= {"aliases": [f"k_{name.lower()}"], "options": {}}
            if more.get("alias"):
                entry |= {"alias": f"{name} (alias)", "path": f"/srv/webui/models/Lora/{name}.safetensors"}
            found.append(entry)
        return found


def _telling(read: Callable[[], Any]) -> Callable[[web.Request], Any]:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(read())

    return answer
