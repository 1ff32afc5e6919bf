"""How full the queue is, for a job that wants to come in.

A store in this process is asked each time, since that costs nothing. One that is shared is a way to another process and
back: while it is not half full, what it said within the last second, and what came in here since, will do. What others
brought meanwhile may go beyond the brim only if they fill the other half in that second.
"""

from __future__ import annotations

from comfyfleet.engine.context import Context
from comfyfleet.policy.admission import check_room
from comfyfleet.ports import Counts

_GOOD_FOR_S = 1.0


class Room:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting = 0
        self._open_bytes = 0
        self._good_until = float("-inf")

    def is_known(self) -> bool:
        """Whether the store need not be asked."""
        rules = self._context.rules
        return (
            self._context.clock.monotonic() < self._good_until
            and 2 * self._waiting < rules.max_waiting
            and 2 * self._open_bytes < rules.max_open_bytes
        )

    def hear(self, counts: Counts) -> None:
        self._waiting = counts.waiting + counts.delayed + counts.paused
        self._open_bytes = counts.payload_bytes
        self._good_until = self._context.clock.monotonic() + _GOOD_FOR_S

    def take(self, size: int) -> None:
        """For a job of that size, which counts from here on; refuses where there is none."""
        check_room(self._waiting, self._open_bytes, size, self._context.rules)
        self._waiting += 1
        self._open_bytes += size
