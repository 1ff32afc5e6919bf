"""Handles workflows that kill servers: refuses them, ends their waiting jobs, suspends the tenant.

The refusal is a block of every worker, written with the end of the last job (`policy/poison_workflows.py`),
so all stores and direct workers obey it at once. Each engine that learns of it ends the waiting jobs, page by
page."""

from __future__ import annotations

import asyncio
import logging

from comfyfleet.engine.context import EngineContext, best_effort, stop
from comfyfleet.engine.failure_handler import FailureHandler
from comfyfleet.model.block import EVERY_WORKER, Block, Pair, whose_target
from comfyfleet.model.calls import FailureReport
from comfyfleet.model.dispatch import AttemptOutcome, Dispatch, Phase
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.paginator import record_pages
from comfyfleet.policy import poison_workflows
from comfyfleet.tracing import in_background

_LOG = logging.getLogger(__name__)
_PAGE = 100
_ENDED_BEFORE = (AttemptOutcome.EXPIRED, AttemptOutcome.CANCELLED)


class PoisonWorkflows:
    def __init__(self, context: EngineContext, failures: FailureHandler) -> None:
        self._context = context
        self._failures = failures
        self._ended: set[str] = set()
        """Refused targets without waiting jobs at the last look."""
        self._returned: set[JobId] = set()
        """Jobs of refused workflows that were queued since."""
        self._over: dict[JobId, Dispatch] = {}
        """Jobs that ended after one server died of them."""
        self._ending: asyncio.Task[None] | None = None
        context.refused_waits = self._note_waiting
        context.ended_after_death = self._note_over
        failures.on_refusal = self.refused
        failures.on_late_death = self.record_late_death

    async def record_late_death(self, call: FailureReport) -> None:
        """Counts a server that died of a job after the job ended, so that such jobs cannot kill one server
        after the other. Each attempt counts once."""
        store, ref = self._context.store, call.ref
        if call.failure.server_died is None:
            return
        with best_effort(f"count the server that died of job {ref.job_id}"):
            dispatch = await store.load(ref.job_id)
            attempts = () if dispatch is None else await store.attempts(ref.job_id)
            for attempt in attempts:
                is_its = attempt.attempt_id == ref.attempt_id and attempt.outcome in _ENDED_BEFORE
                if dispatch is not None and is_its and not attempt.reported_late:
                    await store.mark_late(ref)
                    await self._count_death(dispatch, call.failure)

    async def _count_death(self, dispatch: Dispatch, failure: Failure | None = None) -> None:
        """`failure`: a death that the dispatch does not count yet. Without one, keeps the count for the case
        that somebody cancels the job and submits it again."""
        context, now = self._context, await self._context.store.now()
        known = await context.store.get_block(Pair(EVERY_WORKER, dispatch.block_targets[1]))
        if known is not None and poison_workflows.is_refusing(known):
            return
        deaths = max(dispatch.server_deaths, poison_workflows.deaths_lately(known, context.rules, now))
        deaths += failure is not None
        if failure is None or deaths < context.rules.max_server_deaths:
            await context.store.put_block(poison_workflows.death_of(dispatch, deaths, now))
            return
        refusal = poison_workflows.refusal_of(dispatch, deaths, now)
        await context.store.put_block(refusal)
        context.fleet.cache_block(refusal)
        await self.refused(dispatch, refusal, failure)

    async def refused(self, dispatch: Dispatch, block: Block, failure: Failure) -> None:
        """Runs after the write: raises the alert and suspends the tenant if needed."""
        context = self._context
        _LOG.warning(
            "workflow %s of tenant %s is refused: %d servers died while they ran it, the last of job %s (%s); "
            "lift it with: comfyfleet blocks lift '*' %s",
            *(block.workflow_hash, dispatch.tenant, block.failures, dispatch.job_id),
            *(failure.message, block.target),
        )
        context.publish_fleet_event(
            "workflow_refused",
            EVERY_WORKER,
            tenant=dispatch.tenant,
            workflow_hash=block.workflow_hash,
            job_id=dispatch.job_id,
            message=failure.message,
        )
        context.wake_by(context.clock.now())
        with best_effort(f"check whether to suspend tenant {dispatch.tenant}"):
            await self._pause(dispatch.tenant)

    async def _pause(self, tenant: TenantId) -> None:
        context, now = self._context, await self._context.store.now()
        blocks = await context.store.blocks(EVERY_WORKER)
        if not poison_workflows.is_to_be_paused(tenant, blocks, context.rules, now):
            return
        why = f"servers died of {context.rules.poison_workflows} or more of its workflows within an hour"
        if await context.suspend(tenant):
            _LOG.warning(
                "tenant %s is suspended: %s; `comfyfleet tenant resume %s` lets it work again",
                tenant,
                why,
                tenant,
            )
            context.publish_fleet_event("tenant_suspended", EVERY_WORKER, tenant=tenant, message=why)
        else:
            _LOG.warning(
                "tenant %s was not suspended, because it does not exist or is suspended already: %s",
                tenant,
                why,
            )

    def _note_over(self, dispatch: Dispatch) -> None:
        if dispatch.server_deaths < self._context.rules.max_server_deaths:
            self._over[dispatch.job_id] = dispatch
            self._context.wake_by(self._context.clock.now())

    def _note_waiting(self, dispatch: Dispatch) -> None:
        self._returned.add(dispatch.job_id)
        self._context.wake_by(self._context.clock.now())

    def check(self) -> None:
        """Runs in the background, because a tenant database may be slow."""
        refused = self._context.fleet.refused
        self._ended &= refused
        if self._ending is None and (self._over or self._returned or refused - self._ended):
            self._ending = in_background(self._end_waiting(), name="refused jobs")

    async def close(self) -> None:
        await stop(self._ending)

    async def _end_waiting(self) -> None:
        try:
            for job_id, dispatch in list(self._over.items()):
                with best_effort(f"count the server that died of job {job_id}; the next sweep tries again"):
                    await self._count_death(dispatch)
                    self._over.pop(job_id, None)
            for target in self._context.fleet.refused - self._ended:
                with best_effort(
                    f"end the waiting jobs of the refused workflow {target}; the next sweep tries again"
                ):
                    await self._end_all(target)
                    self._ended.add(target)
            for job_id in list(self._returned):
                with best_effort(f"end job {job_id} of a refused workflow; the next sweep tries again"):
                    await self._end(job_id)
                    self._returned.discard(job_id)
        finally:
            self._ending = None

    async def _end_all(self, target: str) -> None:
        workflow_hash, tenant = whose_target(target)
        async for page in record_pages(self._context.store.records, tenant, Phase.QUEUED, _PAGE):
            for job in page:
                if job.workflow_hash == workflow_hash:
                    await self._end(job.job_id)

    async def _end(self, job_id: JobId) -> None:
        """Repeats until the write is based on what was read."""
        while (dispatch := await self._context.store.load(job_id)) is not None:
            is_refused = dispatch.block_targets[1] in self._context.fleet.refused
            if dispatch.phase is not Phase.QUEUED or not is_refused:
                return
            if (
                await self._failures.end_job(dispatch, poison_workflows.failure_of_waiting(dispatch))
                is not None
            ):
                return
