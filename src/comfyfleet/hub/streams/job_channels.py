"""One channel for each watched job: its facts and latest progress, read from the store once for all watchers.

The bus may lose a notification, so a channel also polls every few seconds. It reads facts from the store in
order, and only the last fact says whether the job has ended. The end is published with its result
(docs/decisions/0030).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.job_operations import no_job, read_together
from comfyfleet.hub.local_worker_api import sanitized
from comfyfleet.hub.streams.feed import Feed, FeedEntry
from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.fact import Event, Fact, ProgressEvent, ProgressKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.tracing import in_background, log_failure
from comfyfleet.wire.progress import ProgressBody, fact_body, known_fields, progress_event_body, remaining_s
from comfyfleet.wire.status_names import status_name

_ALL = {"percentage": 100.0}


class JobProgress:
    """Progress events change it; a new fact replaces it."""

    __slots__ = (
        "_expected_s",
        "_job_id",
        "_lease",
        "_phase",
        "_remaining_s",
        "_reported",
        "_reported_at",
        "_started_at",
        "_updated_at",
        "_worker_id",
    )

    def __init__(self, dispatch: Dispatch, record: Job, expected_s: float | None) -> None:
        lease = dispatch.lease
        self._job_id = dispatch.job_id
        self._phase = dispatch.phase
        self._expected_s = expected_s
        self._worker_id = record.worker_id if lease is None else lease.worker_id
        self._lease = dispatch.lease_number or None if lease is None else lease.number
        self._started_at = record.started_at
        self._updated_at = record.submitted_at
        if lease is not None:
            is_of_this_lease = record.started_at is not None and record.started_at >= lease.leased_at
            self._started_at = record.started_at if is_of_this_lease else lease.leased_at
            self._updated_at = self._started_at or lease.leased_at
        elif dispatch.phase is Phase.QUEUED:
            self._started_at = None
        if record.completed_at is not None:
            self._updated_at = record.completed_at
        self._reported_at = 0.0
        self._remaining_s: float | None = None
        """As the worker reported with the last progress."""
        self._reported: dict[str, Any] = _ALL if dispatch.phase is Phase.COMPLETED else {}

    def update(self, progress: ProgressEvent) -> None:
        if self._phase is Phase.QUEUED and progress.lease_number > (self._lease or 0):
            # Progress can overtake the fact of its lease.
            self._phase = Phase.LEASED
        if self._phase is not Phase.LEASED or (
            progress.lease_number and progress.lease_number < (self._lease or 0)
        ):
            return
        if progress.lease_number and progress.lease_number != self._lease:
            self._reported, self._started_at, self._lease = {}, progress.at, progress.lease_number
            self._remaining_s = None
        self._worker_id = progress.worker_id or self._worker_id
        self._updated_at = progress.at
        if progress.kind is ProgressKind.STARTED:
            self._started_at = progress.at
        elif progress.kind is ProgressKind.PROGRESS:
            self._reported = known_fields(progress.data)
            self._remaining_s, self._reported_at = remaining_s(progress.data), progress.at

    def body(self, now: float) -> ProgressBody:
        estimate = None
        if self._phase is Phase.LEASED and self._remaining_s is not None:
            estimate = self._reported_at + self._remaining_s
        elif self._phase is Phase.LEASED and self._started_at is not None and self._expected_s is not None:
            estimate = self._started_at + self._expected_s
        return ProgressBody(
            self._job_id,
            status_name(self._phase),
            **self._reported,
            worker_id=self._worker_id,
            lease=self._lease,
            started_at=self._started_at,
            updated_at=self._updated_at,
            # An estimate in the past was wrong.
            estimated_completion=None if estimate is None or estimate < now else estimate,
        )


async def progress_of(engine: Engine, dispatch: Dispatch, record: Job) -> JobProgress:
    expected_s = None
    if dispatch.lease is not None:
        expected_s = await engine.expected_s(dispatch.workflow_hash, dispatch.lease.worker_id)
    job_progress = JobProgress(dispatch, record, expected_s)
    if dispatch.lease is not None and (progress := await engine.latest_progress(dispatch)) is not None:
        job_progress.update(progress)
    return job_progress


_LOG = logging.getLogger(__name__)

_KEEP_PROGRESS = 64
_RETRY_S = 1.0
_TRIES = 20


class JobChannel(Feed):
    """`facts`: all facts of the job, shared with later watchers."""

    def __init__(self, engine: Engine, job_id: JobId, ended: Callable[[JobChannel], None]) -> None:
        super().__init__(_KEEP_PROGRESS)
        self._engine = engine
        self._ended = ended
        self.job_id = job_id
        self._progress: JobProgress
        self._reading: asyncio.Task[None] | None = None
        self._is_look_pending = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_closed = False
        self.tenant = TenantId("")
        self.facts: list[FeedEntry] = []

    async def load(self) -> None:
        """Raises `not_found`."""
        await self._read()

    @property
    def last_published(self) -> int:
        """Number of the newest known fact."""
        return self.facts[-1].number if self.facts else 0

    @property
    def progress(self) -> ProgressBody:
        return self._progress.body(self._engine.now())

    def first(self, after: int) -> bytes:
        """The start of a stream for a watcher that knows the facts up to `after`."""
        pieces = [entry.sse for entry in self.facts if entry.number > after]
        if not self.is_over:
            pieces.append(FeedEntry("progress", self.progress).sse)
        return b"".join(pieces)

    def on_event(self, event: Fact | ProgressEvent) -> None:
        if self.is_over:
            return
        if isinstance(event, Fact):
            if event.number > self.last_published:
                self.read_soon()
        elif event.kind is ProgressKind.PREVIEW:
            self.add(FeedEntry(event.kind.value, progress_event_body(event)), only_newest=True)
        else:
            self._progress.update(event)
            if event.kind is not ProgressKind.PROGRESS:
                self.add(FeedEntry(event.kind.value, progress_event_body(event)))
            self.add(FeedEntry("progress", self.progress))

    def end(self) -> None:
        self._ended(self)
        super().end()

    def close(self) -> None:
        """Ends the channel for all watchers."""
        self.is_closed = True
        if self._reading is not None:
            self._reading.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.end()

    def read_soon(self) -> None:
        """Reads the job from the store in the background. A call during a read causes one more read."""
        if self._reading is not None:
            self._is_look_pending = True
        elif not self.is_over:
            self._reading = in_background(self._follow(), name="job channel")

    async def _follow(self) -> None:
        try:
            while True:
                self._is_look_pending = False
                await self._read()
                if not self._is_look_pending or self.is_over:
                    return
        except Refusal:
            # The job was deleted while it was watched.
            self.end()
        except Fault as fault:
            _LOG.warning("cannot read job %s for its watchers; will try again: %s", self.job_id, fault)
            self._look_later()
        except Exception:
            log_failure(_LOG, "cannot read job %s for its watchers; will try again", self.job_id)
            self._look_later()
        finally:
            self._reading = None

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_RETRY_S, self.read_soon)

    async def _read(self) -> None:
        """Reads the facts and then the job. If they disagree about the end, the job changed in between and
        both are read again: the end is published with its result, or not yet."""
        reader = self._engine.reader
        for _ in range(_TRIES):
            facts = await reader.facts(self.job_id, self.last_published)
            if not facts and self.facts:
                # Nothing new, or the job was deleted.
                if await reader.load(self.job_id) is None:
                    raise no_job(self.job_id)
                return
            found = await read_together(reader, self.job_id)
            if found is None or not facts:
                raise no_job(self.job_id)
            dispatch, record = found
            if _end_of(facts[-1]) == (dispatch.round if dispatch.phase.is_final else None):
                await self._publish(dispatch, record, facts)
                return
        raise Fault(f"job {self.job_id} changes faster than it can be read; try again")

    async def _publish(self, dispatch: Dispatch, record: Job, facts: list[Fact]) -> None:
        self.tenant = record.tenant
        self._progress = await progress_of(self._engine, dispatch, record)
        is_over = facts[-1].kind.is_final
        result = None if record.result is None else await sanitized(record.result)
        for fact in facts:
            outcome = (result, record.failure) if is_over and fact is facts[-1] else ()
            entry = FeedEntry(fact.kind.value, fact_body(fact, *outcome), fact.number)
            self.facts.append(entry)
            self.add(entry)
        if is_over:
            self.end()
        else:
            self.add(FeedEntry("progress", self.progress))


def _end_of(fact: Fact) -> int | None:
    """The round that the fact ends, if any."""
    return fact.round if fact.kind.is_final else None


class JobChannels:
    """The channels of all jobs that are watched at this hub."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[JobId, JobChannel] = {}
        self._loading: dict[JobId, asyncio.Task[JobChannel]] = {}
        self._following: dict[JobId, ExitStack] = {}
        self._leave_bus = engine.bus.listen(self._on_event)

    def __len__(self) -> int:
        return len(self._open)

    async def subscribe(self, job_id: JobId, wake: Callable[[], None]) -> JobChannel:
        """Raises `not_found`. The caller must call `unsubscribe` afterwards."""
        while True:
            channel = self._open.get(job_id)
            if channel is None:
                loading = self._loading.get(job_id)
                if loading is None:
                    loading = self._loading[job_id] = asyncio.ensure_future(self._load(job_id))
                    loading.add_done_callback(lambda _: self._loading.pop(job_id, None))
                try:
                    # Shielded: other watchers wait for the same channel.
                    channel = await asyncio.shield(loading)
                except asyncio.CancelledError:
                    loading.add_done_callback(lambda done: done.cancelled() or done.exception())
                    loading.add_done_callback(lambda _: self._close_if_empty(job_id))
                    raise
            if (channel.is_over and not channel.is_closed) or self._open.get(job_id) is channel:
                channel.subscribe(wake)
                return channel
            # All other watchers left before this one resumed.

    def unsubscribe(self, channel: JobChannel, wake: Callable[[], None]) -> None:
        channel.unsubscribe(wake)
        self._close_if_empty(channel.job_id)

    async def _load(self, job_id: JobId) -> JobChannel:
        channel = JobChannel(self._engine, job_id, self._ended)
        await channel.load()
        if not channel.is_over:
            self._open[job_id] = channel
            following = self._following[job_id] = ExitStack()
            following.enter_context(self._engine.following(job_id, channel.last_published, channel.read_soon))
            # Events between the read and now went unnoticed.
            channel.read_soon()
        return channel

    def _ended(self, channel: JobChannel) -> None:
        """Its watchers read to the end; a new watcher opens a new channel."""
        if self._open.get(channel.job_id) is channel:
            del self._open[channel.job_id]
            self._following.pop(channel.job_id).close()

    def _close_if_empty(self, job_id: JobId) -> None:
        channel = self._open.get(job_id)
        if channel is not None and not channel.watchers:
            self._ended(channel)
            channel.close()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Fact | ProgressEvent) and (channel := self._open.get(event.job_id)) is not None:
            channel.on_event(event)

    def close(self) -> None:
        self._leave_bus()
        for loading in self._loading.values():
            loading.cancel()
        for channel in list(self._open.values()):
            self._ended(channel)
            channel.close()
