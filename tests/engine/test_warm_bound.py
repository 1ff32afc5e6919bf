"""Warm jobs may pass cold ones, but nobody for longer than the affinity wait, on a clock wound by hand."""

from __future__ import annotations

import random

from tests.engine._rig import Rig, graph

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.ids import JobId
from comfyfleet.policy.rules import Weights

MODELS = ("red.safetensors", "green.safetensors", "blue.safetensors")
AFFINITY_WAIT_S, RUN_S = 3.0, 1.0


# A score that is the same for everybody: what lets a job pass another is warmth alone.
UNWEIGHTED = Weights(service=0, hardware=0, models=0, tenant=0, performance=0, location=0, cost=0, load=0)


async def play(affinity_wait_s: float) -> tuple[int, float]:
    """Sixty jobs for three models on two workers. Answers the swaps, and the longest wait since being overtaken."""
    async with Rig(affinity_wait_s=affinity_wait_s, weights=UNWEIGHTED) as rig:
        for name in ("a", "b"):
            await rig.worker(name, models=MODELS)
        order = random.Random(4).choices(MODELS, k=60)
        jobs = [await rig.submit(graph(model=model)) for model in order]
        started: dict[JobId, float] = {}
        loaded: dict[str, str] = {}
        swaps = 0
        while len(started) < len(jobs):
            running: list[LeasedJob] = []
            for name in ("a", "b"):
                leased = await rig.poll(name)
                if leased is not None:
                    model = order[jobs.index(leased.job_id)]
                    swaps += loaded.get(name, model) != model
                    loaded[name] = model
                    started[leased.job_id] = rig.clock.now()
                    running.append(leased)
            await rig.clock.advance(RUN_S)
            for leased in running:
                await rig.complete(leased, seconds=RUN_S)
    waits = [
        started[job] - min((started[younger] for younger in jobs[place + 1 :]), default=started[job])
        for place, job in enumerate(jobs)
    ]
    return swaps, max(waits)


async def test_nobody_is_overtaken_for_longer_than_the_affinity_wait_and_one_turn_of_each_lane() -> None:
    swaps, longest_wait = await play(AFFINITY_WAIT_S)
    assert longest_wait <= AFFINITY_WAIT_S + RUN_S * len(MODELS)
    unbounded_swaps, unbounded_wait = await play(1000.0)
    assert unbounded_wait > 3 * longest_wait, "without the bound somebody waits far longer"
    first_come_swaps, first_come_wait = await play(0.0)
    assert first_come_wait == 0, "first come, first served"
    assert unbounded_swaps <= swaps < first_come_swaps
