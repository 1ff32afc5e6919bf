"""Terms of a tenant that change are kept to by the jobs that wait already."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine._rig import graph
from tests.engine.test_several_engines import SharedStore
from tests.tenancy._tenant_services import ACME, BORG, Fleet, one_fleet

from comfyfleet.engine.context import OpenAdmission
from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.ledger import Account
from comfyfleet.model.requirement import LocationNeed
from comfyfleet.model.tenant import Tenant, TenantCaps
from comfyfleet.policy import tenants as policy
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.claims import claim
from comfyfleet.tenancy.terms import TermsReview
from comfyfleet.testing.time import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fleet(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        await fleet.tenant(granted=100, allows_direct=True)
        yield fleet


async def changed(fleet: Fleet, **terms: Any) -> None:
    """As a hub does it: the change is written, and whoever sees to the tenant finds that it is due."""
    tenant_services, clock = fleet.tenant_services, fleet.clock
    assert isinstance(clock, ManualClock)
    tenant = await tenant_services.tenants.change(ACME, lambda found: policy.changed(found, terms))
    assert tenant.judged_number < tenant.terms_number
    mine = await claim(fleet.central.documents, clock, ACME)
    assert mine is not None
    judge = TermsReview(
        fleet.central, tenant_services.tenants, fleet.engine.waiting_job_review.reapply_terms, clock.advance
    )
    tenant = await judge.review(tenant, mine)
    assert tenant.judged_number == tenant.terms_number
    await mine.release()


async def now(fleet: Fleet, job_id: JobId) -> Dispatch:
    found = await fleet.central.load(job_id)
    assert found is not None
    return found


async def test_a_ceiling_for_priority_counts_for_jobs_that_wait(fleet: Fleet) -> None:
    high = await fleet.submit(priority=50)
    low = await fleet.submit(priority=3)
    others = await fleet.submit(BORG, priority=50)
    await changed(fleet, caps=TenantCaps(max_priority=10))
    assert [(await now(fleet, each)).priority for each in (high, low, others)] == [10, 3, 50]
    await changed(fleet, caps=TenantCaps())
    assert (await now(fleet, high)).priority == 50, "and is gone when it is taken away"


async def test_a_tier_counts_for_jobs_that_wait_and_leaves_what_was_set_by_hand(fleet: Fleet) -> None:
    job_id = await fleet.submit(priority=5)
    await fleet.engine.set_priority(job_id, 7)
    await changed(fleet, tier=100)
    assert (await now(fleet, job_id)).priority == 107


async def test_a_job_that_its_tenant_may_not_run_any_more_fails_and_is_refunded(fleet: Fleet) -> None:
    job_id = await fleet.submit()
    assert await fleet.account() == Account(ACME, 100, held=10)
    await changed(fleet, denied_node_classes=("KSampler",))
    job = (await fleet.engine.get(job_id)).job
    assert job.phase is Phase.FAILED and job.failure is not None
    assert job.failure.kind is FailureKind.INVALID_WORKFLOW
    assert "terms" in job.failure.message and "KSampler" in job.failure.message
    assert await fleet.account() == Account(ACME, 100)
    await fleet.check()


async def test_a_region_that_is_required_from_now_on_is_required_of_jobs_that_wait(fleet: Fleet) -> None:
    job_id = await fleet.submit()
    await changed(fleet, location=LocationNeed("eu"))
    await fleet.worker()
    assert await fleet.poll() is None, "this worker is in no region"
    await changed(fleet, location=LocationNeed())
    assert (await fleet.take()).job_id == job_id


async def test_what_runs_goes_on_and_comes_back_with_the_priority_of_the_new_terms(fleet: Fleet) -> None:
    await fleet.worker()
    job_id = await fleet.submit(priority=50)
    leased = await fleet.take()
    await changed(fleet, caps=TenantCaps(max_priority=10), denied_node_classes=("KSampler",))
    await fleet.fail(leased, FailureKind.TRANSIENT)
    assert (await now(fleet, job_id)).priority == 10


async def test_what_is_sent_late_comes_with_the_priority_of_the_terms_as_they_are_then(fleet: Fleet) -> None:
    job_id = await fleet.submit(priority=50)
    home = await fleet.tenant_services.directory.locate(ACME)
    assert home is not None
    (entry,) = await home.database.outbox(is_sent=True, after=None, limit=9)
    await fleet.tenant_services.tenants.change(
        ACME, lambda found: policy.changed(found, {"caps": TenantCaps(max_priority=10)})
    )
    job = await home.database.get(job_id)
    assert job is not None
    tenant = await fleet.tenant_services.tenants.get_uncached(ACME)

    class Gate:
        async def terms(self, _: Any) -> Any:
            return tenant

    fleet.engine.set_admission_control(Gate())  # type: ignore[arg-type]
    written: list[Dispatch] = []

    async def write(dispatch: Dispatch) -> None:
        written.append(dispatch)

    await fleet.engine.admit(job, entry.dispatch, write)
    assert written[0].priority == 10 and written[0].revision == entry.dispatch.revision


async def test_a_change_that_concerns_no_waiting_job_asks_for_no_look(fleet: Fleet) -> None:
    tenant = await fleet.tenant_services.tenants.change(
        ACME, lambda found: policy.changed(found, {"name": "Acme", "weight": 3.0, "unrunnable_after": 60.0})
    )
    assert tenant.terms_number == tenant.judged_number == 0


async def test_jobs_of_another_hub_are_judged_too(tmp_path: Path) -> None:
    clock = ManualClock()
    store = SharedStore(clock)
    databases = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    async with Fleet(store, clock, databases) as one, Fleet(store, clock, databases, seed=1) as other:
        await one.tenant(granted=100)
        job_id = await other.submit(priority=50)
        await changed(one, caps=TenantCaps(max_priority=10), location=LocationNeed("eu"))
        assert (await now(one, job_id)).priority == 10
        assert graph() == (await other.engine.get(job_id)).job.payload.workflow


class _Newest(OpenAdmission):
    """Judges by the terms as they are now."""

    def __init__(self, fleet: Fleet) -> None:
        self._tenants = fleet.tenant_services.tenants

    async def terms(self, tenant_id: TenantId, /) -> Tenant | None:
        return await self._tenants.get_uncached(tenant_id)


async def _is_away(*_: object) -> None:
    raise Fault("the store is away")


async def test_a_round_that_is_sent_late_and_may_not_run_any_more_fails_and_is_refunded(fleet: Fleet) -> None:
    await fleet.worker()
    fleet.engine.set_admission_control(_Newest(fleet))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet.central, "enqueue", _is_away)
        denied, also_denied = await fleet.submit(), await fleet.submit(priority=-1)
    assert await fleet.central.load(denied) is None, "it waits in its tenant's database alone"
    await changed(fleet, caps=TenantCaps(max_nodes=1))
    await fleet.relay.run_once(at_once=True)
    for job_id in (denied, also_denied):
        job = (await fleet.engine.get(job_id)).job
        assert job.phase is Phase.FAILED and job.failure is not None
        assert job.failure.kind is FailureKind.INVALID_WORKFLOW and "terms" in job.failure.message
    assert await fleet.poll() is None
    assert await fleet.account() == Account(ACME, 100)
    await fleet.check()


async def test_a_round_that_is_sent_late_and_whose_hub_died_before_it_was_judged_ends_by_itself(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> None:
        raise Fault("this hub is gone")

    await fleet.worker()
    fleet.engine.set_admission_control(_Newest(fleet))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet.central, "enqueue", _is_away)
        job_id = await fleet.submit()
    await changed(fleet, caps=TenantCaps(max_nodes=1))
    monkeypatch.setattr(fleet.engine.waiting_job_review, "reapply_terms", dies)
    await fleet.relay.run_once(at_once=True)
    assert await fleet.poll() is None, "it is in the queue and nobody gets it"
    assert isinstance(fleet.clock, ManualClock)
    await fleet.clock.advance(61)
    assert (await fleet.engine.get(job_id)).job.phase is Phase.FAILED
    assert await fleet.account() == Account(ACME, 100)
    await fleet.check()
