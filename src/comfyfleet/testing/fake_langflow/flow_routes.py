"""The routes of a fake LangFlow about itself and its flows, and `/api/v1/run`."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from comfyfleet.testing.fake_langflow.answers import answer_json, invalid
from comfyfleet.testing.fake_langflow.flows import FakeFlow
from comfyfleet.testing.fake_langflow.messages import iso_now
from comfyfleet.testing.fake_langflow.run import RunRequest

if TYPE_CHECKING:
    from comfyfleet.testing.fake_langflow.server import FakeLangFlow

USER_ID = "ab15f0c2-c339-4c2a-927e-e3bf3bb1d11b"
_FOLDER_ID = "2e291600-e62c-4d89-9040-0191cc1d5ce0"
_GLOBAL = "x-langflow-global-var-"
_TYPES: dict[str, tuple[type, ...]] = {
    "input_value": (str,),
    "tweaks": (dict,),
    "session_id": (str,),
}
_CHOICES = {
    "input_type": ("chat", "text", "any"),
    "output_type": ("chat", "text", "any", "debug"),
}
# Events of the graph are only in the streams of `/api/v2`.
_STREAMED = ("add_message", "log", "token", "error")


class FlowRoutes:
    def __init__(self, server: FakeLangFlow) -> None:
        self._server = server

    def add_to(self, app: web.Application) -> None:
        router = app.router
        router.add_get("/health", self.health)
        router.add_get("/health_check", self.health_check)
        router.add_get("/healthz", self.health_check)
        router.add_get("/api/v1/version", self.version)
        router.add_get("/api/v1/users/whoami", self.whoami)
        router.add_get("/api/v1/flows/", self.flows)
        router.add_get("/api/v1/flows/{flow_id}", self.flow)
        router.add_post("/api/v1/run/{flow}", self.run)

    async def health(self, _request: web.Request) -> web.Response:
        return answer_json({"status": "ok"})

    async def health_check(self, _request: web.Request) -> web.Response:
        return answer_json({"status": "ok", "chat": "ok", "db": "ok"})

    async def version(self, _request: web.Request) -> web.Response:
        version = self._server.settings.version
        fake = {"is_fake": True} if self._server.settings.is_fake else {}
        return answer_json({"version": version, "main_version": version, "package": "Langflow", **fake})

    async def whoami(self, _request: web.Request) -> web.Response:
        user = {
            "id": USER_ID,
            "username": "lab",
            "profile_image": None,
            "store_api_key": None,
            "is_active": True,
            "is_superuser": True,
            "create_at": iso_now(),
            "updated_at": iso_now(),
            "last_login_at": iso_now(),
            "optins": {"github_starred": False, "dialog_dismissed": False, "discord_clicked": False},
        }
        return answer_json(user)

    async def flows(self, _request: web.Request) -> web.Response:
        listed = [{**_header(flow), "data": None} for flow in self._server.flows]
        if self._server.is_before_1_13:
            # Whatever the client accepts.
            packed = gzip.compress(json.dumps(listed).encode())
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            return web.Response(body=packed, headers=headers)
        return answer_json(listed)

    async def flow(self, request: web.Request) -> web.Response:
        flow = self._server.find_flow(request.match_info["flow_id"])
        if flow is None:
            return answer_json({"detail": "Flow not found"}, 404)
        nodes = [
            {
                "id": component.component_id,
                "type": "genericNode",
                "data": {
                    "id": component.component_id,
                    "type": component.type,
                    "node": {"display_name": component.display_name, "template": component.fields},
                },
            }
            for component in flow.components
        ]
        return answer_json({**_header(flow), "data": {"nodes": nodes, "edges": []}})

    async def run(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["flow"]
        flow = self._server.find_flow(name)
        text = await request.text()
        try:
            body = json.loads(text) if text else {}
        except ValueError:
            return invalid("json_invalid", ["body", 1], "JSON decode error")
        if flow is None:
            return answer_json({"detail": f"Flow identifier {name} not found"}, 404)
        if not _is_typed(body):
            # As recorded: a body of wrong types is dropped whole.
            body = {}
        asked = RunRequest(
            input_value=body.get("input_value"),
            session=body.get("session_id") or flow.flow_id,
            tweaks=body.get("tweaks") or {},
            global_variables={
                header[len(_GLOBAL) :].upper(): value
                for header, value in request.headers.items()
                if header.lower().startswith(_GLOBAL)
            },
        )
        if request.query.get("stream") == "true":
            return await self._stream(request, flow, asked)
        run = self._server.direct_runs.start(flow, asked, lambda *_: None)
        # Hanging up does not stop it.
        await asyncio.shield(run.task)
        if run.error is not None:
            return answer_json({"detail": run.error}, 500)
        return answer_json(run.result)

    async def _stream(self, request: web.Request, flow: FakeFlow, asked: RunRequest) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        def tell(name: str, data: dict[str, Any], _is_durable: bool) -> None:
            if name == "error":
                # Here the blocks have only their plain form.
                data = {**data, "content_blocks": data["data"]["content_blocks"]} if "data" in data else data
            if name in _STREAMED:
                events.put_nowait(json.loads(json.dumps({"event": name, "data": data})))

        run = self._server.direct_runs.start(flow, asked, tell)

        def end(_: object) -> None:
            if run.result is not None:
                events.put_nowait({"event": "end", "data": {"result": run.result}})
            elif run.error is not None:
                events.put_nowait({"event": "error", "data": {"error": f"500: {run.error}"}})
            events.put_nowait(None)

        run.task.add_done_callback(end)
        try:
            while (event := await events.get()) is not None:
                await self._server.wait_unblocked()
                await stream.write(json.dumps(event).encode() + b"\n\n")
                if self._server.faults.cut_streams:
                    self._server.faults.cut_streams -= 1
                    if request.transport is not None:
                        request.transport.abort()
                    return stream
        finally:
            # Hanging up cancels this handler, which stops the run.
            run.task.cancel()
        return stream


def _is_typed(body: Any) -> bool:
    return isinstance(body, dict) and all(
        isinstance(value, _TYPES.get(name, (object,))) and value in _CHOICES.get(name, (value,))
        for name, value in body.items()
    )


def _header(flow: FakeFlow) -> dict[str, Any]:
    return {
        "id": flow.flow_id,
        "name": flow.name,
        "folder_id": _FOLDER_ID,
        "is_component": False,
        "endpoint_name": flow.endpoint_name,
        "description": "lab" if flow.middle is not None else None,
        "access_type": "PRIVATE",
        "tags": None,
        "mcp_enabled": False,
        "flow_type": "workflow",
        "a2a_enabled": False,
        "a2a_card_overrides": None,
        "action_name": None,
        "action_description": None,
        "updated_at": iso_now(),
    }
