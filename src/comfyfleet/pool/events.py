"""The pool's events: their names, their fields, and who hears them.

| event | fields beside `at`, and for a job's event `job_id`, `workflow_hash`, `metadata` |
|---|---|
| `pool:ready` | `message`: every server was asked once |
| `pool:error` | `message`, `error_type`: a handler of yours failed, or something of ours did |
| `job:queued` | |
| `job:waiting` | `message`: no server can take it now, and why; after two seconds, and when the cause changes |
| `job:accepted` | `client_id`, `prompt_id` |
| `job:started` | `client_id`, `prompt_id`: execution began |
| `job:progress` | `client_id`, `node`, `value`, `max`, `percentage`, `message`, `remaining_s` |
| `job:preview` | `client_id`, `node`, `image`, `image_type` |
| `job:output` | `client_id`, `node`, `output`, `files` |
| `job:completed` | `client_id`, `result` |
| `job:failed` | `client_id`, `failure`, `message`, `attempt`, `will_retry`: only `will_retry=False` is final |
| `job:retrying` | `retry_at`, `message`, `attempt`: the number of the one that ended |
| `job:cancelled` | `reason`, where one was given |
| `client:state` | `client_id`, `state`, `message` |
| `client:blocked_workflow` | `client_id`, `workflow_hash`, `blocked_until`, `failures`, `reason`, `message` |
| `client:unblocked_workflow` | `client_id`, `workflow_hash`, `reason`: why it ended |
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, get_args

import msgspec

from comfyfleet.model.failure import Failure
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
    """One event. Which fields are set depends on its name; the module's table has them."""

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
    """How long the run will still take. None: nobody can tell yet."""


Handler = Callable[[PoolEvent], object] | Callable[[PoolEvent], Awaitable[object]]


class _Listener:
    __slots__ = ("handler", "name", "where")

    def __init__(self, name: str, handler: Handler, where: Mapping[str, Any]) -> None:
        self.name = name
        self.handler = handler
        self.where = where

    def wants(self, event: PoolEvent) -> bool:
        if self.name not in (event.name, "*"):
            return False
        return all(event.metadata.get(key) == value for key, value in self.where.items())


class Listeners:
    """Who hears what. Handlers are called in the order of the events; one that fails harms nobody else."""

    def __init__(self) -> None:
        self._listeners: list[_Listener] = []
        self._names: frozenset[str] = frozenset()

    def add(self, name: str, handler: Handler, where: Mapping[str, Any] | None) -> Callable[[], None]:
        if name != "*" and name not in EVENT_NAMES:
            raise ValueError(
                f"there is no event {name!r}; the events are: {', '.join(EVENT_NAMES)}, or '*' for all"
            )
        listener = _Listener(name, handler, where or {})
        self._listeners.append(listener)
        self._note_names()

        def leave() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                self._note_names()

        return leave

    def _note_names(self) -> None:
        self._names = frozenset(listener.name for listener in self._listeners)

    def __bool__(self) -> bool:
        return bool(self._listeners)

    async def tell(self, event: PoolEvent, at: float) -> None:
        if event.name not in self._names and "*" not in self._names:
            return
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
                    told = PoolEvent("pool:error", at, message=message, error_type=type(error).__name__)
                    await self.tell(told, at)
