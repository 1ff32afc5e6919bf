"""Facts and progress on their way to whoever listens, in this process and between processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from comfyfleet.model.fact import Event, Fact, ProgressEvent, RunSnapshot
from comfyfleet.model.ids import JobId


class PeerChannel(Protocol):
    """What the processes on one store say to each other. It may lose a message, and nobody hears himself."""

    def listen(
        self, hear: Callable[[bytes], None], hear_run: Callable[[Fact | ProgressEvent], None]
    ) -> None: ...
    async def watch(self) -> None: ...  # for a while `hear_run` hears of workers without an engine
    async def say(self, message: bytes) -> None: ...
    async def announce(self, message: bytes) -> None: ...  # for readers of the store's own
    async def keep_progress(self, job_id: JobId, note: RunSnapshot) -> None: ...  # for an hour
    async def kept_progress(self, job_ids: Sequence[JobId]) -> list[bytes | None]: ...  # theirs too


class Subscription(Protocol):
    """A bounded view of the bus. Facts are never dropped from it; news is, newest wins."""

    def offer(self, event: Event) -> None:
        """As if the bus had told of it, to this one alone."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def close(self) -> None: ...


class Bus(Protocol):
    """News and wake-ups. It may lose a message and holds no state."""

    def publish(self, event: Event) -> None: ...
    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]: ...
    def subscribe(self, job_id: JobId | None = None) -> Subscription: ...
    def close(self) -> None:
        """Every subscription ends with what it has."""
