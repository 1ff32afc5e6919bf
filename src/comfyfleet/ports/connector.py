"""What an agent needs from a service that runs jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from comfyfleet.model.calls import LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.model.node_classes import NodeCatalog
from comfyfleet.model.payload import PayloadFormat
from comfyfleet.model.worker import Capabilities, LiveState


class Inventory(msgspec.Struct, frozen=True):
    """What a connector discovered about its server."""

    capabilities: Capabilities
    live: LiveState = LiveState()
    boot: str = ""
    """Changes when the server restarts."""
    nodes: NodeCatalog | None = None
    """Its node classes, if the service has any."""


class Connector(Protocol):
    """Drives one kind of service. It knows no leases, tenants or hub."""

    service_name: str

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def inventory(self) -> Inventory: ...
    async def check_health(self) -> bool: ...
    async def process_job(self, job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        """Run the attempt to its end. Raises `ServiceFailed` with a classified failure.

        If the service already has the attempt, because an agent was killed, continue with it.
        """

    async def cancel_job(self, job: LeasedJob) -> None:
        """Stop the waiting or running attempt and return when it is over. Never touch another prompt.

        Only the attempt id of the job must be set."""

    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        """The state of the attempt, for an agent that comes back."""


@runtime_checkable
class OutputSource(Protocol):
    """A connector whose outputs can be fetched."""

    async def save(self, file: OutputFile, path: Path) -> int: ...


class ConnectorPlugin(msgspec.Struct, frozen=True):
    """A kind of connector. A package offers its own under the entry point group `comfyfleet.connectors`."""

    name: str
    """The name in `--service NAME=ADDRESS`."""
    payload: PayloadFormat
    """Of the service that its connectors offer, which may have another name: several connectors may run one service."""
    connect: Callable[[str, Mapping[str, Any]], Connector]
    """Makes a connector from an address and the settings of the worker's table `[connectors.NAME]`. Raises `ValueError`
    for an address or a setting that is wrong. It does not connect yet."""
