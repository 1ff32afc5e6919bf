"""Facts and progress on their way to listeners, in this process and between processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from comfyfleet.model.fact import Event, Fact, ProgressEvent, RunSnapshot
from comfyfleet.model.ids import JobId


class PeerChannel(Protocol):
    """Messages between the processes on one store. It may lose messages, and a process does not get its own."""

    def listen(
        self, on_message: Callable[[bytes], None], on_run_event: Callable[[Fact | ProgressEvent], None]
    ) -> None: ...
    async def watch(self) -> None: ...  # for a while `on_run_event` gets events of direct workers
    async def publish(self, message: bytes) -> None: ...
    async def announce(self, message: bytes) -> None: ...  # for clients that read the store directly
    async def save_progress(self, job_id: JobId, snapshot: RunSnapshot) -> None: ...  # for an hour
    async def load_progress(
        self, job_ids: Sequence[JobId]
    ) -> list[bytes | None]: ...  # also of direct workers


class Subscription(Protocol):
    """A bounded queue of events. It never drops facts; of progress it keeps the newest."""

    def offer(self, event: Event) -> None:
        """Deliver an event to this subscription only."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def close(self) -> None: ...


class Bus(Protocol):
    """Events and wake-ups. It may lose a message and holds no state."""

    def publish(self, event: Event) -> None: ...
    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]: ...
    def subscribe(self, job_id: JobId | None = None) -> Subscription: ...
    def close(self) -> None:
        """End every subscription after the events that it already has."""
