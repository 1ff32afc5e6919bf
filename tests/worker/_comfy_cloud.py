"""Helpers for the tests of the Comfy Cloud connector: quick settings, leases, and pictures made from a graph."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image
from tests.worker._comfyui import leased, picture, slow

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, ServiceFailed
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.testing.fake_comfy_cloud import CloudFaults, FakeCloudSettings, FakeComfyCloud
from comfyfleet.worker.connectors.comfy_cloud import ComfyCloud, ComfyCloudSettings

KEY = "comfyui-fake-key"
LOOPBACK = ("127.0.0.1",)

QUICK = ComfyCloudSettings(
    key=KEY,
    allow=LOOPBACK,
    poll_s=0.02,
    poll_max_s=0.2,
    request_s=5.0,
    connect_s=2.0,
    accept_s=2.0,
    doubt_s=1.0,
    find_s=0.3,
    lost_s=0.3,
    unreachable_s=1.0,
    pause_s=0.5,
    pause_max_s=1.0,
    health_s=0.0,
    cancel_s=5.0,
    stop_s=2.0,
    close_s=1.0,
    min_free_bytes=0,
)

__all__ = [
    "KEY",
    "QUICK",
    "CloudAttempt",
    "account",
    "again",
    "leased",
    "picture",
    "saved_color",
    "slow",
    "tuned",
]


def tuned(**changes: Any) -> ComfyCloudSettings:
    return msgspec.structs.replace(QUICK, **changes)


@asynccontextmanager
async def account(
    settings: ComfyCloudSettings = QUICK, *, faults: CloudFaults | None = None, **fake_settings: Any
) -> AsyncIterator[tuple[FakeComfyCloud, ComfyCloud]]:
    """A fake account and a connector that knows its plan."""
    async with (
        FakeComfyCloud(FakeCloudSettings(**fake_settings), faults=faults) as fake,
        ComfyCloud(fake.url, settings) as connector,
    ):
        await connector._account.read_plan()
        yield fake, connector


def again(job: LeasedJob, *, number: int) -> LeasedJob:
    """A later lease of the same job."""
    return msgspec.structs.replace(job, ref=msgspec.structs.replace(job.ref, number=number))


class CloudAttempt:
    """A job being processed in a task, with everything it reported."""

    def __init__(self, connector: ComfyCloud, job: LeasedJob) -> None:
        self.job = job
        self.reports: list[ProgressReport] = []
        self._progress = asyncio.Event()
        self.task: asyncio.Task[JobResult] = asyncio.create_task(connector.process_job(job, self._hear))

    def _hear(self, report: ProgressReport) -> None:
        self.reports.append(report)
        self._progress.set()

    def of(self, kind: ProgressKind) -> list[ProgressReport]:
        return [report for report in self.reports if report.kind is kind]

    async def heard(self, kind: ProgressKind) -> None:
        async with asyncio.timeout(60):
            while not self.of(kind):
                assert not self.task.done(), f"the attempt ended before it reported {kind}: {self.task}"
                self._progress.clear()
                waiter = asyncio.ensure_future(self._progress.wait())
                await asyncio.wait({self.task, waiter}, return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()

    async def result(self) -> JobResult:
        async with asyncio.timeout(60):
            return await asyncio.shield(self.task)

    async def failed(self) -> ServiceFailed:
        try:
            result = await self.result()
        except ServiceFailed as error:
            return error
        raise AssertionError(f"the attempt completed: {result}")

    async def failure(self) -> Failure:
        return (await self.failed()).failure


async def saved_color(connector: ComfyCloud, file: OutputFile, folder: Path) -> int:
    """The colour of a saved picture, which tells from which graph it was made."""
    path = folder / "output"
    size = await connector.save(file, path)
    assert size == path.stat().st_size > 0
    return color_of(path.read_bytes())


def color_of(content: bytes) -> int:
    red, green, blue = Image.open(io.BytesIO(content)).convert("RGB").getpixel((0, 0))  # type: ignore[misc]
    return int(red) << 16 | int(green) << 8 | int(blue)
