"""A hub that was away longer than a lease, alone on its store: leases last one lease time from its start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.engine._rig import graph, offers

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.model.job import JobResult, Submission
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.time import ManualClock, SeededRandom

A, B = WorkerId("a"), WorkerId("b")
TTL_S = 60.0


class Hub:
    """Can be stopped and started again on the same file, with the same clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self._path = folder / "fleet.db"

    @asynccontextmanager
    async def started(self, *, is_pool: bool = False) -> AsyncIterator[Engine]:
        store = SqliteStore(self._path, self.clock)
        async with Engine(
            store, clock=self.clock, rng=SeededRandom(), workers_may_outlive_it=not is_pool
        ) as engine:
            yield engine

    async def pass_by(self, engine: Engine, seconds: float) -> None:
        await self.clock.advance(seconds)
        await engine.sweep()


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path)


async def lease(engine: Engine, *, is_acknowledged: bool = True) -> LeasedJob:
    for worker_id in (A, B):
        await engine.register(RegisterWorker(worker_id, offers("KSampler"), 1))
    await engine.submit(Submission(graph()))
    leased = await engine.poll(Poll(A, PollId("one"), 0))
    assert leased is not None
    if is_acknowledged:
        await engine.heartbeat(A, [leased.ref])
    return leased


async def phase(engine: Engine, job_id: JobId) -> Phase:
    return (await engine.get(job_id)).dispatch.phase


async def test_a_run_that_ended_meanwhile_is_accepted(hub: Hub) -> None:
    async with hub.started() as engine:
        leased = await lease(engine)
    await hub.clock.advance(75)
    async with hub.started() as engine:
        await hub.pass_by(engine, 15)
        await engine.complete(Completion(leased.ref, JobResult(), 1.0))
        view = await engine.get(leased.job_id)
        assert view.dispatch.phase is Phase.COMPLETED
        assert len(view.attempts) == 1, "it ran once"


async def test_a_heartbeat_renews_the_lease_of_a_worker_that_is_still_there(hub: Hub) -> None:
    async with hub.started() as engine:
        leased = await lease(engine)
    await hub.clock.advance(3600)
    async with hub.started() as engine:
        await hub.pass_by(engine, 50)
        assert (await engine.heartbeat(A, [leased.ref])).alive == (leased.ref,)
        await hub.pass_by(engine, 50)
        assert await phase(engine, leased.job_id) is Phase.LEASED


async def test_a_dead_workers_job_comes_back_one_lease_time_after_the_start(hub: Hub) -> None:
    async with hub.started() as engine:
        leased = await lease(engine)
    await hub.clock.advance(75)
    async with hub.started() as engine:
        await hub.pass_by(engine, TTL_S - 1)
        assert await phase(engine, leased.job_id) is Phase.LEASED
        await hub.pass_by(engine, 2)
        assert await phase(engine, leased.job_id) is Phase.QUEUED
        with pytest.raises(Refusal) as refused:
            await engine.complete(Completion(leased.ref, JobResult(), 1.0))
        assert refused.value.code is RefusalCode.LEASE_LOST


async def test_a_lease_that_was_never_acknowledged_is_not_extended(hub: Hub) -> None:
    async with hub.started() as engine:
        leased = await lease(engine, is_acknowledged=False)
    await hub.clock.advance(11)
    async with hub.started() as engine:
        await hub.pass_by(engine, 1)
        view = await engine.get(leased.job_id)
        assert (view.dispatch.phase, view.dispatch.releases) == (Phase.QUEUED, 1)


async def test_a_pool_does_not_wait_for_workers_that_died_with_it(hub: Hub) -> None:
    async with hub.started(is_pool=True) as engine:
        leased = await lease(engine)
    await hub.clock.advance(75)
    async with hub.started(is_pool=True) as engine:
        await hub.pass_by(engine, 1)
        assert await phase(engine, leased.job_id) is Phase.QUEUED
