"""The files of a fake LangFlow: those of a flow under `/api/v1/files`, those of the user under `/api/v2/files`."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from aiohttp import BodyPartReader, web

from comfyfleet.testing.fake_langflow.answers import answer_json, invalid
from comfyfleet.testing.fake_langflow.flow_routes import USER_ID

if TYPE_CHECKING:
    from comfyfleet.testing.fake_langflow.server import FakeLangFlow


class LangFlowFileRoutes:
    def __init__(self, server: FakeLangFlow) -> None:
        self._server = server
        self._files: dict[str, dict[str, Any]] = {}

    def add_to(self, app: web.Application) -> None:
        router = app.router
        router.add_post("/api/v1/files/upload/{flow_id}", self.upload)
        router.add_get("/api/v1/files/list/{flow_id}", self.list_flow)
        router.add_get("/api/v1/files/download/{flow_id}/{name}", self.download)
        router.add_delete("/api/v1/files/delete/{flow_id}/{name}", self.delete)
        router.add_post("/api/v2/files/", self.upload_user)
        router.add_get("/api/v2/files/", self.list_user)
        router.add_get("/api/v2/files/{file_id}", self.download_user)
        router.add_delete("/api/v2/files/{file_id}", self.delete_user)

    # of a flow

    async def upload(self, request: web.Request) -> web.Response:
        flow_id = request.match_info["flow_id"]
        if self._server.find_flow(flow_id) is None:
            return answer_json({"detail": "Flow not found"}, 404)
        if (sent := await _read_file(request)) is None:
            return invalid("missing", ["body", "file"], "Field required")
        name, content = sent
        path = f"{flow_id}/{datetime.now(UTC).strftime('%Y-%m-%d_%H-%M-%S')}_{name}"
        self._server.storage[path] = content
        return answer_json({"flowId": flow_id, "file_path": path}, 201)

    async def list_flow(self, request: web.Request) -> web.Response:
        flow_id = request.match_info["flow_id"]
        if self._server.find_flow(flow_id) is None:
            return answer_json({"detail": "Flow not found"}, 404)
        names = [path.partition("/")[2] for path in self._server.storage if path.startswith(f"{flow_id}/")]
        return answer_json({"files": names})

    async def download(self, request: web.Request) -> web.Response:
        flow_id, name = request.match_info["flow_id"], request.match_info["name"]
        if self._server.find_flow(flow_id) is None:
            return answer_json({"detail": "Flow not found"}, 404)
        content = self._server.storage.get(f"{flow_id}/{name}")
        if content is None:
            return answer_json({"detail": f"File {name} not found in flow {flow_id}"}, 500)
        return web.Response(body=content, content_type="application/octet-stream")

    async def delete(self, request: web.Request) -> web.Response:
        flow_id, name = request.match_info["flow_id"], request.match_info["name"]
        self._server.storage.pop(f"{flow_id}/{name}", None)
        return answer_json({"message": f"File {name} deleted successfully"})

    # of the user

    async def upload_user(self, request: web.Request) -> web.Response:
        if (sent := await _read_file(request)) is None:
            return invalid("missing", ["body", "file"], "Field required")
        name, content = sent
        if "/" in name or ".." in name:
            words = "Invalid file name: paths, '..', NUL, CR/LF, and unsafe Unicode formatting are forbidden."
            return answer_json({"detail": words}, 400)
        path = PurePosixPath(name)
        taken = {each["name"] for each in self._files.values()}
        stem, number = path.stem, 0
        while stem in taken:
            number += 1
            stem = f"{path.stem} ({number})"
        stored = f"{USER_ID}/{stem}{path.suffix}"
        self._server.storage[stored] = content
        file_id = str(uuid.uuid4())
        entry = {"id": file_id, "name": stem, "path": stored, "size": len(content), "provider": None}
        self._files[file_id] = entry
        return answer_json(entry, 201)

    async def list_user(self, _request: web.Request) -> web.Response:
        return answer_json([{**entry, "user_id": USER_ID} for entry in self._files.values()])

    async def download_user(self, request: web.Request) -> web.Response:
        entry = self._files.get(request.match_info["file_id"])
        if entry is None:
            return answer_json({"detail": "File not found"}, 404)
        content = self._server.storage[entry["path"]]
        return web.Response(body=content, content_type="application/octet-stream")

    async def delete_user(self, request: web.Request) -> web.Response:
        entry = self._files.pop(request.match_info["file_id"], None)
        if entry is None:
            return answer_json({"detail": "File not found"}, 404)
        self._server.storage.pop(entry["path"], None)
        return answer_json({"detail": f"File {entry['name']} deleted successfully"})


async def _read_file(request: web.Request) -> tuple[str, bytes] | None:
    if not request.content_type.startswith("multipart/"):
        return None
    async for part in await request.multipart():
        if isinstance(part, BodyPartReader) and part.name == "file":
            return part.filename or "", bytes(await part.read())
    return None
