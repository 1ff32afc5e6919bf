"""Input and output files of jobs at the hub, for remote agents and for agents in the hub's process.

Inputs are checked at submission and get links when the job is leased. The holder of a lease announces
outputs. A file of another tenant does not exist. The engine knows what a job does with its files; `files/`
stores them.
"""

from __future__ import annotations

import asyncio
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
from comfyfleet.wire.files import FileBody, OutputBody
from comfyfleet.wire.worker import LeaseInputs


class JobInputFiles:
    """`assets` is None if this hub keeps no files; then jobs have no input files."""

    def __init__(self, engine: Engine, assets: FileStore | None) -> None:
        self._engine = engine
        self._assets = assets
        if assets is not None:
            assets.in_use = engine.uses_file

    async def submit(self, submission: Submission, *, is_large: bool = False) -> Submitted:
        """Finds a repeat before it checks the files, which may be gone by now."""
        known = await self._engine.repeat_of(submission) if submission.inputs else None
        if known is not None:
            return known
        try:
            checked = await self._checked(submission)
        except Refusal:
            # If the reference is taken, that job is the answer, whatever became of the files.
            if (known := await self._engine.holder_of(submission)) is None:
                raise
            return known
        return await self._engine.submit(checked, is_own=True, is_large=is_large)

    async def _checked(self, submission: Submission) -> Submission:
        """Adds size and SHA-256 of each file, which must be complete and belong to the tenant."""
        if not submission.inputs or len(submission.inputs) > self._engine.rules.max_inputs:
            # The engine refuses too many inputs; no file is looked up.
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
        if record is None or record.tenant != tenant or self._assets.is_expired(record):
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

    def admitted(self, call: RegisterWorker) -> RegisterWorker:
        """Marks the worker as one with a hub, and without file transfer if this hub has no files."""
        capabilities = call.capabilities
        moves_files = capabilities.moves_files and self._assets is not None
        if capabilities.has_hub and capabilities.moves_files == moves_files:
            return call
        capabilities = msgspec.structs.replace(capabilities, moves_files=moves_files, has_hub=True)
        return msgspec.structs.replace(call, capabilities=capabilities)

    async def linked(self, job: LeasedJob) -> LeasedJob:
        """Adds a link to each file, valid for a short time."""
        if not job.inputs:
            return job
        kept = await self._engine.reader.records.get(job.job_id)
        if kept is None:
            return job
        return msgspec.structs.replace(job, inputs=await self._links(kept, job.inputs))

    async def renewed(self, refs: Sequence[LeaseRef]) -> tuple[LeaseInputs, ...]:
        """New links for leases that are alive."""
        found = []
        for ref in refs:
            job = await self._engine.reader.records.get(ref.job_id)
            if job is not None and (files := job.payload.input_files):
                found.append(LeaseInputs(ref, await self._links(job, files)))
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
        """Checked again: the file may be gone, and a worker may name any file as its output."""
        record = None if self._assets is None else await self._assets.get(file.file_id, job.tenant)
        if record is None or record.tenant != job.tenant or not record.is_complete:
            return None
        return record


class JobOutputFiles:
    def __init__(self, engine: Engine, assets: FileStore) -> None:
        self._engine = engine
        self._assets = assets

    async def leased(self, ref: LeaseRef) -> Dispatch:
        """The dispatch, if the lease is alive."""
        dispatch = await self._engine.reader.load(ref.job_id)
        if dispatch is None or not _holds(dispatch, ref):
            raise Refusal(RefusalCode.LEASE_LOST, "the lease has ended: its files are not kept")
        return dispatch

    async def announce(
        self, dispatch: Dispatch, ref: LeaseRef, outputs: tuple[OutputBody, ...]
    ) -> list[FileRecord]:
        job = await self._engine.reader.records.get(ref.job_id)
        inputs = () if job is None else tuple(dict.fromkeys(each.file_id for each in job.payload.input_files))
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
                derived_from=inputs,
            )
            for each in outputs
        ]


async def reserve_file(assets: FileStore, owner: TenantId, body: FileBody) -> FileRecord:
    return await assets.reserve(
        owner,
        name=body.name,
        content_type=body.type,
        size=body.size,
        sha256=body.sha256,
        derived_from=() if body.source is None else (body.source,),
    )


async def complete_file(assets: FileStore, file_id: str) -> FileRecord:
    """Waits while an object store checks a large file; sending it again would not help."""
    while True:
        try:
            return await assets.complete(file_id)
        except Refusal as refusal:
            if refusal.code is not RefusalCode.UNAVAILABLE:
                raise
            await asyncio.sleep(float(refusal.details.get("retry_after_s", 1.0)))


def _holds(dispatch: Dispatch, ref: LeaseRef) -> bool:
    lease = dispatch.lease
    return (
        lease is not None
        and (dispatch.round, lease.number, lease.epoch) == (ref.round, ref.number, ref.epoch)
        and hmac.compare_digest(lease.token.encode(), ref.token.encode(errors="replace"))
    )
