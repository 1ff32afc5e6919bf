"""Records of jobs whose payload and result lie apart: the central store's stub, filled from the tenant's database."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import FailureText
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, Submission
from comfyfleet.ports import Store
from comfyfleet.stores import failure_texts as texts
from comfyfleet.tenancy.settlement import Settler
from comfyfleet.tenancy.tenants import TenantDirectory

_MAX_REMEMBERED = 1_000


def stub_of(job: Job, *, keeps_payload: bool) -> Job:
    """What the central store keeps of it."""
    payload = job.payload if keeps_payload else Submission({}, tenant=job.tenant)
    # The reference is unique in the tenant's database; here it would only be told to whoever looks.
    return msgspec.structs.replace(
        job, payload=payload, reference=None, seeds=job.seeds if keeps_payload else None
    )


class TenantRecords:
    def __init__(self, central: Store, homes: TenantDirectory, settler: Settler) -> None:
        self._central = central
        self._homes = homes
        self._settler = settler
        self._leased: dict[JobId, Job] = {}
        """As they were looked at for their lease: the lease is about to ask for them."""

    def remember(self, job: Job) -> None:
        self._leased[job.job_id] = job
        if len(self._leased) > _MAX_REMEMBERED:
            del self._leased[next(iter(self._leased))]

    async def get(self, job_id: JobId) -> Job | None:
        leased = self._leased.pop(job_id, None)
        stub = await self._central.records.get(job_id)
        if stub is None:
            return None
        home = await self._homes.of(stub.tenant)
        if home is None:
            return stub
        job = leased if leased is not None and leased.round == stub.round else await home.database.get(job_id)
        return await self._whole(stub, job)

    async def _whole(self, stub: Job, job: Job | None) -> Job:
        """Nobody sees a job that has completed without its result: between K and T1 it is not in its record yet, and
        a tenant that moved a moment ago has it where this hub did not look."""
        lacks_result = (
            job is not None
            and stub.phase is Phase.COMPLETED
            and job.round == stub.round
            and not job.phase.is_final
        )
        if job is None or lacks_result:
            home = await self._homes.newest(stub.tenant)
            if lacks_result:
                dispatch = await self._central.load(stub.job_id)
                if dispatch is not None and dispatch.is_unsettled:
                    await self._settler.settle(dispatch)
            if home is not None:
                job = await home.database.get(stub.job_id) or job
        if (place := texts.place_of(stub)) is not None:
            stub = texts.job_with(stub, await self.texts_of(stub.job_id, {place}))
        # One from before the tenant was set up has all that there is of it in the central store.
        return stub if job is None else filled(stub, job)

    async def texts_of(self, job_id: JobId, wanted: set[str]) -> texts.Texts:
        """What was said of attempts of a job. Looked for anew where the tenant may have moved a moment ago."""
        dispatch = await self._central.load(job_id)
        home = None if dispatch is None else await self._homes.of(dispatch.tenant)
        if dispatch is None or home is None:
            return {}
        found = await home.database.failures_of([job_id])
        if not wanted <= found.keys() and (home := await self._homes.newest(dispatch.tenant)) is not None:
            found = await home.database.failures_of([job_id])
        if wanted <= found.keys():
            return found
        # A worker without a way to that database left them a moment ago.
        return {**found, **await self._settler.left_texts.of(wanted - found.keys())}

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        home = await self._homes.of(tenant)
        job = None if home is None else await home.database.by_reference(tenant, reference)
        if home is None or job is None:
            return await self._central.records.by_reference(tenant, reference)
        stub = await self._central.records.get(job.job_id)
        return job if stub is None else await self._whole(stub, job)

    async def listing(
        self,
        *,
        tenant: TenantId | None,
        phase: Phase | None,
        limit: int,
        after: JobId | None,
        newest_first: bool = False,
    ) -> list[Job]:
        """What the central store lists. A tenant whose database is away is listed without what lies there."""
        page = await self._central.records.listing(
            tenant=tenant, phase=phase, limit=limit, after=after, newest_first=newest_first
        )
        return await self._filled(page, is_one_tenants=tenant is not None)

    async def many(self, job_ids: Sequence[JobId]) -> list[Job]:
        """Those that are there. A tenant whose database is away is answered without what lies there."""
        stubs = [await self._central.records.get(job_id) for job_id in job_ids]
        return await self._filled([each for each in stubs if each is not None], is_one_tenants=False)

    async def _filled(self, page: Sequence[Job], *, is_one_tenants: bool) -> list[Job]:
        of_tenants: dict[TenantId, list[JobId]] = {}
        for stub in page:
            of_tenants.setdefault(stub.tenant, []).append(stub.job_id)
        jobs: dict[JobId, Job] = {}
        unsaid = {stub.job_id for stub in page if texts.place_of(stub) is not None}
        said: dict[str, FailureText] = {}
        for each, job_ids in of_tenants.items():
            try:
                home = await self._homes.of(each)
                if home is not None:
                    jobs |= await home.database.get_many(job_ids)
                    said |= await home.database.failures_of([each for each in job_ids if each in unsaid])
                    left = {place for stub in page if texts.is_left(stub) and (place := texts.place_of(stub))}
                    said |= await self._settler.left_texts.of(left - said.keys())
            except Fault:
                if is_one_tenants:
                    raise
        whole = [texts.job_with(stub, said) for stub in page]
        return [filled(stub, jobs[stub.job_id]) if stub.job_id in jobs else stub for stub in whole]


def filled(stub: Job, job: Job) -> Job:
    """What moves is the central store's to say, what is private the tenant's."""
    return msgspec.structs.replace(
        stub, payload=job.payload, result=job.result, reference=job.reference, seeds=job.seeds
    )
