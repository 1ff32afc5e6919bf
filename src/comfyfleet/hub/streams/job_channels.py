"""A room for each job that is watched: its facts and its newest progress, read from the store once for everybody in it.

The bus only says that something happened, and may lose that; every few seconds the room looks by itself. Facts are
read from the store in their order, so that none is missed and none comes twice, and the last of them alone says whether
the job has ended. An end goes out with what came of it (docs/decisions/0030). Progress goes out as it comes.

Where a job stands: its progress as one record, from the dispatch, the record and the newest that was heard of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.job_operations import read_together
from comfyfleet.hub.local_worker_api import made_safe
from comfyfleet.hub.streams.feed import Feed, FeedEntry
from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import Event, Fact, ProgressEvent, ProgressKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.tracing import in_background, log_failure
from comfyfleet.wire.progress import ProgressBody, fact_body, progress_event_body, remaining_s, told
from comfyfleet.wire.status_names import status_name

_ALL = {"percentage": 100.0}


class JobProgress:
    """Changes with each piece of news; a fact makes a new one."""

    __slots__ = (
        "_expected_s",
        "_job_id",
        "_lease",
        "_phase",
        "_remaining_s",
        "_started_at",
        "_told",
        "_told_at",
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
        self._told_at = 0.0
        self._remaining_s: float | None = None
        """As its worker said with the last progress."""
        self._told: dict[str, Any] = _ALL if dispatch.phase is Phase.COMPLETED else {}

    def hear(self, progress: ProgressEvent) -> None:
        if self._phase is Phase.QUEUED and progress.lease_number > (self._lease or 0):
            # Faster than the fact it follows; of an older lease it is only late.
            self._phase = Phase.LEASED
        if self._phase is not Phase.LEASED or (
            progress.lease_number and progress.lease_number < (self._lease or 0)
        ):
            return
        if progress.lease_number and progress.lease_number != self._lease:
            self._told, self._started_at, self._lease = {}, progress.at, progress.lease_number
            self._remaining_s = None
        self._worker_id = progress.worker_id or self._worker_id
        self._updated_at = progress.at
        if progress.kind is ProgressKind.STARTED:
            self._started_at = progress.at
        elif progress.kind is ProgressKind.PROGRESS:
            self._told = told(progress.data)
            self._remaining_s, self._told_at = remaining_s(progress.data), progress.at

    def body(self, now: float) -> ProgressBody:
        estimate = None
        if self._phase is Phase.LEASED and self._remaining_s is not None:
            estimate = self._told_at + self._remaining_s
        elif self._phase is Phase.LEASED and self._started_at is not None and self._expected_s is not None:
            estimate = self._started_at + self._expected_s
        return ProgressBody(
            self._job_id,
            status_name(self._phase),
            **self._told,
            worker_id=self._worker_id,
            lease=self._lease,
            started_at=self._started_at,
            updated_at=self._updated_at,
            # One that has passed was wrong, and nothing better is known.
            estimated_completion=None if estimate is None or estimate < now else estimate,
        )


async def progress_of(engine: Engine, dispatch: Dispatch, record: Job) -> JobProgress:
    expected_s = None
    if dispatch.lease is not None:
        expected_s = await engine.expected_s(dispatch.workflow_hash, dispatch.lease.worker_id)
    standing = JobProgress(dispatch, record, expected_s)
    if dispatch.lease is not None and (progress := await engine.newest(dispatch)) is not None:
        standing.hear(progress)
    return standing


_LOG = logging.getLogger(__name__)

_KEEP_NEWS = 64
_RETRY_S = 1.0
_TRIES = 20


class JobChannel(Feed):
    """`facts` are all that the job has; an entry of them is shared by whoever comes later."""

    def __init__(self, engine: Engine, job_id: JobId, ended: Callable[[JobChannel], None]) -> None:
        super().__init__(_KEEP_NEWS)
        self._engine = engine
        self._ended = ended
        self.job_id = job_id
        self._standing: JobProgress
        self._reading: asyncio.Task[None] | None = None
        self._is_asked_again = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_closed = False
        self.tenant = TenantId("")
        self.facts: list[FeedEntry] = []

    async def load(self) -> None:
        """Raises `not_found` for a job that is not there."""
        await self._read()

    @property
    def told(self) -> int:
        """The number of the newest fact that is known here."""
        return self.facts[-1].number if self.facts else 0

    @property
    def progress(self) -> ProgressBody:
        return self._standing.body(self._engine.now())

    def first(self, after: int) -> bytes:
        """For whoever comes in and knows the facts up to that number."""
        pieces = [entry.sse for entry in self.facts if entry.number > after]
        if not self.is_over:
            pieces.append(FeedEntry("progress", self.progress).sse)
        return b"".join(pieces)

    def hear(self, event: Fact | ProgressEvent) -> None:
        if self.is_over:
            return
        if isinstance(event, Fact):
            if event.number > self.told:
                self.look()
        elif event.kind is ProgressKind.PREVIEW:
            self.add(FeedEntry(event.kind.value, progress_event_body(event)), only_newest=True)
        else:
            self._standing.hear(event)
            if event.kind is not ProgressKind.PROGRESS:
                self.add(FeedEntry(event.kind.value, progress_event_body(event)))
            self.add(FeedEntry("progress", self.progress))

    def end(self) -> None:
        self._ended(self)
        super().end()

    def close(self) -> None:
        """Nobody is in it, or everybody has to go."""
        self.is_closed = True
        if self._reading is not None:
            self._reading.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.end()

    # reading

    def look(self) -> None:
        if self._reading is not None:
            self._is_asked_again = True
        elif not self.is_over:
            self._reading = in_background(self._follow(), name="room")

    async def _follow(self) -> None:
        try:
            while True:
                self._is_asked_again = False
                await self._read()
                if not self._is_asked_again or self.is_over:
                    return
        except Refusal:
            # Purged under the eyes of its watchers: there is nothing more to come.
            self.end()
        except Fault as fault:
            _LOG.warning(
                "job %s could not be read for its watchers; the next look tries: %s", self.job_id, fault
            )
            self._look_later()
        except Exception:
            log_failure(
                _LOG, "job %s could not be read for its watchers; the next look tries again", self.job_id
            )
            self._look_later()
        finally:
            self._reading = None

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_RETRY_S, self.look)

    async def _read(self) -> None:
        """Facts first, then the job as it is. Where they do not tell of the same end, or only one of them tells of one,
        somebody has changed it in between and both are read again: an end is told with what came of it, or not yet."""
        store = self._engine.store
        for _ in range(_TRIES):
            facts = await store.facts(self.job_id, self.told)
            if not facts and self.facts:
                # Nothing new. One that is gone has no facts either.
                if await store.load(self.job_id) is None:
                    raise _no_job(self.job_id)
                return
            found = await read_together(store, self.job_id)
            if found is None or not facts:
                raise _no_job(self.job_id)
            dispatch, record = found
            if _end_of(facts[-1]) == (dispatch.round if dispatch.phase.is_final else None):
                await self._tell(dispatch, record, facts)
                return
        raise Fault(f"job {self.job_id} changes faster than it can be read; try again")

    async def _tell(self, dispatch: Dispatch, record: Job, facts: list[Fact]) -> None:
        self.tenant = record.tenant
        self._standing = await progress_of(self._engine, dispatch, record)
        is_over = facts[-1].kind.is_final
        result = None if record.result is None else await made_safe(record.result)
        for fact in facts:
            came_of_it = (result, record.failure) if is_over and fact is facts[-1] else ()
            entry = FeedEntry(fact.kind.value, fact_body(fact, *came_of_it), fact.number)
            self.facts.append(entry)
            self.add(entry)
        if is_over:
            self.end()
        else:
            self.add(FeedEntry("progress", self.progress))


def _end_of(fact: Fact) -> int | None:
    """The round that it ends, if any."""
    return fact.round if fact.kind.is_final else None


def _no_job(job_id: JobId) -> Refusal:
    return Refusal(RefusalCode.NOT_FOUND, f"there is no job {job_id!r} (any more)")


class JobChannels:
    """Every job that somebody watches here, whatever the number of watchers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[JobId, JobChannel] = {}
        self._loading: dict[JobId, asyncio.Task[JobChannel]] = {}
        self._following: dict[JobId, ExitStack] = {}
        self._leave_bus = engine.bus.listen(self._hear)

    def __len__(self) -> int:
        return len(self._open)

    async def enter(self, job_id: JobId, wake: Callable[[], None]) -> JobChannel:
        """Raises `not_found`. Whoever entered leaves by `leave`."""
        while True:
            room = self._open.get(job_id)
            if room is None:
                loading = self._loading.get(job_id)
                if loading is None:
                    loading = self._loading[job_id] = asyncio.ensure_future(self._load(job_id))
                    loading.add_done_callback(lambda _: self._loading.pop(job_id, None))
                try:
                    # Shielded: whoever hangs up must not take the room from those who came after.
                    room = await asyncio.shield(loading)
                except asyncio.CancelledError:
                    loading.add_done_callback(lambda done: done.cancelled() or done.exception())
                    loading.add_done_callback(lambda _: self._close_if_empty(job_id))
                    raise
            if (room.is_over and not room.is_closed) or self._open.get(job_id) is room:
                room.join(wake)
                return room
            # Everybody else had come and gone before this one had his turn.

    def leave(self, room: JobChannel, wake: Callable[[], None]) -> None:
        room.leave(wake)
        self._close_if_empty(room.job_id)

    async def _load(self, job_id: JobId) -> JobChannel:
        room = JobChannel(self._engine, job_id, self._ended)
        await room.load()
        if not room.is_over:
            self._open[job_id] = room
            following = self._following[job_id] = ExitStack()
            following.enter_context(self._engine.following(job_id, room.told, room.look))
            # What happened between the look and now was told to nobody.
            room.look()
        return room

    def _ended(self, room: JobChannel) -> None:
        """Whoever is in it reads on to its end; whoever comes now finds the job as it is then."""
        if self._open.get(room.job_id) is room:
            del self._open[room.job_id]
            self._following.pop(room.job_id).close()

    def _close_if_empty(self, job_id: JobId) -> None:
        room = self._open.get(job_id)
        if room is not None and not room.watchers:
            self._ended(room)
            room.close()

    def _hear(self, event: Event) -> None:
        if isinstance(event, Fact | ProgressEvent) and (room := self._open.get(event.job_id)) is not None:
            room.hear(event)

    def close(self) -> None:
        self._leave_bus()
        for loading in self._loading.values():
            loading.cancel()
        for room in list(self._open.values()):
            self._ended(room)
            room.close()
