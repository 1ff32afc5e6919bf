"""Whatever way a job comes into the queue, where it may run is what its tenant's terms say."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext

import msgspec
from tests.engine._rig import Rig, graph

from comfyfleet.model.dispatch import Dispatch, WriteResult
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.requirement import LocationNeed, Requirements
from comfyfleet.model.tenant import Tenant, TenantState

ACME = TenantId("acme")


class Terms:
    """A gate with one tenant, which lets everybody in that keeps to its terms."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant

    async def terms(self, tenant_id: TenantId, /) -> Tenant | None:
        return self.tenant if tenant_id == self.tenant.tenant_id else None

    def admit(self, _: Tenant, /) -> AbstractAsyncContextManager[None]:
        return nullcontext()


async def needs_of(rig: Rig, job_id: JobId) -> Requirements:
    dispatch = await rig.store.load(job_id)
    assert dispatch is not None
    return (await rig.store.table()).classes[dispatch.class_key].requirements


async def test_a_round_that_was_taken_before_is_brought_in_under_the_terms() -> None:
    tenant = Tenant(ACME, "first", 1.0, isolation="strict", location=LocationNeed("eu", ("gdpr",)))
    async with Rig() as rig:
        taken = await rig.submit(tenant=ACME)
        rig.engine.set_admission_control(Terms(tenant))
        placed = await rig.submit(tenant=ACME)
        known = await rig.engine.get(taken)
        dispatch = Dispatch(
            JobId("brought"), known.dispatch.class_key, known.dispatch.workflow_hash, 0, tenant=ACME
        )
        job = Job(dispatch.job_id, ACME, dispatch.workflow_hash, 0.0, Submission(graph(), tenant=ACME))

        async def write(dispatch: Dispatch) -> WriteResult | None:
            return await rig.store.enqueue(dispatch, job, (FactDraft(FactKind.QUEUED),))

        # Suspended since then, perhaps: nothing new is taken, and this is not new.
        rig.engine.set_admission_control(Terms(msgspec.structs.replace(tenant, state=TenantState.SUSPENDED)))
        await rig.engine.admit(job, dispatch, write)
        needs = await needs_of(rig, JobId("brought"))
        assert (needs.isolation, needs.location, needs.needs_hub) == ("strict", tenant.location, True)
        assert needs == await needs_of(rig, placed) != await needs_of(rig, taken)


async def test_what_is_kept_of_a_job_is_what_was_asked_for() -> None:
    async with Rig() as rig:
        rig.engine.set_admission_control(Terms(Tenant(ACME, "first", 1.0, isolation="strict", tier=7)))
        job_id = await rig.submit(tenant=ACME, priority=1)
        view = await rig.engine.get(job_id)
        assert (view.job.payload.tier, view.job.payload.requirements) == (0, Requirements())
        assert view.dispatch.priority == 8
        other = await rig.submit(tenant=TenantId("other"), priority=1)
        assert (await rig.engine.get(other)).dispatch.priority == 1
