"""The files a job brings, at the hub: whose they are when it is submitted, and links to them when it is leased.

Another tenant's file is not there at all. What a job does with its files is the engine's; where they lie `assets/`'s.

What a run left, at the hub: announced by whoever holds the lease, and linked with what its job brought.

For agents far away (`handlers.py`) and those in the hub's own process (`hub/local_worker_api.py`). Where
bytes lie is `assets/`'s.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import LeasedJob, RegisterWorker, Submitted
from comfyfleet.model.dispatch import Dispatch, LeaseRef
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import FileRecord, InputFile
from comfyfleet.model.ids import TenantId
from comfyfleet.model.job import Job, JobInput, Submission
from comfyfleet.ports import FileStore
from comfyfleet.wire.files import OutputBody
from comfyfleet.wire.worker import LeaseInputs, lease_body


class JobInputFiles:
    """`assets` None: this hub keeps no files, so no job brings any."""

    def __init__(self, engine: Engine, assets: FileStore | None) -> None:
        self._engine = engine
        self._assets = assets
        if assets is not None:
            assets.in_use = engine.uses_file

    # submit

    async def submit(self, submission: Submission, *, is_large: bool = False) -> Submitted:
        """A repeat is known before its files are looked for: they may be gone by now."""
        known = await self._engine.repeat_of(submission) if submission.inputs else None
        if known is not None:
            return known
        try:
            checked = await self._checked(submission)
        except Refusal:
            # Under a reference that is taken it is another job, whatever has become of its files.
            if (known := await self._engine.holder_of(submission)) is None:
                raise
            return known
        return await self._engine.submit(checked, is_own=True, is_large=is_large)

    async def _checked(self, submission: Submission) -> Submission:
        """With size and SHA-256 of each file, which is there, whole, and the tenant's own."""
        if not submission.inputs or len(submission.inputs) > self._engine.rules.max_inputs:
            # Of too many none is looked for: the engine refuses them.
            return submission
        if self._assets is None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, "this hub keeps no files: leave out 'inputs'", field="inputs"
            )
        inputs = [await self._checked_input(each, submission.tenant) for each in submission.inputs]
        return msgspec.structs.replace(submission, inputs=tuple(inputs))

    async def _checked_input(self, each: JobInput, tenant: TenantId) -> JobInput:
        if each.file is None:
            return each
        assert self._assets is not None
        record = await self._assets.get(each.file, tenant)
        if record is None or record.tenant != tenant or self._assets.is_old(record):
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"there is no file {each.file!r} (any more)", field="inputs"
            )
        if not record.is_complete:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"the file {each.file!r} is not complete: PUT it to its link, then complete it",
                field="inputs",
            )
        return msgspec.structs.replace(each, sha256=record.sha256, size=record.size)

    # lease

    def admitted(self, call: RegisterWorker) -> RegisterWorker:
        """Whoever registers here has a hub. Without files here, it has nowhere to fetch any from."""
        capabilities = call.capabilities
        moves_files = capabilities.moves_files and self._assets is not None
        if capabilities.has_hub and capabilities.moves_files == moves_files:
            return call
        capabilities = msgspec.structs.replace(capabilities, moves_files=moves_files, has_hub=True)
        return msgspec.structs.replace(call, capabilities=capabilities)

    async def linked(self, job: LeasedJob) -> LeasedJob:
        """With a link to each file, good for a short while."""
        if not job.inputs:
            return job
        kept = await self._engine.store.records.get(job.job_id)
        if kept is None:
            return job
        return msgspec.structs.replace(job, inputs=await self._links(kept, job.inputs))

    async def renewed(self, refs: Sequence[LeaseRef]) -> tuple[LeaseInputs, ...]:
        """Of leases that are alive."""
        found = []
        for ref in refs:
            job = await self._engine.store.records.get(ref.job_id)
            if job is not None and (files := job.payload.input_files):
                found.append(LeaseInputs(lease_body(ref), await self._links(job, files)))
        return tuple(found)

    async def _links(self, job: Job, files: Sequence[InputFile]) -> tuple[InputFile, ...]:
        return tuple([await self._link(job, each) for each in files])

    async def _link(self, job: Job, file: InputFile) -> InputFile:
        record = await self.record(job, file)
        if record is None or self._assets is None:
            return file
        grant = await self._assets.grant(record, "GET")
        return msgspec.structs.replace(
            file, name=record.name, size=record.size, sha256=record.sha256, url=grant.url
        )

    async def record(self, job: Job, file: InputFile) -> FileRecord | None:
        """Asked again: it may be gone by now, and what a worker names as its output may be anything."""
        record = None if self._assets is None else await self._assets.get(file.file_id, job.tenant)
        if record is None or record.tenant != job.tenant or not record.is_complete:
            return None
        return record


class JobOutputFiles:
    def __init__(self, engine: Engine, assets: FileStore) -> None:
        self._engine = engine
        self._assets = assets

    async def leased(self, ref: LeaseRef) -> Dispatch:
        """The dispatch, if this lease of it is alive."""
        dispatch = await self._engine.store.load(ref.job_id)
        if dispatch is None or not _holds(dispatch, ref):
            raise Refusal(RefusalCode.LEASE_LOST, "the lease is over: what it left is not kept")
        return dispatch

    async def announce(
        self, dispatch: Dispatch, ref: LeaseRef, outputs: tuple[OutputBody, ...]
    ) -> list[FileRecord]:
        job = await self._engine.store.records.get(ref.job_id)
        brought = (
            () if job is None else tuple(dict.fromkeys(each.file_id for each in job.payload.input_files))
        )
        return [
            await self._assets.reserve(
                dispatch.tenant,
                name=each.name,
                content_type=each.type,
                kind="output",
                size=each.size,
                sha256=each.sha256,
                job_id=ref.job_id,
                attempt_id=ref.attempt_id,
                derived_from=brought,
            )
            for each in outputs
        ]


def _holds(dispatch: Dispatch, ref: LeaseRef) -> bool:
    lease = dispatch.lease
    return (
        lease is not None
        and (dispatch.round, lease.number, lease.epoch) == (ref.round, ref.number, ref.epoch)
        and hmac.compare_digest(lease.token.encode(), ref.token.encode(errors="replace"))
    )
