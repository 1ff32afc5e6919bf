"""Whoever starts a hub on a Redis that can lose acknowledged jobs is told at the start, with what to set."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from tests.acceptance._process import run_cli
from tests.servers.redis_fixtures import own_server

from comfyfleet.cli.bootstrap import run_hub
from comfyfleet.cli.settings import read_settings


async def warnings_at_start(store: str, data: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    environment = {"COMFYFLEET_DATA": str(data), "COMFYFLEET_STORE": store, "COMFYFLEET_PORT": "0"}
    with caplog.at_level(logging.WARNING):
        async with run_hub(read_settings(config=os.devnull, environment=environment)):
            return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ((), "everything, if it dies"),
        (("--save", "900 1"), "everything since its last snapshot, if it dies"),
        (
            ("--appendonly", "yes", "--appendfsync", "no"),
            "the data that its system has not yet written to the disk, if it dies",
        ),
    ],
)
async def test_a_hub_on_a_redis_that_forgets_warns(
    settings: tuple[str, ...], lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server(*settings, is_durable=False) as server:
        (warning,) = await warnings_at_start(server.url, tmp_path, caplog)
        assert f"this Redis can lose jobs that were acknowledged: {lost}" in warning
        assert "Set appendonly yes" in warning
        found = json.loads(run_cli("store", "check", server.url, "--json").stdout)
    assert found["settings"]["can_lose"].startswith(lost.partition(",")[0])


@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_a_hub_on_a_redis_that_keeps_a_log_does_not(
    fsync: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server("--appendonly", "yes", "--appendfsync", fsync, is_durable=False) as server:
        assert await warnings_at_start(server.url, tmp_path, caplog) == []


async def test_a_hub_on_its_own_file_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert await warnings_at_start(f"sqlite:///{tmp_path}/fleet.db", tmp_path, caplog) == []
