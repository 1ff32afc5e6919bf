"""Who hears what happens, in the pool's words: handlers one after the other, and whoever watches a single job.

What an event looks like is `translation.py`'s, who wants it `events.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

from comfyfleet.bus.local import LocalSubscription
from comfyfleet.engine.engine import Engine
from comfyfleet.model.fact import Event, Fact, FactKind, FleetEvent
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import JobId
from comfyfleet.pool.events import Handler, Listeners, PoolEvent
from comfyfleet.pool.translation import Label, of_fact, of_fleet, of_news
from comfyfleet.ports import Clock

_LOG = logging.getLogger(__name__)


class Teller:
    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._listeners = Listeners()
        self._heard = LocalSubscription(lambda _: None)
        self._labels: dict[JobId, Label] = {}
        """Of the jobs that handlers heard of and that have not ended."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._engine.bus.listen(self.hear)
        self._task = asyncio.get_running_loop().create_task(self._tell(), name="pool events")

    async def close(self) -> None:
        """Returns when everything that was heard is told."""
        self._heard.close()
        if self._task is not None:
            await self._task

    def on(self, name: str, handler: Handler, where: Mapping[str, Any] | None) -> Callable[[], None]:
        return self._listeners.add(name, handler, where)

    def hear(self, event: Event) -> None:
        if self._listeners:
            self._heard.offer(event)

    async def watch(self, job_id: JobId) -> AsyncGenerator[PoolEvent, None]:
        """Everything that is kept of the job's past, and what happens to it until it ends."""
        label = await self._read_label(job_id)
        async with contextlib.aclosing(self._engine.watch(job_id)) as watched:
            async for event in watched:
                for told in await self._of_job(event, label):
                    yield told

    async def _tell(self) -> None:
        async for event in self._heard:
            now = self._clock.now()
            try:
                events = await self._events_of(event)
            except Exception as error:
                # A connector may report what nobody can read; what comes after it is told all the same.
                _LOG.exception("an event could not be told of: %r", event)
                message = f"a {event.kind} event could not be told of: {error}"
                events = (PoolEvent("pool:error", now, message=message, error_type=type(error).__name__),)
            for told in events:
                await self._listeners.tell(told, now)

    async def _events_of(self, event: Event) -> Iterable[PoolEvent]:
        if isinstance(event, FleetEvent):
            told = of_fleet(event)
            return () if told is None else (told,)
        label = self._labels.get(event.job_id) or await self._read_label(event.job_id)
        if isinstance(event, Fact) and event.kind.is_final:
            self._labels.pop(event.job_id, None)
        else:
            self._labels[event.job_id] = label
        return await self._of_job(event, label)

    async def _of_job(self, event: Event, label: Label) -> Iterable[PoolEvent]:
        assert not isinstance(event, FleetEvent)
        if not isinstance(event, Fact):
            return (of_news(event, label),)
        result = failure = None
        if event.kind is FactKind.COMPLETED:
            job = await self._engine.store.records.get(event.job_id)
            result = None if job is None else job.result
        elif event.kind in (FactKind.FAILED, FactKind.RETRYING):
            failure = await self._failure(event)
        return list(of_fact(event, label, result, failure))

    async def _failure(self, fact: Fact) -> Failure | None:
        """All that is known of it; a fact has no room for tracebacks."""
        number = (fact.data or {}).get("lease")
        for attempt in await self._engine.store.attempts(fact.job_id):
            if attempt.lease_number == number:
                return attempt.failure
        return None

    async def _read_label(self, job_id: JobId) -> Label:
        job = await self._engine.store.records.get(job_id)
        if job is None:
            return Label(job_id, "", {})
        return Label(job.reference or job_id, job.workflow_hash, job.payload.metadata or {})
