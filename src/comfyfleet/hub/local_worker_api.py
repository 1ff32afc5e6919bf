"""The worker API for agents in the hub's own process: the engine plus the hub's files.

Remote agents use `worker/transports/http.py`. The functions at the end make worker reports safe for callers;
large reports are processed in a thread, because they would block the event loop for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.files.job_files import JobInputFiles, JobOutputFiles, complete_file
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
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.model.node_classes import NodeCatalog
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.sanitizer import safe_result
from comfyfleet.ports import FileStore, OutputSource
from comfyfleet.wire.files import output_body

_PIECE = 1 << 20


class LocalWorkerApi:
    def __init__(self, engine: Engine, assets: FileStore) -> None:
        self._engine = engine
        self._assets = assets
        self._inputs = JobInputFiles(engine, assets)

    async def register(self, call: RegisterWorker) -> WorkerRecord:
        return await self._engine.register(self._inputs.admitted(call))

    async def describe(self, worker_id: WorkerId, nodes: NodeCatalog) -> None:
        await self._engine.describe(worker_id, nodes)

    async def poll(self, call: Poll) -> LeasedJob | None:
        job = await self._engine.poll(call)
        return None if job is None else await self._inputs.linked(job)

    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
        return await self._engine.heartbeat(worker_id, refs)

    async def progress(self, reports: Sequence[ProgressReport]) -> HeartbeatReply:
        return await self._engine.progress(reports)

    async def complete(self, call: Completion) -> ReportReply:
        return await self._engine.complete(call)

    async def fail(self, call: FailureReport) -> ReportReply:
        return await self._engine.fail(call)

    async def release(self, call: Release) -> ReportReply:
        return await self._engine.release(call)

    async def commands(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        return await self._engine.commands(worker_id, wait_s)

    async def unregister(self, worker_id: WorkerId, reason: str) -> None:
        await self._engine.unregister(worker_id, reason)

    def spool_folder(self) -> Path | None:
        return None

    async def fetch_input(self, job: LeasedJob, file: InputFile, path: Path) -> None:
        record = None if file.url is None else await self._assets.get(file.file_id)
        if record is None:
            raise Refusal(RefusalCode.NOT_FOUND, f"there is no file {file.file_id!r} (any more)")
        with await asyncio.to_thread(path.open, "wb") as target:
            async with contextlib.aclosing(self._assets.read(record)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(target.write, piece)

    async def store_output(self, ref: LeaseRef, file: OutputFile, source: OutputSource) -> str | None:
        with TemporaryDirectory(prefix="comfyfleet-") as folder:
            path = Path(folder) / "output"
            await source.save(file, path)
            size, digest = await asyncio.to_thread(_measure, path)
            body = output_body(file.filename, size, digest)
            outputs = JobOutputFiles(self._engine, self._assets)
            (record,) = await outputs.announce(await outputs.leased(ref), ref, (body,))
            await self._assets.receive(record, _pieces(path))
            return (await complete_file(self._assets, record.file_id)).file_id


def _measure(path: Path) -> tuple[int, str]:
    with path.open("rb") as content:
        return path.stat().st_size, hashlib.file_digest(content, "sha256").hexdigest()


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as content:
        while piece := await asyncio.to_thread(content.read, _PIECE):
            yield piece


_FEW = 1_000
"""Processing this many values takes about a millisecond."""
_TEXT = 10
"""Characters that take about as long as one value."""

T = TypeVar("T")


async def sanitized(result: JobResult) -> JobResult:
    is_large = len(result.files) > _FEW or has_many(result.outputs.values())
    return await offload(lambda: safe_result(result), is_large=is_large)


async def offload(work: Callable[[], T], *, is_large: bool) -> T:
    return await asyncio.to_thread(work) if is_large else work()


def has_many(values: Iterable[Any]) -> bool:
    """Whether there are many values or much text. Stops counting at the bound."""
    left, within = _FEW, [iter(values)]
    while within:
        for value in within[-1]:
            left -= 1
            if isinstance(value, str):
                left -= len(value) // _TEXT
            if left < 0:
                return True
            if isinstance(value, dict):
                within.append(chain.from_iterable(value.items()))
                break
            if isinstance(value, list | tuple):
                within.append(iter(value))
                break
        else:
            within.pop()
    return False
