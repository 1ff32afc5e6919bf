"""A worker process: the product's own agent with a connector that executes by writing a line and waiting.

Its calls go through `LoggedApi`, which writes down what was granted, reported and answered. A direct worker has an
engine of its own on the store; a bridged one speaks to an engine process.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from chaos.bridge import BridgeClient
from chaos.callers import execution_of, result_of
from chaos.logs import Log
from chaos.made import made_from
from chaos.setting import AGENT, Setting, opened_engine, play
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
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.ports import WorkerApi
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.simulated import Reporter, SimulatedConnector

CAPABILITIES = Capabilities((Service("comfyui"),))

_TICK_S = 0.1
_STALLED_S = 0.5
_LATE_S = 0.3


def worker_process(setting: Setting, who: str, name: str, slots: int, is_bridged: bool) -> None:
    play(setting, who, _work(setting, who, name, slots, is_bridged))


@asynccontextmanager
async def worker_door(setting: Setting, is_bridged: bool) -> AsyncIterator[WorkerApi]:
    if is_bridged:
        yield BridgeClient(setting.sockets)
        return
    async with opened_engine(setting) as engine:
        yield engine


async def _work(setting: Setting, who: str, name: str, slots: int, is_bridged: bool) -> None:
    log = Log(setting.logs, who)
    async with worker_door(setting, is_bridged) as door:
        connector = SimulatedConnector(capabilities=CAPABILITIES, behaviour=executing(log, is_bridged))
        settings = msgspec.structs.replace(AGENT, slots=slots)
        async with Agent(LoggedApi(door, log), WorkerId(name), [connector], settings):
            log.write("ready", role="worker")
            await note_stalls(log)


async def note_stalls(log: Log) -> None:
    """A process that the machine did not let run is as good as stopped; its log says so."""
    before = time.monotonic()
    while True:
        await asyncio.sleep(_TICK_S)
        now = time.monotonic()
        if now - before > _TICK_S + _STALLED_S:
            log.write("stalled", since=before)
        before = now


def new_execution(ref: LeaseRef) -> str:
    return f"{ref.attempt_id}/{secrets.token_hex(4)}"


def executing(log: Log, is_bridged: bool) -> Callable[[LeasedJob, Reporter], Awaitable[JobResult]]:
    async def execute(job: LeasedJob, _report: Reporter) -> JobResult:
        execution = new_execution(job.ref)
        log.write("began", execution=execution, is_bridged=is_bridged, **told(job.ref))
        await asyncio.sleep(seconds_of(job))
        log.write("finished", execution=execution, **told(job.ref))
        return result_of(execution, job.workflow)

    return execute


def seconds_of(job: LeasedJob) -> float:
    return float(job.workflow["1"]["inputs"]["seconds"])


def told(ref: LeaseRef) -> dict[str, object]:
    return {"job": ref.job_id, "round": ref.round, "lease": ref.number, "epoch": ref.epoch}


class LoggedApi:
    """The workers' door with a witness at it."""

    def __init__(self, api: WorkerApi, log: Log) -> None:
        self._api = api
        self._log = log

    async def poll(self, call: Poll) -> LeasedJob | None:
        job = await self._api.poll(call)
        if job is not None:
            self._log.write("granted", made=made_from(job.workflow), **told(job.ref))
        return job

    async def complete(self, call: Completion) -> ReportReply:
        execution = execution_of(call.result)
        return await self._witness("complete", call.ref, lambda: self._api.complete(call), execution)

    async def fail(self, call: FailureReport) -> ReportReply:
        return await self._witness("fail", call.ref, lambda: self._api.fail(call))

    async def release(self, call: Release) -> ReportReply:
        return await self._witness("release", call.ref, lambda: self._api.release(call))

    async def _witness(
        self,
        report: str,
        ref: LeaseRef,
        call: Callable[[], Awaitable[ReportReply]],
        execution: str | None = None,
    ) -> ReportReply:
        of = {"report": report, "execution": execution, **told(ref)}
        self._log.write("reporting", **of)
        try:
            settled = await call()
        except Refusal as refusal:
            self._log.write("refused", value=refusal.code.value, **of)
            raise
        except BaseException as error:
            self._log.write("unanswered", value=repr(error)[:200], **of)
            raise
        self._log.write("accepted", value=settled.phase.value, **of)
        return settled

    async def register(self, call: RegisterWorker) -> WorkerRecord:
        return await self._api.register(call)

    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
        sent = time.monotonic()
        try:
            beat = await self._api.heartbeat(worker_id, refs)
        except BaseException as error:
            self._log.write("late_beat", since=sent, value=repr(error)[:200])
            raise
        if time.monotonic() - sent > _LATE_S:
            self._log.write("late_beat", since=sent)
        return beat

    async def progress(self, reports: Sequence[ProgressReport]) -> HeartbeatReply:
        return await self._api.progress(reports)

    async def commands(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        return await self._api.commands(worker_id, wait_s)

    async def unregister(self, worker_id: WorkerId, reason: str) -> None:
        await self._api.unregister(worker_id, reason)
