"""Submitting, watching and stopping prompts over HTTP.

Owns `/prompt`, `/queue`, `/history`, `/interrupt`, `/free`, `/ws` and the job routes. Where a strange request
makes the real server answer 500, nothing here catches it.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from aiohttp import web

from comfyfleet.testing.fake_comfyui import jobs
from comfyfleet.testing.fake_comfyui.machine import FakeMachine
from comfyfleet.testing.fake_comfyui.prompt_queue import public_part
from comfyfleet.testing.fake_comfyui.validation import problem

HIDDEN_KEYS = ("auth_token_comfy_org", "api_key_comfy_org")


class PromptRoutes:
    """Handlers that work on one machine."""

    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine
        self._queue = machine.queue

    def aliased_routes(self) -> list[web.RouteDef]:
        """Routes that also exist below `/api`."""
        return [
            web.get("/ws", self.websocket),
            web.get("/prompt", self.get_prompt),
            web.post("/prompt", self.post_prompt),
            web.get("/queue", self.get_queue),
            web.post("/queue", self.post_queue),
            web.get("/history", self.get_history),
            web.get("/history/{prompt_id}", self.get_history_of),
            web.post("/history", self.post_history),
            web.post("/interrupt", self.post_interrupt),
            web.post("/free", self.post_free),
        ]

    def job_routes(self) -> list[web.RouteDef]:
        """Routes that exist below `/api` only, and not in every release."""
        behaviour = self._machine.behaviour
        routes: list[web.RouteDef] = []
        if behaviour.has_jobs:
            routes += [web.get("/api/jobs", self.get_jobs), web.get("/api/jobs/{job_id}", self.get_job)]
        if behaviour.cancels_jobs:
            routes += [
                web.post("/api/jobs/cancel", self.cancel_jobs),
                web.post("/api/jobs/{job_id}/cancel", self.cancel_job),
            ]
        return routes

    async def websocket(self, request: web.Request) -> web.WebSocketResponse:
        machine = self._machine
        flags = machine.features() if machine.behaviour.negotiates_features else None
        return await machine.sockets.serve(request, self._queue.info, flags)

    async def get_prompt(self, _request: web.Request) -> web.Response:
        return web.json_response(self._queue.info())

    async def post_prompt(self, request: web.Request) -> web.Response:
        machine, behaviour = self._machine, self._machine.behaviour
        body = await request.json()
        if "number" in body:
            number: float = float(body["number"])
        else:
            number = -machine.number if body.get("front") else machine.number
            machine.number += 1
        if "prompt" not in body:
            refusal = problem("no_prompt", "No prompt provided", "No prompt provided")
            return web.json_response({"error": refusal, "node_errors": {}}, status=400)
        prompt_id = self._prompt_id(body)
        if prompt_id is None:
            return web.json_response({"error": _bad_id(), "node_errors": {}}, status=400)
        targets = body.get("partial_execution_targets") if behaviour.takes_partial_targets else None
        verdict = machine.validator.validate(body["prompt"], targets)
        await self._block_for(verdict.blocks_for_s)
        extra_data = body.get("extra_data", {})
        if "client_id" in body:
            extra_data["client_id"] = body["client_id"]
        if verdict.error is not None:
            return web.json_response({"error": verdict.error, "node_errors": verdict.node_errors}, status=400)
        hidden: dict[str, Any] = {}
        if behaviour.hides_api_keys:
            hidden = {key: extra_data.pop(key) for key in HIDDEN_KEYS if key in extra_data}
        if behaviour.stamps_create_time:
            extra_data["create_time"] = machine.create_time()
        machine.stats.prompts_accepted += 1
        self._queue.put((number, prompt_id, body["prompt"], extra_data, list(verdict.outputs), hidden))
        if machine.faults.takes_one("lose_submit_answers"):
            await self._lose_answer(request)
        answer = {"prompt_id": prompt_id, "number": number, "node_errors": verdict.node_errors}
        return web.json_response(answer)

    def _prompt_id(self, body: dict[str, Any]) -> str | None:
        behaviour = self._machine.behaviour
        if not behaviour.takes_own_prompt_id or "prompt_id" not in body:
            return self._machine.new_id()
        given = body["prompt_id"]
        if not behaviour.wants_uuid:
            return str(given)
        if given is None:
            return self._machine.new_id()
        return given if _is_canonical(given) else None

    async def _block_for(self, seconds: float) -> None:
        if seconds <= 0:
            return
        # A slow validation blocks the real server's event loop: nobody gets an answer meanwhile.
        self._machine.loop_is_free.clear()
        try:
            await self._machine.clock.sleep(seconds)
        finally:
            self._machine.loop_is_free.set()

    async def _lose_answer(self, request: web.Request) -> None:
        transport = request.transport
        if transport is None:
            return
        if self._machine.faults.lost_answer_manner == "drop":
            transport.abort()
            return
        await self._machine.never()

    async def get_queue(self, _request: web.Request) -> web.Response:
        running = [public_part(item) for item in self._queue.running.values()]
        pending = [public_part(item) for item in self._queue.pending]
        return web.json_response({"queue_running": running, "queue_pending": pending})

    async def post_queue(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("clear"):
            self._queue.clear()
        for prompt_id in body.get("delete", ()):
            self._queue.delete(prompt_id)
        return web.Response(status=200)

    async def get_history(self, request: web.Request) -> web.Response:
        query = request.rel_url.query
        max_items = int(query["max_items"]) if "max_items" in query else None
        return web.json_response(self._queue.history_page(max_items, int(query.get("offset", -1))))

    async def get_history_of(self, request: web.Request) -> web.Response:
        prompt_id = request.match_info["prompt_id"]
        history = self._queue.history
        return web.json_response({prompt_id: history[prompt_id]} if prompt_id in history else {})

    async def post_history(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("clear"):
            self._queue.history.clear()
        for prompt_id in body.get("delete", ()):
            self._queue.history.pop(prompt_id, None)
        return web.Response(status=200)

    async def post_interrupt(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except json.JSONDecodeError:
            body = {}
        prompt_id = body.get("prompt_id") if self._machine.behaviour.interrupts_by_id else None
        if not prompt_id or self._queue.is_running(prompt_id):
            self._machine.interrupt()
        return web.Response(status=200)

    async def post_free(self, request: web.Request) -> web.Response:
        body = await request.json()
        for flag in ("unload_models", "free_memory"):
            if body.get(flag):
                self._queue.set_flag(flag)
        return web.Response(status=200)

    async def get_jobs(self, request: web.Request) -> web.Response:
        behaviour = self._machine.behaviour
        try:
            query = jobs.parse_query(request.rel_url.query, behaviour)
        except jobs.BadQuery as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response(jobs.list_jobs(self._queue, query, behaviour))

    async def get_job(self, request: web.Request) -> web.Response:
        job = jobs.find_job(self._queue, request.match_info["job_id"], self._machine.behaviour)
        if job is None:
            return web.json_response({"error": "Job not found"}, status=404)
        return web.json_response(job)

    async def cancel_job(self, request: web.Request) -> web.Response:
        return web.json_response({"cancelled": self._cancel(request.match_info["job_id"])})

    async def cancel_jobs(self, request: web.Request) -> web.Response:
        body = await request.json()
        job_ids = body.get("job_ids") if isinstance(body, dict) else None
        if not isinstance(job_ids, list) or not job_ids:
            return web.json_response({"error": "job_ids must be a non-empty list"}, status=400)
        invalid = [job_id for job_id in job_ids if not _is_canonical(job_id)]
        if invalid:
            return web.json_response(
                {"error": "job_ids contains invalid id(s)", "invalid_ids": invalid}, status=400
            )
        cancelled = [self._cancel(job_id) for job_id in job_ids]
        return web.json_response({"cancelled": any(cancelled)})

    def _cancel(self, job_id: str) -> bool:
        if self._queue.is_running(job_id):
            self._machine.interrupt()
            return True
        return self._queue.delete(job_id)


def _is_canonical(given: Any) -> bool:
    try:
        return isinstance(given, str) and str(uuid.UUID(given)) == given
    except ValueError:
        return False


def _bad_id() -> dict[str, Any]:
    return problem(
        "invalid_prompt_id",
        "prompt_id must be a valid UUID",
        "prompt_id must be a UUID string in canonical lowercase hyphenated form; "
        "omit it to let the server generate one",
    )
