"""The times in which an agent is not answered: told once when one begins, and once when it is over.

Every retry of polls and registrations ends here. What is tried again, and when, is for those who ask.
"""

from __future__ import annotations

import logging
import time

from comfyfleet.model.errors import ComfyFleetError
from comfyfleet.model.ids import WorkerId
from comfyfleet.worker.settings import is_worth_a_retry

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
