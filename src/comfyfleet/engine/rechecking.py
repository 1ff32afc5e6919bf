"""Whoever waits for something is called every few seconds to look for itself, so that nobody depends on having heard.

A change is written first and told afterwards. What tells of it can be lost on every way: a bus, a relay, a process that
died in between. A look at the store finds it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from comfyfleet.ports import Clock, Timer

_PAUSE_S = 0.1
"""Between two turns: of many who began at almost the same time, several are called in one."""


class Rechecks:
    def __init__(self, clock: Clock, every_s: float) -> None:
        self._clock = clock
        self._every_s = every_s
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        """In the order in which they are due, as everybody waits equally long."""
        self._timer: Timer | None = None
        self._is_closed = False

    @contextmanager
    def calling(self, look: Callable[[], None]) -> Iterator[None]:
        """While this lasts, `look` is called every few seconds."""
        waiting = object()
        self._due[waiting] = (self._clock.monotonic() + self._every_s, look)
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
