"""Two clocks that differ, the store's and this machine's, and one that somebody sets: nothing spins, nothing is judged
by the wrong one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.engine._rig import Rig, graph, offers

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.calls import LeasedJob, Poll, RegisterWorker
from comfyfleet.model.dispatch import Candidate, Dispatch, LeaseOffer, Phase, WriteResult
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Peek
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.time import ManualClock, SeededRandom

HOUR_S = 3600.0
A, B = WorkerId("a"), WorkerId("b")


class ServersStore(MemoryStore):
    """As on a server that others use too, with a clock of its own. Each question takes a turn of the loop."""

    peeks = 0
    looks_for_due = 0
    is_refusing = False

    @property
    def is_shared(self) -> bool:
        return True

    async def peek(self, query: Peek) -> list[Candidate]:
        self.peeks += 1
        await asyncio.sleep(0)
        return await super().peek(query)

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        return None if self.is_refusing else await super().lease(job_id, offer)

    async def due(self, limit: int, after: Dispatch | None = None) -> list[Dispatch]:
        self.looks_for_due += 1
        return await super().due(limit, after)


class Hub:
    def __init__(self, ahead_s: float) -> None:
        self.store_clock = ManualClock()
        self.clock = ManualClock(self.store_clock.now() + ahead_s)
        self.store = ServersStore(self.store_clock)
        self.engine = Engine(self.store, rules=Rules(), clock=self.clock, rng=SeededRandom())
        self._polls = itertools.count()

    async def worker(self, worker_id: WorkerId) -> None:
        await self.engine.register(RegisterWorker(worker_id, offers("KSampler"), 1))

    async def poll(self, worker_id: WorkerId, wait_s: float = 0.0) -> LeasedJob | None:
        return await self.engine.poll(Poll(worker_id, PollId(f"poll-{next(self._polls)}"), wait_s))

    async def pass_by(self, seconds: float) -> None:
        """In steps: an hour on both clocks is an hour."""
        for _ in range(int(seconds / 0.5)):
            await self.store_clock.advance(0.5)
            await self.clock.advance(0.5)


@asynccontextmanager
async def hub(ahead_s: float) -> AsyncIterator[Hub]:
    made = Hub(ahead_s)
    async with made.engine:
        yield made


@pytest.fixture(params=[HOUR_S, -HOUR_S], ids=["ahead", "behind"])
def ahead_s(request: pytest.FixtureRequest) -> float:
    return float(request.param)


async def test_a_blocked_pair_is_left_to_the_other_worker_whatever_the_hubs_clock_says(
    ahead_s: float,
) -> None:
    async with hub(ahead_s) as here:
        for worker_id in (A, B):
            await here.worker(worker_id)
        job = await here.engine.submit(Submission(graph()))
        # By another hub: this one finds it in the store.
        until = here.store_clock.now() + 60
        await here.store.put_block(Block(A, job.workflow_hash, BlockReason.FAILURES, 1, until))
        await here.pass_by(2)
        parked = [asyncio.create_task(here.poll(worker_id, 1e9)) for worker_id in (A, B)]
        async with asyncio.timeout(60):
            await asyncio.wait(parked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in parked] == [False, True]
        assert here.store.peeks < 20
        await here.engine.submit(Submission(graph()))
        await here.pass_by(2)
        assert not parked[0].done(), "still blocked"
        await here.pass_by(60)
        async with asyncio.timeout(60):
            leased = await parked[0]
        assert leased is not None, "the cooldown is over"


async def test_a_store_that_shows_a_job_and_refuses_it_again_is_asked_again_later() -> None:
    """Whatever the reason is."""
    async with hub(0.0) as here:
        await here.worker(A)
        here.store.is_refusing = True
        job = await here.engine.submit(Submission(graph()))
        async with asyncio.timeout(60):
            assert await here.poll(A) is None
            parked = asyncio.create_task(here.poll(A, 1e9))
            await here.pass_by(2)
            here.store.is_refusing = False
            await here.pass_by(2)
            leased = await parked
        assert leased is not None and leased.ref.job_id == job.job_id


async def test_timers_stand_at_the_stores_time_whatever_the_hubs_clock_says(ahead_s: float) -> None:
    async with hub(ahead_s) as here:
        await here.worker(A)
        delayed = await here.engine.submit(Submission(graph(), not_before=here.store_clock.now() + 30))
        before = here.store.looks_for_due
        await here.pass_by(29)
        assert here.store.looks_for_due - before < 40, "the sweep does not run all the time"
        assert await here.poll(A) is None
        await here.pass_by(3)
        leased = await here.poll(A)
        assert leased is not None and leased.ref.job_id == delayed.job_id


async def test_a_quarantine_lasts_its_time_whatever_the_hubs_clock_says(ahead_s: float) -> None:
    async with hub(ahead_s) as here:
        await here.worker(A)
        (worker,) = await here.store.workers()
        until = here.store_clock.now() + 60
        await here.store.put_worker(msgspec.structs.replace(worker, quarantined_until=until))
        await here.engine.submit(Submission(graph()))
        await here.pass_by(50)
        await here.worker(A)
        assert await here.poll(A) is None
        await here.pass_by(15)
        await here.worker(A)
        assert await here.poll(A) is not None


async def test_what_a_hub_tells_is_in_the_stores_time(ahead_s: float) -> None:
    async with hub(ahead_s) as here:
        assert here.engine.now() == here.store_clock.now()
        here.clock.set_by(2 * HOUR_S)
        await here.engine.sweep()
        assert here.engine.now() == here.store_clock.now(), "somebody sets the hub's clock"


# a clock that is set


def test_the_clock_says_what_the_machine_says_also_after_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    monkeypatch.setattr("comfyfleet.engine.system.time.time", lambda: 1_700_000_000.0)
    assert clock.now() == 1_700_000_000.0
    monkeypatch.setattr("comfyfleet.engine.system.time.time", lambda: 1_600_000_000.0)
    assert clock.now() == 1_600_000_000.0


@pytest.mark.parametrize("by", [HOUR_S, -HOUR_S], ids=["forward", "back"])
async def test_a_lease_and_its_worker_live_on_while_the_clock_is_set_and_end_in_their_time(by: float) -> None:
    async with Rig() as rig:
        for name in ("busy", "silent"):
            await rig.worker(name)
        kept, lost = await rig.submit(), await rig.submit()
        leased, silent = await rig.take("busy"), await rig.take("silent")
        await rig.clock.advance(30)
        rig.clock.set_by(by)
        for _ in range(4):
            beat = await rig.engine.heartbeat(leased.worker_id, [leased.ref])
            assert beat.alive == (leased.ref,)
            await rig.clock.advance(10)
        assert (await rig.engine.get(kept)).dispatch.phase is Phase.LEASED
        assert silent.ref.job_id == lost
        assert (await rig.engine.get(lost)).dispatch.phase is Phase.QUEUED, "after the minute it was given"
        assert rig.engine.known_worker(leased.worker_id) is not None
        status = {each.worker_id: each.is_offline for each in await rig.engine.workers()}
        assert status == {"busy": False, "silent": True}
        assert rig.engine.now() == rig.clock.now()


async def test_slots_are_matched_while_the_clock_is_set_back() -> None:
    async with Rig() as rig:
        await rig.worker("gpu")
        parked = rig.park("gpu")
        await rig.clock.advance(5)
        rig.clock.set_by(-HOUR_S)
        job_id = await rig.submit(not_before=rig.clock.now() + 10)
        await rig.clock.advance(12)
        async with asyncio.timeout(60):
            leased = await parked
        assert leased is not None and leased.ref.job_id == job_id


@pytest.mark.parametrize("heartbeats", [0, 1])
async def test_leases_of_a_file_that_is_opened_with_an_earlier_clock_end_within_their_time(
    tmp_path: Path, heartbeats: int
) -> None:
    """A dead worker's job came back an hour late."""
    clock = ManualClock()
    rules = Rules(lease_ttl_s=90.0)
    async with Engine(SqliteStore(tmp_path / "fleet.db", clock), rules=rules, clock=clock) as engine:
        await engine.register(RegisterWorker(A, offers("KSampler"), 1))
        job_id = (await engine.submit(Submission(graph()))).job_id
        leased = await engine.poll(Poll(A, PollId("one"), 0))
        assert leased is not None
        for _ in range(heartbeats):
            await engine.heartbeat(A, [leased.ref])
    earlier = ManualClock(clock.now() - HOUR_S)
    store = SqliteStore(tmp_path / "fleet.db", earlier)
    async with Engine(store, rules=rules, clock=earlier) as engine:
        at = await store.next_due()
        assert at is not None and at <= earlier.now() + 90.0
        await engine.heartbeat(A, [leased.ref])
        assert (await engine.get(job_id)).dispatch.phase is Phase.LEASED, "its worker may be alive"
        await earlier.advance(91.0)
        await engine.sweep()
        assert (await engine.get(job_id)).dispatch.phase is Phase.QUEUED


async def test_a_worker_that_ran_after_the_clock_was_set_back_is_lost_in_its_time() -> None:
    async with Rig() as rig:
        await rig.worker("gpu")
        await rig.clock.advance(30)
        rig.clock.set_by(-HOUR_S)
        await rig.clock.advance(5)
        await rig.submit()
        await rig.complete(await rig.take("gpu"))
        await rig.clock.advance(70)
        assert [each.is_offline for each in await rig.engine.workers()] == [True]


async def test_a_worker_of_a_file_that_is_opened_with_an_earlier_clock_is_lost_in_its_time(
    tmp_path: Path,
) -> None:
    """It stood there as online for an hour, and another machine was not let in under its name."""
    clock = ManualClock()
    async with Engine(SqliteStore(tmp_path / "fleet.db", clock), clock=clock) as engine:
        await engine.register(RegisterWorker(A, offers("KSampler"), 1, instance="gone"))
    earlier = ManualClock(clock.now() - HOUR_S)
    async with Engine(SqliteStore(tmp_path / "fleet.db", earlier), clock=earlier) as engine:
        await earlier.advance(50)
        assert [each.is_offline for each in await engine.workers()] == [False]
        await earlier.advance(15)
        await engine.sweep()
        assert [each.is_offline for each in await engine.workers()] == [True]
        another = await engine.register(RegisterWorker(A, offers("KSampler"), 1, instance="another"))
        assert another.last_seen_at == earlier.now()


async def test_a_quarantine_is_no_longer_than_its_own_length_after_the_clock_was_set_back(
    tmp_path: Path,
) -> None:
    """A store on disk keeps it over the restart that goes with such a repair."""
    ahead = ManualClock()
    async with Engine(SqliteStore(tmp_path / "fleet.db", ahead), clock=ahead) as engine:
        await engine.register(RegisterWorker(A, offers("KSampler")))
        worker = await engine.store.get_worker(A)
        assert worker is not None
        until = ahead.now() + engine.rules.quarantine_s
        await engine.store.put_worker(msgspec.structs.replace(worker, quarantined_until=until))
    clock = ManualClock(ahead.now() - HOUR_S)
    async with Engine(SqliteStore(tmp_path / "fleet.db", clock), clock=clock) as engine:
        await engine.sweep()
        kept = await engine.store.get_worker(A)
        assert kept is not None and kept.quarantined_until == clock.now() + engine.rules.quarantine_s
        await clock.advance(engine.rules.quarantine_s + 1)
        await engine.sweep()
        kept = await engine.store.get_worker(A)
        assert kept is not None and kept.quarantined_until is None
