"""Warm routing on a fake fleet: far fewer model loads than first come, first served, learned from what servers report.

What it costs whom, exactly: tests/engine/test_scheduling.py."""

from __future__ import annotations

import random
from itertools import pairwise

from tests.pool._fleet import fleet, quick, text_to_image

MODELS = ("red.safetensors", "green.safetensors", "blue.safetensors")

# A card holds one of the models at a time, and loading one takes as long as a few runs.
CARD = quick(
    vram_gb=10.0, models={"checkpoints": dict.fromkeys(MODELS, 6.0)}, load_seconds_per_gb=0.5, time_scale=0.05
)


async def test_two_servers_load_three_models_half_as_often_as_first_come_first_served_would() -> None:
    order = random.Random(4).choices(MODELS, k=60)
    async with fleet(CARD, CARD) as it:
        await it.pool.pause_queue()
        jobs = [await it.pool.enqueue(text_to_image(model)) for model in order]
        await it.pool.resume_queue()
        for job in jobs:
            await it.pool.wait(job, timeout=60)
        swaps = sum(server.stats.model_swaps for server in it.servers)
    in_turn = sum(one != other for half in (order[::2], order[1::2]) for one, other in pairwise(half))
    assert swaps <= in_turn / 2
