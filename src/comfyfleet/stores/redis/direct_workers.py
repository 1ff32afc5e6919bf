"""The engine's side of workers that have a Redis client and nothing else: what they left, read and put away.

Their own side is `workers.lua`. What they wrote is read here with patience: a program in another language may send what
no connector would, and it must neither stop an engine nor be lost in silence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from comfyfleet.model.calls import (
    DirectWorkerBacklog,
    DirectWorkerCompletion,
    DirectWorkerFailure,
    FailureReport,
    PendingRegistration,
    RegisterWorker,
)
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import Capabilities, LiveState
from comfyfleet.stores.redis.codec import UNREADABLE, as_list
from comfyfleet.stores.redis.dispatches import as_bytes

Call = Callable[..., Awaitable[object]]

_TOLD = b',"failure":'


class _Beside(msgspec.Struct, frozen=True):
    """What stands beside the capabilities in a declaration."""

    slots: int = 1
    live: LiveState = LiveState()
    instance: str = ""


class _Report(msgspec.Struct, frozen=True):
    ref: LeaseRef


_capabilities = msgspec.json.Decoder(Capabilities)
_beside = msgspec.json.Decoder(_Beside)
_reports = msgspec.json.Decoder(_Report)
_failures = msgspec.json.Decoder(Failure)
_runs = msgspec.json.Decoder(DirectWorkerCompletion)


class RedisDirectWorkerInbox:
    """`do` calls a function that writes, `ask` one that only reads."""

    def __init__(self, do: Call, ask: Call) -> None:
        self._do = do
        self._ask = ask
        self._wake: Callable[[], None] | None = None

    def listen(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def wake_up(self) -> None:
        if self._wake is not None:
            self._wake()

    async def look(self, limit: int) -> DirectWorkerBacklog:
        waiting, seen, reports, finished = as_list(await self._ask("foreign", limit))
        assert isinstance(finished, int)
        return DirectWorkerBacklog(
            tuple(_applicant(name, text) for name, text in _pairs(waiting)),
            tuple(_report(as_bytes(text)) for text in as_list(reports)),
            {_name(name): float(at) for name, at in _pairs(seen)},
            finished,
        )

    async def admitted(self, applicant: PendingRegistration) -> None:
        await self._do("admitted", applicant.worker_id, applicant.text)

    async def refuse(self, applicant: PendingRegistration, reason: str) -> None:
        await self._do("refuse_worker", applicant.worker_id, applicant.text, reason)

    async def settled(self, report: DirectWorkerFailure) -> None:
        await self._do("settle_report", report.text)

    async def take_finished(self, limit: int) -> list[DirectWorkerCompletion]:
        taken = await self._do("take_finished", limit)
        return [] if taken is None else [_runs.decode(as_bytes(text)) for text in as_list(taken)]


def _pairs(flat: object) -> list[tuple[bytes, bytes]]:
    values = [as_bytes(each) for each in as_list(flat)]
    return list(zip(values[::2], values[1::2], strict=True))


def _name(text: bytes) -> WorkerId:
    return WorkerId(text.decode(errors="replace"))


def _applicant(name: bytes, text: bytes) -> PendingRegistration:
    worker_id = _name(name)
    if not text:
        return PendingRegistration(worker_id, text)
    try:
        beside = _beside.decode(text)
        call = RegisterWorker(
            worker_id, _capabilities.decode(text), max(1, beside.slots), beside.live, beside.instance
        )
    except UNREADABLE as error:
        return PendingRegistration(worker_id, text, problem=str(error))
    return PendingRegistration(worker_id, text, call)


def _report(text: bytes) -> DirectWorkerFailure:
    # The library wrote what comes first, and the worker what follows.
    head, _, told = text.partition(_TOLD)
    ref, told = _reports.decode(head + b"}").ref, told[:-1]
    try:
        failure = _failures.decode(told)
    except UNREADABLE as error:
        # What it meant is not known, only that the run did not succeed.
        shown = told[:500].decode(errors="replace")
        failure = Failure(
            FailureKind.UNKNOWN, f"the worker reported a failure in a form unknown here ({error}): {shown}"
        )
    return DirectWorkerFailure(text, FailureReport(ref, failure))
