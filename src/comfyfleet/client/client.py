"""`FleetClient`: the jobs, queue and workers of a hub as methods.

`calls.py` has its methods for files, tenants, keys and webhooks; `connection.py` sends and repeats requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, Unpack

import msgspec

from comfyfleet.client.calls import FileCalls, KeyCalls, TenantCalls, WebhookCalls
from comfyfleet.client.connection import EventParser, HubConnection, fill_path
from comfyfleet.client.discovery import find_hub
from comfyfleet.client.file_transfer import FileLike
from comfyfleet.client.options import (
    FINAL,
    JobUpdate,
    SubmitOptions,
    WorkflowLike,
    attached_to,
    read_workflow,
    submission,
    update_of,
)
from comfyfleet.model.calls import Explanation
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.estimate import CapacityReport, Quote
from comfyfleet.wire import answers, bodies
from comfyfleet.wire.answers import PayloadBody
from comfyfleet.wire.problems import refusal_in

_BATCH_SIZE = 200
"""Jobs in one request."""
_POLL_S = 0.5
"""The interval for looking at a job if the hub has no stream for it."""

_NOTHING_LEFT = 204


class FleetClient(FileCalls, TenantCalls, KeyCalls, WebhookCalls):
    """An async context manager that can be closed twice.

    The client tries a hub that is away or says "not now" again for `patience_s`, if that cannot do anything
    twice: every submission carries an idempotency key. It raises refusals as `Refusal`, with their code.

    Without an address it uses the hub of this machine and its key, as the commands do. Several addresses are
    hubs on one store: the client calls the next one if one does not answer.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        key: str | None = None,
        *,
        answer_s: float = 30.0,
        patience_s: float = 30.0,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        if url is None:
            found = find_hub()
            url, key, trust = found.urls, key or found.key, trust or found.trust
        self._link = HubConnection(url, key, answer_s=answer_s, patience_s=patience_s, trust=trust)

    @property
    def url(self) -> str:
        return self._link.url

    @property
    def patience_s(self) -> float:
        return self._link.patience_s

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        self._link.patience_s = seconds

    def on_away(self, listener: Callable[[Exception | None], object]) -> None:
        """`listener` gets the error when the hub is away or says "not now", and None when it answers again."""
        self._link.on_away = listener

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._link.close()

    # submit

    async def submit(
        self,
        workflow: WorkflowLike,
        *,
        idempotency_key: str | None = None,
        attach: Mapping[str, FileLike] | None = None,
        traceparent: str | None = None,
        **options: Unpack[SubmitOptions],
    ) -> answers.SubmittedBody:
        """Returns once the job is stored. The same `idempotency_key` or `reference` with the same content is
        one job.

        `attach={"10.image": "photo.png"}` uploads the file for the input `image` of node 10. `traceparent`
        (W3C Trace Context) goes with the job to its attempts.
        """
        await self._attach(attach, options)
        body = submission(workflow, options)
        headers = _traced(traceparent)
        if body.reference is None or idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key or uuid.uuid4().hex
        return await self._link.ask("submit", answers.SubmittedBody, body=body, headers=headers)

    async def submit_many(
        self,
        workflows: Iterable[WorkflowLike],
        *,
        on_progress: Callable[[int, int], object] | None = None,
        attach: Mapping[str, FileLike] | None = None,
        traceparent: str | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[SubmitOptions],
    ) -> list[answers.SubmittedBody | Refusal]:
        """Submits all workflows with the same options and files. Returns the job or the refusal of each.

        `on_progress` gets the number of submitted jobs and of all. If the hub goes away in the middle, the
        remaining jobs are refused as `unavailable`. The same call with the same `idempotency_key` creates no
        job twice.
        """
        if options.get("reference") is not None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, "several jobs cannot share one reference: leave it out"
            )
        await self._attach(attach, options)
        every = [submission(workflow, options) for workflow in workflows]
        found: list[answers.SubmittedBody | Refusal] = []
        key = idempotency_key or uuid.uuid4().hex
        for start in range(0, len(every), _BATCH_SIZE):
            part = tuple(
                msgspec.Raw(msgspec.json.encode(body)) for body in every[start : start + _BATCH_SIZE]
            )
            try:
                answer = await self._link.ask(
                    "submit_batch",
                    answers.BatchAnswer,
                    body=bodies.BatchBody(part),
                    headers={"idempotency-key": f"{key}/{start}", **_traced(traceparent)},
                )
            except (Refusal, Fault) as error:
                if not found:
                    raise
                # The jobs that were accepted before must not be lost.
                return found + [_not_answered(error)] * (len(every) - len(found))
            found += [_job_or_refusal(item) for item in answer.items]
            if on_progress is not None:
                on_progress(len(found), len(every))
        return found

    async def quote(self, workflow: WorkflowLike, **options: Unpack[SubmitOptions]) -> Quote:
        """What a job is expected to take and to cost, with the options of `submit`. Nothing is submitted."""
        return await self._link.ask("quote_job", Quote, body=submission(workflow, options))

    async def convert(self, workflow: WorkflowLike) -> dict[str, Any]:
        """The API-format graph of a ComfyUI editor workflow. It needs a live worker with its nodes."""
        body = bodies.ConvertBody(read_workflow(workflow))
        return (await self._link.ask("convert", bodies.ConvertBody, body=body)).workflow

    async def _attach(self, attach: Mapping[str, FileLike] | None, options: SubmitOptions) -> None:
        if not attach:
            return
        # Parsed before the upload: a wrong name must not leave files on the hub.
        targets = {target: attached_to(target, "") for target in attach}
        tenant = options.get("tenant")
        files = {target: (await self.upload(source, tenant=tenant)).id for target, source in attach.items()}
        brought = [msgspec.structs.replace(each, file=files[target]) for target, each in targets.items()]
        options["inputs"] = (*options.get("inputs", ()), *brought)

    # read

    async def get(self, job_id: str) -> answers.JobDetails:
        return await self._link.ask("get_job", answers.JobDetails, job_id=job_id)

    async def payload(self, job_id: str) -> PayloadBody:
        """What was submitted: workflow, requirements and the rest."""
        return await self._link.ask("get_payload", PayloadBody, job_id=job_id)

    async def result(self, job_id: str) -> answers.ResultBody:
        """The result so far; empty while the job is open."""
        return await self._link.ask("get_result", answers.ResultBody, job_id=job_id)

    async def explain(self, job_id: str) -> Explanation:
        return await self._link.ask("explain_job", Explanation, job_id=job_id)

    async def jobs(
        self,
        *,
        status: str | None = None,
        tenant: str | None = None,
        workflow_hash: str | None = None,
        metadata: dict[str, str] | None = None,
        submitted_after: float | None = None,
        submitted_before: float | None = None,
        unrunnable: bool = False,
        order: Literal["newest", "oldest"] = "newest",
        cursor: str | None = None,
        limit: int = 100,
    ) -> answers.JobList:
        """One page of jobs, the newest first unless `order` is "oldest". Pass its cursor to get the next page."""
        query: dict[str, Any] = {
            "status": status,
            "tenant": tenant,
            "workflow_hash": workflow_hash,
            "submitted_after": submitted_after,
            "submitted_before": submitted_before,
            "unrunnable": "true" if unrunnable else None,
            "order": order,
            "cursor": cursor,
            "limit": limit,
        }
        query |= {f"metadata[{name}]": value for name, value in (metadata or {}).items()}
        return await self._link.ask("list_jobs", answers.JobList, query=query)

    async def every_job(self, **wanted: Any) -> AsyncIterator[answers.JobBody]:
        """All jobs that match, read page by page as you go on. Takes the filters of `jobs`, which reads one page."""
        cursor: str | None = None
        while True:
            page = await self.jobs(**wanted, cursor=cursor)
            for job in page.jobs:
                yield job
            cursor = page.cursor
            if cursor is None:
                return

    async def wait(self, job_id: str, timeout: float | None = None) -> answers.ResultBody:
        """Returns when the job has completed, failed or been cancelled."""
        async with asyncio.timeout(timeout), contextlib.aclosing(self.watch(job_id)) as watched:
            async for _ in watched:
                pass
        return await self.result(job_id)

    async def watch(self, job_id: str, after: int | None = None) -> AsyncGenerator[JobUpdate, None]:
        """The updates of a job until its end, after the number `after`. Survives lost connections."""
        path = fill_path("/api/jobs/{job_id}/progress", {"job_id": job_id})
        last, is_over = after, False
        tries = self._link.tries()
        while True:
            url, parser = self._link.url, EventParser()
            headers = {"accept": "text/event-stream", "cache-control": "no-cache"}
            if last is not None:
                headers["last-event-id"] = str(last)
            try:
                async with self._link.stream(path, headers) as response:
                    async for content in response.content.iter_any():
                        for event in parser.feed(content):
                            update = update_of(event.event, event.data)
                            if update.number is not None:
                                last, is_over = update.number, update.is_end
                            tries = self._link.tries()
                            yield update
                    # The hub ends a stream that has nothing left to send.
                    if is_over or response.status == _NOTHING_LEFT:
                        return
                raise Fault(f"the stream of job {job_id} ended before the job did")
            except Refusal as error:
                if error.code is RefusalCode.NOT_FOUND:
                    break
                if error.code not in (RefusalCode.UNAVAILABLE, RefusalCode.RATE_LIMITED):
                    raise
                if error.code is RefusalCode.UNAVAILABLE:
                    self._link.switch_hub(url)
                await tries.after(error)
            except Fault as error:
                self._link.switch_hub(url)
                await tries.after(error)
        # No such job, or a hub without streams: the next request shows which.
        async for update in self._looks(job_id):
            yield update

    async def _looks(self, job_id: str) -> AsyncGenerator[JobUpdate, None]:
        last: tuple[str, int] | None = None
        while True:
            job = await self.get(job_id)
            if (job.status, job.attempts) != last:
                last = (job.status, job.attempts)
                ended = await self.result(job_id) if job.status in FINAL else None
                yield JobUpdate(
                    job.status,
                    status=job.status,
                    worker_id=job.worker_id,
                    started_at=job.started_at,
                    result=None if ended is None else ended.result,
                    error=job.error,
                )
                if ended is not None:
                    return
            await asyncio.sleep(_POLL_S)

    # change

    async def cancel(self, job_id: str, reason: str = "") -> answers.CancelBody:
        body = bodies.CancelRequest(reason) if reason else None
        return await self._link.ask("cancel_job", answers.CancelBody, body=body, job_id=job_id)

    async def delete(self, job_id: str) -> None:
        """Deletes a job that has ended; cancel others first. Its files stay."""
        await self._link.ask("delete_job", type(None), job_id=job_id)

    async def retry(self, job_id: str) -> answers.SubmittedBody:
        return await self._link.ask("retry_job", answers.SubmittedBody, job_id=job_id)

    async def pause(self, job_id: str) -> answers.JobDetails:
        return await self._link.ask("pause_job", answers.JobDetails, job_id=job_id)

    async def resume(self, job_id: str) -> answers.JobDetails:
        return await self._link.ask("resume_job", answers.JobDetails, job_id=job_id)

    async def set_priority(self, job_id: str, priority: int) -> answers.JobDetails:
        body = bodies.ChangeBody(priority)
        return await self._link.ask("change_job", answers.JobDetails, body=body, job_id=job_id)

    # the queue

    async def stats(self) -> answers.StatsBody:
        return await self._link.ask("stats", answers.StatsBody)

    async def capacity(self, within_s: float = 300.0) -> CapacityReport:
        """How much work waits, and how many more workers would do it within this time."""
        return await self._link.ask("capacity", CapacityReport, query={"within": within_s})

    async def pause_queue(self) -> answers.QueueBody:
        return await self._link.ask("pause_queue", answers.QueueBody)

    async def resume_queue(self) -> answers.QueueBody:
        return await self._link.ask("resume_queue", answers.QueueBody)

    async def dead_letter(self, cursor: str | None = None, limit: int = 100) -> answers.JobList:
        return await self._link.ask("list_dead", answers.JobList, query={"cursor": cursor, "limit": limit})

    async def retry_dead(self, job_id: str) -> answers.SubmittedBody:
        return await self._link.ask("retry_dead", answers.SubmittedBody, job_id=job_id)

    async def purge_dead(self, before: float | None = None, limit: int = 1_000) -> int:
        body = bodies.PurgeBody(before, limit)
        return (await self._link.ask("purge_dead", answers.PurgeAnswer, body=body)).purged

    # workers

    async def services(self) -> Sequence[answers.ServiceBody]:
        """The services that jobs can be submitted to, with the schemas of their payloads."""
        return (await self._link.ask("list_services", answers.ServiceList)).services

    async def workers(self) -> Sequence[answers.WorkerBody]:
        return (await self._link.ask("list_workers", answers.WorkerList)).workers

    async def worker(self, worker_id: str) -> answers.WorkerDetails:
        return await self._link.ask("get_worker", answers.WorkerDetails, worker_id=worker_id)

    async def drain_worker(self, worker_id: str) -> answers.WorkerDetails:
        return await self._link.ask("drain_worker", answers.WorkerDetails, worker_id=worker_id)

    async def pause_worker(self, worker_id: str) -> answers.WorkerDetails:
        return await self._link.ask("pause_worker", answers.WorkerDetails, worker_id=worker_id)

    async def resume_worker(self, worker_id: str) -> answers.WorkerDetails:
        return await self._link.ask("resume_worker", answers.WorkerDetails, worker_id=worker_id)

    async def refresh_worker(self, worker_id: str) -> answers.WorkerDetails:
        """The worker reads its servers' inventories again; the answer shows its state before that."""
        return await self._link.ask("refresh_worker", answers.WorkerDetails, worker_id=worker_id)

    async def drain_workers(self) -> Sequence[answers.WorkerBody]:
        """All connected workers finish their jobs and leave."""
        return (await self._link.ask("drain_workers", answers.WorkerList)).workers

    async def pause_workers(self) -> Sequence[answers.WorkerBody]:
        return (await self._link.ask("pause_workers", answers.WorkerList)).workers

    async def resume_workers(self) -> Sequence[answers.WorkerBody]:
        return (await self._link.ask("resume_workers", answers.WorkerList)).workers

    async def remove_worker(self, worker_id: str) -> None:
        await self._link.ask("remove_worker", type(None), worker_id=worker_id)

    async def blocks(self) -> Sequence[answers.BlockBody]:
        return (await self._link.ask("list_blocks", answers.BlockList)).blocks

    async def lift_block(self, worker_id: str, target: str) -> None:
        await self._link.ask("lift_block", type(None), worker_id=worker_id, target=target)

    # the hub

    async def health(self) -> answers.HealthBody:
        return await self._link.ask("health", answers.HealthBody)


def _traced(traceparent: str | None) -> dict[str, str]:
    return {} if traceparent is None else {"traceparent": traceparent}


def _not_answered(error: Refusal | Fault) -> Refusal:
    if isinstance(error, Refusal):
        return error
    return Refusal(RefusalCode.UNAVAILABLE, f"it is unknown whether the hub accepted this job: {error}")


def _job_or_refusal(item: answers.BatchItem) -> answers.SubmittedBody | Refusal:
    if item.job is not None:
        return item.job
    found = refusal_in(item.status, msgspec.json.encode(item.problem))
    return found if isinstance(found, Refusal) else Refusal(RefusalCode.UNAVAILABLE, str(found))
