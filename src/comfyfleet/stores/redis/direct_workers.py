"""The engine's side of direct workers: reads and acknowledges their registrations and reports.

`workers.lua` is their own side. Decoding is tolerant: a program in another language may send anything, which
must neither stop an engine nor be lost silently.
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

_FAILURE = b',"failure":'


class _Registration(msgspec.Struct, frozen=True):
    """The fields beside the capabilities in a registration."""

    slots: int = 1
    live: LiveState = LiveState()
    instance: str = ""


class _Report(msgspec.Struct, frozen=True):
    ref: LeaseRef


_capabilities = msgspec.json.Decoder(Capabilities)
_registrations = msgspec.json.Decoder(_Registration)
_reports = msgspec.json.Decoder(_Report)
_failures = msgspec.json.Decoder(Failure)
_runs = msgspec.json.Decoder(DirectWorkerCompletion)


class RedisDirectWorkerInbox:
    """`do` calls a writing function, `ask` a reading one."""

    def __init__(self, do: Call, ask: Call) -> None:
        self._do = do
        self._ask = ask
        self._wake: Callable[[], None] | None = None

    def listen(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def wake_up(self) -> None:
        if self._wake is not None:
            self._wake()

    async def backlog(self, limit: int) -> DirectWorkerBacklog:
        waiting, seen, reports, finished = as_list(await self._ask("foreign", limit))
        assert isinstance(finished, int)
        return DirectWorkerBacklog(
            tuple(_applicant(name, text) for name, text in _pairs(waiting)),
            tuple(_report(as_bytes(text)) for text in as_list(reports)),
            {_name(name): float(at) for name, at in _pairs(seen)},
            finished,
        )

    async def admitted(self, registration: PendingRegistration) -> None:
        await self._do("admitted", registration.worker_id, registration.text)

    async def refuse(self, registration: PendingRegistration, reason: str) -> None:
        await self._do("refuse_worker", registration.worker_id, registration.text, reason)

    async def handled(self, report: DirectWorkerFailure) -> None:
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
        registration = _registrations.decode(text)
        call = RegisterWorker(
            worker_id,
            _capabilities.decode(text),
            max(1, registration.slots),
            registration.live,
            registration.instance,
        )
    except UNREADABLE as error:
        return PendingRegistration(worker_id, text, problem=str(error))
    return PendingRegistration(worker_id, text, call)


def _report(text: bytes) -> DirectWorkerFailure:
    # The library wrote the first part, the worker the rest.
    head, _, failure_text = text.partition(_FAILURE)
    ref, failure_text = _reports.decode(head + b"}").ref, failure_text[:-1]
    try:
        failure = _failures.decode(failure_text)
    except UNREADABLE as error:
        # Only the fact of the failure is certain.
        shown = failure_text[:500].decode(errors="replace")
        failure = Failure(
            FailureKind.UNKNOWN, f"the worker reported a failure that cannot be decoded ({error}): {shown}"
        )
    return DirectWorkerFailure(text, FailureReport(ref, failure))
