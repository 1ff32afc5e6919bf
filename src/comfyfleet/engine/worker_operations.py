"""The worker API of an engine: register, poll, heartbeat, progress, and the three reports that end a
lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from comfyfleet.engine import commands, input_files
from comfyfleet.engine.commands import CommandQueue
from comfyfleet.engine.completed_runs import CompletedRun, learn
from comfyfleet.engine.context import EngineContext, best_effort
from comfyfleet.engine.failure_handler import FailureHandler
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.node_catalogs import NodeCatalogs
from comfyfleet.engine.pass_ranks import ParkedPoll
from comfyfleet.model.block import EVERY_WORKER, Block, Pair
from comfyfleet.model.calls import (
    Command,
    Completion,
    DirectWorkerCompletion,
    FailureReport,
    HeartbeatReply,
    LeasedJob,
    Poll,
    ProgressReport,
    RegisterWorker,
    Release,
    ReportReply,
)
from comfyfleet.model.dispatch import (
    AtRevision,
    AttemptEnd,
    AttemptOutcome,
    Change,
    Dispatch,
    HeldBy,
    Lease,
    LeaseRef,
    Phase,
    Write,
)
from comfyfleet.model.encrypted import in_payload
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import FactDraft, FactKind, ProgressEvent, ProgressKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import PollId, WorkerId, prompt_id_of, traceparent_of
from comfyfleet.model.job import Job, JobResult
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.payload_digest import lease_sha256, runnable_workflow
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.failover import lifted_by_inventory
from comfyfleet.policy.lifecycle import completed

_MAX_REASON = 500


class WorkerOperations:
    def __init__(
        self,
        context: EngineContext,
        matcher: Matcher,
        failures: FailureHandler,
        commands: CommandQueue,
        catalogs: NodeCatalogs,
    ) -> None:
        self._context = context
        self._matcher = matcher
        self._failures = failures
        self._commands = commands
        self._catalogs = catalogs
        self._asking: dict[PollId, object] = {}

    # registration

    async def register(self, call: RegisterWorker) -> WorkerRecord:
        context = self._context
        if call.worker_id == EVERY_WORKER:
            words = f"{EVERY_WORKER!r} stands for every worker: give this one another name"
            raise Refusal(RefusalCode.INVALID_REQUEST, words)
        await commands.check(context.store.documents, call.worker_id)
        now = await context.store.now()
        record, before = await context.fleet.put(call, now, context.rules.worker_lost_s)
        if record.is_offline:
            if before is None or not before.is_offline:
                self._matcher.cancel_polls(call.worker_id)
                context.publish_fleet_event("offline", call.worker_id, reason=call.offline_reason)
            return record
        await self._catalogs.clean_up_after(before, record)
        if before is None or before.is_offline:
            context.publish_fleet_event("online", call.worker_id)
        if record.connected_at == now:
            # A new connection: another engine may have delivered the old commands.
            self._commands.take(call.worker_id)
        # A worker registers again after a change of its inventory, a return or a refresh.
        lifted = lifted_by_inventory(await context.store.blocks(call.worker_id))
        for block in await context.store.lift([block.pair for block in lifted]):
            await context.unblocked(block, "the worker reported its inventory again")
        self._matcher.worker_freed(call.worker_id)
        return record

    async def unregister(self, worker_id: WorkerId, reason: str, *, is_lost: bool = False) -> None:
        """Gives the worker no jobs until it registers again. It still reports its running jobs."""
        # Agents send "drain"; people read why the worker is offline.
        reason, was_offline = "drained" if reason == "drain" else reason[:_MAX_REASON], False

        def gone(worker: WorkerRecord) -> WorkerRecord | None:
            nonlocal was_offline
            was_offline = worker.is_offline
            if worker.is_offline and worker.offline_reason == reason:
                return None
            # If it is offline already, only the reason changes.
            disconnects = worker.disconnects + (not worker.is_offline)
            return msgspec.structs.replace(
                worker,
                is_offline=True,
                offline_reason=reason,
                was_lost=worker.was_lost if worker.is_offline else is_lost,
                disconnects=disconnects,
            )

        if await self._context.fleet.change(worker_id, gone) is None or was_offline:
            return
        self._matcher.cancel_polls(worker_id)
        self._context.publish_fleet_event(
            "offline", worker_id, reason=reason, **({"is_lost": True} if is_lost else {})
        )

    async def remove(self, worker_id: WorkerId, *, is_banned: bool = False) -> None:
        """`is_banned`: the worker cannot register again until an operator readmits it."""
        if is_banned:
            # First, because the agent notices its removal at once and registers again.
            newest = await self._context.fleet.stored_worker(worker_id)
            await commands.ban_worker(self._context.store.documents, worker_id, newest)
        self._matcher.cancel_polls(worker_id)
        # Before the rest: a returning worker sends its catalog again.
        await self._catalogs.forget(worker_id)
        for block in await self._context.store.blocks(worker_id):
            await self._context.store.lift([block.pair])
        await self._context.fleet.remove(worker_id)
        # Once more, because a poll may have come in meanwhile.
        self._matcher.cancel_polls(worker_id)
        self._commands.dismiss(worker_id)

    async def set_flags(
        self, worker_id: WorkerId, *, is_paused: bool | None = None, is_draining: bool | None = None
    ) -> WorkerRecord:
        known = self._context.fleet.workers.get(worker_id)
        if known is not None and known.is_offline and (is_paused is not False or is_draining):
            # For an operator; the advice for a worker would not help here.
            raise Refusal(
                RefusalCode.NOT_FOUND, f"worker {worker_id!r} is offline: start it again where it ran"
            )

        def flagged(worker: WorkerRecord) -> WorkerRecord:
            return msgspec.structs.replace(
                worker,
                is_paused=worker.is_paused if is_paused is None else is_paused,
                is_draining=worker.is_draining if is_draining is None else is_draining,
            )

        worker = await self._context.fleet.change(worker_id, flagged)
        if worker is None:
            raise Refusal(RefusalCode.NOT_FOUND, f"there is no worker {worker_id!r}")
        self._matcher.worker_freed(worker_id)
        return worker

    # jobs

    async def poll(self, call: Poll) -> LeasedJob | None:
        # Workers choose poll ids freely; equal ids must not share a lease.
        poll_id = PollId(f"{call.worker_id}/{call.poll_id}")
        slot = self._asking[poll_id] = ParkedPoll(call.worker_id, poll_id, call.current_load)
        try:
            return await self._poll(call, slot)
        except BaseException:
            # If the poll came again, the lease belongs to the last caller.
            if self._asking.get(poll_id) is slot:
                await asyncio.shield(self._abandon(slot))
            raise
        finally:
            if self._asking.get(poll_id) is slot:
                del self._asking[poll_id]

    async def _poll(self, call: Poll, slot: ParkedPoll) -> LeasedJob | None:
        known = await self._context.store.leased_by_poll(slot.poll_id)
        if known is not None:
            # The answer to this poll was lost; repeat the lease.
            return await self._leased_job(known)
        if self._known(call.worker_id).is_other(call.instance):
            raise Refusal(
                RefusalCode.NOT_FOUND,
                f"another agent has registered as {call.worker_id!r}; register again, then poll",
            )
        self._commands.serve(call.worker_id)
        await self._seen(call.worker_id)
        try:
            await self._matcher.park(slot)
            if call.wait_s <= 0:
                await self._matcher.wait_for_pass(slot)
            elif not slot.answer.done():
                # Checked first, because a wait costs a timer and a turn of the loop.
                await asyncio.wait((slot.answer,), timeout=call.wait_s)
        except BaseException:
            slot.answer.cancel()
            raise
        finally:
            self._matcher.unpark(slot)
        # The worker was here while its poll was parked.
        await self._seen(call.worker_id)
        if slot.answer.cancel():
            return None
        grant = slot.answer.result()
        return None if grant is None else await self._leased_job(grant.dispatch, grant.record)

    async def _abandon(self, slot: ParkedPoll) -> None:
        """Requeues the job leased for an abandoned poll. A lease from another hub stays."""
        held = await self._context.store.leased_by_poll(slot.poll_id)
        lease = None if held is None else held.lease
        token = None if slot.offer is None else slot.offer.token
        if held is not None and lease is not None and lease.token == token and not lease.is_acknowledged:
            await self._context.requeue_undelivered(held)

    async def _leased_job(self, dispatch: Dispatch, job: Job | None = None) -> LeasedJob | None:
        """None: nobody can run the job, and it has failed. `job`: its record, if it was read already."""
        job = job or await self._context.store.records.get(dispatch.job_id)
        assert job is not None and dispatch.lease is not None, "a lease stands on a record"
        assert job.job_id == dispatch.job_id, "a lease carries the record of its own job"
        payload = job.payload
        if job.unreadable is not None:
            failure = Failure(FailureKind.UNREADABLE, f"the job can no longer be read: {job.unreadable}")
            await self._failures.end_job(dispatch, failure)
            return None
        if in_payload(payload) is not None:
            # Another process has the key, so the job can still run.
            await self._context.requeue_undelivered(dispatch)
            raise Fault(
                "the jobs of this fleet are encrypted and this process has no key: configure [encryption]"
            )
        signature = self._signature(dispatch.lease.worker_id, payload.requirements.service)
        workflow = runnable_workflow(job, signature)
        rules = self._context.rules
        timeouts = payload.timeouts
        return LeasedJob(
            ref=dispatch.lease_ref(),
            worker_id=dispatch.lease.worker_id,
            ttl_s=rules.lease_ttl_s,
            acknowledge_s=rules.acknowledge_s,
            workflow=workflow,
            workflow_hash=dispatch.workflow_hash,
            service=payload.requirements.service,
            timeouts=msgspec.structs.replace(
                timeouts,
                accept_s=rules.accept_timeout_s if timeouts.accept_s is None else timeouts.accept_s,
                start_s=rules.start_timeout_s if timeouts.start_s is None else timeouts.start_s,
                stall_s=rules.stall_timeout_s if timeouts.stall_s is None else timeouts.stall_s,
            ),
            include_outputs=payload.include_outputs,
            attachments=payload.attachments,
            inputs=payload.input_files,
            attempt=dispatch.attempts,
            metadata=payload.metadata,
            traceparent=traceparent_of(dispatch.job_id, payload.traceparent),
            payload_sha256=lease_sha256(job, workflow, dispatch.payload_sha256).hex(),
            tenant=job.tenant,
            priority=payload.priority if job.priority is None else job.priority,
            requirements=payload.requirements,
        )

    def _signature(self, worker_id: WorkerId, service: str) -> str | None:
        worker = self._context.fleet.workers.get(worker_id)
        services = () if worker is None else worker.capabilities.services
        return next((each.signature for each in services if each.name == service), None)

    # running jobs

    async def extend_leases(self) -> None:
        """Gives each lease one lease time from now. Only for a store that was closed: meanwhile no worker could
        renew its lease, and nobody could lease the job to another. Leases that were never acknowledged stay."""
        context = self._context
        held = await context.store.leases_of(*context.fleet.workers)
        refs = [each.lease_ref() for each in held if each.lease is not None and each.lease.is_acknowledged]
        await context.store.heartbeat(refs, context.rules.lease_ttl_s)

    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
        context = self._context
        self._commands.serve(worker_id)
        await self._seen(worker_id)
        states = await context.store.heartbeat(refs, context.rules.lease_ttl_s)
        commands = self._commands.take(worker_id)
        named = {(command.job_id, command.lease_number) for command in commands}
        for state in states:
            ref = state.ref
            if state.is_alive and state.is_to_stop and (ref.job_id, ref.number) not in named:
                dispatch = await context.store.load(ref.job_id)
                reason = "" if dispatch is None else dispatch.cancel_reason
                commands.append(Command("cancel", ref.job_id, ref.number, reason))
        worker = context.fleet.workers.get(worker_id)
        if worker is not None and worker.is_draining:
            commands.append(Command("drain"))
        return HeartbeatReply(
            context.rules.lease_ttl_s,
            tuple(state.ref for state in states if state.is_alive),
            tuple(state.ref for state in states if not state.is_alive),
            tuple(commands),
        )

    async def progress(self, reports: Sequence[ProgressReport]) -> HeartbeatReply:
        """Publishes the progress of held leases, and reports the other leases as lost."""
        context = self._context
        held: dict[LeaseRef, Lease | None] = {}
        for report in reports:
            ref = report.ref
            if ref not in held:
                dispatch = await self._held(ref)
                held[ref] = None if dispatch is None else dispatch.lease
            lease = held[ref]
            if lease is None:
                continue
            if report.kind is ProgressKind.ACCEPTED or report.kind is ProgressKind.STARTED:
                await self._note_start(report, lease)
            context.bus.publish(
                ProgressEvent(
                    ref.job_id,
                    report.kind,
                    context.clock.now(),
                    lease.worker_id,
                    ref.number,
                    report.data,
                    report.image,
                )
            )
        return HeartbeatReply(
            context.rules.lease_ttl_s,
            tuple(ref for ref, lease in held.items() if lease is not None),
            tuple(ref for ref, lease in held.items() if lease is None),
            tuple(
                command
                for worker_id in dict.fromkeys(lease.worker_id for lease in held.values() if lease)
                for command in self._commands.take(worker_id)
            ),
        )

    async def _note_start(self, report: ProgressReport, lease: Lease) -> None:
        job: dict[str, object] = {
            "worker_id": lease.worker_id,
            "prompt_id": prompt_id_of(report.ref.attempt_id),
        }
        if report.kind is ProgressKind.STARTED:
            # Leases use the store's time, and this clock may be behind it.
            job["started_at"] = max(self._context.clock.now(), lease.leased_at)
        await self._context.store.write(Write(report.ref.job_id, HeldBy(report.ref), Change(), job=job))

    # reports

    async def complete(self, call: Completion) -> ReportReply:
        context, ref = self._context, call.ref
        dispatch = await self._held(ref)
        if dispatch is None:
            return await self._reply_after_lease(ref, AttemptOutcome.COMPLETED)
        assert dispatch.lease is not None
        worker_id, now = dispatch.lease.worker_id, await context.store.now()
        pairs = _pairs(dispatch, worker_id)
        # One call for all of the worker's blocks.
        known = [block for block in await context.store.blocks(worker_id) if block.pair in pairs]
        seconds = call.seconds or now - dispatch.lease.leased_at
        job: dict[str, object] = {
            "phase": Phase.COMPLETED,
            "result": call.result,
            "failure": None,
            "worker_id": worker_id,
            "prompt_id": prompt_id_of(ref.attempt_id),
            "completed_at": now,
        }
        record = await context.store.records.get(ref.job_id)
        if record is not None and (record.started_at or 0) < dispatch.lease.leased_at:
            # The worker did not report the start.
            job["started_at"] = dispatch.lease.leased_at
        if record is not None and record.payload.attachments:
            # A completed job never runs again, so its attachments can go.
            job["payload"] = msgspec.structs.replace(record.payload, attachments=())
        write = Write(
            ref.job_id,
            HeldBy(ref),
            completed(dispatch.phase),
            attempt_end=AttemptEnd(AttemptOutcome.COMPLETED, used_s=seconds),
            facts=(FactDraft(FactKind.COMPLETED, {"worker_id": worker_id, "seconds": seconds}),),
            lifted=tuple(block.pair for block in known),
            job=job,
        )
        # Before the write, which ends the run.
        run = context.outlook.run_of(ref.job_id)
        if await context.write(write) is None:
            return await self._reply_after_lease(ref, AttemptOutcome.COMPLETED)
        is_graph = record is not None and record.payload.requirements.service == COMFYUI
        graph = record.payload.workflow if record is not None and is_graph else None
        context.estimates.count_overhead(now - dispatch.lease.leased_at - seconds)
        await self._succeeded(dispatch, worker_id, CompletedRun(seconds, call.result, graph, run), known)
        if record is not None:
            with best_effort(f"forget which files job {ref.job_id} used"):
                await input_files.forget(context.store.documents, record)
        return ReportReply(Phase.COMPLETED)

    async def finished(self, run: DirectWorkerCompletion) -> None:
        """Learns from a completion that a direct worker has already written, and lifts blocks."""
        context = self._context
        dispatch = await context.store.load(run.job_id)
        if dispatch is None:
            return
        if dispatch.is_awaited and dispatch.phase.is_final:
            context.awaited_ended(dispatch)
        lifted = await context.store.lift(_pairs(dispatch, run.worker_id))
        known = context.outlook.written(dispatch)
        await self._succeeded(
            dispatch, run.worker_id, CompletedRun(run.seconds, JobResult(), None, known), lifted
        )

    async def _succeeded(
        self, dispatch: Dispatch, worker_id: WorkerId, run: CompletedRun, lifted: Sequence[Block]
    ) -> None:
        context, job_id = self._context, dispatch.job_id
        with best_effort(f"tell the failover strategy that job {job_id} succeeded"):
            context.strategy.record_success(worker_id, dispatch.workflow_hash, await context.store.now())
        with best_effort(f"learn from the run of job {job_id}"):
            await learn(context, dispatch, worker_id, run)
        for block in lifted:
            with best_effort(f"publish that worker {worker_id} is no longer blocked"):
                await context.unblocked(block, "it succeeded")
        if lifted:
            self._matcher.worker_freed(worker_id)

    async def fail(self, call: FailureReport) -> ReportReply:
        # Written only over what was read, so that a cancel in between is not lost.
        while (dispatch := await self._held(call.ref)) is not None:
            if dispatch.stop is not None:
                # The failure of a stopped run matters only if the server died of it.
                settled = await self.release(Release(call.ref, "cancelled"))
                await self._failures.on_late_death(call)
                return settled
            after = await self._failures.fail(dispatch, AtRevision(dispatch.revision), call.failure)
            if after is not None:
                return ReportReply(after.phase, will_retry=after.phase is Phase.QUEUED)
        await self._failures.on_late_death(call)
        return await self._reply_after_lease(call.ref, AttemptOutcome.FAILED, AttemptOutcome.CANCELLED)

    async def release(self, call: Release) -> ReportReply:
        ref = call.ref
        while (dispatch := await self._held(ref)) is not None:
            after = await self._failures.release(dispatch, AtRevision(dispatch.revision), call.reason)
            if after is not None:
                return ReportReply(after.phase, will_retry=after.phase is Phase.QUEUED)
        return await self._reply_after_lease(ref, AttemptOutcome.RELEASED, AttemptOutcome.CANCELLED)

    async def _held(self, ref: LeaseRef) -> Dispatch | None:
        dispatch = await self._context.store.load(ref.job_id)
        if dispatch is None or dispatch.lease is None or dispatch.lease_ref() != ref:
            return None
        return dispatch

    async def _reply_after_lease(self, ref: LeaseRef, *same: AttemptOutcome) -> ReportReply:
        """Answers a repeated report like the first. Refuses a report of an old lease."""
        dispatch = await self._context.store.load(ref.job_id)
        attempts = await self._context.store.attempts(ref.job_id)
        for attempt in attempts:
            if attempt.attempt_id == ref.attempt_id and attempt.outcome in same and dispatch is not None:
                if any(later.lease_number > ref.number and later.round == ref.round for later in attempts):
                    return ReportReply(Phase.QUEUED, will_retry=True)
                return ReportReply(dispatch.phase, will_retry=not dispatch.phase.is_final)
        await self._context.store.mark_late(ref)
        raise Refusal(
            RefusalCode.LEASE_LOST,
            f"the lease {ref.number} on job {ref.job_id} is over: it expired, was revoked, or another holds it now",
        )

    # workers

    def _known(self, worker_id: WorkerId) -> WorkerRecord:
        worker = self._context.fleet.workers.get(worker_id)
        if worker is None or worker.is_offline:
            raise Refusal(
                RefusalCode.NOT_FOUND, f"worker {worker_id!r} is not registered; register, then poll"
            )
        return worker

    async def _seen(self, worker_id: WorkerId) -> None:
        await self._context.fleet.record_seen(worker_id, self._context.clock.now())


def _pairs(dispatch: Dispatch, worker_id: WorkerId) -> tuple[Pair, ...]:
    """The blocks that a success disproves: of the job, of its tenant's workflow, of the workflow for all.
    Other tenants' blocks depend on their inputs and stay."""
    return tuple(Pair(worker_id, block_target) for block_target in dispatch.block_targets)
