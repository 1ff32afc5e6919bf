"""Waiting jobs looked at again: by the terms of their tenant when those have changed, and where nobody can run them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from comfyfleet.engine.context import Context
from comfyfleet.engine.rounds import Rounds
from comfyfleet.engine.verdicts import Verdicts
from comfyfleet.model.dispatch import AtRevision, Dispatch, Phase, Write
from comfyfleet.model.errors import Refusal
from comfyfleet.model.fact import FactKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import ClassKey, JobId
from comfyfleet.model.job import Job
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy.feasibility import misses, nearest_miss
from comfyfleet.policy.terms import check_kept, judged_again, under_new_terms
from comfyfleet.policy.unrunnable import fails_at, failure_of
from comfyfleet.policy.visibility import asker_of, name_for


class Judge:
    def __init__(self, context: Context, rounds: Rounds, verdicts: Verdicts) -> None:
        self._context = context
        self._rounds = rounds
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
            self._rounds.job_arrived(written.dispatch.class_key)
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
