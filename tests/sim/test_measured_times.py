"""The fake servers of the benchmarks take the times that were measured on a real card."""

from __future__ import annotations

import pytest
from aiohttp import ClientSession
from bench.fake_servers import WEIGHTS, Wanted, made_from, settings_of, wanted
from tests.sim._client import Client

from comfyfleet.model.workflow import read_needs
from comfyfleet.testing.fake_comfyui import FakeComfyUI, HandClock


@pytest.mark.parametrize(
    ("checkpoint", "load_s", "warm_s"), [("sdxl-1.safetensors", 2.8, 0.95), ("sd15-1.safetensors", 1.2, 0.5)]
)
async def test_a_load_and_a_warm_run_take_as_long_as_measured(
    checkpoint: str, load_s: float, warm_s: float
) -> None:
    clock = HandClock()
    async with FakeComfyUI(settings_of(0), clock=clock) as server, ClientSession() as session:
        client = Client(server, session)
        for number in (1, 2):
            job = Wanted(checkpoint, number, f"picture {number}")
            prompt_id = await client.submit(job.workflow())
            await clock.advance_to(100.0 * number)
            await client.finished(prompt_id)
        assert server.stats.load_seconds == pytest.approx(load_s)
        warm = server.stats.prompt_log[1]
    assert warm.ended_at is not None
    assert warm.ended_at - warm.started_at == pytest.approx(warm_s, abs=0.02)


def test_a_batch_has_every_checkpoint_about_as_often_as_its_weight() -> None:
    batch = wanted(10_000, seed=1)
    assert batch == wanted(10_000, seed=1) != wanted(10_000, seed=2)
    for name, weight in WEIGHTS.items():
        assert sum(each.checkpoint == name for each in batch) == pytest.approx(100 * weight, rel=0.2)


def test_a_graph_says_what_its_picture_was_wanted_to_be() -> None:
    batch = wanted(50, seed=1)
    assert [made_from(each.workflow()) for each in batch] == batch
    assert len({(each.seed, each.text) for each in batch}) == 50


def test_the_fleet_sees_which_model_each_job_needs() -> None:
    for each in wanted(50, seed=1):
        assert read_needs(each.workflow()).models == {each.checkpoint}
