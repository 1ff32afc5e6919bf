"""The routes of the fake account: v2 to run jobs, v1 to know the account, and the storage of outputs.

The storage is another origin and refuses requests that carry the key, as the documentation asks clients not to send
it there.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from comfyfleet.testing.fake_comfy_cloud.jobs import (
    ENDS,
    CloudJob,
    CloudJobs,
    InvalidGraph,
    NoCredits,
    QueueFull,
    timestamp,
)
from comfyfleet.testing.fake_comfy_cloud.settings import PLANS, CloudFaults, CloudStats, FakeCloudSettings

_V1_STATES = {
    "queued": "pending",
    "running": "in_progress",
    "canceling": "in_progress",
    "succeeded": "completed",
    "failed": "failed",
    "canceled": "cancelled",
    "expired": "failed",
}
_GARBAGE = "<!doctype html><title>Just a moment</title>"


class CloudRoutes:
    def __init__(
        self, settings: FakeCloudSettings, faults: CloudFaults, stats: CloudStats, jobs: CloudJobs
    ) -> None:
        self.storage_url = ""
        self._settings = settings
        self._faults = faults
        self._stats = stats
        self._jobs = jobs
        self._links: dict[str, tuple[str, float]] = {}

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._settings.max_upload_bytes + 65_536, middlewares=[self._with_faults]
        )
        app.add_routes(
            [
                web.post("/api/v2/jobs", self.submit),
                web.get("/api/v2/jobs/{id}", self.job),
                web.get("/api/v2/jobs/{id}/workflow", self.workflow),
                web.get("/api/v2/jobs/{id}/events", self.events),
                web.post("/api/v2/jobs/{id}/cancel", self.cancel),
                web.post("/api/v2/assets", self.upload),
                web.get("/api/v2/assets/{id}/content", self.content),
                web.get("/api/user", self.user),
                web.get("/api/features", self.features),
                web.get("/api/object_info", self.object_info),
                web.get("/api/experiment/models", self.model_folders),
                web.get("/api/experiment/models/{folder}", self.models),
                web.get("/api/system_stats", self.system_stats),
                web.get("/api/jobs", self.list_jobs),
                web.get("/api/jobs/{id}", self.job_details),
                web.get("/api/view", self.view),
                web.post("/api/interrupt", self.interrupt),
            ]
        )
        return app

    def storage(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/signed/{token}", self.signed)])
        return app

    @web.middleware
    async def _with_faults(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        faults, path = self._faults, request.path
        name = f"{request.method} {path}"
        self._stats.requests[name] = self._stats.requests.get(name, 0) + 1
        if _meets(path, faults.drop_paths):
            return await self._cut(request)
        if faults.slow_s:
            await asyncio.sleep(faults.slow_s)
        if _meets(path, faults.endless_paths):
            return await _endless(request)
        if _meets(path, faults.garbage_paths):
            return web.Response(text=_GARBAGE, content_type="text/html")
        if (refused := self._unauthorized(request)) is not None:
            return refused
        if path.startswith("/api/v2/jobs/") and faults.rate_limited > 0:
            faults.rate_limited -= 1
            return _error(429, "rate_limited", "Too many requests.", retry_after=0)
        return await handler(request)

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        path, headers = request.path, request.headers
        if path.startswith("/api/experiment/") or path == "/api/system_stats":
            return None
        is_v2 = path.startswith("/api/v2/")
        given = (
            headers.get("Authorization", "").removeprefix("Bearer ")
            if is_v2
            else headers.get("X-API-Key", "")
        )
        said = f" The key was {given}." if self._faults.echoes_key else ""
        if given != self._settings.key or self._faults.is_key_refused:
            return _refusal(is_v2, 401, "unauthorized", f"Missing or invalid credentials.{said}")
        if self._faults.is_forbidden and is_v2:
            return _refusal(is_v2, 403, "forbidden", f"PARTNER_NODE_DISABLED.{said}")
        return None

    async def _cut(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError

    # v2

    async def submit(self, request: web.Request) -> web.StreamResponse:
        faults, jobs = self._faults, self._jobs
        if faults.lose_before > 0:
            faults.lose_before -= 1
            return await self._cut(request)
        self._stats.submissions += 1
        key = request.headers.get("Idempotency-Key")
        body = await request.json()
        if key in jobs.claimed_keys:
            return _error(
                422,
                "idempotency_key_reuse",
                "This Idempotency-Key has already been used. Keys are single-use; poll or list your jobs instead of "
                "resubmitting with the same key.",
            )
        if faults.answers:
            scripted = faults.answers.pop(0)
            headers = {} if scripted.retry_after is None else {"Retry-After": str(scripted.retry_after)}
            return web.json_response(scripted.body, status=scripted.status, headers=headers)
        graph = body.get("workflow") if isinstance(body, dict) else None
        if not isinstance(graph, dict):
            return _error(422, "invalid_workflow", "Missing 'workflow' (API-format graph).")
        if faults.error_before > 0:
            faults.error_before -= 1
            self._claim(key)
            return _error(500, "upstream_error", "An unexpected error occurred.")
        if not PLANS[self._settings.plan]:
            return _error(429, "PAYMENT_REQUIRED", "Subscription inactive.")
        try:
            job = jobs.submit(graph)
        except InvalidGraph as error:
            return _error(422, error.code, str(error), error.details)
        except NoCredits:
            return _error(402, "insufficient_credits", "Out of credits.")
        except QueueFull:
            return _error(429, "queue_full", "The queue is full.", retry_after=1)
        self._claim(key)
        if faults.error_after > 0:
            faults.error_after -= 1
            return _error(500, "upstream_error", "An unexpected error occurred.")
        if faults.lose_after > 0:
            faults.lose_after -= 1
            return await self._cut(request)
        return web.json_response(self._shown(job), status=201)

    def _claim(self, key: str | None) -> None:
        if key is not None:
            self._jobs.claimed_keys.add(key)

    def _shown(self, job: CloudJob) -> dict[str, Any]:
        path = f"/api/v2/jobs/{job.job_id}"
        return {
            "id": job.job_id,
            "status": job.status,
            "created_at": timestamp(job.created_at),
            "started_at": timestamp(job.started_at),
            "completed_at": timestamp(job.completed_at),
            "expires_at": timestamp(self._jobs.expires_at(job)),
            "queue_position": None,
            "progress": job.progress,
            "outputs": [self._shown_output(output) for output in job.outputs],
            "error": job.error,
            "urls": {"self": path, "events": f"{path}/events", "cancel": f"{path}/cancel"},
        }

    def _shown_output(self, output: dict[str, Any]) -> dict[str, Any]:
        expires_at = time.time() + self._settings.link_life_s
        return {**output, "url": self._link(output["id"]), "url_expires_at": timestamp(expires_at)}

    def _link(self, asset_id: str) -> str:
        token = secrets.token_hex(16)
        self._links[token] = (asset_id, time.time() + self._settings.link_life_s)
        return f"{self.storage_url}/signed/{token}?X-Goog-Signature={secrets.token_hex(8)}%2B"

    def _find(self, request: web.Request) -> CloudJob | None:
        job = self._jobs.jobs.get(request.match_info["id"])
        if job is None or self._faults.forgets_jobs or time.time() >= self._jobs.expires_at(job):
            return None
        return job

    def _no_job(self, request: web.Request) -> web.Response:
        return _error(404, "not_found", f"No job {request.match_info['id']}.")

    async def job(self, request: web.Request) -> web.Response:
        job = self._find(request)
        return self._no_job(request) if job is None else web.json_response(self._shown(job))

    async def workflow(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if job is None or self._faults.hides_v2_workflows:
            return self._no_job(request)
        return web.json_response({"workflow": self._graph(job), "format": "api"})

    def _graph(self, job: CloudJob) -> dict[str, Any]:
        if not self._faults.loses_marks:
            return job.graph
        return {
            node_id: {
                "class_type": node["class_type"],
                "inputs": {
                    name: value for name, value in node["inputs"].items() if name != "filename_prefix"
                },
            }
            for node_id, node in job.graph.items()
        }

    async def events(self, request: web.Request) -> web.StreamResponse:
        job, streams = self._find(request), self._faults.streams
        if job is None:
            return self._no_job(request)
        if streams == "missing":
            return _error(501, "not_implemented", "No live events here.")
        if streams == "full":
            return _error(429, "too_many_streams", "Too many streams.", retry_after=1)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        job.listeners.append(queue)
        try:
            await _send(response, "status", {"status": job.status})
            if streams == "cut":
                return await self._cut_stream(request, response)
            if job.progress is not None:
                await _send(response, "progress", job.progress)
            ended = job.status in ENDS
            while not ended:
                event, data = await queue.get()
                shown = self._shown_output(data) if event == "output" else data
                await _send(response, event, shown)
                ended = event == "status" and data["status"] in ENDS
        finally:
            job.listeners.remove(queue)
        return response

    async def _cut_stream(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return response

    async def cancel(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if job is None:
            return self._no_job(request)
        self._jobs.cancel(job)
        return web.json_response(self._shown(job))

    async def upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        file = form.get("file")
        missing = [name for name in ("content_type", "file_path") if name not in form]
        if not isinstance(file, web.FileField) or missing:
            return _error(422, "invalid_request", "file, content_type and file_path are required.")
        self._stats.uploads += 1
        name, content_type = str(form["file_path"]), str(form["content_type"])
        asset = self._jobs.add_asset(file.file.read(), name, content_type)
        now = time.time()
        shown = {
            "id": asset.asset_id,
            "hash": None,
            "size_bytes": asset.path.stat().st_size,
            "content_type": content_type,
            "file_path": name,
            "created_new": True,
            "created_at": timestamp(now),
            "url": self._link(asset.asset_id),
            "url_expires_at": timestamp(now + self._settings.link_life_s),
        }
        return web.json_response(shown, status=201)

    async def content(self, request: web.Request) -> web.Response:
        return self._redirected(request.match_info["id"])

    def _redirected(self, asset_id: str) -> web.Response:
        if asset_id not in self._jobs.assets or self._faults.are_outputs_gone:
            return _error(404, "not_found", "No such asset.")
        target = self._faults.redirect_outputs_to or self._link(asset_id)
        return web.Response(status=302, headers={"Location": target})

    async def signed(self, request: web.Request) -> web.StreamResponse:
        if "Authorization" in request.headers or "X-API-Key" in request.headers:
            self._stats.keys_at_storage += 1
            return web.Response(status=400, text="Only one auth mechanism allowed")
        asset_id, until = self._links.get(request.match_info["token"], ("", 0.0))
        if time.time() >= until or "X-Goog-Signature" not in request.query:
            return web.Response(status=403, text="Expired")
        self._stats.downloads += 1
        if self._faults.are_outputs_endless:
            return await _endless(request)
        asset = self._jobs.assets[asset_id]
        return web.FileResponse(asset.path, headers={"Content-Type": asset.content_type})

    # v1

    async def user(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "active"})

    async def features(self, _request: web.Request) -> web.Response:
        features = {
            "supports_preview_metadata": True,
            "max_upload_size": self._settings.max_upload_bytes,
            "max_concurrent_jobs": PLANS[self._settings.plan],
        }
        return web.json_response(features)

    async def object_info(self, _request: web.Request) -> web.Response:
        machine = self._jobs.machine
        printed = {name: known.printed(machine.list_names) for name, known in machine.catalogue.items()}
        return web.json_response(printed)

    async def model_folders(self, _request: web.Request) -> web.Response:
        return web.json_response([{"name": name, "folders": [name]} for name in self._settings.models])

    async def models(self, request: web.Request) -> web.Response:
        names = self._settings.models.get(request.match_info["folder"])
        if not names:
            return web.json_response({"code": "NOT_FOUND", "message": "No such folder"}, status=404)
        return web.json_response([{"name": name, "pathIndex": 0} for name in sorted(names)])

    async def system_stats(self, _request: web.Request) -> web.Response:
        version = self._jobs.machine.settings.version
        system = {"comfyui_version": version, "python_version": "3.12.0 (main, fake) [GCC 12.2.0]"}
        return web.json_response({"system": system, "devices": []})

    async def list_jobs(self, request: web.Request) -> web.Response:
        offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", 100))
        jobs = [] if self._faults.hides_jobs else list(self._jobs.jobs.values())[::-1]
        page = [self._entry(job) for job in jobs[offset : offset + limit]]
        pagination = {
            "offset": offset,
            "limit": limit,
            "total": len(jobs),
            "has_more": offset + limit < len(jobs),
        }
        return web.json_response({"jobs": page, "pagination": pagination})

    def _entry(self, job: CloudJob) -> dict[str, Any]:
        return {
            "id": job.job_id,
            "status": _V1_STATES[job.status],
            "create_time": int(job.created_at),
            "outputs_count": len(job.outputs),
        }

    async def job_details(self, request: web.Request) -> web.Response:
        job = self._jobs.jobs.get(request.match_info["id"])
        if job is None:
            return web.json_response({"code": "NOT_FOUND", "message": "Job not found"}, status=404)
        entry = self._entry(job)
        workflow = {"prompt": self._graph(job), "extra_data": {}}
        return web.json_response({**entry, "update_time": entry["create_time"], "workflow": workflow})

    async def view(self, request: web.Request) -> web.Response:
        name = request.query.get("filename", "")
        found = next((asset for asset in self._jobs.assets.values() if asset.name == name), None)
        return self._redirected(found.asset_id if found is not None else "")

    async def interrupt(self, _request: web.Request) -> web.Response:
        self._stats.interrupts += 1
        for job in self._jobs.jobs.values():
            if job.status == "running":
                self._jobs.cancel(job)
        return web.json_response({})


def _meets(path: str, prefixes: list[str]) -> bool:
    return any(path.startswith(prefix) for prefix in prefixes)


def _error(
    status: int, code: str, message: str, details: Any = None, *, retry_after: int | None = None
) -> web.Response:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    body = {"error": {"code": code, "message": message, "details": details}}
    return web.json_response(body, status=status, headers=headers)


def _refusal(is_v2: bool, status: int, code: str, message: str) -> web.Response:
    if is_v2:
        return _error(status, code, message)
    return web.json_response({"code": code.upper(), "message": message}, status=status)


async def _send(response: web.StreamResponse, event: str, data: dict[str, Any]) -> None:
    await response.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    with suppress(ConnectionError):
        await response.write(b'{"a": "')
        while True:
            await response.write(b"x" * 65_536)
    return response
