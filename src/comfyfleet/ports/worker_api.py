"""What workers may ask of an engine or a hub: register, poll, report, move files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from comfyfleet.model.calls import (
    Command,
    Completion,
    FailureReport,
    HeartbeatReply,
    LeasedJob,
    Poll,
    ProgressReport,
    RegisterWorker,
    Release,
    ReportReply,
)
from comfyfleet.model.dispatch import (
    LeaseRef,
)
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import OutputFile
from comfyfleet.model.node_classes import NodeCatalog
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.ports.connector import OutputSource


class WorkerApi(Protocol):
    """The workers' door. A poll that parks is an idle slot."""

    async def register(self, call: RegisterWorker) -> WorkerRecord: ...
    async def poll(self, call: Poll) -> LeasedJob | None: ...
    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply: ...
    async def progress(self, reports: Sequence[ProgressReport]) -> HeartbeatReply: ...
    async def complete(self, call: Completion) -> ReportReply: ...
    async def fail(self, call: FailureReport) -> ReportReply: ...
    async def release(self, call: Release) -> ReportReply: ...
    async def commands(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        """Parks until there is something to tell; heartbeats tell the same, only later."""

    async def unregister(self, worker_id: WorkerId, reason: str) -> None: ...


@runtime_checkable
class OutputReceiver(Protocol):
    """A workers' door that takes in what a run left, so that its caller need not reach the server."""

    async def keep(self, ref: LeaseRef, file: OutputFile, source: OutputSource) -> str | None:
        """The name under which it is kept. None: nothing is kept there."""


@runtime_checkable
class NodeCatalogReceiver(Protocol):
    """A workers' door that wants to know a server's node classes: to convert workflows of the editor, and to know which
    graphs the server accepts. One that has been told of equal nodes by another worker need not be told again."""

    async def describe(self, worker_id: WorkerId, nodes: NodeCatalog) -> None: ...


@runtime_checkable
class InputSource(Protocol):
    """A workers' door that has the files a job brings."""

    def spooling(self) -> Path | None:
        """Where files may lie on their way. None: where the system has its temporary ones."""

    async def fetch_input(self, job: LeasedJob, file: InputFile, path: Path) -> None:
        """What is kept, as it is, to a path that it is written anew to; whoever asks compares. `not_found`: nothing is
        kept there (any more)."""
