"""A job for hundreds of idle slots: not all of them are compared, and yet it goes where it would go if they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.engine._model_fleet import CHECKPOINTS, Model, ModelFleet, draw, servers
from tests.engine._rig import Rig, offers

from comfyfleet.engine.pass_ranks import PassRanks, Plan
from comfyfleet.engine.slot_sample import SlotSample
from comfyfleet.model.calls import LeasedJob, RegisterWorker
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import LiveState

MANY = 100
RED, BLUE = Model("red.safetensors"), Model("blue.safetensors")


@contextmanager
def compared_slots() -> Iterator[list[int]]:
    """How many slots each pass compared."""
    counts: list[int] = []
    original = PassRanks.plan

    def plan(self: PassRanks) -> Plan:
        counts.append(sum(map(len, self._seen.groups)))
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassRanks, "plan", plan)
        yield counts


async def test_one_job_for_a_hundred_equal_slots_is_compared_with_a_few() -> None:
    async with ModelFleet(servers(MANY), (RED, BLUE)) as fleet:
        for server in fleet.servers:
            fleet.park(server)
        await fleet.settle()
        with compared_slots() as counts:
            await fleet.submit(RED)
            await fleet.settle()
        assert fleet.order
        assert max(counts) <= 2


async def test_jobs_that_arrive_together_all_start_at_once() -> None:
    async with ModelFleet(servers(MANY), (RED, BLUE)) as fleet:
        for server in fleet.servers:
            fleet.park(server)
        await fleet.settle()
        for number in range(60):
            await fleet.submit(RED if number % 2 else BLUE)
        await fleet.settle()
        assert len(fleet.order) == 60
        assert len({run.server for run in fleet.order}) == 60


async def test_the_only_slot_with_the_models_among_many_gets_the_job() -> None:
    async with ModelFleet(servers(MANY), (RED, BLUE)) as fleet:
        fleet.park(fleet.servers[70])
        await fleet.submit(RED)
        await fleet.advance(30.0)
        for server in fleet.servers:
            if server.name not in fleet._parked:
                fleet.park(server)
        await fleet.advance(5.0)
        job_id = await fleet.submit(RED)
        await fleet.settle()
        assert fleet.runs[job_id].server == fleet.servers[70].name


async def test_the_slot_with_the_most_free_memory_among_many_gets_the_job() -> None:
    async with Rig() as rig:
        parked = {}
        for number in range(MANY):
            name = f"gpu-{number}"
            live = LiveState(free_vram_gb=20.0 if number == 63 else 4.0)
            await rig.engine.register(RegisterWorker(WorkerId(name), offers("KSampler"), live=live))
            parked[name] = rig.park(name)
        await rig.settle()
        job_id = await rig.submit()
        await rig.settle()
        assert taken(parked["gpu-63"].result() if parked["gpu-63"].done() else None) == job_id


def taken(leased: LeasedJob | None) -> str | None:
    return None if leased is None else leased.job_id


async def test_a_preferred_worker_among_many_gets_the_job() -> None:
    async with Rig() as rig:
        parked = {}
        for number in range(MANY):
            await rig.worker(f"gpu-{number}")
            parked[f"gpu-{number}"] = rig.park(f"gpu-{number}")
        await rig.settle()
        job_id = await rig.submit(preferences=rig.prefer("gpu-88"))
        await rig.settle()
        assert taken(parked["gpu-88"].result() if parked["gpu-88"].done() else None) == job_id


async def test_a_blocked_worker_among_many_leaves_the_jobs_to_the_others() -> None:
    async with Rig(cooldown_s=1e6, max_attempts=9) as rig:
        for number in range(MANY):
            await rig.worker(f"gpu-{number}")
        await rig.submit(retry_delay_s=0)
        await rig.fail(await rig.take("gpu-0"), FailureKind.OUT_OF_MEMORY)
        parked = {f"gpu-{number}": rig.park(f"gpu-{number}") for number in range(MANY)}
        await rig.settle()
        for _ in range(MANY - 2):
            await rig.submit()
        await rig.settle()
        assert [name for name, poll in parked.items() if not poll.done()] == ["gpu-0"]


@pytest.mark.parametrize("seed", range(3))
async def test_a_fleet_with_many_idle_slots_does_what_it_would_do_if_all_were_compared(seed: int) -> None:
    ended = []
    for is_sampled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_sampled:
                patch.setattr(SlotSample, "of", lambda _self, slots, _jobs, _kept: list(slots))
                patch.setattr(SlotSample, "groups", lambda _self, groups, _jobs, _kept: groups)
            async with ModelFleet(servers(60), CHECKPOINTS) as fleet:
                await fleet.play(draw(CHECKPOINTS, 150, seed, random.Random(seed).choice((5.0, 40.0, 80.0))))
            ended.append((fleet.loads, sum(run.at - run.submitted_at for run in fleet.order)))
    (loads, waited), (all_loads, all_waited) = ended
    assert loads <= 1.05 * all_loads + 1
    assert waited <= 1.05 * all_waited + 5
