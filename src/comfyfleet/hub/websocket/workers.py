"""The old WebSocket messages of workers, and the commands of operators to workers and the queue.

An old worker does not know leases: the connection remembers the leases that it gave out and proves them for
the worker. After a reconnect, the worker must send the `lease` that came with its job.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.operator_commands import FleetAction
from comfyfleet.hub.files.job_files import JobInputFiles
from comfyfleet.hub.http.credentials import WorkersByKey
from comfyfleet.hub.local_worker_api import has_many, offload, sanitized
from comfyfleet.hub.worker_protocol import as_worker, check_holder
from comfyfleet.model.access import Caller
from comfyfleet.model.block import EVERY_WORKER
from comfyfleet.model.calls import (
    Command,
    Completion,
    FailureReport,
    Poll,
    ProgressReport,
    Release,
    ReportReply,
)
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import bounded
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.sanitizer import safe_failure, safe_progress
from comfyfleet.wire import websocket
from comfyfleet.wire.answers import worker_status
from comfyfleet.wire.problems import problem_response
from comfyfleet.wire.status_names import StatusDialect, status_name
from comfyfleet.wire.worker import RegisterBody, concurrent_jobs, registration

_MAX_PARKED = 64
_COMMANDS_S = 30.0
_RETRY_S = 1.0

Message = dict[str, Any]


class WebSocketWorkers:
    def __init__(
        self,
        engine: Engine,
        inputs: JobInputFiles,
        caller: Caller,
        max_wait_s: float,
        send: Callable[[Message], None],
        check_files: Callable[[JobResult, str], Awaitable[None]],
        keyed: WorkersByKey,
    ) -> None:
        self._keyed = keyed
        self._check_files = check_files
        self._engine = engine
        self._inputs = inputs
        self._caller = caller
        self._max_wait_s = max_wait_s
        self._send = send
        self._leases: dict[JobId, LeaseRef] = {}
        self._cancelled_leases: set[tuple[JobId, int]] = set()
        self._parked: set[asyncio.Task[None]] = set()
        self._listening: dict[WorkerId, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Leases continue: the worker may return with them, or they expire."""
        tasks = [*self._parked, *self._listening.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def handle(self, name: str, body: Any) -> Message | None:
        match name:
            case "ping":
                return {"type": "pong"}
            case "register_worker":
                return await self._register(body)
            case "request_job":
                return await self._request(body)
            case "update_progress":
                await self._progress(body)
                return None
            case "heartbeat":
                return await self._beat(body)
            case "complete_job":
                result, ref = await sanitized(websocket.result_of(body.result)), await self._ref(body)
                await self._check_files(result, ref.attempt_id)
                reply = await self._engine.complete(Completion(ref, result, body.seconds))
                return self._report_answer("job_completed", body, reply)
            case "fail_job":
                failure = safe_failure(bounded(websocket.failure_of(body.error)))
                reply = await self._engine.fail(FailureReport(await self._ref(body), failure, body.seconds))
                return self._report_answer("job_failed", body, reply)
        reply = await self._engine.release(Release(await self._ref(body), body.reason))
        return self._report_answer("job_released", body, reply)

    async def _register(self, body: websocket.RegisterWorkerMessage) -> Message:
        worker_id = as_worker(self._caller, body.worker_id)
        self._keyed.record_worker(self._caller, worker_id)
        fields = RegisterBody(
            worker_id,
            body.capabilities,
            slots=body.slots,
            max_concurrency=body.max_concurrency,
            instance=body.instance,
        )
        record = await self._engine.register(self._inputs.admitted(registration(fields)))
        self._listen(worker_id)
        rules = self._engine.rules
        return {
            "type": "worker_registered",
            "worker_id": worker_id,
            "slots": record.slots,
            "capabilities": record.capabilities,
            "heartbeat_s": rules.lease_ttl_s / 4,
            "lost_after_s": rules.worker_lost_s,
        }

    def _listen(self, worker_id: WorkerId) -> None:
        """Sends commands to the worker while it is connected."""
        if worker_id not in self._listening and len(self._listening) < _MAX_PARKED:
            self._listening[worker_id] = asyncio.ensure_future(self._forward_commands(worker_id))

    async def _forward_commands(self, worker_id: WorkerId) -> None:
        while True:
            try:
                self._command(await self._engine.commands(worker_id, _COMMANDS_S))
            except (Refusal, Fault):
                await asyncio.sleep(_RETRY_S)

    def _command(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if command.action != "cancel" or command.job_id is None:
                fields = {"action": command.action, "job_id": command.job_id, "reason": command.reason}
                self._send({"type": "worker_command", "timestamp": self._engine.now(), **fields})
            elif (command.job_id, command.lease_number) not in self._cancelled_leases:
                self._cancelled_leases.add((command.job_id, command.lease_number))
                self._cancelled(command.job_id, command.reason or "a cancellation was requested")

    def _cancelled(self, job_id: JobId, reason: str) -> None:
        now = self._engine.now()
        self._send({"type": "job_cancelled", "job_id": job_id, "reason": reason, "timestamp": now})

    async def _request(self, body: websocket.RequestJob) -> Message | None:
        worker_id = as_worker(self._caller, body.worker_id)
        self._keyed.record_worker(self._caller, worker_id)
        known = await self._known(worker_id, body.capabilities)
        self._listen(worker_id)
        poll = Poll(
            worker_id,
            PollId(body.poll_id or secrets.token_hex(8)),
            min(body.wait_s, self._max_wait_s),
            current_load=body.current_load,
        )
        if known is not None and body.current_load is not None and body.current_load >= known.slots:
            self._send_no_job(poll)
        elif not poll.wait_s:
            await self._lease(poll)
        elif len(self._parked) >= _MAX_PARKED:
            raise Refusal(
                RefusalCode.TOO_LARGE, f"a connection waits for at most {_MAX_PARKED} jobs at a time"
            )
        else:
            task = asyncio.ensure_future(self._park(poll))
            self._parked.add(task)
            task.add_done_callback(self._parked.discard)
        return None

    async def _known(self, worker_id: WorkerId, capabilities: dict[str, Any] | None) -> WorkerRecord | None:
        """The worker with its current capabilities; a change registers it again."""
        known = self._engine.known_worker(worker_id)
        if capabilities is None:
            return known
        wanted = self._inputs.admitted(registration(RegisterBody(worker_id, capabilities)))
        if known is None or known.is_offline:
            return await self._engine.register(wanted)
        if known.capabilities == wanted.capabilities:
            return known
        slots = concurrent_jobs(capabilities) or known.slots
        changed = msgspec.structs.replace(wanted, slots=slots, instance=known.instance)
        return await self._engine.register(changed)

    def _send_no_job(self, poll: Poll) -> None:
        self._send({"type": "no_job", "worker_id": poll.worker_id, "poll_id": poll.poll_id})

    async def _park(self, poll: Poll) -> None:
        try:
            await self._lease(poll)
        except (Refusal, Fault) as error:
            problem = problem_response(error).body
            fields = {"code": problem["code"], "message": problem.get("detail", "")}
            self._send({"type": "error", "request": "request_job", "worker_id": poll.worker_id, **fields})

    async def _lease(self, poll: Poll) -> None:
        job = await self._engine.poll(poll)
        if job is None:
            self._send_no_job(poll)
            return
        self._leases[job.job_id] = job.ref
        self._send({**websocket.assigned(await self._inputs.linked(job)), "poll_id": poll.poll_id})
        # Old workers send their first heartbeat too late.
        await self._engine.heartbeat(poll.worker_id, [job.ref])

    async def _progress(self, body: websocket.UpdateProgress) -> None:
        ref = await self._ref(body)
        data = body.progress if isinstance(body.progress, dict) else {"percentage": body.progress}
        progress = await offload(lambda: safe_progress(data), is_large=has_many(data.values()))
        beat = await self._engine.progress([ProgressReport(ref, ProgressKind.PROGRESS, progress)])
        self._command(beat.commands)
        self._end_leases(beat.lost)

    async def _beat(self, body: websocket.HeartbeatMessage) -> Message:
        worker_id = as_worker(self._caller, body.worker_id)
        self._keyed.record_worker(self._caller, worker_id)
        known = self._engine.known_worker(worker_id)
        if known is None or known.is_offline:
            raise Refusal(RefusalCode.NOT_FOUND, f"worker {worker_id!r} is not registered; register first")
        shown = {ref.job_id: ref for ref in body.leases}
        await check_holder(self._engine, self._caller, shown.values())
        beat = await self._engine.heartbeat(worker_id, list({**self._leases, **shown}.values()))
        self._leases |= {ref.job_id: ref for ref in beat.alive}
        self._command(beat.commands)
        self._end_leases(beat.lost)
        return {
            "type": "heartbeat_ack",
            "worker_id": worker_id,
            "duration_s": beat.ttl_s,
            "jobs": [ref.job_id for ref in beat.alive],
        }

    def _end_leases(self, lost: Iterable[LeaseRef]) -> None:
        for ref in lost:
            if self._leases.get(ref.job_id) == ref:
                del self._leases[ref.job_id]
            self._cancelled_leases.discard((ref.job_id, ref.number))
            self._cancelled(ref.job_id, "its lease has ended: it expired, or another worker has it now")

    async def _ref(self, body: websocket.LeaseMessage) -> LeaseRef:
        if body.worker_id is not None:
            as_worker(self._caller, body.worker_id)
        if body.lease is not None:
            await check_holder(self._engine, self._caller, [body.lease])
            return body.lease
        ref = self._leases.get(JobId(body.job_id))
        if ref is None:
            raise Refusal(
                RefusalCode.LEASE_LOST,
                f"job {body.job_id!r} was not leased on this connection: send the lease that came with the job",
            )
        return ref

    def _report_answer(self, name: str, body: websocket.LeaseMessage, reply: ReportReply) -> Message:
        ref = self._leases.pop(JobId(body.job_id), None)
        if ref is not None:
            self._cancelled_leases.discard((ref.job_id, ref.number))
        status = status_name(reply.phase, StatusDialect.SOCKET)
        return {"type": name, "job_id": body.job_id, "status": status, "will_retry": reply.will_retry}


_ACTIONS: dict[str, FleetAction] = {
    "drain_worker": "drain",
    "pause_worker": "pause",
    "resume_worker": "resume",
}
COMMANDS = frozenset({*_ACTIONS, "pause_queue", "resume_queue"})


async def run_command(engine: Engine, name: str, body: Any) -> dict[str, Any]:
    if name in ("pause_queue", "resume_queue"):
        await engine.pause_queue(name == "pause_queue")
        return {"type": "queue_updated", "is_paused": name == "pause_queue"}
    assert isinstance(body, websocket.WorkerMessage)
    changed = await _command(engine, _ACTIONS[name], WorkerId(body.worker_id))
    leases = await engine.leases(changed)
    workers = [
        {"worker_id": each.worker_id, "status": worker_status(each, leases[each.worker_id]).value}
        for each in changed
    ]
    return {"type": "workers_updated", "workers": workers}


async def _command(engine: Engine, action: FleetAction, worker_id: WorkerId) -> list[WorkerRecord]:
    if worker_id == EVERY_WORKER:
        return await engine.command_workers(action)
    if action == "resume":
        return [await engine.resume_worker(worker_id)]
    await (engine.drain_worker(worker_id) if action == "drain" else engine.pause_worker(worker_id))
    found = engine.known_worker(worker_id)
    if found is None:
        raise Refusal(RefusalCode.NOT_FOUND, f"there is no worker {worker_id!r}")
    return [found]
