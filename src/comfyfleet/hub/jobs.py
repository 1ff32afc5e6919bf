"""Handlers for callers: submit, read, list, cancel, retry, pause, change priority, explain, delete.

A job of another tenant answers `not_found`. `wire/` decodes the bodies; the engine decides what happens to a
job.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.files.job_files import JobInputFiles
from comfyfleet.hub.http.body import PIECE_BYTES, check_json
from comfyfleet.hub.http.credentials import check_sees, owner_of
from comfyfleet.hub.http.pipeline import HubRequest, Reply, problem_of
from comfyfleet.hub.local_worker_api import sanitized
from comfyfleet.model.access import Caller
from comfyfleet.model.calls import JobFilter, JobView
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.editor_conversion import is_editor_workflow
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.estimate import JobEstimate
from comfyfleet.model.ids import JobId, TenantId, WorkflowHash, traceparent_of
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.workflow_graph import check_workflow, decoded_graph
from comfyfleet.policy.quotes import KNOWN_AFTER_RUNS
from comfyfleet.ports import FileStore
from comfyfleet.tenancy.tenants import TenantDirectory
from comfyfleet.tracing import log_fields
from comfyfleet.wire import answers, bodies
from comfyfleet.wire.answers import payload_body
from comfyfleet.wire.route import LARGE_BYTES
from comfyfleet.wire.status_names import parse_status, status_name

_LOG = logging.getLogger(__name__)

_BATCH_SIZE = 50
"""Jobs of a batch that start together before other requests get their turn."""

_PART_BYTES = 2 * 1024 * 1024
"""Bytes of a batch that are decoded at a time: decoded they may take thirty times as much."""
_ANY_DEPTH = sys.maxsize

_KEY = re.compile(r"[\x21-\x7e]{1,200}")
_ITEM = bodies.SubmitDecoder()


class _Item(NamedTuple):
    body: bodies.RawSubmitBody | Refusal
    size: int


class JobHandlers:
    def __init__(self, engine: Engine, assets: FileStore | None, inputs: JobInputFiles) -> None:
        self._engine = engine
        self._assets = assets
        self._inputs = inputs

    async def submit(self, call: HubRequest[bodies.RawSubmitBody]) -> Reply:
        key = _idempotency_key(call.headers)
        answer = await self._submit(
            partial(_submission, call.take(), call.caller, key, call.traceparent, call.is_large),
            call.traceparent,
            is_large=call.is_large,
        )
        location = {"location": f"/api/jobs/{answer.id}"}
        return Reply(200 if answer.is_repeat else 201, answer, location, created_id=answer.id)

    async def _submit(
        self, asked: Callable[[], Submission], traceparent: str | None, *, is_large: bool
    ) -> answers.SubmittedBody:
        submission = await asyncio.to_thread(asked) if is_large else asked()
        # It holds the text of the body.
        del asked
        submitted = await self._inputs.submit(submission, is_large=is_large)
        if _LOG.isEnabledFor(logging.INFO):
            with log_fields(
                job_id=submitted.job_id, traceparent=traceparent_of(submitted.job_id, traceparent)
            ):
                _LOG.info("submitted%s", " before; this is a repeat" if submitted.is_repeat else "")
        return answers.submitted_body(submitted)

    async def quote_job(self, call: HubRequest[bodies.RawSubmitBody]) -> Reply:
        asked = partial(_submission, call.take(), call.caller, None, None, call.is_large)
        submission = await asyncio.to_thread(asked) if call.is_large else asked()
        quote = await self._engine.quote(submission, is_own=True, is_large=call.is_large)
        if call.caller.scope is not None:
            # The runs of all tenants count, and a tenant sees only whether they are enough.
            quote = msgspec.structs.replace(quote, runs=min(quote.runs, KNOWN_AFTER_RUNS))
        return Reply(200, quote)

    async def submit_batch(self, call: HubRequest[bodies.BatchBody]) -> Reply:
        key, jobs = _idempotency_key(call.headers), call.data.jobs
        items: list[answers.BatchItem] = []
        # If other processes fill the same queue, jobs in flight together may exceed its capacity.
        most = _BATCH_SIZE if self._engine.reader.is_shared else len(jobs)
        async for part in _parts(jobs, most):
            under_way: list[asyncio.Task[answers.BatchItem]] = []
            async with asyncio.TaskGroup() as group:
                for number, item in enumerate(part, len(items)):
                    # Each job has its own key, so a repeat completes a batch that was interrupted.
                    own_key = None if key is None else f"{key}/{number}"
                    one = self._submit_one(item, call.caller, own_key, call.traceparent)
                    under_way.append(group.create_task(one))
                    if len(under_way) % _BATCH_SIZE == 0:
                        await asyncio.sleep(0)
            items += [task.result() for task in under_way]
        accepted = sum(item.job is not None for item in items)
        made = ",".join(item.job.id for item in items[:1] if item.job is not None) + f" and {accepted} in all"
        return Reply(200, answers.BatchAnswer(tuple(items), accepted, len(items) - accepted), created_id=made)

    async def _submit_one(
        self, item: _Item, caller: Caller, key: str | None, traceparent: str | None
    ) -> answers.BatchItem:
        body = item.body
        try:
            if isinstance(body, Refusal):
                raise body
            # A reference already makes a job repeatable.
            own_key = key if _own_reference(body) is None else None
            is_large = item.size > PIECE_BYTES
            asked = partial(_submission, body, caller, own_key, traceparent, is_large)
            answer = await self._submit(asked, traceparent, is_large=is_large)
        except Exception as error:
            # Only this job failed; the other jobs get their own answers.
            answered = problem_of(error, _LOG, "a job of a batch")
            return answers.BatchItem(answered.status, problem=answered.body)
        return answers.BatchItem(200 if answer.is_repeat else 201, answer)

    async def convert(self, call: HubRequest[bodies.ConvertBody]) -> Reply:
        workflow, is_large = call.data.workflow, call.is_large
        if call.data.service not in (None, COMFYUI):
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"a payload of the service {call.data.service!r} is not converted: submit it as it is",
                field="service",
            )
        if is_editor_workflow(workflow):
            workflow, is_large = await self._engine.convert(workflow, call.caller.owner), True
        # The answer for a graph is the graph itself, after the same checks as a submission.
        checked = await asyncio.to_thread(check_workflow, workflow) if is_large else check_workflow(workflow)
        return Reply(200, bodies.ConvertBody(checked.to_graph()))

    async def list_jobs(self, call: HubRequest[bodies.ListQuery]) -> Reply:
        query = call.data
        tenant = call.caller.scope
        if query.tenant is not None:
            if not call.caller.sees(TenantId(query.tenant)):
                return Reply(200, answers.JobList(()))
            tenant = TenantId(query.tenant)
        wanted = JobFilter(
            tenant=tenant,
            phase=None if query.status is None else parse_status(query.status),
            workflow_hash=None if query.workflow_hash is None else WorkflowHash(query.workflow_hash),
            metadata=query.metadata,
            submitted_after=bodies.seconds_of(query.submitted_after),
            submitted_before=bodies.seconds_of(query.submitted_before),
            unrunnable=query.unrunnable,
        )
        after = None if query.cursor is None else JobId(query.cursor)
        newest_first = query.order == "newest"
        page = await self._engine.listing(wanted, query.limit, after, newest_first=newest_first)
        estimates = await self._estimates(page.jobs)
        found = (answers.job_body(job, estimates.get(job.job_id)) for job in page.jobs)
        return Reply(200, answers.JobList(tuple(found), page.after))

    async def _estimates(self, jobs: Sequence[Job]) -> Mapping[JobId, JobEstimate]:
        still_open = [job.job_id for job in jobs if not job.phase.is_final]
        if not still_open:
            return {}
        found = await self._engine.reader.load_many(still_open)
        return await self._engine.estimates(each for each in found if each is not None)

    async def get_job(self, call: HubRequest[None]) -> Reply:
        return await self._details(await self._view(call))

    async def _details(self, view: JobView) -> Reply:
        estimates = await self._engine.estimates([view.dispatch])
        return Reply(200, answers.job_details(view, estimates.get(view.dispatch.job_id)))

    async def get_payload(self, call: HubRequest[None]) -> Reply:
        job = (await self._view(call)).job
        _check_readable(job, "payload")
        return Reply(200, payload_body(job))

    async def get_result(self, call: HubRequest[None]) -> Reply:
        view = await self._view(call)
        phase, job = view.dispatch.phase, view.job
        _check_readable(job, "result")
        result = await self._linked(job)
        body = answers.ResultBody(job.job_id, status_name(phase), result, job.failure)
        return Reply(200 if phase.is_final else 202, body)

    async def _linked(self, job: Job) -> JobResult | None:
        """Uploaded files get a link that is valid for a short time."""
        if job.result is None:
            return None
        # Made safe again: a direct worker writes its result to the store itself.
        result, files = await sanitized(job.result), []
        for file in result.files:
            record = None
            if self._assets is not None and file.file_id is not None:
                record = await self._assets.get(file.file_id, job.tenant)
            if self._assets is not None and record is not None and record.job_id == job.job_id:
                link = await self._assets.grant(record, "GET")
                file = msgspec.structs.replace(file, url=link.url)
            files.append(file)
        return msgspec.structs.replace(result, files=tuple(files))

    async def explain_job(self, call: HubRequest[None]) -> Reply:
        explanation = await self._engine.explain(await self._mine(call), call.caller.scope)
        return Reply(200, msgspec.structs.replace(explanation, id=explanation.job_id))

    async def cancel_job(self, call: HubRequest[bodies.CancelRequest]) -> Reply:
        job_id = await self._mine(call)
        answer = await self._engine.cancel(job_id, call.data.reason)
        return Reply(200, answers.CancelBody(job_id, status_name(answer.phase), answer.cancel_requested))

    async def retry_job(self, call: HubRequest[None]) -> Reply:
        return Reply(200, answers.submitted_body(await self._engine.retry(await self._mine(call))))

    async def pause_job(self, call: HubRequest[None]) -> Reply:
        await self._engine.pause(await self._mine(call))
        return await self.get_job(call)

    async def resume_job(self, call: HubRequest[None]) -> Reply:
        await self._engine.resume(await self._mine(call))
        return await self.get_job(call)

    async def change_job(self, call: HubRequest[bodies.ChangeBody]) -> Reply:
        job_id = await self._mine(call)
        await self._engine.set_priority(job_id, call.data.priority)
        return await self._details(await self._engine.get(job_id))

    async def _mine(
        self, call: HubRequest[None] | HubRequest[bodies.ChangeBody] | HubRequest[bodies.CancelRequest]
    ) -> JobId:
        job_id = JobId(call.parameters["job_id"])
        await check_sees(call.caller, self._engine, job_id)
        return job_id

    async def _view(self, call: HubRequest[None]) -> JobView:
        return await self._engine.get(JobId(call.parameters["job_id"]), call.caller.scope)


def _submission(
    body: bodies.SubmitBody, caller: Caller, key: str | None, traceparent: str | None, is_large: bool
) -> Submission:
    submission = bodies.submission(body, owner_of(body, caller), key, traceparent)
    if not is_large:
        return submission
    # Nodes that stay raw text would keep the whole body in memory.
    return msgspec.structs.replace(submission, workflow=decoded_graph(submission.workflow))


async def _decoded(raw: msgspec.Raw) -> _Item:
    size = memoryview(raw).nbytes
    if size <= PIECE_BYTES:
        return _Item(_item(raw, size), size)
    return _Item(await asyncio.to_thread(_item, raw, size), size)


def _item(raw: msgspec.Raw, size: int) -> bodies.RawSubmitBody | Refusal:
    try:
        if size > PIECE_BYTES:
            # The whole batch was checked as text; each job is checked by its values, as if sent alone.
            check_json(memoryview(raw), _ANY_DEPTH, LARGE_BYTES)
        return _ITEM.decode(raw)
    except Refusal as refusal:
        return refusal
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        return Refusal(RefusalCode.INVALID_REQUEST, f"the job is not valid: {error}")


def _own_reference(body: bodies.RawSubmitBody) -> str | None:
    return body.reference or body.id


async def _parts(jobs: Sequence[msgspec.Raw], most: int) -> AsyncIterator[list[_Item]]:
    """Groups of jobs to submit together. A job that refers to an earlier one is in a later group."""
    part: list[_Item] = []
    references: set[str | None] = set()
    size = 0
    for raw in jobs:
        item = await _decoded(raw)
        body = item.body
        names = set() if isinstance(body, Refusal) else bodies.named_jobs(body)
        size += item.size
        if part and (len(part) == most or size > _PART_BYTES or not references.isdisjoint(names)):
            yield part
            part, references, size = [], set(), item.size
        part.append(item)
        if not isinstance(body, Refusal):
            references.add(_own_reference(body))
    yield part


def _check_readable(job: Job, what: str) -> None:
    if job.unreadable is not None:
        raise Refusal(
            RefusalCode.NOT_FOUND, f"the {what} of job {job.job_id!r} cannot be read: {job.unreadable}"
        )


def _idempotency_key(headers: Mapping[str, str]) -> str | None:
    key = headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            "an Idempotency-Key has 1 to 200 visible ASCII characters and no space",
        )
    return key


_RETRY_S = 5.0


class DeleteHandlers:
    def __init__(self, engine: Engine, directory: TenantDirectory) -> None:
        self._engine = engine
        self._homes = directory

    async def delete_job(self, call: HubRequest[None]) -> Reply:
        job_id = JobId(call.parameters["job_id"])
        await check_sees(call.caller, self._engine, job_id)
        # The tenant's database first: nobody could delete a record that is left there with its reference.
        await self._engine.forget(job_id, self._forget_record)
        return Reply(204)

    async def _forget_record(self, dispatch: Dispatch) -> None:
        home = await self._homes.locate(dispatch.tenant) if dispatch.has_tenant_database else None
        if home is None:
            return
        job_id, database = dispatch.job_id, home.database
        if not await database.forget_jobs([job_id], float("inf")) and await database.get(job_id) is not None:
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"job {job_id!r} cannot be deleted now: its tenant is being moved to another database, or the job is "
                "being retried; try again",
                retry_after_s=_RETRY_S,
            )
