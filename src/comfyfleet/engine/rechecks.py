"""Calls those who follow a job every few seconds, so that they read the store: events of other engines may be lost.

One timer serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from comfyfleet.ports import Clock, Timer

_PAUSE_S = 0.1
"""Pause between two turns, so that one turn calls several clients."""


class Rechecks:
    def __init__(self, clock: Clock, every_s: float) -> None:
        self._clock = clock
        self._every_s = every_s
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        """In due order, as all wait equally long."""
        self._timer: Timer | None = None
        self._is_closed = False

    @contextmanager
    def calling(self, recheck: Callable[[], None]) -> Iterator[None]:
        """Calls `recheck` every few seconds inside this context."""
        waiting = object()
        self._due[waiting] = (self._clock.monotonic() + self._every_s, recheck)
        self._arm()
        try:
            yield
        finally:
            self._due.pop(waiting, None)

    def _arm(self) -> None:
        if self._timer is None and self._due and not self._is_closed:
            first, _ = next(iter(self._due.values()))
            wait_s = max(first - self._clock.monotonic(), _PAUSE_S)
            self._timer = self._clock.call_at(self._clock.now() + wait_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        for waiting, (due_at, look) in list(self._due.items()):
            if due_at > now:
                break
            del self._due[waiting]
            self._due[waiting] = (now + self._every_s, look)
            look()
        self._arm()

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
