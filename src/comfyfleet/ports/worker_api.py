"""The API for workers: register, poll, report, transfer files. An engine or a hub implements it."""

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
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import OutputFile
from comfyfleet.model.node_classes import NodeCatalog
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.ports.connector import OutputSource


class WorkerApi(Protocol):
    """A parked poll is an idle slot."""

    async def register(self, call: RegisterWorker) -> WorkerRecord: ...
    async def poll(self, call: Poll) -> LeasedJob | None: ...
    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply: ...
    async def progress(self, reports: Sequence[ProgressReport]) -> HeartbeatReply: ...
    async def complete(self, call: Completion) -> ReportReply: ...
    async def fail(self, call: FailureReport) -> ReportReply: ...
    async def release(self, call: Release) -> ReportReply: ...
    async def commands(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        """Wait for commands. Replies to heartbeats carry the same commands, but later."""

    async def unregister(self, worker_id: WorkerId, reason: str) -> None: ...


@runtime_checkable
class OutputReceiver(Protocol):
    """A worker API that stores outputs, so that callers need not reach the server."""

    async def store_output(self, ref: LeaseRef, file: OutputFile, source: OutputSource) -> str | None:
        """The file id. None: the hub stores no files."""


@runtime_checkable
class NodeCatalogReceiver(Protocol):
    """A worker API that collects node catalogs, to convert editor workflows and to predict which graphs a server
    accepts. It needs each catalog only once, from any worker."""

    async def describe(self, worker_id: WorkerId, nodes: NodeCatalog) -> None: ...


@runtime_checkable
class InputSource(Protocol):
    """A worker API that provides the input files of a job."""

    def spool_folder(self) -> Path | None:
        """The folder for temporary files. None: the system's default."""

    async def fetch_input(self, job: LeasedJob, file: InputFile, path: Path) -> None:
        """Write the stored file to `path`. The caller verifies its digest. Raises `not_found` if it is gone."""
