"""What `comfyfleet worker` says while it comes to work: that it works only once the hub has taken it, and why not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.acceptance._process import CLI, read_until, started
from tests.hub._hub import running_hub

from comfyfleet.model.access import Role
from comfyfleet.testing.fake_comfyui import FakeComfyUI


async def said(folder: Path, hub: str, key: str | None, server: str, until: str, *options: str) -> list[str]:
    """The lines up to the one with that in it."""
    keyed = () if key is None else ("--key", key)
    command = (*CLI, "worker", "--hub", hub, *keyed, "--name", "gpu", "--server", server, *options)
    env = {"COMFYFLEET_DATA": str(folder), "COMFYFLEET_LOG_LEVEL": "error"}
    with started(*command, env=env) as process:
        return await asyncio.to_thread(read_until, process, lambda line: until in line)


async def test_a_worker_says_that_it_works_once_the_hub_has_taken_it(tmp_path: Path) -> None:
    async with running_hub() as rig, FakeComfyUI() as fake:
        lines = await said(tmp_path, rig.url, rig.keys[Role.ADMIN], fake.url, ": online")
        assert [line.strip() for line in lines] == [
            f"Connecting to {rig.url}",
            f"Connected to {rig.url}",
            "gpu: online",
        ]


@pytest.mark.parametrize("wrong", ["address", "key", "kind", "server"])
async def test_a_worker_that_cannot_work_says_why_and_not_that_it_works(tmp_path: Path, wrong: str) -> None:
    async with running_hub() as rig, FakeComfyUI() as fake:
        hub, key, server = rig.url, rig.keys[Role.ADMIN], fake.url
        match wrong:
            case "address":
                hub = "http://127.0.0.1:9"
                words = "cannot reach the hub at http://127.0.0.1:9: connection refused"
            case "key":
                key, words = "cfk_wrong", "key"
            case "kind":
                hub, words = fake.url, f"a ComfyUI server answers at {fake.url}, not a hub"
            case _:
                server, words = rig.url, f"{rig.url}: a ComfyFleet hub answers there, not ComfyUI"
        lines = await said(tmp_path, hub, key, server, "gpu: offline")
        assert words in lines[-1]
        assert not any("Connected to" in line for line in lines)


async def test_a_worker_without_its_server_says_that_the_hub_is_not_the_reason(tmp_path: Path) -> None:
    async with running_hub() as rig:
        words = "a worker connects once its server responds"
        lines = await said(tmp_path, rig.url, rig.keys[Role.ADMIN], "http://127.0.0.1:9", words)
    assert "gpu: offline" in lines[-2] and "http://127.0.0.1:9: connection refused" in lines[-2]


@pytest.mark.parametrize("transport", ["http", "websocket"])
async def test_a_worker_without_a_key_says_how_it_gets_one(tmp_path: Path, transport: str) -> None:
    async with running_hub() as rig, FakeComfyUI() as fake:
        lines = await said(tmp_path, rig.url, None, fake.url, "gpu: offline", "--transport", transport)
        assert f"the hub at {rig.url} requires a key" in lines[-1]
        assert "`comfyfleet key invite`" in lines[-1] and "--enrol" in lines[-1]
