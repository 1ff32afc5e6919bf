"""What an agent needs of a service that runs jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from comfyfleet.model.calls import LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.model.node_classes import NodeCatalog
from comfyfleet.model.worker import Capabilities, LiveState


class Inventory(msgspec.Struct, frozen=True):
    """What a server really has, as its connector found it."""

    capabilities: Capabilities
    live: LiveState = LiveState()
    boot: str = ""
    """Changes when the server was started anew."""
    nodes: NodeCatalog | None = None
    """Of its node classes, where the service has such."""


class Connector(Protocol):
    """Speaks to one kind of service. Knows no leases, tenants or hub."""

    service_name: str

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def inventory(self) -> Inventory: ...
    async def check_health(self) -> bool: ...
    async def process_job(self, job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        """Runs the attempt to its end. Raises `ServiceFailed` with a classified failure.

        Called again for an attempt that the service has, it goes on with that one: an agent may have been killed.
        """

    async def cancel_job(self, job: LeasedJob) -> None:
        """Stops the attempt, waiting or running, and returns once it is over; never touches another's prompt.

        Of the job nothing but its attempt need be known."""

    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        """Did it finish while we were away?"""


@runtime_checkable
class OutputSource(Protocol):
    """A connector whose outputs can be fetched."""

    async def save(self, file: OutputFile, path: Path) -> int: ...
