"""The pool's events: their names and fields, their creation from the engine's events, and their delivery to handlers.

| event | fields, in addition to `at`, and for jobs `job_id`, `workflow_hash`, `metadata` |
|---|---|
| `pool:ready` | `message`: the pool has contacted every server once |
| `pool:error` | `message`, `error_type`: a handler or the pool itself failed |
| `job:queued` | |
| `job:waiting` | `message`: why no server can take it now; after two seconds, and when the cause changes |
| `job:accepted` | `client_id`, `prompt_id` |
| `job:started` | `client_id`, `prompt_id`: execution began |
| `job:progress` | `client_id`, `node`, `value`, `max`, `percentage`, `message`, `remaining_s` |
| `job:preview` | `client_id`, `node`, `image`, `image_type` |
| `job:output` | `client_id`, `node`, `output`, `files` |
| `job:completed` | `client_id`, `result` |
| `job:failed` | `client_id`, `failure`, `message`, `attempt`, `will_retry`: only `will_retry=False` is final |
| `job:retrying` | `retry_at`, `message`, `attempt`: the number of the ended attempt |
| `job:cancelled` | `reason`, if given |
| `client:state` | `client_id`, `state`, `message` |
| `client:blocked_workflow` | `client_id`, `workflow_hash`, `blocked_until`, `failures`, `reason`, `message` |
| `client:unblocked_workflow` | `client_id`, `workflow_hash`, `reason`: why it ended |

One fact may become two events: a failure and its retry. Handlers run one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.local_bus import LocalSubscription
from comfyfleet.model.fact import Event, Fact, FactKind, FleetEvent, ProgressEvent, ProgressKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import JobResult, OutputFile

EventName = Literal[
    "pool:ready",
    "pool:error",
    "job:queued",
    "job:waiting",
    "job:accepted",
    "job:started",
    "job:progress",
    "job:preview",
    "job:output",
    "job:completed",
    "job:failed",
    "job:retrying",
    "job:cancelled",
    "client:state",
    "client:blocked_workflow",
    "client:unblocked_workflow",
]
EVENT_NAMES: tuple[str, ...] = get_args(EventName)

_LOG = logging.getLogger(__name__)


class PoolEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. Its name determines which fields are set: see the table of the module."""

    name: str
    at: float
    job_id: str | None = None
    workflow_hash: str | None = None
    metadata: dict[str, Any] = {}
    client_id: str | None = None
    prompt_id: str | None = None
    node: str | None = None
    value: float | None = None
    max: float | None = None
    percentage: float | None = None
    message: str = ""
    image: bytes | None = None
    image_type: str | None = None
    output: dict[str, Any] | None = None
    files: tuple[OutputFile, ...] = ()
    result: JobResult | None = None
    failure: Failure | None = None
    will_retry: bool | None = None
    retry_at: float | None = None
    attempt: int | None = None
    state: str | None = None
    blocked_until: float | None = None
    failures: int | None = None
    reason: str | None = None
    error_type: str | None = None
    remaining_s: float | None = None
    """The estimated rest of the run. None: not known yet."""


Handler = Callable[[PoolEvent], object] | Callable[[PoolEvent], Awaitable[object]]


class _Listener(msgspec.Struct, frozen=True, eq=False):
    name: str
    handler: Handler
    where: Mapping[str, Any]

    def wants(self, event: PoolEvent) -> bool:
        if self.name not in (event.name, "*"):
            return False
        return all(event.metadata.get(key) == value for key, value in self.where.items())


class JobLabel(msgspec.Struct, frozen=True, gc=False):
    """The fields of every event of a job."""

    public_id: str
    workflow_hash: str
    metadata: dict[str, Any]


_PROGRESS_EVENTS = {
    ProgressKind.ACCEPTED: "job:accepted",
    ProgressKind.STARTED: "job:started",
    ProgressKind.PROGRESS: "job:progress",
    ProgressKind.PREVIEW: "job:preview",
    ProgressKind.OUTPUT: "job:output",
}


def of_progress(progress: ProgressEvent, label: JobLabel) -> PoolEvent:
    data = progress.data
    return PoolEvent(
        _PROGRESS_EVENTS[progress.kind],
        progress.at,
        label.public_id,
        label.workflow_hash,
        label.metadata,
        client_id=progress.worker_id,
        prompt_id=data.get("prompt_id"),
        node=data.get("node"),
        value=data.get("value"),
        max=data.get("max"),
        percentage=data.get("percentage"),
        remaining_s=data.get("remaining_s"),
        message=data.get("message") or "",
        image=progress.image,
        image_type=data.get("format"),
        output=data.get("output"),
        files=msgspec.convert(data.get("files") or (), tuple[OutputFile, ...]),
    )


def of_fact(
    fact: Fact, label: JobLabel, result: JobResult | None = None, failure: Failure | None = None
) -> Iterator[PoolEvent]:
    """`result` and `failure` come from the store. Without a failure the event has the fact's message."""
    data = fact.data or {}
    base = PoolEvent("", fact.at, label.public_id, label.workflow_hash, label.metadata)

    def event(name: str, **fields: Any) -> PoolEvent:
        return msgspec.structs.replace(base, name=name, **fields)

    match fact.kind:
        case FactKind.QUEUED:
            yield event("job:queued")
        case FactKind.COMPLETED:
            yield event("job:completed", client_id=data.get("worker_id"), result=result)
        case FactKind.RETRYING | FactKind.FAILED:
            will_retry = fact.kind is FactKind.RETRYING
            yield event(
                "job:failed",
                client_id=data.get("worker_id"),
                failure=failure or _failure(data),
                message=str(data.get("why", "")),
                will_retry=will_retry,
                attempt=data.get("attempt"),
            )
            if will_retry:
                retry_at = data.get("not_before") or fact.at
                message = str(data["message"])
                yield event("job:retrying", retry_at=retry_at, message=message, attempt=data.get("attempt"))
        case FactKind.RELEASED:
            message = ": ".join(str(data[name]) for name in ("reason", "note") if name in data)
            yield event("job:retrying", retry_at=fact.at, message=message, attempt=data.get("attempt"))
        case FactKind.CANCELLED:
            yield event("job:cancelled", reason=data.get("reason"))
        case _:
            # The job's record shows leases, pauses and priorities.
            return


def _failure(data: dict[str, Any]) -> Failure:
    return Failure(FailureKind(data["kind"]), str(data["message"]), node_id=data.get("node_id"))


def of_fleet(fleet: FleetEvent) -> PoolEvent | None:
    data = fleet.data
    if fleet.kind == "ready":
        return PoolEvent("pool:ready", fleet.at, message=data["message"])
    if fleet.kind == "waiting":
        return PoolEvent("job:waiting", fleet.at, **data)
    if fleet.kind == "state":
        return PoolEvent(
            "client:state",
            fleet.at,
            client_id=fleet.worker_id,
            state=data["state"],
            message=data["message"],
        )
    if fleet.kind not in ("blocked", "unblocked") or "workflow_hash" not in data:
        return None
    return PoolEvent(
        f"client:{fleet.kind}_workflow",
        fleet.at,
        workflow_hash=str(data["workflow_hash"]),
        client_id=fleet.worker_id,
        blocked_until=data.get("blocked_until"),
        failures=data.get("failures"),
        reason=str(data.get("why", data["reason"])),
        message=str(data.get("message") or ""),
    )


class EventDispatcher:
    """Delivers events to handlers and to watchers of single jobs.

    Handlers are called in the order of the events. A failing handler does not affect others.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listeners: list[_Listener] = []
        self._events = LocalSubscription(lambda _: None)
        self._labels: dict[JobId, JobLabel] = {}
        """The labels of open jobs with published events."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._engine.bus.listen(self.on_event)
        self._task = asyncio.get_running_loop().create_task(self._publish(), name="pool events")

    async def close(self) -> None:
        """Return when all pending events are delivered."""
        self._events.close()
        if self._task is not None:
            await self._task

    def on(self, name: str, handler: Handler, where: Mapping[str, Any] | None) -> Callable[[], None]:
        if name != "*" and name not in EVENT_NAMES:
            raise ValueError(
                f"there is no event {name!r}; the events are: {', '.join(EVENT_NAMES)}, or '*' for all"
            )
        listener = _Listener(name, handler, where or {})
        self._listeners.append(listener)

        def leave() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return leave

    def on_event(self, event: Event) -> None:
        if self._listeners:
            self._events.offer(event)

    async def watch(self, job_id: JobId) -> AsyncGenerator[PoolEvent, None]:
        """The stored events of the job, then all further events until it ends."""
        label = await self._read_label(job_id)
        async with contextlib.aclosing(self._engine.watch(job_id)) as watched:
            async for event in watched:
                for each in await self._of_job(event, label):
                    yield each

    async def _publish(self) -> None:
        async for event in self._events:
            now = self._engine.now()
            try:
                events = await self._events_of(event)
            except Exception as error:
                # A connector may report invalid data. Later events must still be delivered.
                _LOG.exception("an event could not be published: %r", event)
                message = f"a {event.kind} event could not be published: {error}"
                events = (PoolEvent("pool:error", now, message=message, error_type=type(error).__name__),)
            for each in events:
                await self._notify(each, now)

    async def _notify(self, event: PoolEvent, at: float) -> None:
        for listener in tuple(self._listeners):
            if not listener.wants(event):
                continue
            try:
                answer = listener.handler(event)
                if inspect.isawaitable(answer):
                    await answer
            except Exception as error:
                _LOG.exception("a handler of %s failed", event.name)
                if event.name != "pool:error":
                    message = f"a handler of {event.name} failed: {error}"
                    report = PoolEvent("pool:error", at, message=message, error_type=type(error).__name__)
                    await self._notify(report, at)

    async def _events_of(self, event: Event) -> Iterable[PoolEvent]:
        if isinstance(event, FleetEvent):
            of_server = of_fleet(event)
            return () if of_server is None else (of_server,)
        label = self._labels.get(event.job_id) or await self._read_label(event.job_id)
        if isinstance(event, Fact) and event.kind.is_final:
            self._labels.pop(event.job_id, None)
        else:
            self._labels[event.job_id] = label
        return await self._of_job(event, label)

    async def _of_job(self, event: Event, label: JobLabel) -> Iterable[PoolEvent]:
        assert not isinstance(event, FleetEvent)
        if not isinstance(event, Fact):
            return (of_progress(event, label),)
        result = failure = None
        if event.kind is FactKind.COMPLETED:
            job = await self._engine.reader.records.get(event.job_id)
            result = None if job is None else job.result
        elif event.kind in (FactKind.FAILED, FactKind.RETRYING):
            failure = await self._failure(event)
        return list(of_fact(event, label, result, failure))

    async def _failure(self, fact: Fact) -> Failure | None:
        """The whole failure: a fact has no traceback."""
        number = (fact.data or {}).get("lease")
        for attempt in await self._engine.reader.attempts(fact.job_id):
            if attempt.lease_number == number:
                return attempt.failure
        return None

    async def _read_label(self, job_id: JobId) -> JobLabel:
        job = await self._engine.reader.records.get(job_id)
        if job is None:
            return JobLabel(job_id, "", {})
        return JobLabel(job.reference or job_id, job.workflow_hash, job.payload.metadata or {})
