"""HTTP handlers of the worker API: they decode `wire/worker.py` and call the engine.

A key that names a worker is valid for that worker and its leases only. With any other key, the lease itself
is the proof of what the caller may do.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.files.job_files import JobInputFiles
from comfyfleet.hub.http.credentials import WorkersByKey
from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.hub.local_worker_api import has_many, offload, sanitized
from comfyfleet.model.access import Caller
from comfyfleet.model.calls import (
    Command,
    Completion,
    FailureReport,
    LeasedJob,
    Poll,
    ProgressReport,
    Release,
)
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import bounded
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.node_classes import NodeCatalog
from comfyfleet.model.worker import Capabilities, WorkerRecord
from comfyfleet.policy.sanitizer import safe_failure, safe_progress
from comfyfleet.ports import FileStore
from comfyfleet.tracing import log_fields
from comfyfleet.wire import worker as wire

_LOG = logging.getLogger(__name__)

_CONCURRENT_CHECKS = 8
_MAX_HASHES = 10_000


class WorkerHandlers:
    def __init__(
        self,
        engine: Engine,
        max_wait_s: float,
        assets: FileStore | None,
        inputs: JobInputFiles,
        keyed: WorkersByKey,
    ) -> None:
        self._engine = engine
        self._assets = assets
        self._inputs = inputs
        self.keyed = keyed
        self._max_wait_s = max_wait_s
        self._hashes: dict[WorkerId, tuple[Capabilities, str]] = {}

    async def worker_register(self, call: HubRequest[wire.RegisterBody]) -> Reply:
        self.keyed.record_worker(call.caller, as_worker(call.caller, call.data.worker_id))
        record = await self._engine.register(self._inputs.admitted(wire.registration(call.data)))
        rules = self._engine.rules
        answer = wire.RegisteredBody(
            record.worker_id,
            record.capabilities,
            self._hash(record),
            record.slots,
            rules.lease_ttl_s / 4,
            rules.worker_lost_s,
            record.connected_at,
            record.last_seen_at,
            record.profile,
            await self._engine.knows_nodes(record),
            record.worker_id,
        )
        return Reply(200, answer)

    async def worker_unregister(self, call: HubRequest[wire.UnregisterBody]) -> Reply:
        await self._engine.unregister(as_worker(call.caller, call.data.worker_id), call.data.reason)
        return Reply(204)

    async def worker_describe(self, call: HubRequest[wire.DescribeBody]) -> Reply:
        worker_id = as_worker(call.caller, call.data.worker_id)
        if await self._worker(worker_id) is None:
            raise Refusal(
                RefusalCode.NOT_FOUND, f"worker {worker_id!r} is not registered; register, then describe"
            )
        await self._engine.describe(worker_id, NodeCatalog(call.data.definitions, call.data.signatures))
        return Reply(204)

    async def worker_poll(self, call: HubRequest[wire.PollBody]) -> Reply:
        body = call.data
        worker_id = as_worker(call.caller, body.worker_id)
        self.keyed.record_worker(call.caller, worker_id)
        known = await self._worker(worker_id)
        if body.capabilities is not None:
            wanted = self._inputs.admitted(wire.registration(body))
            if (
                known is None
                or known.is_offline
                or known.capabilities != wanted.capabilities
                or known.slots != wanted.slots
            ):
                known = await self._engine.register(wanted)
        elif body.capabilities_hash is not None and (
            known is None
            or self._hash(known) != body.capabilities_hash
            # A direct worker registered without a hub; it has one now.
            or not known.capabilities.has_hub
        ):
            raise Refusal(
                RefusalCode.NOT_FOUND,
                f"worker {worker_id!r} is not registered with these capabilities: register again, or poll with all "
                "capabilities",
            )
        slots = known.slots if known is not None else body.slots or body.max_concurrency
        if slots is not None and body.current_load is not None and body.current_load >= slots:
            return Reply(204)
        job = await self._engine.poll(
            Poll(
                worker_id,
                PollId(body.poll_id or secrets.token_hex(8)),
                self._wait_s(body),
                body.instance or "",
                body.current_load,
            )
        )
        if job is None:
            return Reply(204)
        if _LOG.isEnabledFor(logging.INFO) and job.traceparent is not None:
            with log_fields(job_id=job.job_id, attempt_id=job.attempt_id, traceparent=job.traceparent):
                _LOG.info("leased to %s", worker_id)
        return Reply(200, wire.lease_answer(await self._inputs.linked(job)))

    async def worker_heartbeat(self, call: HubRequest[wire.HeartbeatBody]) -> Reply:
        body = call.data
        worker_id = as_worker(call.caller, body.worker_id)
        self.keyed.record_worker(call.caller, worker_id)
        if not body.leases and await self._worker(worker_id) is None:
            raise Refusal(
                RefusalCode.NOT_FOUND, f"worker {worker_id!r} is not registered; register, then poll"
            )
        refs = list(body.leases)
        await check_holder(self._engine, call.caller, refs + [each.ref for each in body.reports])
        commands: tuple[Command, ...] = ()
        if body.reports:
            commands = (await self._engine.progress(await _reports(call))).commands
        beat = await self._engine.heartbeat(worker_id, refs)
        if commands:
            # The engine hands out most commands once, in the first of the two replies.
            beat = msgspec.structs.replace(beat, commands=tuple(dict.fromkeys(commands + beat.commands)))
        inputs = await self._inputs.renewed(beat.alive) if body.inputs else ()
        return Reply(200, wire.heartbeat_answer(beat, self._engine.now(), inputs))

    async def worker_progress(self, call: HubRequest[wire.ProgressBatch]) -> Reply:
        refs = [each.ref for each in call.data.reports]
        await check_holder(self._engine, call.caller, refs)
        beat = await self._engine.progress(await _reports(call))
        return Reply(200, wire.heartbeat_answer(beat, self._engine.now()))

    async def worker_commands(self, call: HubRequest[wire.CommandsBody]) -> Reply:
        worker_id = as_worker(call.caller, call.data.worker_id)
        commands = await self._engine.commands(worker_id, self._wait_s(call.data))
        return Reply(200, wire.CommandsAnswer(wire.command_bodies(commands, self._engine.now())))

    async def worker_complete(self, call: HubRequest[wire.CompleteBody]) -> Reply:
        body = call.data
        ref = body.ref
        await check_holder(self._engine, call.caller, [ref])
        await self.check_files(body.result, ref.attempt_id)
        holder = await self._holder(body)
        reply = await self._engine.complete(Completion(ref, await sanitized(body.result), body.seconds))
        _log_end(ref, "completed")
        return Reply(200, wire.report_answer(reply, await self._following(call.caller, body.next, holder)))

    async def worker_fail(self, call: HubRequest[wire.FailBody]) -> Reply:
        body = call.data
        ref = body.ref
        await check_holder(self._engine, call.caller, [ref])
        holder = await self._holder(body)
        reply = await self._engine.fail(FailureReport(ref, safe_failure(bounded(body.failure)), body.seconds))
        _log_end(ref, f"failed ({body.failure.kind}): {body.failure.message[:1_000]}")
        return Reply(200, wire.report_answer(reply, await self._following(call.caller, body.next, holder)))

    async def worker_release(self, call: HubRequest[Release]) -> Reply:
        ref = call.data.ref
        await check_holder(self._engine, call.caller, [ref])
        reply = await self._engine.release(call.data)
        _log_end(ref, f"released: {call.data.reason}")
        return Reply(200, wire.report_answer(reply))

    async def check_files(self, result: JobResult, attempt_id: str) -> None:
        """Every file that a completion names must be uploaded completely, and by the same attempt."""
        named = [file.file_id for file in result.files if file.file_id is not None]
        for start in range(0, len(named), _CONCURRENT_CHECKS):
            checks = (
                self._check_file(file_id, attempt_id) for file_id in named[start : start + _CONCURRENT_CHECKS]
            )
            for error in await asyncio.gather(*checks, return_exceptions=True):
                if error is not None:
                    raise error

    async def _check_file(self, file_id: str, attempt_id: str) -> None:
        record = None if self._assets is None else await self._assets.get(file_id)
        why = "upload it, then complete"
        if self._assets is not None and record is not None and record.attempt_id == attempt_id:
            if record.is_complete:
                return
            try:
                await self._assets.complete(file_id)
                return
            except Refusal as refusal:
                if refusal.code is RefusalCode.UNAVAILABLE:
                    raise
                why = refusal.message
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"the file {file_id!r} was not uploaded by this attempt: {why}"
        )

    async def _holder(self, body: wire.CompleteBody | wire.FailBody) -> WorkerId | None:
        """The holder of the lease, read before the lease ends: afterwards the store does not know it."""
        if body.next is None:
            return None
        ref = body.ref
        for attempt in await self._engine.reader.attempts(ref.job_id):
            if attempt.attempt_id == ref.attempt_id:
                return attempt.worker_id
        return None

    async def _following(
        self, caller: Caller, asked: wire.NextPoll | None, holder: WorkerId | None
    ) -> LeasedJob | None:
        if asked is None or holder is None:
            return None
        try:
            job = await self._engine.poll(Poll(as_worker(caller, holder), PollId(asked.poll_id), 0))
        except Refusal:
            # The report stands. A worker without a next lease polls, and that poll reports the refusal.
            return None
        return None if job is None else await self._inputs.linked(job)

    def _wait_s(self, body: wire.PollBody | wire.CommandsBody) -> float:
        return min(body.wait_s, self._max_wait_s)

    async def _worker(self, worker_id: WorkerId) -> WorkerRecord | None:
        known = self._engine.known_worker(worker_id)
        if known is None:
            # The worker may have registered at another hub a moment ago.
            await self._engine.workers()
            known = self._engine.known_worker(worker_id)
        return known

    def _hash(self, record: WorkerRecord) -> str:
        known = self._hashes.get(record.worker_id)
        # Identity first: capabilities are replaced, never changed.
        if known is None or (known[0] is not record.capabilities and known[0] != record.capabilities):
            if len(self._hashes) > _MAX_HASHES:
                self._hashes.clear()
            known = (record.capabilities, wire.capabilities_hash(record.capabilities))
            self._hashes[record.worker_id] = known
        return known[1]


async def _reports(
    call: HubRequest[wire.HeartbeatBody] | HubRequest[wire.ProgressBatch],
) -> list[ProgressReport]:
    bodies = call.data.reports
    is_large = call.is_large or has_many(report.data for report in bodies)
    return await offload(lambda: list(map(_safe_report, bodies)), is_large=is_large)


def _safe_report(report: ProgressReport) -> ProgressReport:
    return msgspec.structs.replace(report, data=safe_progress(report.data))


def _log_end(ref: LeaseRef, end: str) -> None:
    if _LOG.isEnabledFor(logging.INFO):
        with log_fields(job_id=ref.job_id, attempt_id=ref.attempt_id):
            _LOG.info("%s", end)


async def check_holder(engine: Engine, caller: Caller, refs: Iterable[LeaseRef]) -> None:
    """A key that names a worker may not use another worker's lease. The engine refuses ended leases."""
    if caller.worker_id is None:
        return
    for ref in {ref.attempt_id: ref for ref in refs}.values():
        dispatch = await engine.reader.load(ref.job_id)
        lease = None if dispatch is None else dispatch.lease
        if (
            dispatch is not None
            and lease is not None
            and (dispatch.round, lease.number, lease.epoch) == (ref.round, ref.number, ref.epoch)
            and lease.worker_id != caller.worker_id
        ):
            raise Refusal(
                RefusalCode.NOT_ALLOWED,
                f"the lease of job {ref.job_id!r} belongs to another worker; this key is for {caller.worker_id!r}",
            )


def as_worker(caller: Caller, worker_id: str) -> WorkerId:
    if caller.worker_id is not None and caller.worker_id != worker_id:
        raise Refusal(
            RefusalCode.NOT_ALLOWED,
            f"this key is for worker {caller.worker_id!r}, not for {worker_id!r}",
        )
    return WorkerId(worker_id)
