"""Waiting jobs looked at again: by the terms of their tenant when those have changed, and where nobody can run them.

Jobs that wait though no worker which is here may take them: asked for in a list, counted for whoever looks on.

What waiting jobs need and a worker lacks, told to its agent: it may be there a moment later.

The agent is told with each heartbeat, and looks for it while it is told. A class that nobody can take stays known for a
while after its last job, so agents may look for something in vain while other jobs wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from comfyfleet.engine.commands import CommandQueue
from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.failure_handler import FailureHandler
from comfyfleet.engine.matcher import Matcher
from comfyfleet.model.dispatch import AtRevision, Dispatch, Phase, Write
from comfyfleet.model.errors import Refusal
from comfyfleet.model.fact import FactKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import ClassKey, JobId, ProfileKey, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy.feasibility import misses, names_missing, nearest_miss
from comfyfleet.policy.tenants import asker_of, name_for
from comfyfleet.policy.terms import check_kept, judged_again, under_new_terms
from comfyfleet.policy.timers import fails_at, failure_of
from comfyfleet.ports import Timer


class WaitingJobReview:
    def __init__(self, context: EngineContext, matcher: Matcher, verdicts: FailureHandler) -> None:
        self._context = context
        self._matcher = matcher
        self._verdicts = verdicts

    # terms

    async def judge_again(self, job_id: JobId, tenant: Tenant) -> None:
        """A waiting job keeps to the terms as they are now, or fails with what it does not keep to. What runs goes on;
        should it come back, it waits with the priority that the terms allow now."""
        while True:
            dispatch = await self._context.store.load(job_id)
            if dispatch is None or dispatch.phase.is_final:
                return
            job = await self._context.store.records.get(job_id)
            if job is None or job.unreadable is not None or await self._judged(dispatch, job, tenant):
                return

    async def _judged(self, dispatch: Dispatch, job: Job, tenant: Tenant) -> bool:
        """False: somebody has written it meanwhile."""
        context = self._context
        if dispatch.phase is Phase.QUEUED:
            try:
                check_kept(job.payload, tenant)
            except Refusal as refusal:
                why = f"the terms of the tenant {tenant.tenant_id!r} have changed since it was taken: {refusal.message}"
                failure = Failure(FailureKind.INVALID_WORKFLOW, why)
                return await self._verdicts.ended(dispatch, failure) is not None
        now = await context.store.now()
        change = under_new_terms(dispatch, job, tenant, now, context.rules)
        if dispatch.phase is Phase.QUEUED:
            for name in ("class_key", "relaxed_class"):
                cls = await self._class(getattr(dispatch, name))
                if cls is not None and (again := judged_again(cls, job.payload, tenant)) != cls:
                    key = await context.fleet.ensure_class(again)
                    change = msgspec.structs.replace(change, **{name: key})
        if change.apply(dispatch) == msgspec.structs.replace(dispatch, revision=dispatch.revision + 1):
            return True
        written = await context.store.write(Write(dispatch.job_id, AtRevision(dispatch.revision), change))
        if written is None:
            return False
        context.publish(written)
        if written.dispatch.stands_in_lane:
            self._matcher.job_arrived(written.dispatch.class_key)
        return True

    async def _class(self, key: ClassKey | None) -> RequirementClass | None:
        if key is not None and key not in self._context.fleet.classes:
            # Of a job that another engine has put there.
            await self._context.fleet.sync()
        return None if key is None else self._context.fleet.classes.get(key)

    # jobs that nobody can run

    async def unrunnable_classes(self) -> Mapping[ClassKey, RequirementClass]:
        """Those that no worker may take which is here or is known to come back."""
        fleet = self._context.fleet
        if self._context.store.is_shared:
            await fleet.sync()
        table = await self._context.store.table()
        profiles = {worker.profile for worker in fleet.workers.values() if not fleet.is_held_back(worker)}
        return {
            key: cls
            for key, cls in table.classes.items()
            # Of a class that is new to this engine nothing is known yet.
            if key in fleet.classes and profiles.isdisjoint(fleet.profiles_for(key))
        }

    async def fail_unrunnable(self, dispatch: Dispatch, since: float, after_s: float) -> bool:
        """If it has waited for so long since nobody can run its class. False: it waits on."""
        now = await self._context.store.now()
        at = fails_at(dispatch, since, after_s)
        if at is None or at > now:
            return False
        if dispatch.round > 1:
            # A retry by hand waits anew; the place in line is that of the first round.
            facts = await self._context.store.facts(dispatch.job_id)
            begun = [
                fact.at for fact in facts if fact.kind is FactKind.QUEUED and fact.round == dispatch.round
            ]
            at = fails_at(dispatch, max([since, *begun]), after_s)
            if at is None or at > now:
                return False
        failure = failure_of(after_s, self._lacking(dispatch))
        return await self._verdicts.ended(dispatch, failure) is not None

    def _lacking(self, dispatch: Dispatch) -> str | None:
        """What the nearest of all known workers lacks."""
        fleet, cls = self._context.fleet, self._context.fleet.classes.get(dispatch.class_key)
        if cls is None:
            return None
        lacking = {
            worker.worker_id: misses(cls, worker.worker_id, worker.capabilities)
            for worker in fleet.workers.values()
        }
        nearest = nearest_miss(lacking, self._context.rules.weights)
        if nearest is None:
            return None
        access = fleet.workers[nearest].capabilities.tenant_access
        name = name_for(nearest, access, asker_of(dispatch.tenant))
        return f"{name} " + "; ".join(miss.reason for miss in lacking[nearest])


MAX_COUNTED = 2_000
"""Waiting jobs that are looked at, the oldest first: each is read whole."""
_PAGE = 100
_REMEMBER_S = 30.0


class UnrunnableJobs:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._counted: tuple[int, float] | None = None
        """How many, and since when that is known."""

    def is_unrunnable(self, dispatch: Dispatch) -> bool:
        """Nobody of the kind it needs is here. Blocks end by themselves and do not count."""
        if dispatch.phase is not Phase.QUEUED or dispatch.is_held:
            return False
        fleet = self._context.fleet
        keys = [key for key in (dispatch.class_key, dispatch.relaxed_class) if key is not None]
        # Of a class that is new to this engine nothing is known yet.
        return all(key in fleet.classes and not fleet.selectivity(key) for key in keys)

    async def among(self, jobs: Sequence[Job]) -> set[JobId]:
        context = self._context
        if context.store.is_shared:
            await context.fleet.freshen(context.rules.round_s)
        found = await context.store.load_many([job.job_id for job in jobs])
        return {each.job_id for each in found if each is not None and self.is_unrunnable(each)}

    async def count(self) -> int:
        """Of the oldest jobs that wait, at most `MAX_COUNTED`; what was counted is good for a while."""
        now = self._context.clock.monotonic()
        if self._counted is None or now >= self._counted[1] + _REMEMBER_S:
            self._counted = (await self._count(), now)
        return self._counted[0]

    async def _count(self) -> int:
        return len([job_id async for job_id in self.oldest()])

    async def oldest(self) -> AsyncIterator[JobId]:
        """Those among the oldest jobs that wait, at most `MAX_COUNTED`."""
        fleet = self._context.fleet
        if all(fleet.selectivity(key) for key in fleet.classes):
            return
        after = None
        for _ in range(MAX_COUNTED // _PAGE):
            page = await self._context.store.records.listing(
                tenant=None, phase=Phase.QUEUED, limit=_PAGE, after=after
            )
            for job_id in await self.among(page):
                yield job_id
            if len(page) < _PAGE:
                return
            after = page[-1].job_id


_FRESH_S = 2.0
_MAX_CLASSES = 100
_MAX_NAMES = 50
_MAX_NAME = 300
"""No file and no class is called anything longer; what a caller writes into a graph may be."""
_MAX_CALLED = 100
"""Others hear of it with their next heartbeat."""
_CALL_EVERY_S = 2.0


class MissingRequirements:
    def __init__(self, context: EngineContext, commands: CommandQueue) -> None:
        self._context = context
        self._commands = commands
        self._read_at = float("-inf")
        self._classes: list[RequirementClass] = []
        """Those that nobody who is there can take, where jobs wait."""
        self._known: dict[ProfileKey, tuple[str, ...]] = {}
        """For them: what workers of a profile lack."""
        self._called_for: dict[ClassKey, None] = {}
        self._to_call: dict[WorkerId, None] = {}
        self._called_at = float("-inf")
        self._timer: Timer | None = None

    async def of(self, worker_id: WorkerId) -> tuple[str, ...]:
        worker = self._context.fleet.workers.get(worker_id)
        if worker is None or worker.is_offline:
            return ()
        await self._read()
        if not self._classes:
            return ()
        known = self._known.get(worker.profile)
        if known is None:
            names = (
                name
                for cls in self._classes
                for name in names_missing(cls, worker_id, worker.capabilities)
                if len(name) <= _MAX_NAME
            )
            known = self._known[worker.profile] = tuple(dict.fromkeys(names))[:_MAX_NAMES]
        return known

    def call(self, cls: RequirementClass) -> None:
        """A job of this class has come and nobody can take it: those that lack a name or two are to ask at once, or
        soon, where others were called a moment ago."""
        self._read_at = float("-inf")
        fleet = self._context.fleet
        key = fleet.key_of(cls)
        if key in self._called_for:
            return
        if len(self._called_for) >= _MAX_CLASSES:
            self._called_for.clear()
        self._called_for[key] = None
        for worker in fleet.workers.values():
            if len(self._to_call) == _MAX_CALLED:
                break
            if not worker.is_offline and names_missing(cls, worker.worker_id, worker.capabilities):
                self._to_call[worker.worker_id] = None
        if self._timer is None and self._to_call:
            clock = self._context.clock
            wait_s = self._called_at + _CALL_EVERY_S - clock.monotonic()
            if wait_s <= 0:
                self._call_now()
            else:
                self._timer = clock.call_at(clock.now() + wait_s, self._call_now)

    def _call_now(self) -> None:
        """Whoever is called sends a heartbeat and looks at its servers: not for each of many jobs. When the engine has
        closed meanwhile, nobody listens any more."""
        self._timer, self._called_at = None, self._context.clock.monotonic()
        called, self._to_call = self._to_call, {}
        for worker_id in called:
            self._commands.call(worker_id)

    async def _read(self) -> None:
        now = self._context.clock.monotonic()
        if now < self._read_at + _FRESH_S:
            return
        self._read_at = now
        fleet = self._context.fleet
        there = {
            worker.profile
            for worker in fleet.workers.values()
            if not worker.is_offline and not fleet.is_held_back(worker)
        }
        # The newest are the last.
        found = [cls for key, cls in fleet.classes.items() if fleet.profiles_for(key).isdisjoint(there)]
        is_waiting = bool(found) and (await self._context.store.counts()).waiting > 0
        self._classes = found[-_MAX_CLASSES:] if is_waiting else []
        self._known = {}
