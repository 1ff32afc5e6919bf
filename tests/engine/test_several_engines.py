"""Several engines on one store: what one adds the others come to know, and a profile means the same to all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.engine._rig import Rig, graph, offers

from comfyfleet.engine.engine import Engine
from comfyfleet.model.block import EVERY_WORKER
from comfyfleet.model.calls import Completion, Poll, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal
from comfyfleet.model.fact import Event, Fact
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import JobId, PollId, WorkerId, WorkflowHash
from comfyfleet.model.job import JobResult, Submission
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerDelta, WorkerRecord
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.workflow_stats import expected_s, of_run
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock, SeededRandom


class SharedStore(MemoryStore):
    """As if in another process: it is shared, gives no hints, and outlives the engines on it."""

    @property
    def is_shared(self) -> bool:
        return True


class Engines:
    """Two engines that know each other through the store alone."""

    def __init__(self, store: type[SharedStore] = SharedStore, **rules: Any) -> None:
        self.clock = ManualClock()
        self.store = store(self.clock)
        self.first, self.second = (
            Engine(self.store, rules=Rules(**rules), clock=self.clock, rng=SeededRandom(seed))
            for seed in (1, 2)
        )

    async def __aenter__(self) -> Engines:
        await self.first.__aenter__()
        await self.second.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.first.close()
        await self.second.close()


class StoreAhead(SharedStore):
    async def now(self) -> float:
        return await super().now() + 3600


async def take(engine: Engine, worker: str, poll: str = "poll") -> JobId | None:
    leased = await engine.poll(Poll(WorkerId(worker), PollId(poll), 0))
    return None if leased is None else leased.job_id


async def register(engine: Engine, worker: str, *kinds: str, **more: Any) -> None:
    await engine.register(RegisterWorker(WorkerId(worker), offers(*kinds, **more)))


async def test_a_job_submitted_at_one_engine_runs_on_a_worker_of_the_other() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        submitted = await it.first.submit(Submission(graph()))
        assert submitted.unworkable == (), "the other engine's worker counts"
        leased = await it.second.poll(Poll(WorkerId("b"), PollId("p"), 0))
        assert leased is not None
        await it.second.complete(Completion(leased.ref, JobResult()))
        assert (await it.first.get(submitted.job_id)).job.phase is Phase.COMPLETED


async def test_a_parked_poll_finds_the_other_engines_job_within_a_second_without_any_hint() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        rig = Rig()
        rig.engine, rig.clock = it.second, it.clock
        parked = rig.park("b")
        await it.clock.settle()
        job_id = (await it.first.submit(Submission(graph()))).job_id
        await it.clock.settle()
        assert not parked.done()
        await it.clock.advance(1.0)
        leased = parked.result()
        assert leased is not None
        assert leased.job_id == job_id


async def test_a_new_word_at_one_engine_parts_the_workers_of_the_other() -> None:
    async with Engines() as it:
        await register(it.second, "with", "KSampler", models=("rare.safetensors",))
        await register(it.second, "without", "KSampler")
        await it.first.submit(Submission(graph(priority=1)))
        # Until now nobody could tell the two apart.
        profiles = {str(worker.worker_id): worker.profile for worker in await it.second.workers()}
        job_id = (await it.first.submit(Submission(graph(model="rare.safetensors"), priority=5))).job_id
        assert await take(it.second, "without", "1") != job_id
        await it.clock.advance(1.0)
        assert await take(it.second, "with", "2") == job_id
        assert profiles["with"] == profiles["without"]


async def test_workers_of_one_kind_registered_at_both_engines_share_a_profile_and_each_verdict_is_right() -> (
    None
):
    async with Engines() as it:
        await it.first.submit(Submission(graph(model="one.safetensors")))
        await register(it.first, "a", "KSampler", models=("one.safetensors", "two.safetensors"))
        await it.second.submit(Submission(graph(model="two.safetensors")))
        await register(it.second, "b", "KSampler", models=("one.safetensors",))
        assert await take(it.second, "b", "1") is not None
        assert await take(it.second, "b", "2") is None, "the other job needs what it lacks"
        assert await take(it.first, "a", "3") is not None


async def test_a_worker_seen_by_one_engine_is_not_lost_to_the_other() -> None:
    async with Engines(worker_lost_s=60) as it:
        await register(it.second, "b", "KSampler")
        for _ in range(10):
            await it.clock.advance(12)
            await it.second.heartbeat(WorkerId("b"), [])
        await it.first.submit(Submission(graph()))
        workers = await it.first.workers()
        assert [worker.is_offline for worker in workers] == [False]


async def test_a_block_set_at_one_engine_holds_at_the_other() -> None:
    async with Engines(cooldown_s=60, max_attempts=9) as it:
        for engine, name in ((it.first, "a"), (it.second, "b")):
            await register(engine, name, "KSampler")
        job_id = (await it.first.submit(Submission(graph(), max_attempts=9))).job_id
        leased = await it.first.poll(Poll(WorkerId("a"), PollId("p"), 0))
        assert leased is not None
        rig = Rig()
        rig.engine = it.first
        await rig.fail(leased, FailureKind.OUT_OF_MEMORY)
        # The same worker, now polling at the other engine.
        assert await take(it.second, "a", "q") is None
        await it.clock.advance(1.0)
        assert await take(it.second, "b", "r") == job_id


async def test_an_engine_that_starts_again_knows_what_waits_and_who_works() -> None:
    it = Engines()
    async with it:
        await register(it.first, "a", "KSampler")
        job_id = (await it.first.submit(Submission(graph()))).job_id
    later = Engine(it.store, clock=it.clock, rng=SeededRandom(3))
    async with later:
        assert [worker.worker_id for worker in await later.workers()] == ["a"]
        assert "worker" in (await later.explain(job_id)).summary
        await register(later, "a", "KSampler")
        assert await take(later, "a") == job_id


async def test_whoever_watches_a_job_hears_what_another_engine_did_to_it_within_a_second_and_once() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        job_id = (await it.first.submit(Submission(graph()))).job_id
        heard: list[str] = []
        told: list[Event] = []
        it.first.bus.listen(told.append)

        async def watch() -> None:
            async for event in it.first.watch(job_id):
                heard.append(event.kind.value)

        watching = asyncio.create_task(watch())
        await it.clock.settle()
        leased = await it.second.poll(Poll(WorkerId("b"), PollId("p"), 0))
        assert leased is not None
        await it.second.heartbeat(WorkerId("b"), [leased.ref])
        await it.second.complete(Completion(leased.ref, JobResult()))
        await it.clock.settle()
        assert heard == ["queued"]
        await it.clock.advance(1.0)
        assert watching.done()
        assert heard == ["queued", "leased", "completed"]
        assert [event.number for event in told if isinstance(event, Fact)] == [2, 3]


async def test_a_flag_set_at_one_engine_undoes_nothing_the_worker_has_declared_at_the_other() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        await it.first.workers()
        await register(it.second, "b", "Upscale")
        await it.first.pause_worker(WorkerId("b"))
        stored = await it.store.get_worker(WorkerId("b"))
        assert stored is not None
        assert stored.is_paused
        assert stored.capabilities == offers("Upscale")


async def test_a_worker_that_leaves_at_one_engine_keeps_what_was_set_at_the_other() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        await it.first.workers()
        await it.first.pause_worker(WorkerId("b"))
        await it.second.unregister(WorkerId("b"), "done")
        stored = await it.store.get_worker(WorkerId("b"))
        assert stored is not None
        assert (stored.is_paused, stored.is_offline) == (True, True)


async def test_a_worker_removed_at_one_engine_stays_so_until_it_registers_at_the_other() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        await it.first.submit(Submission(graph()))
        leased = await it.second.poll(Poll(WorkerId("b"), PollId("p"), 0))
        assert leased is not None
        await it.second.heartbeat(WorkerId("b"), [leased.ref])
        await it.clock.advance(12)
        await it.first.remove_worker(WorkerId("b"))
        # What it does meanwhile counts for its job, and for nothing else.
        beat = await it.second.heartbeat(WorkerId("b"), [leased.ref])
        assert beat.alive == (leased.ref,)
        assert (await it.second.complete(Completion(leased.ref, JobResult()))).phase is Phase.COMPLETED
        with pytest.raises(Refusal, match="there is no worker"):
            await it.second.pause_worker(WorkerId("b"))
        assert await it.store.workers() == []
        with pytest.raises(Refusal, match="not registered"):
            await take(it.second, "b")
        await register(it.second, "b", "KSampler")
        assert [worker.worker_id for worker in await it.first.workers()] == ["b"]


async def test_a_worker_removed_between_a_look_and_a_write_is_not_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        look = it.store.get_worker

        async def look_then_lose(worker_id: WorkerId) -> WorkerRecord | None:
            found = await look(worker_id)
            await it.first.remove_worker(worker_id)
            return found

        note = it.store.apply_worker_delta

        async def lose_then_note(worker_id: WorkerId, delta: WorkerDelta) -> WorkerRecord | None:
            await it.first.remove_worker(worker_id)
            return await note(worker_id, delta)

        monkeypatch.setattr(it.store, "get_worker", look_then_lose)
        monkeypatch.setattr(it.store, "apply_worker_delta", lose_then_note)
        with pytest.raises(Refusal, match="there is no worker"):
            await it.second.pause_worker(WorkerId("b"))
        assert await it.store.workers() == []
        await register(it.second, "b", "KSampler")
        await it.clock.advance(12)
        assert await it.second.heartbeat(WorkerId("b"), []) is not None
        assert await it.store.workers() == [], "a heartbeat notes when the worker was seen, and nothing else"
        await register(it.second, "b", "KSampler")
        await it.second.unregister(WorkerId("b"), "stopped")
        assert await it.store.workers() == [] and it.second.known_worker(WorkerId("b")) is None


async def test_an_engine_looks_round_though_the_clock_of_its_store_is_ahead() -> None:
    async with Engines(StoreAhead) as it:
        await register(it.first, "a", "X", "Y")
        parked = asyncio.create_task(it.first.poll(Poll(WorkerId("a"), PollId("p"), 60)))
        await it.clock.settle()
        assert (await it.first.submit(Submission(graph("Z")))).unworkable, (
            "which looks at the store's workers"
        )
        # A class that names something new: the worker has another profile in the store from now on.
        other = await it.second.submit(Submission(graph("X")))
        await it.clock.advance(5)
        assert parked.done()
        leased = parked.result()
        assert leased is not None and leased.job_id == other.job_id


async def test_a_workflow_refused_at_one_engine_is_refused_at_the_other_and_so_is_its_end() -> None:
    async with Engines() as it:
        rig = Rig()
        rig.engine, rig.clock = it.first, it.clock
        await rig.submit(retry_delay_s=0)
        for name in "ab":
            await register(it.first, name, "KSampler")
            leased = await rig.take(name)
            await rig.fail(leased, FailureKind.DEAD_WORKER, server_died="thread")
        await register(it.second, "c", "KSampler")
        # It has not heard of it, but no store gives such a job to anybody.
        late = (await it.second.submit(Submission(graph()))).job_id
        assert await take(it.second, "c") is None
        await it.clock.advance(3)
        job = (await it.second.get(late)).job
        assert job.phase is Phase.FAILED and job.failure is not None
        assert "servers died" in job.failure.message
        with pytest.raises(Refusal, match="servers died"):
            await it.second.submit(Submission(graph()))
        assert await it.first.unblock(EVERY_WORKER, job.workflow_hash)
        await it.clock.advance(3)
        again = (await it.second.submit(Submission(graph()))).job_id
        assert await take(it.second, "c", "again") == again


class ChangedMeanwhile(SharedStore):
    """Another engine pauses a worker and lets it work again, just before this one gives it another profile."""

    meddles = False

    async def replace_worker(self, worker: WorkerRecord) -> bool:
        stored = await self.get_worker(worker.worker_id)
        if self.meddles and stored is not None and stored.profile != worker.profile:
            self.meddles = False
            for is_paused in (True, False):
                stored = await self.get_worker(worker.worker_id)
                assert stored is not None
                assert await super().replace_worker(msgspec.structs.replace(stored, is_paused=is_paused))
        return await super().replace_worker(worker)


async def test_workers_part_though_one_of_them_is_changed_at_another_engine_meanwhile() -> None:
    async with Engines(ChangedMeanwhile) as it:
        await register(it.first, "lacks", "KSampler")
        await register(it.first, "has", "KSampler", "Rare")
        # So far they are equal for all that anybody asked for.
        common = (await it.first.submit(Submission(graph()))).job_id
        assert await take(it.first, "lacks", "0") == common
        store = it.store
        assert isinstance(store, ChangedMeanwhile)
        store.meddles = True
        job_id = (await it.first.submit(Submission(graph("Rare")))).job_id
        assert not store.meddles, "they part for a class that nobody asked for before"
        assert await take(it.first, "lacks", "1") is None
        assert await take(it.first, "has", "2") == job_id


async def test_what_is_known_of_a_workflow_ranks_its_jobs_also_when_it_is_long_since_it_was_read() -> None:
    async with Engines() as it:
        context = it.first._context
        waits, other = WorkflowHash("waits"), WorkflowHash("other")
        await context.add_workflow_stats(of_run(waits, "RTX", 7.0))
        await it.clock.advance(11)
        await context.stats(other)
        assert expected_s(context.known_workflow_stats(waits), "RTX") == 7.0
        # Meanwhile the other engine has learned as well, which is read with the next question.
        await it.second._context.add_workflow_stats(of_run(waits, "RTX", 9.0))
        assert expected_s(await context.stats(waits), "RTX") == 8.0


async def test_what_two_engines_put_at_once_leaves_no_class_without_the_worker_that_can_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker comes to this engine with a profile that it has not judged, and gets another one at once."""
    async with Engines() as it:
        await register(it.first, "gpu", "A", "B", "C")
        of_a = (await it.first.submit(Submission(graph("A")))).job_id
        await it.clock.advance(2)
        fleet = it.second._context.fleet
        await fleet.sync()
        grow = fleet._grow
        of_c = []

        async def grow_after_the_other(*classes: RequirementClass) -> None:
            monkeypatch.setattr(fleet, "_grow", grow)
            of_c.append((await it.first.submit(Submission(graph("C")))).job_id)
            await grow(*classes)

        monkeypatch.setattr(fleet, "_grow", grow_after_the_other)
        of_b = (await it.second.submit(Submission(graph("B")))).job_id
        taken = {await take(it.first, "gpu", str(number)) for number in range(3)}
        assert taken == {of_a, of_b, *of_c}


async def test_a_profile_that_another_engine_took_for_unused_is_put_back() -> None:
    async with Engines() as it:
        await register(it.first, "gpu", "KSampler")
        job_id = (await it.first.submit(Submission(graph()))).job_id
        await it.clock.advance(2)
        await it.second._context.fleet.sync()
        await it.store.drop_profiles((await it.store.table()).profiles)
        await it.clock.advance(2)
        assert await take(it.first, "gpu", "0") == job_id


async def test_a_worker_that_registers_while_another_engine_drops_what_nobody_uses_gets_its_jobs() -> None:
    """That engine has not heard of the worker yet, and takes its profile for unused."""
    async with Engines() as it:
        await register(it.first, "old", "KSampler")
        await register(it.first, "gpu", "Other")
        of_old = (await it.first.submit(Submission(graph("KSampler")))).job_id
        await it.clock.advance(2)
        await it.second._context.fleet.sync()
        await register(it.second, "new", "KSampler", "Other")
        job_id = (await it.second.submit(Submission(graph("Other"), priority=5))).job_id
        rig = Rig()
        rig.engine, rig.clock = it.second, it.clock
        new = await it.store.get_worker(WorkerId("new"))
        assert new is not None
        mine = new.profile
        assert mine in (await it.store.table()).profiles
        await it.first.remove_worker(WorkerId("gpu"))
        assert mine not in (await it.store.table()).profiles, "it was dropped, as the test wants it"
        parked = rig.park("new")
        await it.clock.advance(2)
        leased = parked.result()
        assert leased is not None and leased.job_id in (job_id, of_old)
        assert mine in (await it.store.table()).profiles


async def test_a_worker_that_registers_while_it_gets_another_profile_keeps_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Engines() as it:
        await register(it.first, "gpu", "KSampler", "Rare")
        look, jobs = it.store.get_worker, []

        async def submit_then_look(worker_id: WorkerId) -> WorkerRecord | None:
            monkeypatch.setattr(it.store, "get_worker", look)
            jobs.append((await it.second.submit(Submission(graph("Rare")))).job_id)
            return await look(worker_id)

        monkeypatch.setattr(it.store, "get_worker", submit_then_look)
        await register(it.first, "gpu", "KSampler", "Rare")
        worker = await it.store.get_worker(WorkerId("gpu"))
        assert worker is not None and worker.profile in (await it.store.table()).profiles
        assert [await take(it.first, "gpu", "0")] == jobs


async def test_a_poll_that_is_given_up_at_one_engine_leaves_the_lease_that_the_other_gave_for_it() -> None:
    """A worker that asks again elsewhere asks with the same id, and its first request may end late."""
    async with Engines() as both:
        await register(both.first, "gpu", "KSampler")
        parked = asyncio.create_task(both.first.poll(Poll(WorkerId("gpu"), PollId("poll"), 1e9)))
        while not both.first.idle_slots:
            await asyncio.sleep(0)
        await register(both.second, "gpu", "KSampler")
        await both.second.submit(Submission(graph()))
        leased = await both.second.poll(Poll(WorkerId("gpu"), PollId("poll"), 0))
        assert leased is not None and not parked.done()
        parked.cancel()
        await asyncio.wait({parked})
        beat = await both.second.heartbeat(WorkerId("gpu"), [leased.ref])
        assert beat.alive == (leased.ref,)
