"""The slots of an agent: each polls, hands over what it got, and polls again; all can be called back from their polls.

A parked poll is an idle slot, so closing the gate here is what takes a worker out of the matching. What becomes of a
lease is for whoever takes it (`agent.py`, `attempt.py`).

The times in which an agent is not answered: told once when one begins, and once when it is over.

Every retry of polls and registrations ends here. What is tried again, and when, is for those who ask.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from comfyfleet.model.calls import LeasedJob, Poll
from comfyfleet.model.errors import ComfyFleetError, Refusal, RefusalCode
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.ports import WorkerApi
from comfyfleet.worker.journal import StartedAttempt
from comfyfleet.worker.settings import AgentSettings, Backoff, is_worth_a_retry

_log = logging.getLogger(__name__)


class Outage:
    def __init__(self, worker_id: WorkerId) -> None:
        self._worker_id = worker_id
        self._began_at = 0.0
        self._told: str | None = None
        """Why, as it was told last; empty for faults of every kind, of which the first is told. None: all is well."""
        self._missed_polls = False
        self._missed_beats = False
        self._beats = 0
        """Answered since anything was missed."""

    def poll_missed(self, error: Exception) -> None:
        self._missed_polls = True
        self.miss(error)

    def miss(self, error: Exception) -> None:
        """A call got no answer, or one that is no use. The same one over and over is one line."""
        self._beats = 0
        is_away = is_worth_a_retry(error)
        why = "" if is_away else str(error)
        if why == self._told:
            _log.debug("worker %s asks again: %s", self._worker_id, error)
            return
        if self._told is None:
            self._began_at = time.monotonic()
        self._told = why
        is_what = "gets no jobs for now" if is_away else "is refused"
        told = str(error) if isinstance(error, ComfyFleetError) else repr(error)
        _log.warning("worker %s %s and tries on: %s", self._worker_id, is_what, told)

    def answered(self) -> None:
        if self._told is None:
            return
        self._told = None
        self._missed_polls = self._missed_beats = False
        away_s = time.monotonic() - self._began_at
        _log.warning("worker %s is answered again, after %.0f s", self._worker_id, away_s)

    def registered(self) -> None:
        """A hub that is stopping still does that, and refuses polls."""
        if not self._missed_polls:
            self.answered()

    def beat_missed(self) -> None:
        self._missed_beats, self._beats = self._told is not None, 0

    def beat_answered(self) -> None:
        """Polls are parked for long before they are answered. Beats stand for them only where they were missed too, and
        only two with no poll refused between them: they may be answered while polls are not."""
        self._beats += 1
        if self._missed_beats and self._beats > 1:
            self.answered()


_LONGEST_TURN_S = 0.01
"""A slot whose calls all end at once still lets the others run this often."""


class Slots:
    """`take` runs a lease to its end, `clear_away` ends what runs without one; `next_begun` was begun before the agent
    came to life, and is asked for before anything new. `register_again` is called when the other side does not know
    the worker, with what `registration` said before the poll.
    """

    def __init__(
        self,
        api: WorkerApi,
        worker_id: WorkerId,
        settings: AgentSettings,
        take: Callable[[LeasedJob, PollId], Awaitable[None]],
        registration: Callable[[], int],
        register_again: Callable[[int], Awaitable[None]],
        next_begun: Callable[[], StartedAttempt | None],
        clear_away: Callable[[StartedAttempt], Awaitable[None]],
        outage: Outage,
    ) -> None:
        self.quiet = asyncio.Event()
        """Set while every slot rests: nothing is polled, run or reported."""
        self.instance = ""
        """As in the registration."""
        self._api = api
        self._worker_id = worker_id
        self._settings = settings
        self._take = take
        self._registration = registration
        self._register_again = register_again
        self._next_begun = next_begun
        self._clear_away = clear_away
        self._outage = outage
        self._gate = asyncio.Event()
        self._parked: set[asyncio.Task[Any]] = set()
        self._recalled: set[asyncio.Task[Any]] = set()
        self._resting = 0
        # The same poll asked again must have the same id, another one never: also after a restart under one name.
        self._poll_prefix = secrets.token_hex(8)
        self._polls = 0

    def open(self) -> None:
        self._gate.set()

    def close(self) -> None:
        """Takes nothing more. What runs goes on."""
        self._gate.clear()
        self.recall()

    def recall(self) -> None:
        """Ends the parked polls; while the gate is open they are asked again at once, under the same ids."""
        # The task that calls is not parked, whatever it was about to do.
        for task in self._parked - self._recalled - {asyncio.current_task()}:
            self._recalled.add(task)
            task.cancel()

    async def run_one(self) -> None:
        """The life of one slot."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._settings)
        poll: Poll | None = None
        begun: StartedAttempt | None = None
        turn_ends_at = loop.time() + _LONGEST_TURN_S
        while True:
            if not self._gate.is_set():
                await self._rest()
            if begun is None:
                begun = self._next_begun()
            if begun is not None:
                # The poll of back then gets the lease of back then, if that is still alive.
                asked = Poll(self._worker_id, PollId(begun.poll_id), 0.0, self.instance)
            else:
                asked = poll = poll or self._new_poll()
            is_answered, job = await self._poll(asked, backoff)
            if not is_answered:
                # The answer may be lost, not the lease: the same poll is asked again.
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
            self.quiet.set()
        try:
            await self._gate.wait()
        finally:
            self._resting -= 1
            self.quiet.clear()

    async def _poll(self, poll: Poll, backoff: Backoff) -> tuple[bool, LeasedJob | None]:
        """Whether there was an answer, and the answer."""
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
