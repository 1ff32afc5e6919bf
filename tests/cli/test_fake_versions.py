"""Fake servers of a mixed fleet: each behaves like the release it was told."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.sim._client import text_to_image

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.servers import fakes, journals, named, print_state
from comfyfleet.cli.settings import ResolvedSettings, read_settings
from comfyfleet.cli.settings_schema import Settings
from comfyfleet.pool.servers import PoolAgents


async def _versions_of(settings: Settings) -> list[str]:
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        servers = await fakes(stack, "here", ResolvedSettings(settings, {}))
        versions = []
        for server in servers:
            async with session.get(f"{server.url}/system_stats") as answer:
                versions.append((await answer.json())["system"]["comfyui_version"])
        return versions


async def test_fakes_take_the_given_releases_in_turn() -> None:
    given = Settings(fake=("3",), fake_version=("0.3.64", "0.33.0"))
    assert await _versions_of(given) == ["0.3.64", "0.33.0", "0.3.64"]
    assert await _versions_of(Settings(fake=("1",))) == ["0.7.0"]


async def test_a_release_that_no_fake_can_show_is_refused_by_its_option() -> None:
    with pytest.raises(CommandFailed, match=r"fake_version.*0\.3\.40"):
        await _versions_of(Settings(fake=("1",), fake_version=("0.1.0",)))


@pytest.mark.parametrize("rate", [0.0, 0.01])
async def test_fakes_load_models_as_slowly_as_they_are_told(rate: float) -> None:
    given = ResolvedSettings(Settings(fake=("1",), fake_load_seconds_per_gb=rate), {})
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        (server,) = await fakes(stack, "here", given)
        prompt = text_to_image("sd15.safetensors", edge=64, steps=1)
        async with session.post(f"{server.url}/prompt", json={"prompt": prompt}) as answer:
            assert answer.status == 200
        async with asyncio.timeout(60):
            while not await _ask(session, f"{server.url}/history"):
                await asyncio.sleep(0.01)
        stats = await _ask(session, f"{server.url}/fake/stats")
        assert (stats["model_loads"], stats["load_seconds"]) == (1, pytest.approx(2.0 * rate))


async def _ask(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url) as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def test_only_fake_servers_keep_no_journal(tmp_path: Path) -> None:
    """They end with their process; what a real server beside them runs does not."""
    resolved = read_settings({"fake": 1, "data": str(tmp_path)}, environment={})
    agents = PoolAgents(print_state, journals=journals(resolved))
    async with AsyncExitStack() as stack:
        real = named(("http://127.0.0.1:9",), None, 1, alone=False)
        fake = await fakes(stack, "here", resolved)
        assert [agents.journal_of(server) is not None for server in (*real, *fake)] == [True, False]
