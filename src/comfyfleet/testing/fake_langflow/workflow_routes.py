"""The routes `/api/v2/workflows` of a fake LangFlow: submit, status, events and stop of background jobs."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from comfyfleet.testing.fake_langflow.answers import answer_json, detail, invalid
from comfyfleet.testing.fake_langflow.jobs import FakeLangFlowJob
from comfyfleet.testing.fake_langflow.messages import iso_now
from comfyfleet.testing.fake_langflow.run import RunRequest

if TYPE_CHECKING:
    from comfyfleet.testing.fake_langflow.server import FakeLangFlow

_PATH = "/api/v2/workflows"
_TYPES: dict[str, tuple[type, str, str]] = {
    "flow_id": (str, "string_type", "Input should be a valid string"),
    "input_value": (str, "string_type", "Input should be a valid string"),
    "session_id": (str, "string_type", "Input should be a valid string"),
    "mode": (str, "string_type", "Input should be a valid string"),
    "stream_protocol": (str, "string_type", "Input should be a valid string"),
    "idempotency_key": (str, "string_type", "Input should be a valid string"),
    "start_component_id": (str, "string_type", "Input should be a valid string"),
    "stop_component_id": (str, "string_type", "Input should be a valid string"),
    "tweaks": (dict, "dict_type", "Input should be a valid dictionary"),
    "globals": (dict, "dict_type", "Input should be a valid dictionary"),
    "data": (dict, "dict_type", "Input should be a valid dictionary"),
    "files": (list, "list_type", "Input should be a valid list"),
    "output_ids": (list, "list_type", "Input should be a valid list"),
    "expose_graph_state": (bool, "bool_type", "Input should be a valid boolean"),
}
_MAX_KEY = 255


class WorkflowRoutes:
    def __init__(self, server: FakeLangFlow) -> None:
        self._server = server

    def add_to(self, app: web.Application) -> None:
        app.router.add_post(_PATH, self.submit)
        app.router.add_get(_PATH, self.status)
        app.router.add_post(f"{_PATH}/stop", self.stop)
        app.router.add_get(f"{_PATH}/{{job_id}}/events", self.events)

    async def submit(self, request: web.Request) -> web.StreamResponse:
        server, faults = self._server, self._server.faults
        try:
            body = await request.json()
        except ValueError:
            return invalid("json_invalid", ["body", 1], "JSON decode error")
        if (refusal := _check_body(body)) is not None:
            return refusal
        if faults.busy_submits:
            faults.busy_submits -= 1
            words = "Failed to fetch flow. Please try again."
            return detail(503, "Service unavailable, Please try again.", "DATABASE_ERROR", words)
        flow = server.find_flow(body["flow_id"])
        if flow is None:
            words = f"Flow '{body['flow_id']}' does not exist. Verify the flow_id and try again."
            return detail(404, "Flow not found", "FLOW_NOT_FOUND", words, flow_id=body["flow_id"])
        if body.get("output_ids"):
            words = (
                "mode='background' does not support request fields: output_ids. Output selection via output_ids only "
                "applies to mode='sync'."
            )
            refused = {"fields": ["output_ids"]}
            return detail(
                422, "Unsupported request fields for mode", "MODE_UNSUPPORTED_FIELDS", words, **refused
            )
        if body.get("mode") != "background":
            return detail(
                501, "Not in this fake", "NOT_IN_THIS_FAKE", "This fake runs only mode='background'."
            )
        if faults.cut_submits_before:
            faults.cut_submits_before -= 1
            return _cut(request)
        bounds = (body.get("start_component_id"), body.get("stop_component_id"))
        known = {component.component_id for component in flow.components}
        asked = RunRequest(
            input_value=body.get("input_value", ""),
            session=body.get("session_id") or flow.flow_id,
            tweaks=_without_code(body.get("tweaks") or {})
            if server.is_before_1_13
            else body.get("tweaks") or {},
            files=list(body.get("files") or []),
            # As recorded: in background mode the field `globals` has no effect.
            is_empty=any(bound is not None and bound not in known for bound in bounds),
        )
        job = server.jobs.submit(flow, asked, body.get("session_id"), body.get("idempotency_key"))
        if faults.cut_submits_after:
            faults.cut_submits_after -= 1
            return _cut(request)
        # As recorded: the answer to a repeated submit says `queued`, whatever the state is.
        return answer_json(_describe(job, "queued"))

    async def status(self, request: web.Request) -> web.Response:
        job_id = request.query.get("job_id")
        if job_id is None:
            return detail(400, "Missing required parameter", "MISSING_PARAMETER", "Job ID must be provided")
        if not _is_uuid(job_id):
            return invalid("value_error", ["query", "job_id"], "Value error, Invalid job_id, must be a UUID")
        job = self._server.jobs.by_id.get(job_id)
        if job is None:
            words = f"Workflow job {job_id} not found"
            return detail(404, "Workflow job not found", "JOB_NOT_FOUND", words, job_id=job_id)
        if job.state == "completed":
            session = {"session_id": None} if self._server.is_before_1_13 else {}
            return answer_json({**_result(job), **session})
        is_unclear = job.state == "cancelled" and self._server.clock.now() < job.unclear_until
        if job.state == "failed" or is_unclear:
            words = f"Job {job_id} has failed execution."
            return detail(
                500,
                "Job failed",
                "JOB_FAILED",
                words,
                job_id=job_id,
                error_detail=job.error if not is_unclear else None,
            )
        if job.state == "timed_out":
            words = "Workflow execution timed out"
            more = {"job_id": job_id, "flow_id": job.flow.flow_id}
            return detail(408, "Execution timeout", "EXECUTION_TIMEOUT", words, **more)
        return answer_json(_describe(job, job.state))

    async def stop(self, request: web.Request) -> web.Response:
        body = await request.json()
        job_id = body.get("job_id") if isinstance(body, dict) else None
        if not isinstance(job_id, str) or not _is_uuid(job_id):
            return invalid("value_error", ["body", "job_id"], "Value error, Invalid job_id, must be a UUID")
        job = self._server.jobs.by_id.get(job_id)
        if job is None:
            return detail(404, "Job not found", "JOB_NOT_FOUND", f"Job {job_id} not found", job_id=job_id)
        return answer_json({"job_id": job_id, "message": self._server.jobs.stop(job)})

    async def events(self, request: web.Request) -> web.StreamResponse:
        job_id = request.match_info["job_id"]
        job = self._server.jobs.by_id.get(job_id)
        if job is None:
            words = f"No background run for job {job_id}."
            return detail(404, "Background run not found", "JOB_NOT_FOUND", words, job_id=job_id)
        last = request.headers.get("Last-Event-ID", "")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        reader = job.subscribe(int(last) if last.isdecimal() else 0)
        try:
            while (item := await reader.get()) is not None:
                number, event = item
                await self._server.wait_unblocked()
                if self._server.faults.deaf_streams:
                    continue
                await stream.write(f"data: {json.dumps(event)}\nid: {number}\n\n".encode())
                if self._server.faults.cut_streams:
                    self._server.faults.cut_streams -= 1
                    return _cut(request)
        finally:
            job.unsubscribe(reader)
        return stream


def _check_body(body: Any) -> web.Response | None:
    if not isinstance(body, dict):
        return invalid("model_attributes_type", ["body"], "Input should be a valid dictionary or object")
    for name, value in body.items():
        if name not in _TYPES:
            return invalid("extra_forbidden", ["body", name], "Extra inputs are not permitted")
        kind, code, words = _TYPES[name]
        if not isinstance(value, kind):
            return invalid(code, ["body", name], words)
    if "flow_id" not in body:
        return invalid("missing", ["body", "flow_id"], "Field required")
    if not _is_uuid(body["flow_id"]):
        return invalid("value_error", ["body"], "Value error, Invalid flow_id, must be a UUID")
    if len(body.get("idempotency_key", "")) > _MAX_KEY:
        words = f"String should have at most {_MAX_KEY} characters"
        return invalid("string_too_long", ["body", "idempotency_key"], words)
    protocol = body.get("stream_protocol", "langflow")
    if protocol not in ("agui", "langflow"):
        words = f"Unknown stream_protocol '{protocol}'."
        more = {"available": ["agui", "langflow"]}
        return detail(422, "Unknown stream_protocol", "UNKNOWN_STREAM_PROTOCOL", words, **more)
    return None


def _describe(job: FakeLangFlowJob, state: str) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "flow_id": job.flow.flow_id,
        "object": "job",
        "created_timestamp": iso_now(),
        "status": state,
        "links": {
            "status": f"{_PATH}?job_id={job.job_id}",
            "events": f"{_PATH}/{job.job_id}/events",
            "stop": f"{_PATH}/stop",
        },
        "errors": [],
        "globals": {},
    }


def _result(job: FakeLangFlowJob) -> dict[str, Any]:
    output: dict[str, Any] = {"reason": "none", "text": None, "source": None}
    outputs = {}
    if job.output is not None:
        component = job.output["component_id"]
        outputs[component] = {name: each for name, each in job.output.items() if name != "component_id"}
        output = {"reason": "single", "text": job.output["content"], "source": component}
    return {
        "flow_id": job.flow.flow_id,
        "session_id": job.session,
        "job_id": job.job_id,
        "object": "response",
        "created_timestamp": iso_now(),
        "status": "completed",
        "output": output,
        "errors": [],
        "warnings": [],
        "inputs": {},
        "globals": {},
        "outputs": outputs,
        "human_request": None,
        "has_errors": False,
    }


def _without_code(tweaks: dict[str, Any]) -> dict[str, Any]:
    return {
        component: {name: value for name, value in fields.items() if name != "code"}
        for component, fields in tweaks.items()
        if isinstance(fields, dict)
    }


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _cut(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
