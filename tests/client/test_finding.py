"""A client without an address means the hub of this machine, as the commands do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.hub._hub import graph, running_hub

from comfyfleet import FleetClient, Refusal, SyncFleetClient
from comfyfleet.cli.hub_connection import write_hub
from comfyfleet.client.discovery import DEFAULT_URL, FoundHub, LocalHub, find_hub
from comfyfleet.model.access import Role


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMFYFLEET_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


async def test_the_hub_that_was_started_here_is_found_with_its_key(data: Path) -> None:
    async with running_hub() as rig:
        write_hub(data, LocalHub(rig.url, rig.keys[Role.ADMIN]))
        async with FleetClient() as client:
            assert client.url == rig.url
            job = await client.submit(graph())
            assert [each.id for each in (await client.jobs()).jobs] == [job.id]


def test_so_does_the_client_of_scripts(data: Path) -> None:
    write_hub(data, LocalHub("http://127.0.0.1:4001", "cfk_a_b"))
    with SyncFleetClient() as client:
        assert client.client.url == "http://127.0.0.1:4001"


def test_without_one_it_is_the_usual_address(data: Path) -> None:
    assert find_hub() == FoundHub((DEFAULT_URL,))


def test_what_the_environment_or_the_file_names_is_nearer_and_the_owners_key_does_not_go_there(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hub(data, LocalHub("http://127.0.0.1:4001", "cfk_a_b"))
    Path("comfyfleet.toml").write_text('hub = ["https://a:1", "https://b:1"]\nkey = "cfk_file"\n')
    assert find_hub() == FoundHub(("https://a:1", "https://b:1"), "cfk_file")
    monkeypatch.setenv("COMFYFLEET_HUB", "https://c:1, https://d:1")
    monkeypatch.setenv("COMFYFLEET_KEY", "cfk_environment")
    assert find_hub() == FoundHub(("https://c:1", "https://d:1"), "cfk_environment")
    monkeypatch.delenv("COMFYFLEET_KEY")
    Path("comfyfleet.toml").unlink()
    assert find_hub() == FoundHub(("https://c:1", "https://d:1"))
    monkeypatch.setenv("COMFYFLEET_HUB", "http://127.0.0.1:4001/")
    assert find_hub().key == "cfk_a_b"


@pytest.mark.skipif(os.name != "posix", reason="rights of files")
def test_a_key_that_others_can_read_is_refused(data: Path) -> None:
    write_hub(data, LocalHub("http://127.0.0.1:4001", "cfk_a_b")).chmod(0o644)
    with pytest.raises(Refusal, match="chmod 600"):
        FleetClient()
