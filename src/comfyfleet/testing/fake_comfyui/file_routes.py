"""Files over HTTP: `/view`, `/upload/image`, `/upload/mask`.

Answers with the same status codes as the real server for names that escape, folders that do not exist and
files that are gone. Names and folders are decided by `disk`.
"""

from __future__ import annotations

import json
import mimetypes
from pathlib import Path
from typing import Any

from aiohttp import web

from comfyfleet.testing.fake_comfyui import pictures
from comfyfleet.testing.fake_comfyui.machine import FakeMachine

_NEVER_SHOWN = ("text/html", "text/html-sandboxed", "application/xhtml+xml", "text/javascript", "text/css")


class FileRoutes:
    """Handlers that work on one machine's disk."""

    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine
        self._disk = machine.disk

    def aliased_routes(self) -> list[web.RouteDef]:
        """Routes that also exist below `/api`."""
        return [
            web.get("/view", self.view),
            web.post("/upload/image", self.upload_image),
            web.post("/upload/mask", self.upload_mask),
        ]

    async def view(self, request: web.Request) -> web.StreamResponse:
        query = request.rel_url.query
        if "filename" not in query:
            return web.Response(status=404)
        found = self._find(query["filename"], query.get("type", "output"), query.get("subfolder"))
        if isinstance(found, int):
            return web.Response(status=found)
        headers = {"Content-Disposition": f'filename="{found.name}"'}
        channel = query.get("channel", "")
        if "preview" in query:
            wanted = query["preview"].split(";")
            image_format = wanted[0] if wanted[0] in ("webp", "jpeg") and "a" not in channel else "webp"
            quality = int(wanted[-1]) if wanted[-1].isdigit() else 90
            body = pictures.reencode(found.read_bytes(), image_format, quality, channel)
            return web.Response(body=body, content_type=f"image/{image_format}", headers=headers)
        if channel in ("rgb", "a"):
            body = pictures.one_channel(found.read_bytes(), channel)
            return web.Response(body=body, content_type="image/png", headers=headers)
        content_type = mimetypes.guess_type(found.name)[0] or "application/octet-stream"
        if content_type in _NEVER_SHOWN:
            content_type = "application/octet-stream"
        return web.FileResponse(found, headers={**headers, "Content-Type": content_type})

    def _find(self, name: str, kind: str, subfolder: str | None) -> Path | int:
        """The file, or the status to answer with."""
        plain, folder = self._disk.annotated(name)
        if not plain or plain.startswith("/") or ".." in plain:
            return 400
        folder = folder or self._disk.folder(kind)
        if folder is None:
            return 400
        if subfolder is not None:
            inside = self._disk.inside(folder, subfolder)
            if inside is None:
                return 403
            folder = inside
        path = folder / Path(plain).name
        return path if path.is_file() else 404

    async def upload_image(self, request: web.Request) -> web.Response:
        form = await request.post()
        return self._store(form, None)

    async def upload_mask(self, request: web.Request) -> web.Response:
        form = await request.post()
        original = json.loads(str(form["original_ref"]))
        found = self._find(original["filename"], original.get("type", "output"), original.get("subfolder"))
        return self._store(form, found if isinstance(found, Path) else None)

    def _store(self, form: Any, original: Path | None) -> web.Response:
        # Looked up first: an unknown folder raises and gives a 500, as on the real server.
        kind = form.get("type") or "input"
        folder = {name: self._disk.base / name for name in ("input", "temp", "output")}[kind]
        image = form.get("image")
        if not isinstance(image, web.FileField) or not image.filename:
            return web.Response(status=400)
        subfolder = str(form.get("subfolder", ""))
        path = self._disk.inside(folder, subfolder, image.filename)
        if path is None:
            return web.Response(status=400)
        content = image.file.read()
        if original is not None:
            content = pictures.with_mask(original.read_bytes(), content)
        path.parent.mkdir(parents=True, exist_ok=True)
        if form.get("overwrite") not in ("true", "1"):
            stem, ending = path.stem, path.suffix
            number = 1
            # Equal content under a taken name is the same file; other content gets a new name.
            while path.exists() and path.read_bytes() != content:
                path = path.with_name(f"{stem} ({number}){ending}")
                number += 1
        path.write_bytes(content)
        self._machine.stats.uploads += 1
        return web.json_response({"name": path.name, "subfolder": subfolder, "type": kind})
