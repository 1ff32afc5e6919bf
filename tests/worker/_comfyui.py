"""Helpers for the tests of the ComfyUI connector: quick settings, leased jobs, small graphs, recorded traffic."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, ServiceFailed
from comfyfleet.model.ids import JobId, LeaseToken, WorkerId, WorkflowHash, prompt_id_of
from comfyfleet.model.job import Attachment, JobResult, Timeouts
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings
from comfyfleet.worker.connectors.comfyui import ComfyUI, ComfyUISettings
from comfyfleet.worker.connectors.comfyui.api import ApiAnswer, Unreachable

TRACES = Path(__file__).parents[1] / "data" / "comfyui_traces"

QUICK = ComfyUISettings(
    request_s=2.0,
    accept_s=3.0,
    poll_s=0.1,
    settle_s=0.05,
    refused_s=0.3,
    unreachable_s=0.5,
    unresponsive_s=1.0,
    connect_s=2.0,
    listen_s=1.0,
    reconnect_min_s=0.02,
    reconnect_max_s=0.1,
    end_news_s=0.2,
    quiet_s=20.0,
    idle_queue_s=0.5,
    silent_start_s=0.5,
    silent_run_s=30.0,
    cancel_s=5.0,
    stop_s=2.0,
    cancel_interval_s=0.03,
    sweep_s=3.0,
    close_s=1.0,
    progress_interval_s=0.0,
)

_numbers = itertools.count(1)


def tuned(**changes: Any) -> ComfyUISettings:
    return msgspec.structs.replace(QUICK, **changes)


def leased(
    workflow: dict[str, Any],
    *,
    timeouts: Timeouts | None = None,
    include: tuple[str, ...] = (),
    attachments: tuple[Attachment, ...] = (),
) -> LeasedJob:
    ref = LeaseRef(JobId(f"job-{next(_numbers)}"), 1, 1, 1, LeaseToken("token"))
    return LeasedJob(
        ref=ref,
        worker_id=WorkerId("w"),
        ttl_s=60.0,
        acknowledge_s=10.0,
        workflow=workflow,
        workflow_hash=WorkflowHash("hash"),
        timeouts=timeouts or Timeouts(),
        include_outputs=include,
        attachments=attachments,
    )


def picture(color: int = 7, prefix: str = "out") -> dict[str, Any]:
    return {
        "1": {
            "class_type": "EmptyImage",
            "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": color},
        },
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": prefix}},
    }


def slow(
    steps: int = 4, step_seconds: float = 0.05, *, preview: bool = False, seed: int = 1
) -> dict[str, Any]:
    inputs = {"steps": steps, "step_seconds": step_seconds, "preview": preview, "seed": seed}
    return {
        "1": {"class_type": "LabSlow", "inputs": inputs},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "slow"}},
    }


def lab_ui(kind: str, size: int = 1) -> dict[str, Any]:
    return {"1": {"class_type": "LabUi", "inputs": {"kind": kind, "size": size, "seed": 1}}}


def lab_fail(kind: str) -> dict[str, Any]:
    return {
        "1": {"class_type": "LabFail", "inputs": {"kind": kind, "seed": 1}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }


class Attempt:
    """A job being processed in a task, with everything it reported."""

    def __init__(self, connector: ComfyUI, job: LeasedJob) -> None:
        self.job = job
        self.connector = connector
        self.prompt_id = prompt_id_of(job.attempt_id)
        self.reports: list[ProgressReport] = []
        self._progress = asyncio.Event()
        self.task: asyncio.Task[JobResult] = asyncio.create_task(connector.process_job(job, self._hear))

    def _hear(self, report: ProgressReport) -> None:
        self.reports.append(report)
        self._progress.set()

    def of(self, kind: ProgressKind) -> list[ProgressReport]:
        return [report for report in self.reports if report.kind is kind]

    async def heard(self, kind: ProgressKind, count: int = 1, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while len(self.of(kind)) < count:
                if self.task.done():
                    raise AssertionError(f"the attempt ended before it reported {kind}: {self.task}")
                self._progress.clear()
                await asyncio.wait(
                    {self.task, asyncio.ensure_future(self._progress.wait())},
                    return_when=asyncio.FIRST_COMPLETED,
                )

    async def result(self, within_s: float = 60.0) -> JobResult:
        async with asyncio.timeout(within_s):
            return await asyncio.shield(self.task)

    async def failure(self, within_s: float = 60.0) -> Failure:
        try:
            result = await self.result(within_s)
        except ServiceFailed as failed:
            return failed.failure
        raise AssertionError(f"the attempt completed: {result}")


class LateSubmit:
    """The first submit of a connector gets lost on the way and arrives when the test says so."""

    def __init__(self, connector: ComfyUI) -> None:
        self._submit = connector._api.submit
        self._arguments: tuple[Any, ...] = ()
        connector._api.__dict__["submit"] = self._lose

    async def _lose(self, *arguments: Any) -> ApiAnswer:
        self._arguments = arguments
        raise Unreachable("no answer in time", is_timeout=True)

    async def arrive(self) -> None:
        assert (await self._submit(*self._arguments)).status == 200


async def eventually(condition: Callable[[], bool | Awaitable[bool]], within_s: float = 60.0) -> None:
    """Poll until it holds; an assertion fails when it does not in time."""
    for _ in range(int(within_s / 0.01)):
        met = condition()
        if met is True or (met is not False and await met):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"did not come true within {within_s:g} s")


async def queue_of(fake: FakeComfyUI, connector: ComfyUI) -> list[Any]:
    """What runs and waits on the server, without the faults of its own routes in the way."""
    async with connector._api.session.get(f"{fake.url}/queue") as response:
        body = await response.json()
    return [*body["queue_running"], *body["queue_pending"]]


@asynccontextmanager
async def server_and_connector(
    settings: ComfyUISettings = QUICK, **fake_settings: Any
) -> AsyncIterator[tuple[FakeComfyUI, ComfyUI]]:
    fake_settings.setdefault("load_seconds_per_gb", 0.0)
    async with FakeComfyUI(FakeSettings(**fake_settings)) as fake, ComfyUI(fake.url, settings) as connector:
        yield fake, connector


def trace(name: str) -> list[dict[str, Any]]:
    (path,) = TRACES.glob(f"{name}*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(name: str, to: str) -> Iterator[dict[str, Any]]:
    """The recorded HTTP answers to requests that begin so."""
    for line in trace(name):
        if line["dir"] == "recv" and line["channel"] == "http" and line["for"].startswith(to):
            yield line


def frames(name: str) -> Iterator[str]:
    """The recorded text frames, as they came."""
    for line in trace(name):
        if line["dir"] == "recv" and line["channel"] == "ws":
            if "raw_text" in line:
                yield line["raw_text"]
            elif "json" in line:
                yield json.dumps(line["json"])
