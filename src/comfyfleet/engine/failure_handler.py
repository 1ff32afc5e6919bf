"""Ends attempts that did not complete: failures, expired leases, releases and requested stops. Asks policy, writes its
decision, publishes blocks.

Worker reports and the sweeper's findings both come here, so a failure has the same effect whoever notices
it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from comfyfleet.engine.context import EngineContext, best_effort, ignore
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.placement import RefusalHandler
from comfyfleet.model.block import EVERY_WORKER, Block, BlockReason, Pair
from comfyfleet.model.calls import FailureReport
from comfyfleet.model.dispatch import (
    AtRevision,
    AttemptEnd,
    AttemptOutcome,
    Change,
    Dispatch,
    Guard,
    Phase,
    Stop,
    Write,
)
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.failure import Failure, FailureKind, bounded
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.policy.acceptance import is_refusal
from comfyfleet.policy.failover import (
    block_for_all_tenants,
    block_for_only_worker,
    blocked_target,
    is_quarantined,
)
from comfyfleet.policy.fair_share import used_s
from comfyfleet.policy.lifecycle import Transition, cancelled, failed, target
from comfyfleet.policy.poison_workflows import deaths_lately, failure_of_poison, refusal_of
from comfyfleet.policy.retry import RetryChoice, RetryDecision, after_failure, after_release
from comfyfleet.policy.timers import requeued
from comfyfleet.policy.workflow_stats import of_out_of_memory, with_memory

_MAX_KEPT_OFF = 256
"""For so many jobs a sweep lifts blocks between a job and a worker that failed it. Those of the other jobs end with the
cooldown at the latest."""


class FailureHandler:
    """Every end of an attempt except completion. `release` and `end_stopped` are no failures and cost no attempt."""

    def __init__(self, context: EngineContext, matcher: Matcher, refusals: RefusalHandler) -> None:
        self._context = context
        self._matcher = matcher
        self._refusals = refusals
        context.requeue_undelivered = self.requeue_undelivered
        self.on_late_death: Callable[[FailureReport], Awaitable[None]] = ignore
        """Set by the poison workflows: a run failed after its job was cancelled or had ended."""
        self.on_refusal: Callable[[Dispatch, Block, Failure], Awaitable[None]] = ignore
        """Set by the poison workflows: this job shows that its workflow kills servers."""

    async def fail(self, dispatch: Dispatch, guard: Guard, failure: Failure) -> Dispatch | None:
        """None: the guard did not hold, because somebody else ended this lease."""
        context = self._context
        assert dispatch.lease is not None, "an attempt holds a lease"
        worker_id, now = dispatch.lease.worker_id, await context.store.now()
        failure = bounded(self._with_card(failure, worker_id))
        if failure.server_died is not None:
            known = await context.store.get_block(Pair(EVERY_WORKER, dispatch.block_targets[1]))
            deaths = max(dispatch.server_deaths, deaths_lately(known, context.rules, now))
            dispatch = msgspec.structs.replace(dispatch, server_deaths=deaths)
        block, known_block = await self._record_in_strategy(dispatch, worker_id, failure, now)
        job = await context.store.records.get(dispatch.job_id)
        if block is not None and block.reason is BlockReason.REFUSED and job and job.payload.variants:
            # The hash covers several graphs, and the server refused only this one.
            block = None
        choice = await self._choice(dispatch, worker_id, block, now)
        if (own := block_for_only_worker(block, known_block, failure, choice)) != block:
            block, choice = own, await self._choice(dispatch, worker_id, own, now)
        refusing: frozenset[str] = frozenset()
        if is_refusal(failure):
            refusing = await self._refusals.refusing(dispatch, worker_id, failure, now)
            may_accept = await self._refusals.may_accept(dispatch, worker_id, refusing, now)
            choice = msgspec.structs.replace(choice, may_accept=may_accept)
        decision = after_failure(
            dispatch,
            worker_id,
            failure,
            choice,
            rules=context.rules,
            now=now,
            fraction=context.rng.fraction(),
            retry_delay_s=None if job is None else job.payload.retry_delay_s,
        )
        blocks = await self._blocks(dispatch, worker_id, failure, decision, block, refusing, now)
        refusing_block = refusal_of(dispatch, decision.server_deaths, now) if decision.is_poison else None
        if decision.will_retry:
            next_dispatch = await self._with_next_class(dispatch, failure, refusing, now)
            write = self._write_of(next_dispatch, guard, failure, decision, tuple(blocks), now)
        else:
            refusals = () if refusing_block is None else (refusing_block,)
            final = failure if refusing_block is None else failure_of_poison(failure, dispatch)
            write = self._write_of(dispatch, guard, final, decision, (*blocks, *refusals), now)
        written = await context.write(write)
        if written is None:
            return None
        for each in blocks:
            context.blocked(each, failure.message)
        if refusing_block is not None:
            context.fleet.cache_block(refusing_block)
            with best_effort(f"publish the refusal of workflow {refusing_block.target}"):
                await self.on_refusal(written.dispatch, refusing_block, failure)
        try:
            with best_effort(f"count a failure of worker {worker_id}"):
                await context.fleet.record_failure(worker_id)
            if blocks:
                with best_effort(f"check whether to quarantine worker {worker_id}"):
                    await self._quarantine(worker_id, now)
        finally:
            # Not earlier, or the job returns to the worker that it failed on.
            self._matcher.job_arrived(written.dispatch)
        return written.dispatch

    async def release(self, dispatch: Dispatch, guard: Guard, reason: str) -> Dispatch | None:
        """Ends the lease without a charge and requeues the job. If a stop was requested, `end_stopped` decides what
        becomes of it. After too many releases the job fails."""
        context = self._context
        if dispatch.stop is not None:
            return await self.end_stopped(dispatch, guard)
        assert dispatch.lease is not None, "only a leased job is released"
        now = await context.store.now()
        decision = after_release(dispatch, reason, context.rules, now)
        if decision.failure is not None:
            return await self.end_job(dispatch, decision.failure, guard, outcome=AttemptOutcome.RELEASED)
        change = msgspec.structs.replace(self._requeued(dispatch, now), releases=decision.releases)
        blocks: tuple[Block, ...] = ()
        if (until := decision.keep_off_until) is not None:
            blocks = (Block(dispatch.lease.worker_id, dispatch.job_id, BlockReason.JOB, 1, until),)
        written = await context.write(
            Write(
                dispatch.job_id,
                guard,
                change,
                attempt_end=AttemptEnd(AttemptOutcome.RELEASED, used_s=used_s(dispatch.lease, now)),
                facts=(FactDraft(FactKind.RELEASED, {"reason": reason, "attempt": dispatch.attempts}),),
                blocks=blocks,
                job={"phase": Phase.QUEUED},
            )
        )
        if written is None:
            return None
        for block in blocks:
            context.blocked(block, reason)
        self._matcher.job_arrived(written.dispatch)
        return written.dispatch

    async def requeue_undelivered(self, dispatch: Dispatch) -> None:
        """Requeues a job whose worker left before it learned of the lease."""
        store, ref = self._context.store, dispatch.lease_ref()
        # Written only over what was read, so that a stop request in between is not lost.
        while (current := await store.load(ref.job_id)) is not None and current.lease is not None:
            if current.lease_ref() != ref:
                return
            if await self.release(current, AtRevision(current.revision), "the worker went away") is not None:
                return

    async def end_stopped(self, dispatch: Dispatch, guard: Guard, note: str = "") -> Dispatch | None:
        """Ends a lease with a stop request: the worker confirmed it, released the job, or ran out of time. The job is
        cancelled, paused, or (retry) queued again.

        `note`: how it ended, if the worker did not confirm it. `reason` is only what a caller or worker gave."""
        context = self._context
        now = await context.store.now()
        job: dict[str, object] = {"phase": Phase.QUEUED}
        match dispatch.stop:
            case Stop.CANCEL:
                data: dict[str, object] = {"reason": dispatch.cancel_reason} if dispatch.cancel_reason else {}
                change, kind = cancelled(dispatch), FactKind.CANCELLED
                job = {"phase": Phase.CANCELLED, "completed_at": now}
            case Stop.PAUSE:
                change, kind, data = self._requeued(dispatch, now), FactKind.PAUSED, {}
            case _:
                change, kind = self._requeued(dispatch, now), FactKind.RELEASED
                data = {"reason": "retry", "attempt": dispatch.attempts}
        if note:
            data["note"] = note
        written = await context.write(
            Write(
                dispatch.job_id,
                guard,
                change,
                # The run was stopped, so its attempt is cancelled even if the job goes on.
                attempt_end=AttemptEnd(AttemptOutcome.CANCELLED, used_s=used_s(dispatch.lease, now)),
                facts=(FactDraft(kind, data or None),),
                job=job,
            )
        )
        if written is None:
            return None
        self._matcher.job_arrived(written.dispatch)
        return written.dispatch

    def _requeued(self, dispatch: Dispatch, now: float) -> Change:
        phase = target(dispatch.phase, Transition.RELEASE)
        return requeued(dispatch, phase, dispatch.not_before, now, self._context.rules)

    async def end_needless_blocks(self) -> None:
        """Lifts the blocks between a job and workers that failed it, when no other worker can run it."""
        context = self._context
        if not context.fleet.with_blocks:
            return
        store, now = context.store, await context.store.now()
        kept_off: dict[JobId, list[Block]] = {}
        for block in await store.blocks():
            if block.reason is BlockReason.JOB and block.is_in_force(now) and len(kept_off) < _MAX_KEPT_OFF:
                kept_off.setdefault(JobId(block.target), []).append(block)
        for dispatch in await store.load_many(list(kept_off)) if kept_off else ():
            if dispatch is None or dispatch.phase is not Phase.QUEUED or await self._has_taker(dispatch, now):
                continue
            # A worker that declined the job without a failure would decline it again.
            pairs = [each.pair for each in kept_off[dispatch.job_id] if each.worker_id in dispatch.failed_on]
            for lifted in await store.lift(pairs):
                await context.unblocked(lifted, "no other worker can run the job")
                self._matcher.worker_freed(lifted.worker_id)

    async def end_job(
        self,
        dispatch: Dispatch,
        failure: Failure,
        guard: Guard | None = None,
        outcome: AttemptOutcome = AttemptOutcome.FAILED,
    ) -> Dispatch | None:
        """Fails a job that has reached one of its limits or cannot run, with or without a lease.

        `outcome`: how the attempt ended if the job is leased. The worker's repeated report gets the same answer only
        if it names what the worker did."""
        now = await self._context.store.now()
        end = None
        if dispatch.lease is not None:
            end = AttemptEnd(outcome, failure=failure, used_s=used_s(dispatch.lease, now))
        written = await self._context.write(
            Write(
                dispatch.job_id,
                guard or AtRevision(dispatch.revision),
                failed(dispatch, Transition.END),
                attempt_end=end,
                facts=(FactDraft(FactKind.FAILED, _fact_data(failure, failure.message, dispatch)),),
                job={"phase": Phase.FAILED, "failure": failure, "completed_at": now},
            )
        )
        return None if written is None else written.dispatch

    def _write_of(
        self,
        dispatch: Dispatch,
        guard: Guard,
        failure: Failure,
        decision: RetryDecision,
        blocks: tuple[Block, ...],
        now: float,
    ) -> Write:
        job: dict[str, object] = {
            "failure": failure,
            "worker_id": dispatch.lease and dispatch.lease.worker_id,
        }
        if decision.will_retry:
            phase = target(dispatch.phase, Transition.REQUEUE)
            change = requeued(dispatch, phase, decision.not_before, now, self._context.rules)
            data = {**_fact_data(failure, failure.message, dispatch), "not_before": decision.not_before}
            ends = [block.blocked_until for block in blocks if block.blocked_until and block.is_in_force(now)]
            if ends:
                # So that a watcher of the job knows what it waits for.
                data |= {"blocked_until": max(ends), "blocked_s": max(ends) - now}
            fact = FactDraft(FactKind.RETRYING, data)
            job["phase"] = Phase.QUEUED
        else:
            change = failed(dispatch, Transition.GIVE_UP)
            fact = FactDraft(FactKind.FAILED, _fact_data(failure, decision.why, dispatch))
            job |= {"phase": Phase.FAILED, "completed_at": now}
        change = msgspec.structs.replace(
            change,
            charged=decision.charged,
            worker_faults=decision.worker_faults,
            failed_on=decision.failed_on,
            expired_on=decision.expired_on,
            server_deaths=decision.server_deaths,
        )
        return Write(
            dispatch.job_id,
            guard,
            change,
            attempt_end=_end(dispatch, failure, decision, now),
            facts=(fact,),
            blocks=blocks,
            job=job,
        )

    async def _blocks(
        self,
        dispatch: Dispatch,
        worker_id: WorkerId,
        failure: Failure,
        decision: RetryDecision,
        block: Block | None,
        refusing: frozenset[str],
        now: float,
    ) -> list[Block]:
        """Blocks for the workflow on this worker and, where needed, for this job on this worker."""
        rules, is_refused = self._context.rules, is_refusal(failure)
        if is_refused and not decision.will_retry:
            # No other worker could take this workflow, so the next job of it should be refused at once.
            return []
        if block is not None and block.is_in_force(now):
            for_all = block_for_all_tenants(block, await self._context.store.blocks(worker_id), now)
            return [block] if for_all is None else [block, for_all]
        blocks = [block] if block is not None else []
        # If the whole signature refuses the job, its next class already excludes this worker.
        if decision.keep_off_worker and not refusing:
            reason = BlockReason.REFUSED if is_refused else BlockReason.JOB
            until = now + (rules.inventory_block_s if is_refused else rules.cooldown_s)
            blocks.append(Block(worker_id, dispatch.job_id, reason, 1, until))
        return blocks

    async def _record_in_strategy(
        self, dispatch: Dispatch, worker_id: WorkerId, failure: Failure, now: float
    ) -> tuple[Block | None, Block | None]:
        """Counts the failure with the failover strategy. Returns the new block and the previous one."""
        context, workflow_hash = self._context, dispatch.workflow_hash
        cls = context.fleet.classes.get(dispatch.class_key)
        block_target = blocked_target(
            workflow_hash, dispatch.tenant, failure, None if cls is None else cls.requirements
        )
        known = await context.store.get_block(Pair(worker_id, block_target))
        previous = known and msgspec.structs.replace(known, target=workflow_hash)
        block = context.strategy.record_failure(worker_id, workflow_hash, failure, previous, now)
        return block and msgspec.structs.replace(block, target=block_target), known

    async def _choice(
        self, dispatch: Dispatch, worker_id: WorkerId, block: Block | None, now: float
    ) -> RetryChoice:
        fleet = self._context.fleet
        profiles = frozenset(fleet.profiles_for(dispatch.relaxed_class or dispatch.class_key))
        others, is_blocked_everywhere, is_only_worker = 0, True, True
        for worker in list(fleet.workers.values()):
            if worker.profile not in profiles:
                continue
            if worker.worker_id == worker_id:
                is_blocked = block is not None and self._context.strategy.is_blocked(block, now)
            else:
                for_all, for_tenant, for_job = dispatch.block_targets
                is_blocked = await self._is_blocked(worker.worker_id, now, for_tenant, for_all)
                takes_work = self._takes(dispatch, worker, now)
                is_only_worker &= not takes_work
                # A worker that failed this job too is no alternative.
                if not is_blocked and takes_work:
                    others += not await self._is_blocked(worker.worker_id, now, for_job)
            # An offline worker may still return and run it.
            is_blocked_everywhere &= is_blocked
        return RetryChoice(others, is_blocked_everywhere, is_only_worker)

    def _takes(self, dispatch: Dispatch, worker: WorkerRecord, now: float) -> bool:
        """Whether the worker takes such work now, ignoring blocks."""
        context = self._context
        return context.fleet.takes_work(worker, now) and not context.strategy.should_skip(
            worker.worker_id, dispatch.workflow_hash, now
        )

    async def _has_taker(self, dispatch: Dispatch, now: float) -> bool:
        fleet = self._context.fleet
        profiles = frozenset(fleet.profiles_for(dispatch.relaxed_class or dispatch.class_key))
        for worker in list(fleet.workers.values()):
            if worker.profile not in profiles or not self._takes(dispatch, worker, now):
                continue
            if not await self._is_blocked(worker.worker_id, now, *dispatch.block_targets):
                return True
        return False

    async def _is_blocked(self, worker_id: WorkerId, now: float, *targets: str) -> bool:
        if worker_id not in self._context.fleet.with_blocks:
            return False
        for each in targets:
            block = await self._context.store.get_block(Pair(worker_id, each))
            if block is not None and self._context.strategy.is_blocked(block, now):
                return True
        return False

    def _with_card(self, failure: Failure, worker_id: WorkerId) -> Failure:
        """Adds the size of the card to an out-of-memory failure."""
        worker = self._context.fleet.workers.get(worker_id)
        if failure.kind is not FailureKind.OUT_OF_MEMORY or failure.vram_gb is not None or worker is None:
            return failure
        return msgspec.structs.replace(failure, vram_gb=worker.capabilities.hardware.gpu.memory_gb)

    async def _with_next_class(
        self, dispatch: Dispatch, failure: Failure, refusing: frozenset[str], now: float
    ) -> Dispatch:
        """Chooses the class of the next attempt: with bigger cards, or without the first preference."""
        if failure.kind is FailureKind.OUT_OF_MEMORY:
            return await self._with_more_memory(dispatch, failure, now)
        if refusing:
            dispatch = await self._refusals.reroute(dispatch, refusing)
        if self._context.fleet.waits_for_memory(dispatch):
            return dispatch
        # The preferred worker had its chance; a retry goes to any worker.
        anywhere = dispatch.relaxed_class or dispatch.class_key
        return msgspec.structs.replace(dispatch, class_key=anywhere, relaxed_class=None, relax_at=None)

    async def _with_more_memory(self, dispatch: Dispatch, failure: Failure, now: float) -> Dispatch:
        """Records the memory need of the workflow and asks for a bigger card if the fleet has one."""
        context, workflow_hash = self._context, dispatch.workflow_hash
        stats = await context.stats(workflow_hash) or WorkflowStats(workflow_hash)
        if failure.vram_gb:
            stats = await context.add_workflow_stats(
                of_out_of_memory(workflow_hash, dispatch.tenant, failure.vram_gb)
            )
        base = dispatch.relaxed_class or dispatch.class_key
        cls = context.fleet.classes[base]
        needs = with_memory(cls.requirements, stats, dispatch.tenant, context.fleet.capabilities())
        bigger = msgspec.structs.replace(cls, requirements=needs)
        if bigger == cls or not context.fleet.is_workable(bigger):
            return msgspec.structs.replace(dispatch, class_key=base, relaxed_class=None, relax_at=None)
        return msgspec.structs.replace(
            dispatch,
            class_key=await context.fleet.ensure_class(bigger),
            relaxed_class=base,
            relax_at=now + context.rules.bigger_card_wait_s,
        )

    async def _quarantine(self, worker_id: WorkerId, now: float) -> None:
        context = self._context
        worker = context.fleet.workers.get(worker_id)
        if worker is None or worker.quarantined_until is not None:
            return
        if is_quarantined(await context.store.blocks(worker_id), context.rules, now):
            until = now + context.rules.quarantine_s
            if await context.fleet.quarantine(worker_id, until) is None:
                return
            context.publish_fleet_event("quarantined", worker_id, until=until)
            context.wake_by(until)


def _end(dispatch: Dispatch, failure: Failure, decision: RetryDecision, now: float) -> AttemptEnd:
    is_expiry = failure.kind is FailureKind.LEASE_EXPIRED
    outcome = AttemptOutcome.EXPIRED if is_expiry else AttemptOutcome.FAILED
    return AttemptEnd(outcome, decision.counts_against.value, failure, used_s(dispatch.lease, now))


def _fact_data(failure: Failure, why: str, dispatch: Dispatch) -> dict[str, object]:
    data: dict[str, object] = {"kind": failure.kind.value, "message": failure.message, "why": why}
    data["attempt"] = dispatch.attempts
    if dispatch.lease is not None:
        data |= {"worker_id": dispatch.lease.worker_id, "lease": dispatch.lease.number}
    if failure.node_id is not None:
        data["node_id"] = failure.node_id
    return data
