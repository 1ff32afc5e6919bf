"""The engine: implements the job API and the worker API in this process. It builds the other modules' parts
and owns their tasks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType

import msgspec

from comfyfleet.engine.capacity import Capacity
from comfyfleet.engine.commands import CommandQueue
from comfyfleet.engine.context import AdmissionControl, EngineContext
from comfyfleet.engine.dependencies import Dependencies
from comfyfleet.engine.direct_workers import DirectWorkers
from comfyfleet.engine.explanation import WaitingView, explain
from comfyfleet.engine.failure_handler import FailureHandler
from comfyfleet.engine.forecasts import Forecasts, Quotes
from comfyfleet.engine.input_files import InputFiles
from comfyfleet.engine.input_files import forget as forget_uses
from comfyfleet.engine.job_list import list_jobs
from comfyfleet.engine.job_operations import JobOperations, ended_job, forget, no_job, purge
from comfyfleet.engine.local_bus import LocalBus
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.node_catalogs import EditorConverter, NodeCatalogs
from comfyfleet.engine.operator_commands import OperatorCommands
from comfyfleet.engine.peers import LatestProgress, PeerBus, RemoteFactPoller
from comfyfleet.engine.placement import RefusalHandler
from comfyfleet.engine.poison_workflows import PoisonWorkflows
from comfyfleet.engine.submitter import Submitter
from comfyfleet.engine.sweeper import Sweeper
from comfyfleet.engine.system import SystemClock, SystemRandom
from comfyfleet.engine.waiting_jobs import MissingRequirements, NeedReview, UnrunnableJobs, WaitingJobReview
from comfyfleet.engine.worker_operations import WorkerOperations
from comfyfleet.model.block import Block
from comfyfleet.model.calls import (
    Command,
    Explanation,
    HeartbeatReply,
    JobFilter,
    JobPage,
    QueueStats,
    RegisterWorker,
)
from comfyfleet.model.dispatch import AtRevision, Dispatch, LeaseRef, Phase, WriteResult
from comfyfleet.model.fact import Event, Fact, ProgressEvent
from comfyfleet.model.ids import JobId, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.node_classes import NodeCatalog
from comfyfleet.model.payload import PayloadFormat
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.failover import FailoverStrategy, SmartFailover
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.scheduling import WaitReason
from comfyfleet.policy.workflow_stats import expected_s
from comfyfleet.ports import Bus, Clock, QueueReader, RandomSource, Store

_BATCH_SIZE = 500


class Engine:
    """The job API and the `WorkerApi` over one store. An async context manager; closing twice is harmless."""

    def __init__(
        self,
        store: Store,
        *,
        rules: Rules | None = None,
        bus: Bus | None = None,
        clock: Clock | None = None,
        rng: RandomSource | None = None,
        strategy: FailoverStrategy | None = None,
        workers_may_outlive_it: bool = False,
        formats: Mapping[str, PayloadFormat] | None = None,
    ) -> None:
        """`workers_may_outlive_it`: workers run in other processes. If nobody else uses the store, their leases
        last one lease time from each start, because no heartbeat could arrive before. `formats` read the
        payloads of other services than ComfyUI; a service without one takes any JSON object."""
        self.rules = rules or Rules()
        self._workers_may_outlive_it = workers_may_outlive_it
        self.bus: Bus = bus or LocalBus()
        self.store = store
        self.reader: QueueReader = store
        self._context = EngineContext(
            store,
            self.bus,
            clock or SystemClock(),
            rng or SystemRandom(),
            self.rules,
            strategy or SmartFailover(self.rules),
            formats,
        )
        self.payloads = self._context.payloads
        self._matcher = Matcher(self._context)
        self._context.others_changed = self._matcher.others_changed
        self._catalogs = NodeCatalogs(self._context)
        self._failures = FailureHandler(
            self._context, self._matcher, RefusalHandler(self._context, self._catalogs)
        )
        self._commands = CommandQueue(self._context, self._matcher)
        self._missing = MissingRequirements(self._context, self._commands)
        self._worker_operations = WorkerOperations(
            self._context, self._matcher, self._failures, self._commands, self._catalogs
        )
        self._operators = OperatorCommands(
            self._context, self._matcher, self._worker_operations, self._commands
        )
        self._inputs = InputFiles(self._context)
        self._dependencies = Dependencies(self._context, self._matcher, self._failures, self._inputs)
        self._nodes = EditorConverter(self._context, self._catalogs)
        self._submitter = Submitter(
            self._context,
            self._matcher,
            self._dependencies,
            self._inputs,
            self._nodes,
            self._catalogs,
            self._missing,
        )
        self._forecasts = Forecasts(self._context)
        self._jobs = JobOperations(
            self._context,
            self._matcher,
            self._commands.send_stop,
            self._dependencies,
            self._inputs,
            self._catalogs,
        )
        self.waiting_job_review = WaitingJobReview(self._context, self._matcher, self._failures)
        self._fact_poller = RemoteFactPoller(self._context)
        self._unrunnable = UnrunnableJobs(self._context)
        self._need_review = NeedReview(self._context, self._matcher, self._catalogs, self._unrunnable)
        self._peer_bus = PeerBus(self._context, self._fact_poller, LatestProgress(self.bus))
        self._direct_workers = DirectWorkers(self._context, self._worker_operations)
        self._sweeper = Sweeper(
            self._context,
            self._matcher,
            self._failures,
            self._worker_operations,
            self._commands,
            self._dependencies,
            PoisonWorkflows(self._context, self._failures),
            self._catalogs,
        )
        # job API: the calls that one part answers alone
        self.submit = self._submitter.submit
        self.quote = Quotes(self._context, self._submitter, self._forecasts).quote
        self.estimates = self._forecasts.of
        self.capacity = Capacity(self._context).report
        self.repeat_of = self._submitter.repeat_of
        self.holder_of = self._submitter.holder_of
        self.convert = self._nodes.convert
        self.get = self._jobs.get
        self.by_reference = self._jobs.by_reference
        self.cancel = self._jobs.cancel
        self.retry = self._jobs.retry
        self.pause = self._jobs.pause
        self.resume = self._jobs.resume
        self.set_priority = self._jobs.set_priority
        self.following = self._fact_poller.follow
        self.latest_progress = self._peer_bus.latest_progress
        self.listen_remote = self._peer_bus.listen_remote
        self.unrunnable = self._unrunnable.count
        self.uses_file = self._inputs.is_used
        # worker API
        self.poll = self._worker_operations.poll
        self.progress = self._worker_operations.progress
        self.complete = self._worker_operations.complete
        self.fail = self._worker_operations.fail
        self.release = self._worker_operations.release
        self.unregister = self._worker_operations.unregister
        self.commands = self._commands.wait
        self.knows_nodes = self._catalogs.knows
        # operators
        self.remove_worker = self._worker_operations.remove
        self.resume_worker = self._operators.resume
        self.pause_worker = self._operators.pause
        self.command_workers = self._operators.command_all
        self.pause_queue = self._operators.pause_queue
        self.unblock = self._operators.unblock
        self.sweep = self._sweeper.sweep

    async def __aenter__(self) -> Engine:
        try:
            await self.store.open()
            if self.store.is_shared:
                await self._context.compare_clocks()
            await self._context.fleet.load()
            if self._workers_may_outlive_it and not self.store.is_shared:
                await self._worker_operations.extend_leases()
            self._peer_bus.start()
            matcher = self._matcher
            self.store.listen(matcher.everything_changed, self._commands.on_command, matcher.reload_classes)
            await self._direct_workers.start()
        except BaseException:
            # Otherwise the store's file stays locked. A part that never opened may fail to close.
            with suppress(Exception):
                await self.close()
            raise
        self._sweeper.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes every part, even if one fails: a store that stays open keeps its file locked."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.store.close)
            stack.callback(self.bus.close)
            for part in (
                self._fact_poller,
                self._need_review,
                self._dependencies,
                self._peer_bus,
                self._direct_workers,
                self._sweeper,
                self._matcher,
            ):
                stack.push_async_callback(part.close)

    # job API

    async def admit(
        self, job: Job, dispatch: Dispatch, write: Callable[[Dispatch], Awaitable[WriteResult | None]]
    ) -> None:
        """Queues a round that this or another engine accepted earlier."""
        tenant = await self._submitter.admit(job, dispatch, write)
        if tenant is not None:
            await self.waiting_job_review.reapply_terms(job.job_id, tenant)

    async def listing(
        self,
        filter_: JobFilter,
        limit: int = 100,
        after: JobId | None = None,
        *,
        newest_first: bool = False,
    ) -> JobPage:
        if filter_.unrunnable:
            if filter_.phase not in (None, Phase.QUEUED):
                return JobPage(())
            filter_ = msgspec.structs.replace(filter_, phase=Phase.QUEUED)
        select = self._unrunnable.unrunnable_of if filter_.unrunnable else None
        return await list_jobs(
            self.store.records, filter_, limit, after, newest_first=newest_first, select=select
        )

    async def watch(self, job_id: JobId, after: int = 0) -> AsyncGenerator[Fact | ProgressEvent, None]:
        """Yields the facts after number `after`, then each new event until the job ends: no gap, no repeat.

        All facts come from the store, and the last one decides whether the job has ended. The bus is only a
        reason to look."""
        subscription = self.bus.subscribe(job_id)
        try:
            facts = await self.store.facts(job_id)
            if not facts:
                raise no_job(job_id)
            last = facts[-1]
            for fact in facts:
                if fact.number > after:
                    yield fact
            if last.kind.is_final:
                return
            with self.following(job_id, last.number, lambda: subscription.offer(last)):
                async for event in subscription:
                    if isinstance(event, ProgressEvent):
                        yield event
                        continue
                    facts = await self.store.facts(job_id, last.number)
                    if not facts and await self.store.load(job_id) is None:
                        # Somebody purged the job meanwhile.
                        return
                    for fact in facts:
                        last = fact
                        yield fact
                    if last.kind.is_final:
                        return
        finally:
            subscription.close()

    def set_write_listener(self, callback: Callable[[WriteResult], None]) -> None:
        """Calls `callback` after each write of this engine."""
        self._context.on_write = callback

    def why_left(self, dispatch: Dispatch) -> WaitReason | None:
        """Why a waiting job is left to others although a slot is idle here. None: it is not."""
        return self._matcher.left_to_others(dispatch.lane)

    @property
    def idle_slots(self) -> int:
        """The number of polls parked here."""
        return self._matcher.idle_slots

    async def expected_s(self, workflow_hash: WorkflowHash, worker_id: WorkerId) -> float | None:
        """The learned duration of the workflow on this worker."""
        worker = self._context.fleet.workers.get(worker_id)
        stats = await self._context.stats(workflow_hash)
        return expected_s(stats, "" if worker is None else worker.capabilities.worker_class)

    def announce_to(self, callback: Callable[[Submission, JobId, int], Awaitable[None]]) -> None:
        """Calls `callback` before each round of a job is written, so that its outbox entries precede the first
        fact. `callback` may refuse the round; an announced round may still not be written."""
        self._context.announce = callback

    def set_tenant_suspension(self, suspend: Callable[[TenantId], Awaitable[bool]]) -> None:
        """Sets how the engine suspends a tenant whose workflows kill servers."""
        self._context.suspend = suspend

    def set_admission_control(self, admission_control: AdmissionControl) -> None:
        """Sets the admission control for new and manually retried jobs."""
        self._context.admission_control = admission_control

    def now(self) -> float:
        """The store's time, without a call to the store."""
        return self._context.clock.now()

    @property
    def clock(self) -> Clock:
        """The store's time. Hubs on several machines compare times from it."""
        return self._context.clock

    async def forget(self, job_id: JobId, delete_external: Callable[[Dispatch], Awaitable[None]]) -> None:
        """Deletes a job that has ended. `delete_external` deletes its data outside the queue."""
        dispatch = await ended_job(self.store, job_id)
        job = await self.store.records.get(job_id)
        if dispatch.is_awaited:
            await self._dependencies.notify_dependents(job_id)
        await delete_external(dispatch)
        await forget(self.store, job_id)
        if job is not None:
            await forget_uses(self.store.documents, job)

    async def explain(self, job_id: JobId, tenant: TenantId | None = None) -> Explanation:
        """`tenant`: explains to that tenant, and names only the workers that it may know."""
        dispatch = (await self._jobs.get(job_id)).dispatch
        if self.store.is_shared:
            # Another engine may have added the class.
            await self._context.fleet.sync()
        waiting = WaitingView(self._forecasts, self._matcher)
        return await explain(self._context, self._catalogs, dispatch, tenant, waiting)

    async def stats(self) -> QueueStats:
        counts = await self.store.counts()
        by_phase = counts.by_phase
        return QueueStats(
            waiting=counts.waiting,
            delayed=counts.delayed,
            paused=counts.paused,
            leased=by_phase[Phase.LEASED],
            completed=by_phase[Phase.COMPLETED],
            failed=by_phase[Phase.FAILED],
            cancelled=by_phase[Phase.CANCELLED],
            workers=sum(not worker.is_offline for worker in self._context.fleet.workers.values()),
            idle_slots=self._matcher.idle_slots,
            payload_bytes=counts.payload_bytes,
        )

    # worker API

    async def register(self, call: RegisterWorker) -> WorkerRecord:
        worker = await self._worker_operations.register(call)
        self._need_review.wake()
        return worker

    async def describe(self, worker_id: WorkerId, nodes: NodeCatalog) -> None:
        await self._catalogs.describe(worker_id, nodes)
        self._need_review.wake()

    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
        beat = await self._worker_operations.heartbeat(worker_id, refs)
        missing = await self._missing.of(worker_id)
        return msgspec.structs.replace(beat, missing=missing) if missing else beat

    # operators

    async def evict_worker(self, worker_id: WorkerId, reason: str) -> None:
        """Takes the worker offline and requeues its jobs; this costs no attempt. The worker may register again."""
        await self._worker_operations.unregister(worker_id, reason)
        for dispatch in await self.store.leases_of(worker_id):
            await self._failures.release(dispatch, AtRevision(dispatch.revision), reason)

    async def workers(self, *, max_age_s: float = 0.0) -> list[WorkerRecord]:
        """`max_age_s`: how old the engine's copy may be."""
        if self.store.is_shared:
            # Without parked polls here, nothing else reads the workers of other engines.
            await self._context.fleet.refresh(max_age_s)
        return list(self._context.fleet.workers.values())

    async def leases(self, workers: Iterable[WorkerRecord]) -> dict[WorkerId, list[Dispatch]]:
        """The leases of each worker. An offline worker may still hold some."""
        found: dict[WorkerId, list[Dispatch]] = {worker.worker_id: [] for worker in workers}
        names = list(found)
        for start in range(0, len(names), _BATCH_SIZE):
            for dispatch in await self.store.leases_of(*names[start : start + _BATCH_SIZE]):
                assert dispatch.lease is not None, "that is what was asked for"
                found[dispatch.lease.worker_id].append(dispatch)
        return found

    def known_worker(self, worker_id: WorkerId) -> WorkerRecord | None:
        """From this engine's memory, without a call to the store."""
        return self._context.fleet.workers.get(worker_id)

    async def drain_worker(self, worker_id: WorkerId) -> None:
        await self._operators.command(worker_id, "drain")

    async def refresh_worker(self, worker_id: WorkerId) -> None:
        """Asks the agent to read its servers' inventory and to register again."""
        await self._commands.send(Command("refresh"), worker_id)

    async def blocks(self) -> list[Block]:
        return await self.store.blocks()

    async def dead_letter(self, limit: int = 100, after: JobId | None = None) -> list[Dispatch]:
        return await self.store.dead_letter(limit, after)

    async def purge_dead_letter(self, before: float | None = None, limit: int = 1_000) -> int:
        """Deletes jobs that failed before that time, oldest first."""
        until = await self.store.now() if before is None else before
        return await purge(self.store, Phase.FAILED, until, limit)


__all__ = ["Engine", "Event"]
