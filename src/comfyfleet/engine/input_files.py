"""Resolves inputs that are outputs of earlier jobs, and records which jobs use which files.

A note in the document store, one per file and job, comes before the job and stays until it completes. The
file store asks `is_used` before it deletes a file. Policy decides which output an input means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from comfyfleet.engine.context import EngineContext
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, Submission
from comfyfleet.policy.admission import output_of
from comfyfleet.ports import DocumentStore

COLLECTION = "file_uses"
_PAGE = 100
_PAGES = 10
_GRACE_S = 3600.0
"""For this long a note without a job counts: the job may still be on its way."""


class InputFiles:
    def __init__(self, context: EngineContext) -> None:
        self._context = context

    async def named(self, submission: Submission) -> Submission:
        """Replaces references by job ids, and adds the source job of each input to `after`."""
        known: dict[str, JobId] = {}
        for name in (*submission.after, *(each.job for each in submission.inputs if each.job is not None)):
            if name not in known:
                known[name] = await self._id_of(name, submission.tenant)
        inputs = tuple(
            each if each.job is None else msgspec.structs.replace(each, job=known[each.job])
            for each in submission.inputs
        )
        return msgspec.structs.replace(submission, after=tuple(dict.fromkeys(known.values())), inputs=inputs)

    async def _id_of(self, name: JobId, tenant: TenantId) -> JobId:
        """The id of the job with this id or reference. Other names stay, and are refused later."""
        store = self._context.store
        dispatch = await store.load(name)
        if dispatch is None or dispatch.tenant != tenant:
            job = await store.records.by_reference(tenant, name)
            return name if job is None else job.job_id
        return name

    async def found(self, submission: Submission, awaited: JobId) -> dict[int, str] | Failure:
        """The file for each input that names this completed job, by input number."""
        files: dict[int, str] = {}
        wanted = [(number, each) for number, each in enumerate(submission.inputs) if each.job == awaited]
        job = await self._context.store.records.get(awaited) if wanted else None
        for number, each in wanted:
            if job is None or job.result is None:
                return Failure(
                    FailureKind.MISSING_INPUT,
                    f"the input {each.target} is not available: the job {awaited} no longer exists",
                    node_id=each.node,
                    missing=(each.target,),
                )
            file_id = output_of(each, job.result)
            if isinstance(file_id, Failure):
                return file_id
            files[number] = file_id
        return files

    async def filled(self, submission: Submission) -> Submission:
        """Fills in the files when all awaited jobs have completed. Refuses an input that is missing."""
        files: dict[int, str] = {}
        for awaited in submission.after:
            found = await self.found(submission, awaited)
            if isinstance(found, Failure):
                raise Refusal(RefusalCode.INVALID_REQUEST, found.message, field="inputs")
            files |= found
        return with_files(submission, files)

    async def use(self, files: Iterable[str | None], job_id: JobId) -> None:
        now = b"%.0f" % self._context.clock.now()
        for file_id in dict.fromkeys(files):
            if file_id is not None:
                await self._context.store.documents.put(COLLECTION, f"{file_id}/{job_id}", now, version=None)

    async def is_used(self, file_id: str) -> bool:
        """Whether an open job uses the file. Removes notes of ended jobs, a bounded number in each call."""
        store, beginning = self._context.store, f"{file_id}/"
        after = beginning
        for _ in range(_PAGES):
            page = await store.documents.listing(COLLECTION, after, _PAGE)
            for document in page:
                after = document.name
                if not after.startswith(beginning):
                    return False
                dispatch = await store.load(JobId(after.removeprefix(beginning)))
                if dispatch is None and self._context.clock.now() - float(document.body) < _GRACE_S:
                    return True
                if dispatch is not None and not dispatch.phase.is_final:
                    return True
                await store.documents.remove(COLLECTION, document.name)
            if len(page) < _PAGE:
                return False
        return True


async def forget(documents: DocumentStore, job: Job) -> None:
    """Removes the notes of a deleted job. `is_used` removes those of other ended jobs."""
    for file_id in dict.fromkeys(each.file for each in job.payload.inputs):
        if file_id is not None:
            await documents.remove(COLLECTION, f"{file_id}/{job.job_id}")


def with_files(submission: Submission, files: Mapping[int, str]) -> Submission:
    if not files:
        return submission
    inputs = tuple(
        msgspec.structs.replace(each, file=files.get(number, each.file))
        for number, each in enumerate(submission.inputs)
    )
    return msgspec.structs.replace(submission, inputs=inputs)
