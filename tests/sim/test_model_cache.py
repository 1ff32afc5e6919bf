"""Cold and warm runs: what each cache mode keeps, what a load costs, and how the messages show it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession
from tests.sim._client import Client, Graph, fake, plain, text_to_image, until

from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings, HandClock
from comfyfleet.testing.fake_comfyui.result_cache import CacheMode

LOADER = "1"
MODELS = {"checkpoints": {"a": 6.0, "b": 6.0, "c": 6.0}, "loras": {"x": 0.5}}


def settings(cache_mode: CacheMode = "classic", **more: Any) -> FakeSettings:
    return FakeSettings(**{"time_scale": 0.001, "models": MODELS, "cache_mode": cache_mode, **more})


def cached_of(entry: dict[str, Any]) -> list[str]:
    found: list[str] = dict(entry["status"]["messages"])["execution_cached"]["nodes"]
    return found


async def loads(client: Client, graph: Graph) -> int:
    """How many model files the run of a graph read."""
    before = client.server.stats.model_loads
    entry = await client.run(graph)
    assert entry["status"]["completed"], entry["status"]
    after = client.server.stats.model_loads
    assert (LOADER in cached_of(entry)) is (after == before), "the cached loader is the one that did not run"
    return after - before


def with_lora(checkpoint: str, strength: float = 1.0) -> Graph:
    graph = text_to_image(checkpoint)
    inputs = {"lora_name": "x", "strength_model": strength, "strength_clip": 1.0, "model": ["1", 0]}
    graph["7"] = {"class_type": "LoraLoader", "inputs": {**inputs, "clip": ["1", 1]}}
    graph["4"]["inputs"]["model"] = ["7", 0]
    return graph


@pytest.mark.parametrize(
    ("cache_mode", "expected"), [("classic", [1, 0, 1, 1]), ("lru", [1, 0, 1, 0]), ("none", [1, 1, 1, 1])]
)
async def test_each_mode_has_its_warm_runs(cache_mode: CacheMode, expected: list[int]) -> None:
    """Cold, warm, another model, and back."""
    async with fake(settings(cache_mode)) as client:
        found = [
            await loads(client, text_to_image(name, seed=seed))
            for seed, name in enumerate(("a", "a", "b", "a"))
        ]
        assert found == expected


async def test_a_prompt_without_models_makes_a_server_cold() -> None:
    async with fake(settings()) as client:
        assert await loads(client, text_to_image("a", seed=1)) == 1
        await client.run(plain())
        assert (await client.get("/fake/stats"))["now"]["models_on_card"] == []
        assert await loads(client, text_to_image("a", seed=2)) == 1


async def test_a_refused_prompt_leaves_the_server_warm() -> None:
    async with fake(settings()) as client:
        await client.run(text_to_image("a", seed=1))
        assert (await client.post("/prompt", {"prompt": text_to_image("unknown")}))[0] == 400
        assert await loads(client, text_to_image("a", seed=2)) == 0


async def test_lru_drops_the_results_of_the_oldest_prompt_first() -> None:
    # A graph has six nodes. The check is made when a prompt begins, before its own results are there.
    async with fake(settings("lru", lru_size=12)) as client:
        for name in ("a", "b"):
            assert await loads(client, text_to_image(name, seed=1)) == 1
        assert await loads(client, text_to_image("a", seed=1)) == 0, "used again, so b is the oldest now"
        assert await loads(client, text_to_image("c", seed=1)) == 1
        assert await loads(client, text_to_image("a", seed=1)) == 0
        assert await loads(client, text_to_image("b", seed=1)) == 1


async def test_without_a_cache_every_node_of_the_same_prompt_runs_again() -> None:
    async with fake(settings("none")) as client:
        first = await client.run(text_to_image("a"), "me")
        again = await client.run(text_to_image("a"), "me")
        assert (cached_of(first), cached_of(again)) == ([], [])
        assert client.server.stats.nodes_executed == 12
        assert (await client.get("/fake/stats"))["now"]["models_on_card"] == []


async def test_a_lora_is_read_once_while_its_node_stays() -> None:
    async with fake(settings()) as client:
        assert await loads(client, with_lora("a")) == 2
        assert await loads(client, with_lora("a", strength=0.5)) == 0
        assert await loads(client, with_lora("b")) == 1, "another checkpoint, the same file of the same node"
        await client.run(plain())
        assert await loads(client, with_lora("b")) == 2


async def test_after_a_restart_everything_is_read_again() -> None:
    async with fake(settings()) as client:
        assert await loads(client, text_to_image("a", seed=1)) == 1
        await client.server.restart()
        assert await loads(client, text_to_image("a", seed=2)) == 1


async def test_unloading_takes_models_off_the_card_and_freeing_out_of_memory() -> None:
    async with fake(settings()) as client:
        await client.run(text_to_image("a", seed=1))
        await client.post("/free", {"unload_models": True})
        await _card_is_empty(client)
        assert await loads(client, text_to_image("a", seed=2)) == 0
        await client.post("/free", {"free_memory": True})
        await _card_is_empty(client)
        assert await loads(client, text_to_image("a", seed=3)) == 1


async def _card_is_empty(client: Client) -> None:
    while (await client.get("/fake/stats"))["now"]["models_on_card"]:
        pass


@pytest.mark.parametrize(
    ("cache_mode", "flags"), [("classic", []), ("lru", ["--cache-lru", "7"]), ("none", ["--cache-none"])]
)
async def test_the_mode_is_among_the_arguments_of_the_server(cache_mode: CacheMode, flags: list[str]) -> None:
    async with fake(settings(cache_mode, lru_size=7)) as client:
        argv = (await client.get("/system_stats"))["system"]["argv"]
        assert argv == ["main.py", "--listen", "127.0.0.1", *flags]


@asynccontextmanager
async def stopped_clock(**more: Any) -> AsyncIterator[tuple[Client, HandClock]]:
    clock = HandClock()
    async with FakeComfyUI(settings(**more), clock=clock) as server, ClientSession() as session:
        client = Client(server, session)
        try:
            yield client, clock
        finally:
            await client.close()


async def test_the_loader_is_the_node_that_executes_while_a_model_is_read() -> None:
    async with stopped_clock(load_seconds_per_gb=0.5, load_seconds=1.0, transfer_seconds_per_gb=0.1) as (
        client,
        clock,
    ):
        listener = await client.listen("me")

        def executing() -> list[str]:
            return [each["data"]["node"] for each in listener.messages if each["type"] == "executing"]

        prompt_id = await client.submit(text_to_image("a"), "me")
        await clock.advance_to(3.9)
        await until(lambda: LOADER in executing())
        assert executing()[-1] == LOADER
        assert "CLIPTextEncode" not in client.server.stats.nodes_by_class
        assert (await client.get("/fake/stats"))["now"]["models_on_card"] == []
        await clock.advance_to(4.1)
        # The next node is the first that uses the model: the way to the card is its time.
        await until(lambda: executing()[-1] == "3")
        assert (await client.get("/fake/stats"))["now"]["models_on_card"] == ["checkpoints/a"]
        await clock.advance_to(4.65)
        assert "KSampler" not in client.server.stats.nodes_by_class
        await clock.advance_to(100.0)
        await client.finished(prompt_id)
        assert client.server.stats.load_seconds == pytest.approx(4.0)


async def test_a_warm_run_is_shorter_by_the_load_and_the_way_to_the_card() -> None:
    async with stopped_clock(load_seconds_per_gb=0.5, transfer_seconds_per_gb=0.1) as (client, clock):
        for seed in (1, 2):
            prompt_id = await client.submit(text_to_image("a", seed=seed))
            await clock.advance_to(seed * 100.0)
            await client.finished(prompt_id)
        cold, warm = (
            run.ended_at - run.started_at
            for run in client.server.stats.prompt_log
            if run.ended_at is not None
        )
        # 3 s to read, 0.6 s to the card, and the text that is encoded once.
        assert cold - warm == pytest.approx(3.0 + 0.6 + 0.1)


async def test_loads_differ_by_their_noise_and_are_the_same_for_a_seed() -> None:
    async def measured(seed: int) -> list[float]:
        found = []
        async with fake(settings("none", load_seconds_per_gb=0.5, load_noise=0.2, seed=seed)) as client:
            for _ in range(3):
                before = client.server.stats.load_seconds
                await client.run(text_to_image("a"))
                found.append(client.server.stats.load_seconds - before)
        return found

    first = await measured(1)
    assert len(set(first)) == 3 and all(2.4 <= each <= 3.6 for each in first)
    assert await measured(1) == pytest.approx(first)
    assert await measured(2) != pytest.approx(first)
