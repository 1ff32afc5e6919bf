"""A connector without a server, for tests, benchmarks and simulations: a behaviour decides how each job ends.

It keeps the contract of every connector, so an agent cannot tell it from a real one. As the service `simulated`
(`--service simulated=SECONDS`) it does what the payload says (`simulated_payload.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from comfyfleet.model.calls import LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.canonical_json import canonical_json
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, LiveState, Service
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.ports import Connector, ConnectorPlugin, Inventory
from comfyfleet.worker.connectors.settings import converted_settings
from comfyfleet.worker.connectors.simulated_payload import (
    SERVICE,
    SimulatedFormat,
    SimulatedPayload,
    read_simulated,
)

Reporter = Callable[[ProgressReport], None]
Behaviour = Callable[[LeasedJob, Reporter], Awaitable[JobResult]]
Sleep = Callable[[float], Awaitable[object]]

RunState = Literal["running", "completed", "failed", "cancelled"]

_EMPTY = JobResult()


def instant(result: JobResult = _EMPTY) -> Behaviour:
    """Completes at once and reports no progress."""

    async def behave(_job: LeasedJob, _report: Reporter) -> JobResult:
        return result

    return behave


def takes(
    seconds: float, *, steps: int = 4, sleep: Sleep = asyncio.sleep, result: JobResult = _EMPTY
) -> Behaviour:
    """Completes after a time and reports like a real run: accepted, started, each step."""

    async def behave(job: LeasedJob, report: Reporter) -> JobResult:
        report(ProgressReport(job.ref, ProgressKind.ACCEPTED, {"prompt_id": prompt_id_of(job.attempt_id)}))
        report(ProgressReport(job.ref, ProgressKind.STARTED))
        for step in range(steps):
            await sleep(seconds / steps)
            report(ProgressReport(job.ref, ProgressKind.PROGRESS, {"value": step + 1, "max": steps}))
        if not steps:
            await sleep(seconds)
        return result

    return behave


def fails(failure: Failure, times: int | None = None, then: Behaviour | None = None) -> Behaviour:
    """Fails this many times (None: always), then follows `then`, by default `instant()`."""
    left = times
    afterwards = then or instant()

    async def behave(job: LeasedJob, report: Reporter) -> JobResult:
        nonlocal left
        if left is None or left > 0:
            left = None if left is None else left - 1
            raise ServiceFailed(failure)
        return await afterwards(job, report)

    return behave


def follows_payload(seconds: float, *, sleep: Sleep = asyncio.sleep) -> Behaviour:
    """Does what the payload says. A payload without a duration takes `seconds`."""

    async def behave(job: LeasedJob, report: Reporter) -> JobResult:
        try:
            # A job that an older version accepted has a graph.
            payload = SimulatedPayload() if _is_graph(job.workflow) else read_simulated(job.workflow)
        except InvalidWorkflow as error:
            raise ServiceFailed(Failure(FailureKind.INVALID_WORKFLOW, error.message)) from error
        wait_s = seconds if payload.seconds is None else payload.seconds
        await takes(wait_s, steps=payload.steps, sleep=sleep)(job, report)
        fail = payload.fail
        if fail is not None and job.attempt <= fail.times:
            raise ServiceFailed(Failure(fail.failure_kind, fail.message))
        return await _result_of(job, payload)

    return behave


def _is_graph(payload: Mapping[str, Any]) -> bool:
    return bool(payload) and all(type(each) is dict and "class_type" in each for each in payload.values())


async def _result_of(job: LeasedJob, payload: SimulatedPayload) -> JobResult:
    """The outputs that the payload names, and one that proves from what they were made."""
    made: dict[str, Any] = {"sha256": [sha256(canonical_json(job.workflow)).hexdigest()]}
    if payload.seed is not None:
        made["seed"] = [payload.seed]
    if job.fetched:
        made["files"] = [[each.input, await asyncio.to_thread(_sha256, each.path)] for each in job.fetched]
    outputs = {**payload.outputs, "payload": made}
    wanted = job.include_outputs
    return JobResult({name: each for name, each in outputs.items() if not wanted or name in wanted})


def _sha256(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def hangs() -> Behaviour:
    async def behave(job: LeasedJob, report: Reporter) -> JobResult:
        report(ProgressReport(job.ref, ProgressKind.ACCEPTED, {"prompt_id": prompt_id_of(job.attempt_id)}))
        report(ProgressReport(job.ref, ProgressKind.STARTED))
        await asyncio.Event().wait()
        raise AssertionError("this event is never set")

    return behave


class SimulatedRun(msgspec.Struct, eq=False):
    """One call of `process_job`, kept for tests to look at."""

    job: LeasedJob
    state: RunState = "running"
    task: asyncio.Task[JobResult] | None = None


class SimulatedConnector:
    """`behaviour` is a function, a number of seconds, or None for instant jobs.

    `capabilities`, `live`, `boot` and `is_healthy` can be changed at any time.
    """

    def __init__(
        self,
        service_name: str = "comfyui",
        capabilities: Capabilities | None = None,
        behaviour: Behaviour | float | None = None,
        *,
        live: LiveState | None = None,
        sleep: Sleep = asyncio.sleep,
        keep_runs: int = 1000,
    ) -> None:
        self.service_name = service_name
        self.capabilities = capabilities or Capabilities(services=(Service(service_name),), is_fake=True)
        self.live = live or LiveState()
        self.boot = "1"
        self.is_healthy = True
        self.on_connection: Callable[[bool], None] | None = None
        if isinstance(behaviour, (int, float)):
            behaviour = takes(behaviour, sleep=sleep)
        self._behaviour = behaviour
        self.runs: deque[SimulatedRun] = deque(maxlen=keep_runs)
        self.run_count = 0
        self.cancels: deque[LeasedJob] = deque(maxlen=keep_runs)
        self.inventory_count = 0
        self.is_open = False
        self._running: dict[str, SimulatedRun] = {}

    # events of the simulated server

    def go_offline(self) -> None:
        self.is_healthy = False
        if self.on_connection is not None:
            self.on_connection(False)

    def go_online(self, *, restarted: bool = False) -> None:
        self.is_healthy = True
        if restarted:
            self.boot = str(int(self.boot) + 1)
        if self.on_connection is not None:
            self.on_connection(True)

    # Connector

    async def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def inventory(self) -> Inventory:
        if not self.is_healthy:
            raise ConnectionError(f"the simulated {self.service_name} is down")
        self.inventory_count += 1
        return Inventory(self.capabilities, self.live, self.boot)

    async def check_health(self) -> bool:
        return self.is_healthy

    async def process_job(self, job: LeasedJob, report: Reporter) -> JobResult:
        self.run_count += 1
        run = SimulatedRun(job)
        self.runs.append(run)
        if self._behaviour is None:
            run.state = "completed"
            return _EMPTY
        self._running[job.attempt_id] = run
        # In its own task, so that cancelling the job does not cancel the caller.
        run.task = asyncio.ensure_future(self._behaviour(job, report))
        try:
            result = await run.task
        except asyncio.CancelledError:
            is_job_cancelled, run.state = run.state == "cancelled", "cancelled"
            caller = asyncio.current_task()
            if not is_job_cancelled or (caller is not None and caller.cancelling()):
                raise
            raise ServiceFailed(
                Failure(FailureKind.INTERRUPTED, "The simulated run was cancelled.")
            ) from None
        except BaseException:
            run.state = "failed"
            raise
        finally:
            del self._running[job.attempt_id]
        run.state = "completed"
        return result

    async def cancel_job(self, job: LeasedJob) -> None:
        self.cancels.append(job)
        run = self._running.get(job.attempt_id)
        if run is not None and run.task is not None:
            run.state = "cancelled"
            run.task.cancel()
            await asyncio.wait({run.task})

    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        run = self._running.get(job.attempt_id)
        return RunningAttempt("unknown" if run is None else run.state)


class SimulatedSettings(msgspec.Struct, frozen=True):
    models: tuple[str, ...] | None = None
    """What the worker offers. None: it has no list, so any model will do."""


def _connect(address: str, settings: Mapping[str, Any]) -> Connector:
    chosen = converted_settings(settings, SimulatedSettings)
    try:
        seconds = float(address)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"the address of a simulated service is the seconds that a run takes, not {address!r}"
        )
    models = None if chosen.models is None else frozenset(chosen.models)
    offered = Capabilities(services=(Service(SERVICE, models=models),), is_fake=True)
    return SimulatedConnector(SERVICE, offered, follows_payload(seconds))


PLUGIN = ConnectorPlugin(SERVICE, SimulatedFormat(), _connect)
