"""Runs timed work: delays, leases, deadlines, blocks, quarantines, purges.

One timer stands at the next due time; a slow sweep covers the rest. Each step ends in a guarded write and may
run twice."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from comfyfleet.engine.commands import CommandQueue
from comfyfleet.engine.context import EngineContext, best_effort, stop
from comfyfleet.engine.dependencies import Dependencies
from comfyfleet.engine.explanation import explain
from comfyfleet.engine.failure_handler import FailureHandler
from comfyfleet.engine.job_operations import purge
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.node_catalogs import NodeCatalogs
from comfyfleet.engine.poison_workflows import PoisonWorkflows
from comfyfleet.engine.worker_operations import WorkerOperations
from comfyfleet.model.dispatch import AtRevision, AttemptOutcome, Dispatch, Phase, Stop, Write
from comfyfleet.model.errors import Fault
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import TenantId
from comfyfleet.policy.tenants import reader_of
from comfyfleet.policy.timers import DueAction, due_action
from comfyfleet.ports import Timer
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)
_BATCH = 256
_TENANT_PATIENCE_S = 1.0
"""How long a page waits for tenant databases."""
_MIN_PAUSE_S = 0.01
_PURGE_BATCH = 10_000
_PURGE_EVERY_S = 60.0
_FORGET_BATCH = 100
_UNCONFIRMED = "the worker did not confirm"


class Sweeper:
    def __init__(
        self,
        context: EngineContext,
        matcher: Matcher,
        failures: FailureHandler,
        workers: WorkerOperations,
        commands: CommandQueue,
        dependencies: Dependencies,
        poison_workflows: PoisonWorkflows,
        catalogs: NodeCatalogs,
    ) -> None:
        self._context = context
        self._matcher = matcher
        self._failures = failures
        self._workers = workers
        self._commands = commands
        self._dependencies = dependencies
        self._poison_workflows = poison_workflows
        self._catalogs = catalogs
        self._timer: Timer | None = None
        self._timer_at = float("inf")
        self._running: asyncio.Task[None] | None = None
        self._is_due_again = False
        self._purged_at = 0.0
        self._tenant_pause_end: float | None = None
        self._by_tenant: dict[TenantId, asyncio.Task[bool]] = {}
        self._away: set[TenantId] = set()
        """Tenants whose database was away, so that the log says it once."""
        self._is_closed = False
        context.wake_by = self.wake_by

    def wake_by(self, at: float | None) -> None:
        if at is None or self._is_closed or at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._context.clock.call_at(at, self._fire)

    def _fire(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        if self._running is not None:
            self._is_due_again = True
        elif not self._is_closed:
            self._running = in_background(self._run(), name="sweep")

    async def _run(self) -> None:
        try:
            await self.sweep()
        except Exception:
            log_failure(_LOG, "a sweep failed; the next one tries again")
        finally:
            self._running = None
            wait_s = 0.0 if self._is_due_again else self._context.rules.sweep_s
            self._is_due_again = False
            self.wake_by(self._context.clock.now() + wait_s)

    async def sweep(self) -> None:
        """Does now what the timer would do."""
        context = self._context
        if context.store.is_shared:
            # Another engine may know more recent times of its workers.
            await context.compare_clocks()
            await context.fleet.refresh(context.rules.round_s)
        else:
            context.fleet.adjust_last_seen()
        await self._end_blocks()
        self._poison_workflows.check()
        await self._end_quarantines()
        await self._find_lost_workers()
        with best_effort("lift needless blocks"):
            await self._failures.end_needless_blocks()
        await self._end_tenant_pauses()
        is_all_done = await self._handle_due_jobs()
        await self._purge()
        # Failed work is still due; an immediate retry would only repeat the fault.
        earliest = await context.store.now() + (_MIN_PAUSE_S if is_all_done else context.rules.sweep_s)
        for at in (await context.store.next_due(), await context.store.next_block_end()):
            self.wake_by(at if at is None else max(at, earliest))

    async def _handle_due_jobs(self) -> bool:
        """Handles all due jobs, page by page. Failed ones and slow databases do not delay the others."""
        store, began, is_all_done = self._context.store, await self._context.store.now(), True
        left_out: set[TenantId] = set()
        last: Dispatch | None = None
        while due := await store.due(_BATCH, last):
            last = due[-1]
            of_tenants: dict[TenantId, list[Dispatch]] = {}
            for dispatch in due:
                if not self._context.reaches_tenants:
                    is_all_done &= await self._handle_or_log(dispatch)
                elif dispatch.tenant not in left_out:
                    of_tenants.setdefault(dispatch.tenant, []).append(dispatch)
            left_out |= await self._handle_tenants(of_tenants)
            # Jobs that fell due meanwhile have their own timer.
            if len(due) < _BATCH or last.due_at is None or last.due_at > began:
                break
        return is_all_done and not left_out

    async def _handle_or_log(self, dispatch: Dispatch) -> bool:
        try:
            await self._handle_due(dispatch)
        except Exception:
            log_failure(
                _LOG, "could not handle job %s, which is due; the next sweep tries again", dispatch.job_id
            )
            return False
        return True

    async def _handle_tenants(self, due: dict[TenantId, list[Dispatch]]) -> set[TenantId]:
        """Returns the tenants with work left. A slow database delays only its own tenant."""
        left = {tenant for tenant in due if tenant in self._by_tenant}
        for tenant in due.keys() - left:
            task = asyncio.create_task(self._handle_tenant(tenant, due[tenant]), name=f"sweep {tenant}")
            self._by_tenant[tenant] = task
            task.add_done_callback(partial(self._tenant_done, tenant))
        tasks = {tenant: self._by_tenant[tenant] for tenant in due.keys() - left}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=_TENANT_PATIENCE_S)
        return left | {tenant for tenant, task in tasks.items() if not (task.done() and task.result())}

    def _tenant_done(self, tenant: TenantId, _: asyncio.Task[bool]) -> None:
        del self._by_tenant[tenant]

    async def _handle_tenant(self, tenant: TenantId, due: list[Dispatch]) -> bool:
        """False: work is left. Stops at the first fault of the tenant's database."""
        is_all_done = True
        for dispatch in due:
            try:
                await self._handle_due(dispatch)
            except Fault as fault:
                if tenant not in self._away:
                    self._away.add(tenant)
                    _LOG.warning("due jobs of tenant %s wait until its database is back: %s", tenant, fault)
                return False
            except Exception:
                log_failure(
                    _LOG, "could not handle job %s, which is due; the next sweep tries again", dispatch.job_id
                )
                is_all_done = False
        self._away.discard(tenant)
        return is_all_done

    async def _why(self, dispatch: Dispatch) -> str:
        """What the job waited for, or where it ran, for the failure message."""
        summary = ""
        with best_effort(f"explain why job {dispatch.job_id} did not end in time"):
            found = await explain(self._context, self._catalogs, dispatch, reader_of(dispatch.tenant))
            summary = found.summary
        return summary and f": {summary}"

    async def _handle_due(self, dispatch: Dispatch) -> None:
        context = self._context
        now = await context.store.now()
        if self._still_hopes_for_memory(dispatch, now):
            dispatch = msgspec.structs.replace(dispatch, relax_at=now + context.rules.bigger_card_wait_s)
        found = due_action(dispatch, now, context.rules)
        if (
            dispatch.awaits_jobs
            and found.action is DueAction.NOTHING
            and await self._dependencies.recheck(dispatch.job_id)
        ):
            return
        match found.action:
            case DueAction.TOTAL_OVER:
                words = f"the total time given to the job is over{await self._why(dispatch)}"
                failure = Failure(FailureKind.TOTAL_TIMEOUT, words)
                # The worker is told to stop, as for a cancel.
                ended = await self._failures.end_job(dispatch, failure, outcome=AttemptOutcome.CANCELLED)
                if ended is not None and dispatch.lease is not None:
                    await self._commands.send_stop(dispatch, Stop.CANCEL)
            case DueAction.DEADLINE_OVER:
                words = f"the deadline passed before a worker was free{await self._why(dispatch)}"
                await self._failures.end_job(dispatch, Failure(FailureKind.DEADLINE_PASSED, words))
            case DueAction.STOP_OVERDUE:
                await self._failures.end_stopped(dispatch, AtRevision(dispatch.revision), _UNCONFIRMED)
            case DueAction.LEASE_EXPIRED:
                await self._expire(dispatch)
            case DueAction.NOTHING | DueAction.DEADLINE_FLAGGED:
                if found.change is None:
                    return
                is_late = found.action is DueAction.DEADLINE_FLAGGED
                written = await context.write(
                    Write(
                        dispatch.job_id,
                        AtRevision(dispatch.revision),
                        found.change,
                        facts=(FactDraft(FactKind.LATE),) if is_late else (),
                        job={"is_late": True} if is_late else None,
                    )
                )
                if written is not None:
                    self._matcher.job_arrived(written.dispatch)

    def _still_hopes_for_memory(self, dispatch: Dispatch, now: float) -> bool:
        """A job keeps waiting for a bigger card while the fleet has one."""
        fleet = self._context.fleet
        return (
            dispatch.relax_at is not None
            and dispatch.relax_at <= now
            and fleet.waits_for_memory(dispatch)
            and fleet.selectivity(dispatch.class_key) > 0
        )

    async def _expire(self, dispatch: Dispatch) -> None:
        assert dispatch.lease is not None
        guard = AtRevision(dispatch.revision)
        if not dispatch.lease.is_acknowledged:
            await self._failures.release(dispatch, guard, "the lease was never acknowledged")
            return
        if dispatch.stop is not None:
            await self._failures.end_stopped(dispatch, guard, _UNCONFIRMED)
            return
        worker_id = dispatch.lease.worker_id
        failure = Failure(FailureKind.LEASE_EXPIRED, f"no heartbeat of worker {worker_id} arrived in time")
        await self._failures.fail(dispatch, guard, failure)

    async def _end_blocks(self) -> None:
        for block in await self._context.store.expired_blocks():
            await self._context.unblocked(block, "the cooldown is over")
            self._matcher.worker_freed(block.worker_id)

    async def _end_quarantines(self) -> None:
        fleet, now = self._context.fleet, self._context.clock.now()
        longest = now + self._context.rules.quarantine_s
        for worker in list(fleet.workers.values()):
            until = worker.quarantined_until
            if until is None:
                continue
            if until > longest:
                # It began before the clock was set back and would last too long.
                until = longest
                await fleet.quarantine(worker.worker_id, until)
            if until > now:
                self.wake_by(until)
                continue
            if await fleet.quarantine(worker.worker_id, None) is None:
                continue
            # Clients know the end of a quarantine by this word. The fact `released` is another thing: a job's lease.
            self._context.publish_fleet_event("released", worker.worker_id)
            self._matcher.worker_freed(worker.worker_id)

    async def _end_tenant_pauses(self) -> None:
        """The store leases jobs of a held tenant again by itself; waiting polls must look again."""
        ended_at, self._tenant_pause_end = (
            self._tenant_pause_end,
            await self._context.store.fair_share.next_hold_end(),
        )
        if ended_at is not None and ended_at != self._tenant_pause_end:
            self._matcher.everything_changed()
        # An operator ends a hold that has no end of its own.
        if self._tenant_pause_end != float("inf"):
            self.wake_by(self._tenant_pause_end)

    async def _find_lost_workers(self) -> None:
        now, limit_s = self._context.clock.now(), self._context.rules.worker_lost_s
        for worker in list(self._context.fleet.workers.values()):
            is_silent = worker.last_seen_at + limit_s <= now and not self._matcher.has_parked(
                worker.worker_id
            )
            if is_silent and not worker.is_offline:
                reason = f"no heartbeat for {limit_s:g} s"
                await self._workers.unregister(worker.worker_id, reason, is_lost=True)

    async def _purge(self) -> None:
        context, rules = self._context, self._context.rules
        now = await context.store.now()
        if now - self._purged_at < _PURGE_EVERY_S:
            return
        is_done = True
        for phase, keep_s in (
            (Phase.COMPLETED, rules.keep_completed_s),
            (Phase.FAILED, rules.keep_failed_s),
            (Phase.CANCELLED, rules.keep_cancelled_s),
        ):
            is_done &= await purge(context.store, phase, now - keep_s, _PURGE_BATCH) < _PURGE_BATCH
        is_done &= await self._forget_workers(now - rules.keep_offline_workers_s) < _FORGET_BATCH
        if is_done:
            self._purged_at = now

    async def _forget_workers(self, before: float) -> int:
        """Removes offline workers not seen since then. A returning worker registers anyway."""
        fleet, forgotten = self._context.fleet, 0
        old = [each for each in fleet.workers.values() if each.is_offline and each.last_seen_at < before]
        for worker in old[:_FORGET_BATCH]:
            newest = await fleet.stored_worker(worker.worker_id)
            if newest is not None and newest.is_offline and newest.last_seen_at < before:
                await self._workers.remove(worker.worker_id)
            forgotten += 1
        return forgotten

    def start(self) -> None:
        self.wake_by(self._context.clock.now() + self._context.rules.sweep_s)

    async def close(self) -> None:
        self._is_closed = True
        await self._poison_workflows.close()
        await stop(self._timer, self._running, *self._by_tenant.values())
