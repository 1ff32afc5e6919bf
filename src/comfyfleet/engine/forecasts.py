"""When jobs are expected to start and to end, for people: the forecast of a moment, kept for a second.

Policy plays the queue forward (`policy/forecast.py`); this module gathers what it needs from the store, the fleet and
the learned figures. A forecast is shared by all who ask within a second, so a list of jobs costs one.

A quote is what is expected of a job before it is submitted: the submitter says where it would wait, the forecast when
it would start, and policy what the tenant's price makes of it. Nothing is written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from comfyfleet.engine.context import EngineContext, best_effort
from comfyfleet.engine.submitter import Preview, Submitter
from comfyfleet.model.block import tenant_target
from comfyfleet.model.dispatch import Dispatch, LaneKey, Phase, Readiness
from comfyfleet.model.estimate import CreditRange, JobEstimate, Quote, Range
from comfyfleet.model.ids import JobId, ProfileKey, TenantId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.demand import ModelSet, RequestKind
from comfyfleet.policy.feasibility import is_feasible, normal_model
from comfyfleet.policy.forecast import (
    MAX_LANES,
    ExpectedRun,
    LaneAhead,
    Place,
    QueueForecast,
    Situation,
    SlotAhead,
    forecast,
)
from comfyfleet.policy.quotes import KnownRun, expected_credits, known_run
from comfyfleet.policy.scheduling import left_s
from comfyfleet.ports import LaneBacklog

_FRESH_S = 1.0
"""How old a forecast may be."""
_NEWER_S = 0.1
"""A forecast is not made more often, also for a job that came after it."""
_REST = 20
"""After a forecast, no other is made for so many times as long as it took."""
_MAX_READ = 256


class Expected(NamedTuple):
    """A job that is not in the queue."""

    cls: RequirementClass
    lane: LaneKey


class _Gathered(NamedTuple):
    """What is known at one moment, by lane."""

    situation: Situation
    numbers: dict[LaneKey, int]


class _Made(NamedTuple):
    at: float
    took_s: float
    gathered: _Gathered | None
    """None: the queue is paused."""
    forecast: QueueForecast | None

    def is_good(self, at: float, max_age_s: float) -> bool:
        return self.at <= at < self.at + max(max_age_s, _REST * self.took_s)


class Forecasts:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._made: _Made | None = None
        self._making = asyncio.Lock()

    async def of(self, dispatches: Iterable[Dispatch]) -> dict[JobId, JobEstimate]:
        """The estimates of open jobs. Jobs that have ended, are paused or wait for others have none."""
        found: dict[JobId, JobEstimate] = {}
        waiting: list[Dispatch] = []
        for dispatch in dispatches:
            if dispatch.phase is Phase.LEASED:
                found[dispatch.job_id] = self._of_running(dispatch)
            elif dispatch.phase is Phase.QUEUED and dispatch.standing is not Readiness.PAUSED:
                waiting.append(dispatch)
        if waiting:
            # A list of jobs must not fail because of its estimates.
            with best_effort("estimate when waiting jobs start"):
                await self._add_waiting(waiting, found)
        return found

    async def run_of(self, expected: Expected) -> ExpectedRun | None:
        """The run of a job that would be submitted now. None: nobody can run it, or the queue is paused."""
        made = await self._current(_FRESH_S)
        if made.gathered is None:
            return None
        await self._context.estimates.read([self._kind(expected.cls, expected.lane)])
        situation, number = self._with(made.gathered, expected)
        return forecast(situation, self._context.estimates).run_at(
            number, situation.lanes[number].waiting - 1
        )

    def estimate(self, lane: LaneKey, run: ExpectedRun) -> JobEstimate:
        now = self._context.clock.now()
        known = known_run(self._context.known_workflow_stats(lane.workflow_hash), run.worker_class, run.run_s)
        # The forecast may be a second old, and the job still waits.
        starts_at = max(run.starts_at, now)
        return JobEstimate(
            starts_at, starts_at + run.load_s + run.run_s, known.is_rough or run.is_extrapolated
        )

    def _of_running(self, dispatch: Dispatch) -> JobEstimate:
        context, lease = self._context, dispatch.lease
        assert lease is not None, "a leased job has a lease"
        now, worker = context.clock.now(), context.fleet.workers.get(lease.worker_id)
        worker_class = "" if worker is None else worker.capabilities.worker_class
        run_s = lease.run_s or context.estimates.run_s(dispatch.workflow_hash, worker_class)
        known = known_run(context.known_workflow_stats(dispatch.workflow_hash), worker_class, run_s)
        ends_at = lease.leased_at + run_s + lease.load_s
        is_overdue = ends_at < now
        if is_overdue:
            ends_at = now + left_s(ends_at, now)
        return JobEstimate(lease.leased_at, ends_at, known.is_rough or is_overdue)

    async def _add_waiting(self, waiting: Sequence[Dispatch], found: dict[JobId, JobEstimate]) -> None:
        made = await self._current(_FRESH_S)
        if any(each.stands_in_lane and not _covers(made, each) for each in waiting):
            # A job that came after the forecast.
            made = await self._current(_NEWER_S)
        if made.gathered is None or made.forecast is None:
            return
        for each in waiting:
            number = made.gathered.numbers.get(each.lane)
            if each.awaits_jobs or number is None:
                continue
            lane = made.gathered.situation.lanes[number]
            index = lane.index_of(each.sequence) if each.stands_in_lane else float(lane.waiting)
            run = made.forecast.run_at(number, index)
            if run is None:
                continue
            estimate = self.estimate(each.lane, run)
            if not each.stands_in_lane:
                # Who will be there by then is not known.
                starts_at = max(estimate.starts_at, each.not_before or 0.0)
                estimate = JobEstimate(starts_at, starts_at + run.load_s + run.run_s, True)
            found[each.job_id] = estimate

    # the forecast of the moment

    async def _current(self, max_age_s: float) -> _Made:
        """Made once for all who ask meanwhile."""
        clock = self._context.clock
        async with self._making:
            made = self._made
            if made is None or not made.is_good(clock.monotonic(), max_age_s):
                gathered, began_at, played = await self._gather(), clock.monotonic(), None
                if gathered is not None:
                    played = forecast(gathered.situation, self._context.estimates)
                made = self._made = _Made(began_at, clock.monotonic() - began_at, gathered, played)
            return made

    async def _gather(self) -> _Gathered | None:
        context = self._context
        store, fleet = context.store, context.fleet
        if await store.is_queue_paused():
            return None
        if store.is_shared:
            await fleet.refresh(_FRESH_S)
        backlogs = await store.waiting_lanes(_MAX_READ)
        if any(each.lane.class_key not in fleet.classes for each in backlogs):
            await fleet.sync()
        backlogs = [each for each in backlogs if each.lane.class_key in fleet.classes]
        backlogs.sort(key=lambda each: (-each.lane.priority, each.oldest.sequence))
        await context.outlook.refresh()
        await context.estimates.read(
            self._kind(fleet.classes[each.lane.class_key], each.lane) for each in backlogs[:MAX_LANES]
        )
        held, times = await self._tenants({each.lane.tenant for each in backlogs})
        blocked = await self._blocked()
        lanes = [self._lane(each) for each in backlogs]
        numbers = {each.lane: number for number, each in enumerate(backlogs)}
        open_lanes = [None if each.lane.tenant in held else each.lane for each in backlogs]
        situation = Situation(
            context.clock.now(),
            lanes,
            self._slots(open_lanes, blocked),
            context.rules.patience,
            context.rules.quantum_s,
            times,
            context.rules.round_s,
        )
        return _Gathered(situation, numbers)

    async def _tenants(
        self, tenants: set[TenantId]
    ) -> tuple[set[TenantId], dict[TenantId, tuple[float, float]]]:
        """Those that are held, and the virtual times and weights if tenants have terms."""
        fair_share, now = self._context.store.fair_share, self._context.clock.now()
        terms = {each.tenant: each for each in await fair_share.terms()}
        if not terms:
            return set(), {}
        held = {tenant for tenant in tenants if tenant in terms and terms[tenant].is_held(now)}
        shares = await asyncio.gather(*(fair_share.get(tenant) for tenant in tenants - held))
        return held, {each.tenant: (each.virtual_time, each.weight) for each in shares}

    async def _blocked(self) -> dict[WorkerId, set[str]]:
        """The block targets of each worker."""
        context, found = self._context, dict[WorkerId, set[str]]()
        if context.fleet.with_blocks or context.fleet.refused:
            now = context.clock.now()
            for block in await context.store.blocks():
                if block.is_in_force(now):
                    found.setdefault(block.worker_id, set()).add(block.target)
        return found

    def _kind(self, cls: RequirementClass, lane: LaneKey) -> RequestKind:
        return RequestKind(_models_of(cls), lane.workflow_hash)

    def _lane(self, backlog: LaneBacklog) -> LaneAhead:
        context, lane = self._context, backlog.lane
        models = context.outlook.models_of(lane.class_key)
        pace_s, since = context.outlook.pace(), context.outlook.moving_since
        oldest, newest = (
            Place(
                each.sequence,
                max(each.queued_at, since) + (each.place * pace_s if each.place else 0.0),
            )
            for each in (backlog.oldest, backlog.newest)
        )
        return LaneAhead(
            lane.priority,
            lane.tenant,
            models,
            lane.workflow_hash,
            backlog.waiting,
            oldest,
            newest,
            context.fleet.selectivity(lane.class_key),
            context.outlook.slowest_load_s(lane.class_key),
        )

    def _slots(self, lanes: Sequence[LaneKey | None], blocked: dict[WorkerId, set[str]]) -> list[SlotAhead]:
        context = self._context
        fleet, outlook, now = context.fleet, context.outlook, context.clock.now()
        for_all = blocked.get(WorkerId("*"), set())
        by_profile: dict[ProfileKey, frozenset[int]] = {}
        found: list[SlotAhead] = []
        for worker in list(fleet.workers.values()):
            if not fleet.takes_work(worker, now):
                continue
            takes = by_profile.get(worker.profile)
            if takes is None:
                takes = by_profile[worker.profile] = frozenset(
                    number
                    for number, lane in enumerate(lanes)
                    if lane is not None
                    and worker.profile in fleet.profiles_for(lane.class_key)
                    and not _is_blocked(lane, for_all)
                )
            if own := blocked.get(worker.worker_id):
                takes = frozenset(
                    number
                    for number in takes
                    if (lane := lanes[number]) is not None and not _is_blocked(lane, own)
                )
            kind, runs = outlook.kind_of(worker), list(outlook.runs_of(worker.worker_id))
            free_at = [now + left_s(run.ends_at, now) for run in runs]
            free_at += [now] * (worker.slots - len(free_at))
            found += [
                SlotAhead(worker.worker_id, kind.worker_class, kind.loaded, takes, at) for at in free_at
            ]
        # Of idle slots, those of fast workers start first.
        run_s = context.estimates.run_s
        some = next((lane.workflow_hash for lane in lanes if lane is not None), None)
        if some is not None and len({slot.worker_class for slot in found}) > 1:
            found.sort(key=lambda slot: run_s(some, slot.worker_class))
        return found

    def _with(self, gathered: _Gathered, expected: Expected) -> tuple[Situation, int]:
        """The situation with one more job, and the number of its lane."""
        context, situation = self._context, gathered.situation
        now, lanes = context.clock.now(), list(situation.lanes)
        newest = max((lane.newest.sequence for lane in lanes), default=0) + 1
        ahead = sum(lane.waiting for lane in lanes if lane.priority >= expected.lane.priority)
        pace_s = context.outlook.pace()
        place = Place(newest, now + (ahead + 1) * pace_s if pace_s < inf else inf)
        number = gathered.numbers.get(expected.lane)
        if number is not None:
            lane = lanes[number]
            lanes[number] = lane._replace(waiting=lane.waiting + 1, newest=place)
            return situation._replace(lanes=lanes), number
        models = _models_of(expected.cls)
        able = self._able(expected, now)
        classes = {worker.capabilities.worker_class for worker in able.values()}
        number = len(lanes)
        lanes.append(
            LaneAhead(
                expected.lane.priority,
                expected.lane.tenant,
                models,
                expected.lane.workflow_hash,
                1,
                place,
                place,
                len(able),
                max((context.estimates.load_s(models, each) for each in classes), default=0.0),
            )
        )
        also: dict[frozenset[int], frozenset[int]] = {}
        slots = [
            slot._replace(takes=also.setdefault(slot.takes, slot.takes | {number}))
            if slot.worker_id in able
            else slot
            for slot in situation.slots
        ]
        return situation._replace(lanes=lanes, slots=slots), number

    def _able(self, expected: Expected, now: float) -> dict[WorkerId, WorkerRecord]:
        fleet = self._context.fleet
        return {
            worker.worker_id: worker
            for worker in fleet.workers.values()
            if fleet.takes_work(worker, now)
            and is_feasible(expected.cls, worker.worker_id, worker.capabilities)
        }


def _covers(made: _Made, dispatch: Dispatch) -> bool:
    """Whether the forecast was made after the job came."""
    if made.gathered is None:
        return True
    number = made.gathered.numbers.get(dispatch.lane)
    return number is not None and dispatch.sequence <= made.gathered.situation.lanes[number].newest.sequence


def _is_blocked(lane: LaneKey, targets: set[str]) -> bool:
    return lane.workflow_hash in targets or tenant_target(lane.workflow_hash, lane.tenant) in targets


def _models_of(cls: RequirementClass) -> ModelSet:
    return frozenset(map(normal_model, cls.requirements.models))


class Quotes:
    def __init__(self, context: EngineContext, submitter: Submitter, forecasts: Forecasts) -> None:
        self._context = context
        self._submitter = submitter
        self._forecasts = forecasts

    async def quote(self, submission: Submission, *, is_own: bool = False, is_large: bool = False) -> Quote:
        """`is_own` and `is_large` as for `submit`. Refuses what `submit` refuses in the submission itself."""
        preview = await self._submitter.preview(submission, is_own=is_own, is_large=is_large)
        lane = preview.dispatch.lane
        run = await self._forecasts.run_of(Expected(preview.cls, lane))
        worker_class = "" if run is None else run.worker_class
        stats = await self._context.stats(lane.workflow_hash)
        known = known_run(
            stats, worker_class, self._context.estimates.run_s(lane.workflow_hash, worker_class)
        )
        load_s = 0.0 if run is None else run.load_s
        return Quote(
            lane.workflow_hash,
            known.seconds,
            load_s,
            known.runs,
            None if run is None else self._estimate(preview, run),
            _credits(preview, known, load_s),
            preview.unworkable,
        )

    def _estimate(self, preview: Preview, run: ExpectedRun) -> JobEstimate:
        estimate, dispatch = self._forecasts.estimate(preview.dispatch.lane, run), preview.dispatch
        later_s = max(0.0, (dispatch.not_before or 0.0) - estimate.starts_at)
        if not later_s:
            return estimate
        # Who will wait by then is not known.
        return JobEstimate(estimate.starts_at + later_s, estimate.ends_at + later_s, True)


def _credits(preview: Preview, known: KnownRun, load_s: float) -> CreditRange | None:
    tenant = preview.tenant
    if tenant is None or tenant.price is None:
        return None
    seconds = known.seconds
    # A load counts as use of the worker; whether there is one depends on the worker that runs the job.
    used = Range(seconds.expected + load_s, seconds.low, seconds.high + load_s)
    return expected_credits(tenant.price, preview.cls.requirements.service, used)
