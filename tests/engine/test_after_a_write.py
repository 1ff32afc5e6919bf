"""A change that stands in the store is told at once: what fails after the write hides no end from those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Release, ReportReply
from comfyfleet.model.dispatch import Phase, Write, WriteResult
from comfyfleet.model.fact import Fact, FactKind
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import JobId
from comfyfleet.ports import Clock
from comfyfleet.stores.memory import MemoryStore


class Broken(Exception):
    """Neither a fault nor a refusal: nobody expects it."""


class BreaksAfterWrites(MemoryStore):
    """Once armed, the first write stands, and from then on everything but reading the job fails."""

    def __init__(self, clock: Clock, epoch: int = 1) -> None:
        super().__init__(clock, epoch)
        self.is_armed = False
        self.is_broken = False

    async def write(self, write: Write) -> WriteResult | None:
        written = await super().write(write)
        self.is_broken |= self.is_armed
        return written

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in _LATER and super().__getattribute__("is_broken"):
            return _fails
        return found


_LATER = frozenset(
    {
        "now",
        "blocks",
        "lift",
        "get_block",
        "put_workflow_stats",
        "get_workflow_stats",
        "add_workflow_stats",
        "put_worker",
        "add_worker",
        "replace_worker",
        "apply_worker_delta",
        "send_command",
    }
)


async def _fails(*_: object, **__: object) -> None:
    raise Broken("the disk is full")


async def _ending(engine: Engine, job_id: JobId) -> list[Fact]:
    async with asyncio.timeout(60), aclosing(engine.watch(job_id)) as watched:
        return [event async for event in watched if isinstance(event, Fact)]


Report = Callable[[Rig, Any], Any]


@pytest.mark.parametrize(
    ("report", "answer", "last"),
    [
        (lambda rig, leased: rig.complete(leased), ReportReply(Phase.COMPLETED), FactKind.COMPLETED),
        (
            lambda rig, leased: rig.fail(leased, FailureKind.INVALID_WORKFLOW),
            ReportReply(Phase.FAILED),
            FactKind.FAILED,
        ),
        (
            lambda rig, leased: rig.fail(leased, FailureKind.NODE_ERROR),
            ReportReply(Phase.FAILED),
            FactKind.FAILED,
        ),
    ],
    ids=["completed", "invalid", "failed with a block"],
)
async def test_the_end_is_told_and_answered_though_all_that_follows_the_write_fails(
    report: Report, answer: ReportReply, last: FactKind, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(BreaksAfterWrites, quarantine_blocks=1) as rig:
        assert isinstance(rig.store, BreaksAfterWrites)
        await rig.worker("a")
        job_id = await rig.submit(max_attempts=1)
        leased = await rig.take("a")
        watching = asyncio.create_task(_ending(rig.engine, job_id))
        await rig.settle()
        rig.store.is_armed = True
        assert await report(rig, leased) == answer
        assert [fact.kind for fact in await watching][-1] is last
        assert "the disk is full" in caplog.text, "whoever runs it finds out"


async def test_a_retry_is_told_and_runs_elsewhere_though_statistics_cannot_be_written() -> None:
    async with Rig(BreaksAfterWrites) as rig:
        assert isinstance(rig.store, BreaksAfterWrites)
        await rig.worker("a")
        job_id = await rig.submit(max_attempts=3)
        leased = await rig.take("a")
        parked = rig.park("b") if await rig.worker("b") else None
        assert parked is not None
        await rig.settle()
        rig.store.is_armed = True
        settled = await rig.fail(leased, FailureKind.TRANSIENT)
        assert settled.will_retry
        rig.store.is_armed = rig.store.is_broken = False
        assert rig.facts(job_id)[-1] == "retrying"
        await rig.clock.advance(60)
        again = parked.result()
        assert again is not None, "the other worker was woken"
        assert again.job_id == job_id


async def test_a_cancel_stands_though_its_worker_cannot_be_told_now() -> None:
    async with Rig(BreaksAfterWrites) as rig:
        assert isinstance(rig.store, BreaksAfterWrites)
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        rig.store.is_armed = True
        answer = await rig.engine.cancel(job_id)
        rig.store.is_armed = rig.store.is_broken = False
        assert answer.cancel_requested
        beat = await rig.engine.heartbeat(leased.worker_id, [leased.ref])
        assert [command.action for command in beat.commands] == ["cancel"], "the next heartbeat tells"


async def test_a_measurement_that_fails_keeps_nothing_back() -> None:
    async with Rig() as rig:

        def measure(_: WriteResult) -> None:
            raise Broken("no such counter")

        rig.engine.set_write_listener(measure)
        await rig.worker("a")
        job_id = await rig.submit(graph())
        await rig.complete(await rig.take("a"))
        assert rig.facts(job_id) == ["queued", "leased", "completed"]


async def test_a_declined_lease_is_told_before_its_block() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        await rig.engine.release(Release(leased.ref, "declined"))
        kinds = [event.kind for event in rig.events]
        assert kinds.index("released") < kinds.index("blocked")
        assert rig.facts(job_id)[-1] == "released"
