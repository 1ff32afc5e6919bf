"""Job records of tenants: the stub in the central store, completed from the tenant database."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import FailureText
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.recent import RecentDict
from comfyfleet.ports import RecordQuery, Store
from comfyfleet.stores import failure_texts as texts
from comfyfleet.tenancy.settlement import Settler
from comfyfleet.tenancy.tenants import TenantDirectory

_MAX_REMEMBERED = 1_000


def stub_of(job: Job, *, keeps_payload: bool) -> Job:
    """The record that the central store gets."""
    payload = job.payload if keeps_payload else Submission({}, tenant=job.tenant)
    # The reference is private; only the tenant database needs it.
    return msgspec.structs.replace(
        job, payload=payload, reference=None, seeds=job.seeds if keeps_payload else None
    )


class TenantRecords:
    def __init__(self, central: Store, directory: TenantDirectory, settler: Settler) -> None:
        self._central = central
        self._directory = directory
        self._settler = settler
        self._leased: RecentDict[JobId, Job] = RecentDict(_MAX_REMEMBERED)
        """Read for a lease that is about to ask for them again."""

    def remember(self, job: Job) -> None:
        self._leased[job.job_id] = job

    async def get(self, job_id: JobId) -> Job | None:
        leased = self._leased.pop(job_id, None)
        stub = await self._central.records.get(job_id)
        if stub is None:
            return None
        home = await self._directory.locate(stub.tenant)
        if home is None:
            return stub
        job = leased if leased is not None and leased.round == stub.round else await home.database.get(job_id)
        return await self._complete(stub, job)

    async def _complete(self, stub: Job, job: Job | None) -> Job:
        """Makes sure that a completed job has its result: settles it first (T1), and looks again if the
        tenant has just moved."""
        lacks_result = (
            job is not None
            and stub.phase is Phase.COMPLETED
            and job.round == stub.round
            and not job.phase.is_final
        )
        if job is None or lacks_result:
            home = await self._directory.locate_uncached(stub.tenant)
            if lacks_result:
                dispatch = await self._central.load(stub.job_id)
                if dispatch is not None and dispatch.is_unsettled:
                    await self._settler.settle(dispatch)
            if home is not None:
                job = await home.database.get(stub.job_id) or job
        if (place := texts.attempt_of_text(stub)) is not None:
            stub = texts.job_with(stub, await self.texts_of(stub.job_id, {place}))
        # A job from before the tenant was created is only in the central store.
        return stub if job is None else filled(stub, job)

    async def texts_of(self, job_id: JobId, wanted: set[str]) -> texts.Texts:
        """The failure texts of a job's attempts. Looks again in case the tenant has just moved."""
        dispatch = await self._central.load(job_id)
        home = None if dispatch is None else await self._directory.locate(dispatch.tenant)
        if dispatch is None or home is None:
            return {}
        found = await home.database.failures_of([job_id])
        if (
            not wanted <= found.keys()
            and (home := await self._directory.locate_uncached(dispatch.tenant)) is not None
        ):
            found = await home.database.failures_of([job_id])
        if wanted <= found.keys():
            return found
        # A worker that cannot reach the database may have left them in the central store.
        return {**found, **await self._settler.pending_texts.get_many(wanted - found.keys())}

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        home = await self._directory.locate(tenant)
        job = None if home is None else await home.database.by_reference(tenant, reference)
        if home is None or job is None:
            return await self._central.records.by_reference(tenant, reference)
        stub = await self._central.records.get(job.job_id)
        return job if stub is None else await self._complete(stub, job)

    async def listing(self, query: RecordQuery) -> list[Job]:
        """A list of several tenants has only stubs for those whose database is unreachable."""
        page = await self._central.records.listing(query)
        return await self._filled(page, is_one_tenants=query.tenant is not None)

    async def many(self, job_ids: Sequence[JobId]) -> list[Job]:
        """Leaves out unknown jobs; has only stubs for tenants whose database is unreachable."""
        stubs = [await self._central.records.get(job_id) for job_id in job_ids]
        return await self._filled([each for each in stubs if each is not None], is_one_tenants=False)

    async def _filled(self, page: Sequence[Job], *, is_one_tenants: bool) -> list[Job]:
        by_tenant: dict[TenantId, list[JobId]] = {}
        for stub in page:
            by_tenant.setdefault(stub.tenant, []).append(stub.job_id)
        jobs: dict[JobId, Job] = {}
        without_text = {stub.job_id for stub in page if texts.attempt_of_text(stub) is not None}
        found: dict[str, FailureText] = {}
        for each, job_ids in by_tenant.items():
            try:
                home = await self._directory.locate(each)
                if home is not None:
                    jobs |= await home.database.get_many(job_ids)
                    found |= await home.database.failures_of(
                        [each for each in job_ids if each in without_text]
                    )
                    left = {
                        place
                        for stub in page
                        if texts.is_text_pending(stub) and (place := texts.attempt_of_text(stub))
                    }
                    found |= await self._settler.pending_texts.get_many(left - found.keys())
            except Fault:
                if is_one_tenants:
                    raise
        stubs = [texts.job_with(stub, found) for stub in page]
        return [filled(stub, jobs[stub.job_id]) if stub.job_id in jobs else stub for stub in stubs]


def filled(stub: Job, job: Job) -> Job:
    """State comes from the stub, private data from the tenant's job."""
    return msgspec.structs.replace(
        stub, payload=job.payload, result=job.result, reference=job.reference, seeds=job.seeds
    )
