"""Fake servers of a mixed fleet: each behaves like the release it was told."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.servers import fakes, journals, named, print_state
from comfyfleet.cli.settings import ResolvedSettings, read_settings
from comfyfleet.cli.settings_schema import Settings
from comfyfleet.pool.servers import PoolAgents


async def _versions_of(settings: Settings) -> list[str]:
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        servers = await fakes(stack, settings.fake, "here", ResolvedSettings(settings, {}))
        versions = []
        for server in servers:
            async with session.get(f"{server.url}/system_stats") as answer:
                versions.append((await answer.json())["system"]["comfyui_version"])
        return versions


async def test_fakes_take_the_given_releases_in_turn() -> None:
    given = Settings(fake=3, fake_version=("0.3.64", "0.33.0"))
    assert await _versions_of(given) == ["0.3.64", "0.33.0", "0.3.64"]
    assert await _versions_of(Settings(fake=1)) == ["0.7.0"]


async def test_a_release_that_no_fake_can_show_is_refused_by_its_option() -> None:
    with pytest.raises(CommandFailed, match=r"fake_version.*0\.3\.40"):
        await _versions_of(Settings(fake=1, fake_version=("0.1.0",)))


async def test_only_fake_servers_keep_no_journal(tmp_path: Path) -> None:
    """They end with their process; what a real server beside them runs does not."""
    resolved = read_settings({"fake": 1, "data": str(tmp_path)}, environment={})
    agents = PoolAgents(print_state, journals=journals(resolved))
    async with AsyncExitStack() as stack:
        real = named(("http://127.0.0.1:9",), None, 1, alone=False)
        fake = await fakes(stack, 1, "here", resolved)
        assert [agents.journal_of(server) is not None for server in (*real, *fake)] == [True, False]
