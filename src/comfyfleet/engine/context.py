"""What the parts of one engine share: ports, rules, admission control, workflow statistics, publication of facts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from comfyfleet.engine.estimates import TimeEstimates
from comfyfleet.engine.fleet import Fleet
from comfyfleet.engine.outlook import FleetOutlook
from comfyfleet.engine.payload_reader import PayloadReader
from comfyfleet.engine.system import StoreClock
from comfyfleet.model.block import Block
from comfyfleet.model.dispatch import Dispatch, LaneKey, LeaseOffer, Phase, Write, WriteResult
from comfyfleet.model.errors import Fault
from comfyfleet.model.fact import FleetEvent
from comfyfleet.model.ids import JobId, LeaseToken, PollId, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Submission
from comfyfleet.model.payload import PayloadFormat
from comfyfleet.model.tenant import Tenant
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta
from comfyfleet.policy.failover import FailoverStrategy
from comfyfleet.policy.fair_share import charge_s
from comfyfleet.policy.poison_workflows import is_refusing
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.scheduling import missing
from comfyfleet.policy.workflow_stats import expected_s
from comfyfleet.ports import Bus, Clock, RandomSource, Store, Timer

_LOG = logging.getLogger(__name__)


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """For work after a published write: logs a failure and goes on. `what` completes "could not ..."."""
    try:
        yield
    except Fault as fault:
        _LOG.warning("could not %s: %s", what, fault)
    except Exception:
        _LOG.exception("could not %s", what)


async def stop(*pending: Timer | asyncio.Task[Any] | None) -> None:
    """Cancels timers and tasks, and waits until the tasks have ended."""
    for each in pending:
        if each is not None:
            each.cancel()
    tasks = [each for each in pending if isinstance(each, asyncio.Task)]
    await asyncio.gather(*tasks, return_exceptions=True)


_MAX_WORKFLOW_STATS = 10_000
_LEARN_AGAIN_S = 10.0


async def _not_wired(_: Dispatch) -> None:
    raise AssertionError("an engine wires its parts before it serves")


async def ignore(*_: object) -> None:
    """The default of hooks that nobody has set."""


async def _suspend_nobody(_: TenantId) -> bool:
    return False


class AdmissionControl(Protocol):
    """Stores the terms of tenants and counts their jobs. Each new or manually retried job passes it; the engine applies
    the terms (`policy/terms.py`)."""

    async def terms(self, tenant_id: TenantId, /) -> Tenant | None:
        """None: the tenant has no terms."""

    def admit(self, tenant: Tenant, /) -> AbstractAsyncContextManager[None]:
        """Wraps the write of a job. Refuses when the tenant has too many open jobs or submits too fast."""


class OpenAdmission:
    """The default: no tenant has terms."""

    async def terms(self, _: TenantId, /) -> Tenant | None:
        return None

    def admit(self, _: Tenant, /) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class EngineContext:
    def __init__(
        self,
        store: Store,
        bus: Bus,
        clock: Clock,
        rng: RandomSource,
        rules: Rules,
        strategy: FailoverStrategy,
        formats: Mapping[str, PayloadFormat] | None = None,
    ) -> None:
        self.store = store
        self.bus = bus
        self.clock = StoreClock(clock, is_shared=store.is_shared)
        """The store's time. All written, published and compared times use it."""
        self.rng = rng
        self.rules = rules
        self.strategy = strategy
        self.payloads = PayloadReader(formats or {}, rules.max_nodes)
        """Of services other than ComfyUI."""
        self.fleet = Fleet(store, self.clock)
        self.reaches_tenants: bool = getattr(store, "reaches_tenants", False)
        """Whether the store forwards writes to tenant databases (`tenancy/ledger_store.py`)."""
        self.wake_by: Callable[[float | None], None] = lambda _: None
        """Set by the sweeper: it wakes at this time."""
        self.requeue_undelivered: Callable[[Dispatch], Awaitable[None]] = _not_wired
        """Set by the failure handler: requeues a job whose lease nobody took."""
        self.awaited_ended: Callable[[Dispatch], None] = lambda _: None
        """Set by the dependencies: a job that others await, or that waited itself, has ended."""
        self.refused_waits: Callable[[Dispatch], None] = lambda _: None
        """Set by the poison workflows. Called after a write that leaves a job waiting whose workflow is refused."""
        self.ended_after_death: Callable[[Dispatch], None] = lambda _: None
        """Set by the poison workflows: a job has ended after a server died of it."""
        self.on_write: Callable[[WriteResult], None] = lambda _: None
        """Set by `Engine.set_write_listener` (the hub counts metrics): this engine has written."""
        self.announce: Callable[[Submission, JobId, int], Awaitable[None]] = ignore
        """Set by the webhook outbox: runs before a round of a job is written, and may refuse it."""
        self.suspend: Callable[[TenantId], Awaitable[bool]] = _suspend_nobody
        """Set by the tenant services: suspends the tenant until an operator resumes it."""
        self.admission_control: AdmissionControl = OpenAdmission()
        """Set by the tenant services."""
        self.estimates = TimeEstimates(self.known_workflow_stats, self.stats, self.clock)
        self.outlook = FleetOutlook(store, self.clock, self.fleet, rules, self.estimates)
        self.others_changed: Callable[[], None] = lambda: None
        """Set by the matcher. Called when a busy worker changes: jobs that were left to it may go to idle slots."""
        self._workflow_stats: dict[WorkflowHash, WorkflowStats] = {}
        self._up_to_date: set[WorkflowHash] = set()
        self._learned_at = self.clock.monotonic()

    async def compare_clocks(self) -> None:
        self.clock.set_store_time(await self.store.now())

    async def write(self, write: Write) -> WriteResult | None:
        """Writes and publishes. None: the guard did not hold."""
        written = await self.store.write(write)
        if written is not None:
            self.publish(written)
        return written

    def publish(self, written: WriteResult) -> None:
        """Publishes the facts and sets the sweeper's timer. Call it directly after the write, before any step
        that can fail: nobody repeats a lost publication."""
        for fact in written.facts:
            self.bus.publish(fact)
        dispatch = written.dispatch
        if self.outlook.written(dispatch) is not None and dispatch.phase is not Phase.COMPLETED:
            self.others_changed()
        self.wake_by(dispatch.due_at)
        if (dispatch.is_awaited or dispatch.awaits_jobs) and dispatch.phase.is_final:
            self.awaited_ended(dispatch)
        refused = self.fleet.refused
        if refused and dispatch.phase is Phase.QUEUED and dispatch.block_targets[1] in refused:
            self.refused_waits(dispatch)
        if dispatch.server_deaths and dispatch.phase in (Phase.CANCELLED, Phase.FAILED):
            self.ended_after_death(dispatch)
        with best_effort(f"measure a write of job {dispatch.job_id}"):
            self.on_write(written)

    def publish_fleet_event(self, kind: str, worker_id: WorkerId, **data: object) -> None:
        self.bus.publish(FleetEvent(kind, self.clock.now(), worker_id, data))

    def blocked(self, block: Block, message: str = "") -> None:
        now = self.clock.now()
        if block.is_in_force(now):
            self.fleet.cache_block(block)
            self.wake_by(block.blocked_until)
            self.publish_fleet_event(
                "blocked",
                block.worker_id,
                target=block.target,
                **_whose(block),
                reason=block.reason.value,
                failures=block.failures,
                blocked_until=block.blocked_until,
                message=message,
            )

    async def unblocked(self, block: Block, why: str) -> None:
        others = await self.store.blocks(block.worker_id)
        if all(other.blocked_until is None for other in others):
            self.fleet.with_blocks.discard(block.worker_id)
        if is_refusing(block):
            self.fleet.refused -= {block.target}
            self.publish_fleet_event("workflow_allowed", block.worker_id, **_whose(block), why=why)
        elif block.blocked_until is not None:
            self.publish_fleet_event(
                "unblocked",
                block.worker_id,
                target=block.target,
                **_whose(block),
                reason=block.reason.value,
                why=why,
            )

    def offer(self, worker: WorkerRecord, poll_id: PollId, lane: LaneKey) -> LeaseOffer:
        rules, kind = self.rules, self.outlook.kind_of(worker)
        expected = expected_s(self.known_workflow_stats(lane.workflow_hash), kind.worker_class)
        models = self.outlook.models_of(lane.class_key)
        load_s = self.estimates.load_s(missing(models, kind.loaded), kind.worker_class) if models else 0.0
        return LeaseOffer(
            worker.worker_id,
            worker.profile,
            poll_id,
            LeaseToken(self.rng.token()),
            rules.lease_ttl_s,
            rules.acknowledge_s,
            charge_s(None if expected is None else expected + load_s, rules),
            self.estimates.run_s(lane.workflow_hash, kind.worker_class),
            load_s,
        )

    # workflow statistics

    async def stats(self, workflow_hash: WorkflowHash) -> WorkflowStats | None:
        known = self._workflow_stats.get(workflow_hash)
        if self.store.is_shared and self.clock.monotonic() >= self._learned_at + _LEARN_AGAIN_S:
            # Other engines add runs too. The old figures rank well enough meanwhile.
            self._up_to_date.clear()
            self._learned_at = self.clock.monotonic()
        if known is None or (self.store.is_shared and workflow_hash not in self._up_to_date):
            known = await self.store.get_workflow_stats(workflow_hash)
            if known is not None:
                self._remember(known)
        return known

    def known_workflow_stats(self, workflow_hash: WorkflowHash) -> WorkflowStats | None:
        """From this engine's memory; good enough for ranking."""
        return self._workflow_stats.get(workflow_hash)

    async def add_workflow_stats(self, delta: WorkflowStatsDelta) -> WorkflowStats:
        """Adds the delta in the store and returns the totals of all engines."""
        stats = await self.store.add_workflow_stats(delta)
        self._remember(stats)
        return stats

    def _remember(self, stats: WorkflowStats) -> None:
        self._workflow_stats.pop(stats.workflow_hash, None)
        self._workflow_stats[stats.workflow_hash] = stats
        self._up_to_date.add(stats.workflow_hash)
        self.estimates.stats_changed(stats.workflow_hash)
        if len(self._workflow_stats) > _MAX_WORKFLOW_STATS:
            oldest = next(iter(self._workflow_stats))
            del self._workflow_stats[oldest]
            self._up_to_date.discard(oldest)


def _whose(block: Block) -> dict[str, object]:
    """Names the blocked workflow and tenant. A block for one job needs neither."""
    if block.names_job:
        return {}
    return {"workflow_hash": block.workflow_hash, "tenant": block.tenant}
