"""The routes of the fake A1111 server that make pictures: they check a request, wait for the lock and run it.

`sampler.py` does the work; `info_routes.py` has every other route.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from comfyfleet.testing.fake_a1111.answers import http_error, run_error
from comfyfleet.testing.fake_a1111.faults import A1111Faults
from comfyfleet.testing.fake_a1111.pictures import check_picture
from comfyfleet.testing.fake_a1111.sampler import FakeSampler, RunError, digest
from comfyfleet.testing.fake_a1111.settings import FakeA1111Settings
from comfyfleet.testing.fake_a1111.tasks import FakeA1111Run, FakeProcess

DEFAULTS: dict[str, Any] = {
    "prompt": "",
    "negative_prompt": "",
    "seed": -1,
    "subseed": -1,
    "subseed_strength": 0,
    "seed_resize_from_h": -1,
    "seed_resize_from_w": -1,
    "batch_size": 1,
    "n_iter": 1,
    "steps": 50,
    "cfg_scale": 7.0,
    "width": 512,
    "height": 512,
    "do_not_save_samples": False,
    "do_not_save_grid": False,
    "override_settings_restore_afterwards": True,
    "disable_extra_networks": False,
    "enable_hr": False,
    "firstphase_width": 0,
    "firstphase_height": 0,
    "hr_scale": 2.0,
    "hr_second_pass_steps": 0,
    "hr_resize_x": 0,
    "hr_resize_y": 0,
    "hr_prompt": "",
    "hr_negative_prompt": "",
    "sampler_index": "Euler",
    "send_images": True,
    "save_images": False,
}
"""As the recorded server echoes them; other fields have no default that matters."""
_INTEGERS = ("steps", "seed", "subseed", "batch_size", "n_iter", "width", "height")


class GenerationRoutes:
    def __init__(
        self,
        settings: FakeA1111Settings,
        faults: A1111Faults,
        process: FakeProcess,
        sampler: FakeSampler,
        runs: list[FakeA1111Run],
    ) -> None:
        self._settings = settings
        self._faults = faults
        self._process = process
        self._sampler = sampler
        self._runs = runs

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/sdapi/v1/txt2img", self._route("txt2img", self._generate)),
            web.post("/sdapi/v1/img2img", self._route("img2img", self._generate)),
            web.post("/sdapi/v1/extra-single-image", self._route("extra-single-image", self._upscale)),
            web.post("/sdapi/v1/extra-batch-images", self._route("extra-batch-images", self._upscale)),
        ]

    def _route(
        self, route: str, work: Callable[[str, dict[str, Any]], Coroutine[Any, Any, web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            content = await request.read()
            try:
                body = json.loads(content)
            except ValueError as error:
                return _not_json(error)
            if not isinstance(body, dict):
                return _unprocessable([], "value is not a valid dict", "type_error.dict")
            if self._faults.lose_answers > 0:
                self._faults.lose_answers -= 1
                # The connection is cut now; the run does not notice.
                if request.transport is not None:
                    request.transport.abort()
            # In a task of the process: it ends with the process and not with the connection.
            run = asyncio.create_task(work(route, body))
            self._process.work.add(run)
            run.add_done_callback(self._process.work.discard)
            return await run

        return handle

    async def _generate(self, route: str, given: dict[str, Any]) -> web.Response:
        body = {**DEFAULTS, **given}
        for name in _INTEGERS:
            try:
                body[name] = int(body[name])
            except (TypeError, ValueError):
                return _unprocessable([name], "value is not a valid integer", "type_error.integer")
        settings = self._settings
        if (body.get("sampler_name") or body["sampler_index"]) not in settings.samplers:
            status = 404 if settings.flavour == "forge-classic" else 400
            return http_error(settings.flavour, status, "Sampler not found")
        script = str(body.get("script_name") or "")
        if script and script.lower() not in settings.scripts:
            return http_error(settings.flavour, 422, f"Script '{script}' not found")
        for name in body.get("alwayson_scripts") or {}:
            if name.lower() not in settings.always_on_scripts:
                return http_error(settings.flavour, 422, f"Script '{name}' not found")
        if route == "img2img" and not body.get("init_images"):
            return http_error(settings.flavour, 404, "Init image not found")
        tasks = self._process.tasks
        task_id = str(body.get("force_task_id") or tasks.make(route))
        if settings.flavour == "sdnext":
            task_id = tasks.make(route)
        tasks.add(task_id)
        pictures = list(body.get("init_images") or []) if route == "img2img" else []
        if route == "img2img" and body.get("mask"):
            pictures.append(body["mask"])
        sources = []
        for text in pictures:
            content, refusal = self._decoded(text)
            if refusal is not None:
                return refusal
            sources.append(digest(content))
        run = FakeA1111Run(task_id, route, body)
        async with self._process.lock:
            self._runs.append(run)
            flags = self._process.flags
            flags.begin(f"scripts_{route}")
            tasks.start(task_id)
            try:
                answer = await self._sampler.sample(run, tuple(sources))
                tasks.finish(task_id)
            except RunError as error:
                run.outcome = "failed"
                if settings.flavour != "sdnext":
                    # SD.Next shows the failed run until the next one begins.
                    flags.end()
                return run_error(settings.flavour, error.name, error.text)
            flags.end()
        return web.json_response(answer)

    async def _upscale(self, route: str, body: dict[str, Any]) -> web.Response:
        texts = (
            [body.get("image") or ""]
            if route == "extra-single-image"
            else [each.get("data", "") for each in body.get("imageList") or []]
        )
        sources = []
        for text in texts:
            content, refusal = self._decoded(text)
            if refusal is not None:
                return refusal
            sources.append(content)
        run = FakeA1111Run("", route, body)
        async with self._process.lock:
            self._runs.append(run)
            try:
                answer = await self._sampler.upscale(route, sources, body)
            except RunError as error:
                run.outcome = "failed"
                return run_error(self._settings.flavour, error.name, error.text)
            run.outcome = "completed"
        return web.json_response(answer)

    def _decoded(self, text: Any) -> tuple[bytes, web.Response | None]:
        flavour = self._settings.flavour
        if not isinstance(text, str):
            return b"", _unprocessable(["image"], "str type expected", "type_error.str")
        if text.startswith(("http://", "https://")):
            return b"", http_error(flavour, 500, "Requests not allowed")
        try:
            content = base64.b64decode(text.partition(";base64,")[2] or text, validate=True)
        except (binascii.Error, ValueError):
            content = b""
        if not check_picture(content):
            return b"", http_error(flavour, 500, "Invalid encoded image")
        return content, None


def _unprocessable(where: list[Any], message: str, kind: str) -> web.Response:
    return web.json_response(
        {"detail": [{"loc": ["body", *where], "msg": message, "type": kind}]}, status=422
    )


def _not_json(error: ValueError) -> web.Response:
    if not isinstance(error, json.JSONDecodeError):
        return _unprocessable([], str(error), "value_error.jsondecode")
    detail = {
        "loc": ["body", error.pos],
        "msg": str(error),
        "type": "value_error.jsondecode",
        "ctx": {
            "msg": error.msg,
            "doc": error.doc,
            "pos": error.pos,
            "lineno": error.lineno,
            "colno": error.colno,
        },
    }
    return web.json_response({"detail": [detail]}, status=422)
