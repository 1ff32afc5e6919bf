"""Both doors of an engine over a Unix socket, so that callers and workers can be processes of their own on any store.

A frame is a length and a message; calls share one connection and are answered out of order. A connection that ends
takes its parked polls along, as a hang-up does anywhere. Nothing here is retried: that is for whoever calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import (
    CancelReply,
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
    Submitted,
)
from comfyfleet.model.dispatch import LeaseRef, Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import JobResult, Submission
from comfyfleet.model.worker import WorkerRecord


class Look(msgspec.Struct, frozen=True):
    """A job as its caller sees it."""

    phase: Phase
    result: JobResult | None


_CALLS: dict[str, tuple[Any, Any]] = {
    "submit": (tuple[Submission], Submitted),
    "look": (tuple[JobId], Look),
    "cancel": (tuple[JobId], CancelReply),
    "retry": (tuple[JobId], Submitted),
    "register": (tuple[RegisterWorker], WorkerRecord),
    "poll": (tuple[Poll], LeasedJob | None),
    "heartbeat": (tuple[WorkerId, list[LeaseRef]], HeartbeatReply),
    "progress": (tuple[list[ProgressReport]], HeartbeatReply),
    "complete": (tuple[Completion], ReportReply),
    "fail": (tuple[FailureReport], ReportReply),
    "release": (tuple[Release], ReportReply),
    "commands": (tuple[WorkerId, float], tuple[Command, ...]),
    "unregister": (tuple[WorkerId, str], None),
}


class _Question(msgspec.Struct, array_like=True):
    number: int
    name: str
    arguments: msgspec.Raw


class _Answer(msgspec.Struct, array_like=True):
    number: int
    value: msgspec.Raw
    refusal: str = ""
    """The code of a refusal, or `fault`; then the value is the message."""


_encode = msgspec.msgpack.Encoder().encode
_questions = msgspec.msgpack.Decoder(_Question)
_answers = msgspec.msgpack.Decoder(_Answer)
_arguments = {name: msgspec.msgpack.Decoder(types[0]) for name, types in _CALLS.items()}
_values = {name: msgspec.msgpack.Decoder(types[1]) for name, types in _CALLS.items()}


async def look_at(engine: Engine, job_id: JobId) -> Look:
    view = await engine.get(job_id)
    return Look(view.dispatch.phase, view.job.result)


def _send(writer: asyncio.StreamWriter, message: object) -> None:
    encoded = _encode(message)
    writer.write(len(encoded).to_bytes(4, "big") + encoded)


async def _receive(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


class BridgeServer:
    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._path = path

    async def serve(self) -> None:
        # What a killed one has left.
        self._path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._connected, self._path)
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                question = _questions.decode(await _receive(reader))
                task = asyncio.create_task(self._answer(question, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (asyncio.IncompleteReadError, OSError):
            for task in tasks:
                task.cancel()
        finally:
            writer.close()

    async def _answer(self, question: _Question, writer: asyncio.StreamWriter) -> None:
        try:
            value = await self._call(question.name)(*_arguments[question.name].decode(question.arguments))
            answer = _Answer(question.number, msgspec.Raw(_encode(value)))
        except Refusal as refusal:
            answer = _Answer(question.number, msgspec.Raw(_encode(refusal.message)), refusal.code.value)
        except Exception as error:
            answer = _Answer(question.number, msgspec.Raw(_encode(repr(error))), "fault")
        if not writer.is_closing():
            _send(writer, answer)

    def _call(self, name: str) -> Callable[..., Awaitable[object]]:
        if name == "look":
            return lambda job_id: look_at(self._engine, job_id)
        return cast("Callable[..., Awaitable[object]]", getattr(self._engine, name))


class BridgeClient:
    """`WorkerApi`, and what a caller needs of `JobApi`, at any of several engines: another, if one is lost."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def call(self, name: str, *arguments: object) -> Any:
        async with self._connecting:
            if self._writer is None:
                await self._connect()
        writer = self._writer
        if writer is None:
            raise Fault("the engine hung up")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            _send(writer, _Question(number, name, msgspec.Raw(_encode(arguments))))
            found = await answer
        finally:
            self._waiting.pop(number, None)
        if found.refusal == "fault":
            raise Fault(msgspec.msgpack.decode(found.value, type=str))
        if found.refusal:
            raise Refusal(RefusalCode(found.refusal), msgspec.msgpack.decode(found.value, type=str))
        return _values[name].decode(found.value)

    async def _connect(self) -> None:
        for path in random.sample(self._paths, len(self._paths)):
            try:
                reader, self._writer = await asyncio.open_unix_connection(path)
            except OSError:
                continue
            self._reading = asyncio.create_task(self._read(reader))
            return
        raise Fault("no engine listens")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                answer = _answers.decode(await _receive(reader))
                # A question whose asker was called away is answered all the same.
                if (waiting := self._waiting.get(answer.number)) is not None and not waiting.done():
                    waiting.set_result(answer)
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Fault("the engine hung up before it answered"))

    # the callers' door

    async def submit(self, submission: Submission) -> Submitted:
        return cast("Submitted", await self.call("submit", submission))

    async def look(self, job_id: JobId) -> Look:
        return cast("Look", await self.call("look", job_id))

    async def cancel(self, job_id: JobId) -> CancelReply:
        return cast("CancelReply", await self.call("cancel", job_id))

    async def retry(self, job_id: JobId) -> Submitted:
        return cast("Submitted", await self.call("retry", job_id))

    # the workers' door

    async def register(self, call: RegisterWorker) -> WorkerRecord:
        return cast("WorkerRecord", await self.call("register", call))

    async def poll(self, call: Poll) -> LeasedJob | None:
        return cast("LeasedJob | None", await self.call("poll", call))

    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
        return cast("HeartbeatReply", await self.call("heartbeat", worker_id, refs))

    async def progress(self, reports: Sequence[ProgressReport]) -> HeartbeatReply:
        return cast("HeartbeatReply", await self.call("progress", reports))

    async def complete(self, call: Completion) -> ReportReply:
        return cast("ReportReply", await self.call("complete", call))

    async def fail(self, call: FailureReport) -> ReportReply:
        return cast("ReportReply", await self.call("fail", call))

    async def release(self, call: Release) -> ReportReply:
        return cast("ReportReply", await self.call("release", call))

    async def commands(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        return cast("tuple[Command, ...]", await self.call("commands", worker_id, wait_s))

    async def unregister(self, worker_id: WorkerId, reason: str) -> None:
        await self.call("unregister", worker_id, reason)
