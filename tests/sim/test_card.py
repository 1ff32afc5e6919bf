"""The simulated card: loading, swapping, running out of memory, caching, speed."""

from __future__ import annotations

import pytest
from aiohttp import ClientSession
from tests.sim._client import Client, error_of, fake, plain, text_to_image

from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings, HandClock
from comfyfleet.testing.fake_comfyui.result_cache import CacheMode


def card(vram_gb: float, cache_mode: CacheMode = "classic", **models: float) -> FakeSettings:
    return FakeSettings(
        time_scale=0.001, vram_gb=vram_gb, cache_mode=cache_mode, models={"checkpoints": dict(models)}
    )


async def test_a_model_that_is_on_the_card_is_not_loaded_again() -> None:
    async with fake(card(12, a=6.0)) as client:
        for seed in range(3):
            await client.run(text_to_image("a", seed=seed))
        assert (client.server.stats.model_loads, client.server.stats.model_swaps) == (1, 0)


async def test_models_that_fit_together_stay_together_where_results_are_kept() -> None:
    async with fake(card(24, "lru", a=6.0, b=6.0)) as client:
        for name in ("a", "b", "a", "b"):
            await client.run(text_to_image(name))
        assert (client.server.stats.model_loads, client.server.stats.model_swaps) == (2, 0)
        assert (await client.get("/fake/stats"))["now"]["models_on_card"] == [
            "checkpoints/a",
            "checkpoints/b",
        ]


async def test_by_default_a_prompt_displaces_the_models_of_the_last_one_whatever_the_card_holds() -> None:
    async with fake(card(24, a=6.0, b=6.0)) as client:
        for name in ("a", "b", "a", "b"):
            await client.run(text_to_image(name))
        assert (client.server.stats.model_loads, client.server.stats.model_swaps) == (4, 3)
        assert (await client.get("/fake/stats"))["now"]["models_on_card"] == ["checkpoints/b"]


async def test_a_model_that_left_the_card_and_not_the_memory_is_not_read_again() -> None:
    async with fake(card(8, "lru", a=6.0, b=6.0)) as client:
        for name in ("a", "b", "a", "b"):
            await client.run(text_to_image(name, seed=client.server.stats.model_swaps))
        assert (client.server.stats.model_loads, client.server.stats.model_swaps) == (2, 3)


async def test_a_model_that_does_not_fit_beside_another_swaps_it_out() -> None:
    async with fake(card(8, a=6.0, b=6.0)) as client:
        for name in ("a", "b", "a", "b"):
            assert (await client.run(text_to_image(name)))["status"]["completed"]
        assert (client.server.stats.model_loads, client.server.stats.model_swaps) == (4, 3)
        assert (await client.get("/fake/stats"))["now"]["models_on_card"] == ["checkpoints/b"]


@pytest.mark.parametrize(("edge", "size"), [(512, 9.0), (4096, 6.0)])
async def test_a_workflow_larger_than_the_card_runs_out_of_memory(edge: int, size: float) -> None:
    async with fake(card(8, a=size)) as client:
        error = error_of(await client.run(text_to_image("a", edge=edge)))
        assert error["exception_type"] == "torch.OutOfMemoryError"
        assert (await client.get("/fake/stats"))["now"]["models_on_card"] == []


async def test_free_memory_of_the_card_is_told() -> None:
    async with fake(card(10, a=6.0)) as client:
        await client.run(text_to_image("a"))
        device = (await client.get("/system_stats"))["devices"][0]
        assert (device["vram_total"], device["vram_free"]) == (10 * 1024**3, 4 * 1024**3)
        await client.post("/free", {"unload_models": True})
        device = (await client.get("/system_stats"))["devices"][0]
        assert device["vram_free"] == device["vram_total"]


async def test_the_same_prompt_again_runs_no_node() -> None:
    async with fake() as client:
        first = await client.run(text_to_image("sd15.safetensors"), "a")
        executed = client.server.stats.nodes_executed
        again = await client.run(text_to_image("sd15.safetensors"), "a")
        assert client.server.stats.nodes_executed == executed == 6
        assert again["outputs"] == first["outputs"]
        assert sorted(dict(again["status"]["messages"])["execution_cached"]["nodes"]) == [
            "1",
            "2",
            "3",
            "4",
            "5",
            "6",
        ]


async def test_a_changed_seed_runs_only_what_depends_on_it() -> None:
    async with fake() as client:
        await client.run(text_to_image("sd15.safetensors", seed=1))
        await client.run(text_to_image("sd15.safetensors", seed=2))
        by_class = client.server.stats.nodes_by_class
        assert (by_class["CheckpointLoaderSimple"], by_class["CLIPTextEncode"]) == (1, 1)
        assert (by_class["KSampler"], by_class["VAEDecode"], by_class["SaveImage"]) == (2, 2, 2)


async def test_the_cache_holds_the_last_prompt_only() -> None:
    async with fake() as client:
        for color in (1, 2, 1):
            await client.run(plain(color))
        assert client.server.stats.nodes_by_class == {"EmptyImage": 3, "SaveImage": 3}


async def test_a_changed_input_file_is_noticed() -> None:
    graph = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "in.png"}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    async with fake() as client:
        saved = (await client.run(plain(1)))["outputs"]["2"]["images"][0]["filename"]
        output, target = client.server.disk.base / "output", client.server.disk.base / "input" / "in.png"
        target.write_bytes((output / saved).read_bytes())
        await client.run(graph)
        await client.run(graph)
        other = (await client.run(plain(2)))["outputs"]["2"]["images"][0]["filename"]
        await client.run(graph)
        target.write_bytes((output / other).read_bytes())
        await client.run(graph)
        assert client.server.stats.nodes_by_class["LoadImage"] == 3


@pytest.mark.parametrize(("speed", "seconds"), [(1.0, 6.5), (2.0, 4.5)])
async def test_time_is_loading_plus_work_by_speed(speed: float, seconds: float) -> None:
    clock = HandClock()
    settings = FakeSettings(
        speed=speed,
        models={"checkpoints": {"a": 5.0}},
        load_seconds_per_gb=0.5,
        transfer_seconds_per_gb=0.0,
        step_seconds=1.0,
    )
    async with FakeComfyUI(settings, clock=clock) as server:
        async with ClientSession() as session:
            client = Client(server, session)
            # 2.5 s to load, 15 steps on a quarter of a megapixel, 0.1 s of text and 0.13 s of decoding.
            prompt_id = await client.submit(text_to_image("a", edge=500, steps=15))
            await clock.advance_to(100.0)
            await client.finished(prompt_id)
        run = server.stats.prompt_log[0]
    assert run.ended_at is not None
    assert run.ended_at - run.started_at == pytest.approx(seconds, abs=0.05)
