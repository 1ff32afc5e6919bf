"""The slots of an agent: each polls, runs the leased job and polls again. `agent.py` runs a lease.

A parked poll is an idle slot, so closing the slots takes a worker out of matching. `Outage` logs once when
the hub stops answering and once when it answers again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from comfyfleet.model.calls import LeasedJob, Poll
from comfyfleet.model.errors import ComfyFleetError, Refusal, RefusalCode
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.ports import WorkerApi
from comfyfleet.worker.journal import StartedAttempt
from comfyfleet.worker.settings import AgentSettings, Backoff, is_retryable

_log = logging.getLogger(__name__)


class Outage:
    def __init__(self, worker_id: WorkerId) -> None:
        self._worker_id = worker_id
        self._began_at = 0.0
        self._told: str | None = None
        """The cause that was logged last; empty for any fault. None: no outage."""
        self._missed_polls = False
        self._missed_beats = False
        self._beats = 0
        """Heartbeats answered since the last missed call."""

    def poll_missed(self, error: Exception) -> None:
        self._missed_polls = True
        self.miss(error)

    def miss(self, error: Exception) -> None:
        """A call was refused or got no answer. The same cause is logged once."""
        self._beats = 0
        is_away = is_retryable(error)
        why = "" if is_away else str(error)
        if why == self._told:
            _log.debug("worker %s: the hub still does not answer: %s", self._worker_id, error)
            return
        if self._told is None:
            self._began_at = time.monotonic()
        self._told = why
        effect = "gets no jobs for now" if is_away else "is refused"
        cause = str(error) if isinstance(error, ComfyFleetError) else repr(error)
        _log.warning("worker %s %s and tries again: %s", self._worker_id, effect, cause)

    def answered(self) -> None:
        if self._told is None:
            return
        self._told = None
        self._missed_polls = self._missed_beats = False
        away_s = time.monotonic() - self._began_at
        _log.warning("worker %s: the hub answers again after %.0f s", self._worker_id, away_s)

    def registered(self) -> None:
        """A hub that is stopping registers workers and refuses their polls."""
        if not self._missed_polls:
            self.answered()

    def heartbeat_missed(self) -> None:
        self._missed_beats, self._beats = self._told is not None, 0

    def heartbeat_answered(self) -> None:
        """A parked poll is answered late, so heartbeats can end an outage too: if they were missed, and if
        two in a row are answered with no refused poll between them."""
        self._beats += 1
        if self._missed_beats and self._beats > 1:
            self.answered()


class AgentContext(NamedTuple):
    """What each part of an agent needs."""

    api: WorkerApi
    worker_id: WorkerId
    settings: AgentSettings
    outage: Outage


_LONGEST_TURN_S = 0.01
"""A slot whose calls all return at once still yields to the others this often."""


class Slots:
    """`take` runs a lease to its end and `clear_away` stops a run without a lease. `next_begun` gives
    attempts of an earlier process, which come before new polls. `register_again` gets the number that
    `registration` had before the poll, when the hub does not know the worker.
    """

    def __init__(
        self,
        context: AgentContext,
        take: Callable[[LeasedJob, PollId], Awaitable[None]],
        registration: Callable[[], int],
        register_again: Callable[[int], Awaitable[None]],
        next_begun: Callable[[], StartedAttempt | None],
        clear_away: Callable[[StartedAttempt], Awaitable[None]],
    ) -> None:
        self.idle = asyncio.Event()
        """Set while no slot polls, runs or reports."""
        self.instance = ""
        self._api, self._worker_id, self._settings, self._outage = context
        self._take = take
        self._registration = registration
        self._register_again = register_again
        self._next_begun = next_begun
        self._clear_away = clear_away
        self._is_open = asyncio.Event()
        self._parked: set[asyncio.Task[Any]] = set()
        self._recalled: set[asyncio.Task[Any]] = set()
        self._resting = 0
        # A repeated poll needs the same id, a new one another id, also after a restart under the same name.
        self._poll_prefix = secrets.token_hex(8)
        self._polls = 0

    def open(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        """Stops polling. Running jobs go on."""
        self._is_open.clear()
        self.cancel_polls()

    def cancel_polls(self) -> None:
        """Ends the parked polls. While the slots are open they poll again at once, under the same ids."""
        # The calling task is not parked, even if it is listed.
        for task in self._parked - self._recalled - {asyncio.current_task()}:
            self._recalled.add(task)
            task.cancel()

    async def run_one(self) -> None:
        """Runs one slot for ever."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._settings)
        poll: Poll | None = None
        begun: StartedAttempt | None = None
        turn_ends_at = loop.time() + _LONGEST_TURN_S
        while True:
            if not self._is_open.is_set():
                await self._rest()
            if begun is None:
                begun = self._next_begun()
            if begun is not None:
                # The earlier process's poll id gets its lease again, if that is still alive.
                asked = Poll(self._worker_id, PollId(begun.poll_id), 0.0, self.instance)
            else:
                asked = poll = poll or self._new_poll()
            is_answered, job = await self._poll(asked, backoff)
            if not is_answered:
                # The hub may have granted a lease whose answer was lost: the slot repeats the same poll.
                continue
            if begun is None:
                poll = None
            else:
                if job is None or job.attempt_id != begun.attempt_id:
                    await self._clear_away(begun)
                begun = None
            if job is not None:
                await self._take(job, asked.poll_id)
            if loop.time() >= turn_ends_at:
                await asyncio.sleep(0)
                turn_ends_at = loop.time() + _LONGEST_TURN_S

    def _new_poll(self) -> Poll:
        self._polls += 1
        poll_id = PollId(f"{self._poll_prefix}-{self._polls}")
        return Poll(self._worker_id, poll_id, self._settings.poll_wait_s, self.instance)

    async def _rest(self) -> None:
        self._resting += 1
        if self._resting == self._settings.slots:
            self.idle.set()
        try:
            await self._is_open.wait()
        finally:
            self._resting -= 1
            self.idle.clear()

    async def _poll(self, poll: Poll, backoff: Backoff) -> tuple[bool, LeasedJob | None]:
        task = asyncio.current_task()
        assert task is not None
        registration = self._registration()
        self._parked.add(task)
        try:
            try:
                job = await self._api.poll(poll)
                backoff.reset()
                self._outage.answered()
                return True, job
            except Refusal as refusal:
                if refusal.code is RefusalCode.NOT_FOUND:
                    await self._register_again(registration)
                else:
                    self._outage.poll_missed(refusal)
            except Exception as error:
                self._outage.poll_missed(error)
            await asyncio.sleep(backoff.next_s())
        except asyncio.CancelledError:
            if task.cancelling() > (task in self._recalled):
                raise
        finally:
            self._parked.discard(task)
            if task in self._recalled:
                self._recalled.discard(task)
                task.uncancel()
        return False, None
