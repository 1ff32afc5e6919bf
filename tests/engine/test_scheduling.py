"""An engine with servers that keep the models of their last run: fewer loads, and nobody is forgotten."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.engine._model_fleet import CHECKPOINTS, Model, ModelFleet, Server, draw, servers

from comfyfleet.engine import pass_ranking
from comfyfleet.engine.pass_ranking import PassRanking, Plan
from comfyfleet.model.calls import FailureReport, Poll
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.memory import MemoryStore

RED, GREEN, BLUE = (Model(f"{name}.safetensors") for name in ("red", "green", "blue"))
THREE = (RED, GREEN, BLUE)


class SharedStore(MemoryStore):
    is_shared = True


async def warmed_up(fleet: ModelFleet, *models: Model) -> None:
    """Each server runs one job of its model, and all are idle after that."""
    for server, model in zip(fleet.servers, models, strict=False):
        fleet.park(server)
        await fleet.settle()
        await fleet.submit(model)
        await fleet.settle()
        await fleet.advance(20.0)
    for server in fleet.servers:
        if server.name not in fleet._parked:
            fleet.park(server)
    await fleet.advance(5.0)
    assert [server.loaded for server in fleet.servers[: len(models)]] == [model.name for model in models]


async def started(fleet: ModelFleet, job_id: JobId) -> str:
    await fleet.settle()
    return fleet.runs[job_id].server


# whole batches


@pytest.mark.parametrize("seed", range(3))
async def test_a_batch_takes_a_third_of_the_loads_of_first_come_first_served_and_half_of_its_time(
    seed: int,
) -> None:
    jobs = draw(CHECKPOINTS, 64, seed)
    async with ModelFleet(servers(4)) as fleet:
        await fleet.play(jobs)
    # What first come, first served does with the same jobs: every idle server takes the oldest one.
    free, loaded, loads = [0.0] * 4, [""] * 4, 0
    for _, model in jobs:
        first = free.index(min(free))
        is_cold = loaded[first] != model.name
        loads += is_cold
        free[first] += model.run_s + is_cold * model.load_s
        loaded[first] = model.name
    assert fleet.loads <= loads / 3
    assert fleet.end <= 0.6 * max(free)


async def test_the_first_batch_with_loads_ten_times_as_long_as_assumed_loads_each_model_about_once() -> None:
    slow = tuple(Model(model.name, model.run_s, 30.0, model.weight) for model in CHECKPOINTS)
    async with ModelFleet(servers(4), slow) as fleet:
        await fleet.play(draw(slow, 96, 1))
    assert fleet.loads <= 15


@pytest.mark.parametrize("engines", [2, 4])
async def test_several_engines_on_one_store_load_at_most_half_as_often_again_as_one(engines: int) -> None:
    loads = {1: 0, engines: 0}
    for seed in range(4):
        jobs = draw(CHECKPOINTS, 100, seed, rate=5.0)
        for count in loads:
            async with ModelFleet(servers(8), engines=count, store_type=SharedStore) as fleet:
                await fleet.play(jobs)
            loads[count] += fleet.loads
    assert loads[engines] <= 1.5 * loads[1]


async def test_loads_that_take_no_time_leave_the_order_of_arrival() -> None:
    instant = tuple(Model(model.name, 1.0, 0.0) for model in THREE)
    async with ModelFleet(servers(1), instant) as fleet:
        await warmed_up(fleet, instant[0])
        fleet.order.clear()
        await fleet.clock.advance(100)
        names = random.Random(3).choices(instant, k=20)
        jobs = [await fleet.submit(model) for model in names]
        await fleet.settle()
        await fleet.finish()
    assert [run.job_id for run in fleet.order] == jobs


async def test_without_models_and_without_patience_jobs_start_in_the_order_of_arrival() -> None:
    async with ModelFleet(servers(3), rules=Rules(patience=0)) as fleet:
        jobs = [await fleet.submit(None) for _ in range(20)]
        for server in fleet.servers:
            fleet.park(server)
        await fleet.settle()
        await fleet.finish()
    assert [run.job_id for run in fleet.order] == jobs


# the promise


@contextmanager
def watched_passes() -> Iterator[list[tuple[dict[JobId, float], Plan, PassRanking]]]:
    """What each pass knew and chose."""
    passes: list[tuple[dict[JobId, float], Plan, PassRanking]] = []
    original = PassRanking.plan

    def plan(self: PassRanking) -> Plan:
        made = original(self)
        passes.append((self._start_by, made, self))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_ranking.PassRanking, "plan", plan)
        yield passes


@pytest.mark.parametrize("seed", range(12))
async def test_no_job_starts_later_than_its_moment_plus_the_due_jobs_before_it(seed: int) -> None:
    chance = random.Random(seed)
    models = tuple(
        Model(
            f"m{n}.safetensors", chance.uniform(0.2, 2), chance.choice((0.5, 3, 12)), chance.random() + 0.05
        )
        for n in range(chance.randint(2, 7))
    )
    count = chance.randint(1, 4)
    jobs = draw(models, 50, seed, chance.choice((None, 0.7 * count, 1.5 * count)))
    with watched_passes() as passes:
        async with ModelFleet(servers(count), models, Rules(patience=chance.choice((0, 1, 2, 5)))) as fleet:
            await fleet.play(jobs)
    last: dict[JobId, float] = {}
    for starts, plan, ranking in passes:
        last |= starts
        now = ranking._now + 1e-9
        due = [job_id for job_id, at in starts.items() if at <= now]
        left_out = [job_id for job_id in due if job_id not in plan.chosen.values()]
        for chosen in plan.chosen.values() if left_out else ():
            # A slot that could have taken them went to an older job that was due too.
            assert chosen in due
            assert plan.seen[chosen].sequence < max(plan.seen[job_id].sequence for job_id in left_out)
        assert plan.chosen or not due, "no slot idles while a job is due"
    longest = max(model.run_s + model.load_s for model in models)
    for number, run in enumerate(fleet.order):
        late = run.at - last.get(run.job_id, run.at)
        before = [other for other in fleet.order[:number] if other.at > run.at - late]
        assert late <= longest * (1 + len(before) / count) + 1e-6


async def test_a_model_that_is_always_asked_for_does_not_keep_the_only_server() -> None:
    async with ModelFleet(servers(1), THREE) as fleet:
        await warmed_up(fleet, RED)
        for _ in range(3):
            await fleet.submit(RED)
        await fleet.settle()
        seldom = await fleet.submit(GREEN)
        for _ in range(40):
            await fleet.submit(RED)
            await fleet.advance(1.0)
        run = fleet.runs[seldom]
        assert run.server, "it has started"
        # Three before it, and two loads of 3 s; each job takes 1 s.
        assert run.at - run.submitted_at <= 3 + 2 * 3 + 3 + 1


async def test_the_place_of_a_job_counts_those_before_it_and_one_turn_if_no_slot_is_idle() -> None:
    async with ModelFleet(servers(1), THREE) as fleet:
        fleet.park(fleet.servers[0])
        await fleet.clock.settle()
        places = []
        for _ in range(4):
            places.append(fleet.runs[await fleet.submit(RED)].place)
            await fleet.clock.settle()
    assert places == [0, 1, 2, 3]


# left to others


async def one_busy(left_s: float, fleet: ModelFleet) -> None:
    """The server with RED is busy for so long, the one with GREEN is idle."""
    await warmed_up(fleet, RED, GREEN)
    await fleet.submit(RED)
    await fleet.settle()
    await fleet.advance(RED.run_s - left_s)


async def test_a_job_waits_for_the_warm_server_that_is_free_in_half_a_second() -> None:
    async with ModelFleet(servers(2), THREE) as fleet:
        await one_busy(0.5, fleet)
        job_id = await fleet.submit(RED)
        assert await started(fleet, job_id) == ""
        reason = fleet.engine.why_left(await dispatch_of(fleet, job_id))
        assert reason is not None
        assert reason.worker_id == "gpu-a"
        assert reason.free_in_s == pytest.approx(0.5, abs=0.2)
        assert reason.load_s == pytest.approx(3.0, rel=0.1)
        await fleet.advance(0.6)
        assert await started(fleet, job_id) == "gpu-a"


async def dispatch_of(fleet: ModelFleet, job_id: JobId) -> Any:
    return (await fleet.engine.get(job_id)).dispatch


async def test_a_job_does_not_wait_for_a_warm_server_that_is_busy_for_long() -> None:
    long = Model("red.safetensors", run_s=8.0)
    async with ModelFleet(servers(2), (long, GREEN)) as fleet:
        await warmed_up(fleet, long, GREEN)
        await fleet.submit(long)
        await fleet.settle()
        assert await started(fleet, await fleet.submit(long)) == "gpu-b"


async def test_with_many_waiting_the_idle_server_opens_a_second_copy() -> None:
    async with ModelFleet(servers(2), THREE) as fleet:
        await one_busy(0.5, fleet)
        for _ in range(3):
            await fleet.submit(RED)
            await fleet.settle()
        assert fleet.servers[1].loaded == GREEN.name
        for _ in range(6):
            await fleet.submit(RED)
        await fleet.settle()
        assert fleet.servers[1].loaded == RED.name


async def test_models_without_a_copy_are_loaded_before_a_second_copy_of_a_popular_one() -> None:
    async with ModelFleet(servers(3), THREE) as fleet:
        await fleet.engine.pause_queue()
        for _ in range(20):
            await fleet.submit(RED)
        await fleet.submit(GREEN)
        await fleet.submit(BLUE)
        for server in fleet.servers:
            fleet.park(server)
        await fleet.clock.settle()
        await fleet.engine.pause_queue(False)
        await fleet.settle()
        assert {server.loaded for server in fleet.servers} == {model.name for model in THREE}


async def test_an_empty_server_takes_the_first_job_that_it_may() -> None:
    async with ModelFleet([*servers(1), Server("new")], THREE) as fleet:
        await warmed_up(fleet, RED)
        await fleet.submit(RED)
        await fleet.settle()
        assert await started(fleet, await fleet.submit(RED)) == "new"


async def test_a_job_that_was_left_to_a_server_that_hangs_starts_elsewhere_within_two_loads() -> None:
    async with ModelFleet(servers(2), THREE) as fleet:
        await warmed_up(fleet, RED, GREEN)
        fleet.servers[0].hangs = True
        await fleet.submit(RED)
        await fleet.settle()
        job_id = await fleet.submit(RED)
        assert await started(fleet, job_id) == ""
        await fleet.advance(2 * RED.load_s + 1.0)
        assert fleet.runs[job_id].server == "gpu-b"


async def test_a_job_that_was_left_to_a_server_that_goes_offline_starts_elsewhere_at_once() -> None:
    async with ModelFleet(servers(2), THREE, Rules(round_s=100.0)) as fleet:
        await one_busy(0.5, fleet)
        job_id = await fleet.submit(RED)
        assert await started(fleet, job_id) == ""
        await fleet.engine.unregister(WorkerId("gpu-a"), "gone")
        assert await started(fleet, job_id) == "gpu-b"


@pytest.mark.parametrize("change", ["pause_worker", "drain_worker"])
async def test_nothing_is_left_to_a_server_that_takes_no_more_work(change: str) -> None:
    async with ModelFleet(servers(2), THREE) as fleet:
        await one_busy(0.5, fleet)
        await getattr(fleet.engine, change)(WorkerId("gpu-a"))
        assert await started(fleet, await fleet.submit(RED)) == "gpu-b"


async def test_a_lower_priority_begins_on_a_slot_that_the_higher_one_leaves_and_nowhere_else() -> None:
    async with ModelFleet(servers(2), THREE) as fleet:
        await one_busy(0.5, fleet)
        high = await fleet.submit(RED, priority=5)
        await fleet.settle()
        low = await fleet.submit(GREEN)
        assert await started(fleet, low) == "gpu-b"
        assert await started(fleet, high) == ""
        # Neither is left to others: the higher one goes first.
        await fleet.advance(1e2)
        other = await fleet.submit(GREEN)
        first = await fleet.submit(BLUE, priority=5)
        await fleet.advance(1e2)
        assert fleet.runs[first].server and fleet.runs[other].server


async def test_an_idle_slot_that_leaves_jobs_to_others_is_not_looked_at_all_the_time() -> None:
    long = Model("red.safetensors", run_s=30.0, load_s=100.0)
    with watched_passes() as passes:
        async with ModelFleet(servers(2), (long, GREEN)) as fleet:
            await warmed_up(fleet, long, GREEN)
            await fleet.advance(200.0)
            await fleet.submit(long)
            await fleet.settle()
            job_id = await fleet.submit(long)
            passes.clear()
            await fleet.clock.advance(20.0)
            assert fleet.runs[job_id].server == ""
            assert len(passes) <= 45, "about once a second"


# what is known


async def test_a_second_server_does_not_load_what_the_first_is_loading() -> None:
    async with ModelFleet(servers(2), THREE) as fleet:
        await warmed_up(fleet, GREEN, BLUE)
        first = await fleet.submit(RED)
        assert await started(fleet, first)
        await fleet.advance(1.5)
        second = await fleet.submit(RED)
        # A second load would be done later than the first, which has begun.
        await fleet.advance(1.0)
        assert fleet.runs[second].server == ""
        await fleet.advance(10.0)
        assert fleet.runs[second].server == fleet.runs[first].server
    assert fleet.loads == 3


async def test_a_failed_run_leaves_what_was_known_to_be_loaded() -> None:
    async with ModelFleet(servers(1), THREE) as fleet:
        await warmed_up(fleet, GREEN)
        outlook, workers = fleet.engine._context.outlook, fleet.engine._context.fleet.workers
        task = fleet._parked.pop("gpu-a")
        await fleet.submit(RED, max_attempts=1)
        leased = await task
        assert leased is not None
        assert outlook.kind_of(workers[WorkerId("gpu-a")]).loaded == {RED.name}
        await fleet.engine.fail(FailureReport(leased.ref, Failure(FailureKind.NODE_ERROR, "it broke")))
        assert outlook.kind_of(workers[WorkerId("gpu-a")]).loaded == {GREEN.name}


async def test_a_lease_tells_the_expected_run_and_load() -> None:
    async with ModelFleet(servers(1), THREE) as fleet:
        await warmed_up(fleet, GREEN)
        await fleet.submit(RED)
        await fleet.settle()
        (held,) = await fleet.store.leases_of(WorkerId("gpu-a"))
        assert held.lease is not None
        assert held.lease.run_s == pytest.approx(1.0)
        assert held.lease.load_s == pytest.approx(3.0)
        await fleet.advance(10.0)
        await fleet.submit(RED)
        await fleet.settle()
        (held,) = await fleet.store.leases_of(WorkerId("gpu-a"))
        assert held.lease is not None and held.lease.load_s == 0.0


@pytest.mark.parametrize("reports", [True, False], ids=["with timings", "without timings"])
async def test_load_times_are_learned_apart_from_runs(reports: bool) -> None:
    slow = Model("red.safetensors", run_s=2.0, load_s=20.0)
    async with ModelFleet(servers(1), (slow, GREEN), reports_timings=reports) as fleet:
        await warmed_up(fleet, slow)
        for model in (slow, slow, slow, slow, GREEN, slow, slow, slow):
            await fleet.submit(model)
            await fleet.advance(100.0)
        estimates = fleet.engine._context.estimates
        workflow_hash = (await dispatch_of(fleet, fleet.order[0].job_id)).workflow_hash
        worker_class = "RTX 1/12GB/x1"
        assert estimates.load_s(frozenset({slow.name}), worker_class) == pytest.approx(20.0, rel=0.25)
        assert estimates.run_s(workflow_hash, worker_class) == pytest.approx(2.0, rel=0.5 if reports else 2.0)


async def test_another_engine_reads_the_load_times_and_the_expected_ends() -> None:
    slow = Model("red.safetensors", run_s=1.0, load_s=20.0)
    async with ModelFleet(servers(2), (slow, GREEN), engines=2, store_type=SharedStore) as fleet:
        fleet.park(fleet.servers[0])
        await fleet.submit(slow)
        await fleet.submit(slow)
        await fleet.advance(60.0)
        fleet.park(fleet.servers[1])
        await fleet.submit(GREEN)
        await fleet.advance(60.0)
        # Both are idle now, one at each engine. The first takes it, and the second leaves the next one to it.
        await fleet.advance(60.0)
        for _ in range(4):
            await fleet.submit(slow)
        await fleet.advance(60.0)
        assert {run.server for run in fleet.order if run.model == slow.name} == {"gpu-a"}


async def test_a_slot_that_leaves_jobs_to_others_is_shown_lanes_of_lower_priority() -> None:
    async with ModelFleet(servers(2), THREE) as fleet:
        await one_busy(0.5, fleet)
        for priority in (9, 8, 7):
            await fleet.submit(RED, priority=priority)
        await fleet.settle()
        low = await fleet.submit(GREEN)
        assert await started(fleet, low) == "gpu-b"


async def test_a_poll_that_does_not_wait_gets_nothing_rather_than_what_is_left_to_others() -> None:
    async with ModelFleet(servers(2), THREE) as fleet:
        await one_busy(0.5, fleet)
        fleet._parked.pop("gpu-b").cancel()
        await fleet.submit(RED)
        assert await fleet.engine.poll(Poll(WorkerId("gpu-b"), PollId("now"), 0)) is None
        await fleet.advance(0.6)
