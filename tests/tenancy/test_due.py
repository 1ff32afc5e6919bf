"""Timers and rounds of the fleet while a tenant's database is away or slow: that tenant waits, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.tenancy._tenant_services import ACME, BORG, WORKER, Fleet, one_fleet

from comfyfleet.model.calls import Poll
from comfyfleet.model.dispatch import Phase, Readiness
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import DEFAULT_TENANT, JobId, PollId
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock

BATCH = 4
Work = Callable[[], Coroutine[Any, Any, Any]]


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr("comfyfleet.engine.sweeper._BATCH", BATCH)
    monkeypatch.setattr("comfyfleet.engine.sweeper._TENANT_PATIENCE_S", 0.05)
    clock = ManualClock()
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        await fleet.tenant(ACME, granted=1000)
        await fleet.tenant(BORG, granted=1000, database="second")
        await fleet.worker(slots=4 * BATCH)
        yield fleet


def answers_by(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Work], Any]) -> None:
    """The first database does so from now on."""
    ask = fleet.tenant_services.databases.watched

    async def watched(name: str, work: Work) -> Any:
        return await (ask(name, work) if name != "first" else answer(work))

    monkeypatch.setattr(fleet.tenant_services.databases, "watched", watched)


def clock_of(fleet: Fleet) -> ManualClock:
    assert isinstance(fleet.clock, ManualClock)
    return fleet.clock


async def with_leases_that_end(fleet: Fleet) -> list[JobId]:
    """More than a page of them, all of one tenant and due before anything else."""
    leases = []
    for _ in range(2 * BATCH + 1):
        await fleet.submit(ACME)
        leases.append(await fleet.take())
    return [leased.ref.job_id for leased in leases]


async def stands(fleet: Fleet, job_id: JobId) -> Readiness:
    dispatch = await fleet.central.load(job_id)
    assert dispatch is not None
    return dispatch.standing


async def test_jobs_that_are_due_and_cannot_be_attended_to_stop_nobody_elses_timers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = await with_leases_that_end(fleet)

    async def is_away(_: Work) -> Any:
        raise Fault("the database is away")

    answers_by(fleet, monkeypatch, is_away)
    delayed = await fleet.submit(BORG, not_before=fleet.clock.now() + 90)
    anybodys = await fleet.submit(DEFAULT_TENANT, not_before=fleet.clock.now() + 90)
    await clock_of(fleet).advance(100)
    for _ in range(3):
        await fleet.engine.sweep()
    assert await stands(fleet, delayed) is Readiness.IN_LANE
    assert await stands(fleet, anybodys) is Readiness.IN_LANE
    said = [each for each in caplog.records if each.name == "comfyfleet.engine.sweeper"]
    assert [(each.levelname, each.exc_info) for each in said] == [("WARNING", None)], "once, not for each job"
    assert "acme" in said[0].getMessage()
    monkeypatch.undo()
    await fleet.engine.sweep()
    for job_id in theirs:
        dispatch = await fleet.central.load(job_id)
        assert dispatch is not None and dispatch.phase is Phase.QUEUED, (
            "its lease ended when that was possible"
        )


async def test_a_database_that_does_not_answer_holds_up_nobody_elses_timers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = await with_leases_that_end(fleet)
    answers = asyncio.Event()

    async def is_slow(work: Work) -> Any:
        await answers.wait()
        return await work()

    answers_by(fleet, monkeypatch, is_slow)
    delayed = await fleet.submit(BORG, not_before=fleet.clock.now() + 90)
    await clock_of(fleet).advance(100)
    async with asyncio.timeout(60):
        await fleet.engine.sweep()
        assert await stands(fleet, delayed) is Readiness.IN_LANE
        answers.set()
        while any([(await fleet.engine.get(each)).dispatch.phase is Phase.LEASED for each in theirs]):
            await fleet.engine.sweep()


async def test_a_lease_that_waits_for_its_tenants_database_holds_up_nobody_elses_round(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.tenancy.ledger_store._LEASE_TIMEOUT_S", 60.0)
    answers = asyncio.Event()

    async def is_slow(work: Work) -> Any:
        await answers.wait()
        return await work()

    parked = [
        asyncio.create_task(fleet.engine.poll(Poll(WORKER, PollId(f"parked-{number}"), 1e6)))
        for number in range(2)
    ]
    await clock_of(fleet).settle()
    theirs = await fleet.submit(ACME, not_before=fleet.clock.now() + 5)
    answers_by(fleet, monkeypatch, is_slow)
    await clock_of(fleet).advance(6)
    await clock_of(fleet).settle()
    others = await fleet.submit(BORG)
    async with asyncio.timeout(60):
        done, waiting = await asyncio.wait(parked, return_when=asyncio.FIRST_COMPLETED)
        (leased,) = [task.result() for task in done]
        assert leased is not None and leased.ref.job_id == others
        answers.set()
        (slow,) = [await task for task in waiting]
    assert slow is not None and slow.ref.job_id == theirs
