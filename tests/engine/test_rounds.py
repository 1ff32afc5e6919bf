"""Parked polls are idle slots: which job goes to which, that no slot idles, and that none is stranded."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from tests.engine._rig import Rig, graph
from tests.engine.test_failures import taken

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.calls import LeasedJob, Poll
from comfyfleet.model.dispatch import LeaseOffer, Phase, WriteResult
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.stores.memory import MemoryStore


@pytest.mark.parametrize("kinds", list(itertools.permutations(["X", "Y"])))
@pytest.mark.parametrize("parked_first", ["jobs", "slots"])
async def test_the_specialist_leaves_the_generalist_what_only_it_can_do(
    kinds: tuple[str, str], parked_first: str
) -> None:
    """A runs X, B runs X and Y: whatever the order, both are busy with one job each."""
    async with Rig() as rig:
        await rig.worker("a", "X")
        await rig.worker("b", "X", "Y")
        if parked_first == "jobs":
            await rig.engine.pause_queue()
            jobs = {kind: await rig.submit(graph(kind)) for kind in kinds}
            parked = {name: rig.park(name) for name in "ba"}
            await rig.settle()
            await rig.engine.pause_queue(False)
        else:
            parked = {name: rig.park(name) for name in "ba"}
            await rig.settle()
            jobs = {kind: await rig.submit(graph(kind)) for kind in kinds}
        await rig.settle()
        assert (taken(parked["a"]), taken(parked["b"])) == (jobs["X"], jobs["Y"])


async def test_the_worker_that_can_do_both_takes_the_rarer_kind_first_though_it_came_later() -> None:
    async with Rig() as rig:
        await rig.worker("a", "X")
        await rig.worker("b", "X", "Y")
        common, rare = await rig.submit(graph("X")), await rig.submit(graph("Y"))
        assert (await rig.take("b")).job_id == rare
        assert (await rig.take("b")).job_id == common


def most_leases(slots: list[set[str]], jobs: list[str]) -> int:
    """The size of a maximum matching, by trying."""
    holder: dict[int, int] = {}

    def place(job: int, seen: set[int]) -> bool:
        for slot, kinds in enumerate(slots):
            if jobs[job] in kinds and slot not in seen:
                seen.add(slot)
                if slot not in holder or place(holder[slot], seen):
                    holder[slot] = job
                    return True
        return False

    return sum(place(job, set()) for job in range(len(jobs)))


@pytest.mark.parametrize("seed", range(40))
async def test_a_round_fills_as_many_slots_as_can_be_and_prefers_higher_priorities(seed: int) -> None:
    chance = random.Random(seed)
    kinds = ["W", "X", "Y", "Z"]
    async with Rig() as rig:
        workers = {
            f"w{number}": set(chance.sample(kinds, chance.randint(1, 3)))
            for number in range(chance.randint(1, 5))
        }
        for name, can in workers.items():
            await rig.worker(name, *can, slots=2)
        await rig.engine.pause_queue()
        jobs: dict[JobId, tuple[str, int]] = {}
        for number in range(chance.randint(1, 9)):
            kind, priority = chance.choice(kinds), chance.choice([0, 0, 5])
            jobs[await rig.submit(graph(kind, seed=number), priority=priority)] = (kind, priority)
        slots = [name for name in workers for _ in range(chance.randint(1, 2))]
        chance.shuffle(slots)
        parked = [rig.park(name) for name in slots]
        await rig.settle()
        await rig.engine.pause_queue(False)
        await rig.settle()
        got = {
            name: job for name, each in zip(slots, parked, strict=True) if (job := taken(each)) is not None
        }
        leased = [job for each in parked if (job := taken(each)) is not None]
        assert len(set(leased)) == len(leased)
        assert all(jobs[job][0] in workers[name] for name, job in got.items())
        offered = [workers[name] for name in slots]
        assert len(leased) == most_leases(offered, [kind for kind, _ in jobs.values()])
        urgent = [kind for kind, priority in jobs.values() if priority == 5]
        assert sum(jobs[job][1] == 5 for job in leased) == most_leases(offered, urgent)


async def test_a_higher_priority_never_waits_behind_a_lower_one_for_the_same_slot() -> None:
    async with Rig() as rig:
        await rig.worker("a", "X", "Y", models=("m.safetensors",))
        low = await rig.submit(graph("X", "m.safetensors"))
        await rig.complete(await rig.take("a"))
        low = await rig.submit(graph("X", "m.safetensors"))
        high = await rig.submit(graph("Y"), priority=1)
        assert [(await rig.take("a")).job_id for _ in range(2)] == [high, low]


async def test_a_job_goes_to_the_slot_whose_worker_has_its_model_loaded() -> None:
    async with Rig() as rig:
        for name in "ab":
            await rig.worker(name, models=("m.safetensors",))
        await rig.submit(graph(model="m.safetensors", seed=1))
        await rig.complete(await rig.take("b"))
        parked = {name: rig.park(name) for name in "ab"}
        await rig.settle()
        job_id = await rig.submit(graph(model="m.safetensors", seed=2))
        await rig.settle()
        assert (taken(parked["a"]), taken(parked["b"])) == (None, job_id)


@pytest.mark.parametrize(("patience", "most"), [(0, 4), (1, 7), (2, 10)])
async def test_a_cold_job_is_overtaken_by_warm_ones_only_for_the_patience_in_loads(
    patience: float, most: int
) -> None:
    """Nothing is known of the load, so it counts as 3 s."""
    async with Rig(patience=patience) as rig:
        await rig.worker("a", models=("warm.safetensors", "cold.safetensors"))
        await rig.submit(graph(model="warm.safetensors", seed=0))
        await rig.complete(await rig.take("a"))
        cold = await rig.submit(graph(model="cold.safetensors"))
        passed = 0
        while True:
            await rig.submit(graph(model="warm.safetensors", seed=passed + 1))
            leased = await rig.take("a")
            await rig.clock.advance(1)
            if leased.job_id == cold:
                break
            passed += 1
            await rig.complete(leased)
        assert most - 3 <= passed <= most, "one turn with a load, and the patience"


async def test_jobs_without_models_run_in_the_order_in_which_they_came_whatever_they_take() -> None:
    async with Rig() as rig:
        await rig.worker("a", "Short", "Long", "Other")
        for kind, seconds in (("Long", 500.0), ("Short", 1.0), ("Other", 1.0)):
            await rig.submit(graph(kind, seed=0))
            await rig.complete(await rig.take("a"), seconds)
        jobs = [await rig.submit(graph(kind, seed=1)) for kind in ("Other", "Long", "Short", "Long", "Short")]
        assert [(await rig.take("a")).job_id for _ in jobs] == jobs


async def test_a_worker_with_several_slots_fills_them_all() -> None:
    async with Rig() as rig:
        await rig.worker("a", slots=3)
        parked = [rig.park("a") for _ in range(3)]
        await rig.settle()
        jobs = {await rig.submit() for _ in range(4)}
        await rig.settle()
        assert len({taken(each) for each in parked} & jobs) == 3
        assert (await rig.engine.stats()).waiting == 1


async def test_the_parked_poll_of_a_worker_that_goes_offline_is_answered_with_nothing() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        parked = rig.park("a")
        await rig.settle()
        await rig.engine.unregister(WorkerId("a"), "gone")
        await rig.settle()
        assert parked.done()
        assert parked.result() is None
        await rig.submit()
        assert (await rig.engine.stats()).idle_slots == 0


async def test_a_worker_that_registers_again_with_more_takes_what_waits_without_a_new_job() -> None:
    async with Rig() as rig:
        await rig.worker("a", "Other")
        job_id = await rig.submit()
        parked = rig.park("a")
        await rig.settle()
        assert not parked.done()
        await rig.worker("a", "Other", "KSampler")
        await rig.settle()
        assert taken(parked) == job_id


async def test_a_worker_that_comes_back_and_parks_takes_what_waits() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.engine.unregister(WorkerId("a"), "gone")
        job_id = await rig.submit()
        await rig.worker("a")
        parked = rig.park("a")
        await rig.settle()
        assert taken(parked) == job_id


async def test_removing_a_worker_answers_its_polls_and_later_jobs_do_not_stumble_over_it() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        parked = rig.park("a")
        await rig.settle()
        await rig.engine.remove_worker(WorkerId("a"))
        await rig.settle()
        assert parked.result() is None
        job_id = await rig.submit()
        await rig.worker("b")
        assert (await rig.take("b")).job_id == job_id
        assert [worker.worker_id for worker in await rig.engine.workers()] == ["b"]


async def test_a_poll_that_does_not_wait_is_served_even_while_a_round_runs() -> None:
    async with Rig() as rig:
        await rig.worker("other", "Other")
        await rig.worker("a", "Other", "KSampler")
        rig.park("other")
        await rig.settle()
        job_id = await rig.submit()
        await rig.submit(graph("Other"))
        leased = await rig.poll("a")
        assert leased is not None
        assert leased.job_id == job_id


class SlowStore(MemoryStore):
    """Answers a lease only when it is let."""

    admission_control: asyncio.Event | None = None

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        written = await super().lease(job_id, offer)
        if self.admission_control is not None:
            await self.admission_control.wait()
        return written


@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("ends_by", ["cancel", "going offline"])
async def test_a_poll_that_goes_away_while_its_lease_is_being_granted_returns_the_job_at_once(
    is_parked: bool, ends_by: str
) -> None:
    async with Rig(SlowStore) as rig:
        assert isinstance(rig.store, SlowStore)
        await rig.worker("a")
        admission_control = rig.store.admission_control = asyncio.Event()
        if is_parked:
            parked = rig.park("a")
            await rig.settle()
            job_id = await rig.submit()
        else:
            job_id = await rig.submit()
            parked = rig.park("a")
        await rig.settle()
        assert (await rig.engine.get(job_id)).dispatch.phase is Phase.LEASED
        if ends_by == "cancel":
            parked.cancel()
            await asyncio.gather(parked, return_exceptions=True)
        else:
            await rig.engine.unregister(WorkerId("a"), "gone")
        admission_control.set()
        rig.store.admission_control = None
        await rig.settle()
        view = await rig.engine.get(job_id)
        assert (view.dispatch.phase, view.dispatch.charged) == (Phase.QUEUED, 0)
        assert (await rig.engine.stats()).idle_slots == 0
        await rig.worker("b")
        assert (await rig.take("b")).job_id == job_id


async def test_a_poll_that_times_out_leaves_no_slot_behind() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        assert await rig.engine.poll(Poll(WorkerId("a"), PollId("p"), 0.001)) is None
        assert (await rig.engine.stats()).idle_slots == 0
        job_id = await rig.submit()
        assert (await rig.take("a")).job_id == job_id


async def test_a_block_the_engine_has_not_heard_of_costs_a_second_look_and_not_an_endless_round() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        job_id = await rig.submit(not_before=rig.clock.now() + 1)
        workflow_hash = (await rig.engine.get(job_id)).dispatch.workflow_hash
        await rig.store.put_block(Block(WorkerId("a"), workflow_hash, BlockReason.OPERATOR, 1, 1e12))
        await rig.store.put_block(Block(WorkerId("b"), workflow_hash, BlockReason.OPERATOR, 1, 1e12))
        parked = [rig.park("a"), rig.park("b")]
        await asyncio.wait_for(rig.clock.advance(5), 60)
        assert not any(each.done() for each in parked)
        await rig.worker("c")
        last: LeasedJob = await rig.take("c")
        assert last.job_id == job_id


async def test_the_engine_learns_of_a_block_that_another_wrote_when_it_stumbles_over_it() -> None:
    async with Rig() as rig:
        for name in "ab":
            await rig.worker(name)
        await rig.submit(graph(seed=0))
        warm = await rig.take("b")
        await rig.complete(warm)
        await rig.store.put_block(Block(WorkerId("b"), warm.workflow_hash, BlockReason.OPERATOR, 1, 1e12))
        parked = {name: rig.park(name) for name in "ab"}
        await rig.settle()
        job_id = await rig.submit(graph(seed=1))
        await rig.settle()
        assert (taken(parked["a"]), taken(parked["b"])) == (job_id, None)


@pytest.mark.parametrize("idle", ["a", "b"])
async def test_of_two_workers_alike_the_one_that_says_it_runs_less_gets_the_job(idle: str) -> None:
    async with Rig() as rig:
        polls = {}
        for name in ("a", "b"):
            await rig.worker(name, slots=4)
            call = Poll(WorkerId(name), PollId(name), 1e9, current_load=0 if name == idle else 3)
            polls[name] = asyncio.get_running_loop().create_task(rig.engine.poll(call))
        await rig.settle()
        job_id = await rig.submit()
        async with asyncio.timeout(60):
            leased = await polls[idle]
        assert leased is not None and leased.job_id == job_id
