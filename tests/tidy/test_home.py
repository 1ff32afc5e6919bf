"""Nothing that a test does, or a program that it starts, reaches what is the user's own."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests._home import offences
from tests.keep_out.sitecustomize import OFFENCES, PORTS, VARIABLE

from comfyfleet.cli.hub_connection import read_hub
from comfyfleet.cli.settings import read_settings

LIMITS: dict[str, list[str]] = json.loads(os.environ[VARIABLE])


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Offences of this test go where they do not make it fail."""
    with monkeypatch.context() as patched:
        patched.setenv(OFFENCES, str(tmp_path / "offences"))
        yield tmp_path / "offences"


def test_the_home_folder_is_empty_and_not_the_users() -> None:
    assert os.environ["HOME"] not in LIMITS["homes"]
    assert str(Path.home()) == os.environ["HOME"]
    resolved = read_settings(config=os.devnull)
    assert resolved.data.is_relative_to(os.environ["HOME"])
    assert read_hub(resolved.data) is None
    assert (resolved.values.hub, resolved.values.store, resolved.values.key) == ((), None, None)


@pytest.mark.parametrize("home", LIMITS["homes"])
def test_the_users_home_folder_is_not_written_to_and_its_data_not_read(
    home: str, noted: Path, tmp_path: Path
) -> None:
    with pytest.raises(PermissionError, match="tests keep out"):
        (Path(home) / "comfyfleet-test").open("w")
    with pytest.raises(PermissionError, match="tests keep out"):
        (Path(home) / "comfyfleet-test").mkdir()
    (tmp_path / "link").symlink_to(home)
    data = next(each for each in LIMITS["data"] if each.startswith(home))
    with pytest.raises(PermissionError, match="tests keep out"):
        (Path(data) / "hub.json").read_text()
    with pytest.raises(PermissionError, match="tests keep out"):
        sqlite3.connect(Path(data) / "fleet.db")
    assert len(offences()) == 4


@pytest.mark.parametrize("port", [3001, 8188, 8199])
def test_the_ports_of_the_users_hub_and_servers_are_neither_called_nor_taken(port: int, noted: Path) -> None:
    assert port in PORTS
    with socket.socket() as one, pytest.raises(PermissionError, match="tests keep out"):
        one.connect(("127.0.0.1", port))
    with socket.socket() as other, pytest.raises(PermissionError, match="tests keep out"):
        other.bind(("127.0.0.1", port))
    assert len(offences()) == 2


def test_a_process_that_a_test_starts_keeps_out_too_and_its_try_is_noted(noted: Path) -> None:
    program = "import socket; socket.create_connection(('127.0.0.1', 8188))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "tests keep out" in ended.stderr
    (line,) = offences()
    assert line.startswith("socket.connect")
