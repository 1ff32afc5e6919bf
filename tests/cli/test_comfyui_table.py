"""What a worker reads of its servers is a setting like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.settings import read_settings


def test_bounds_come_from_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[comfyui]\nmax_file_bytes = 10_000\noccupied_s = 30\n")
    monkeypatch.setenv("COMFYFLEET_COMFYUI_MAX_ANSWER_BYTES", "5000")
    found = read_settings({}, config=str(file)).comfyui()
    assert (found.max_file_bytes, found.occupied_s, found.max_answer_bytes) == (10_000, 30.0, 5_000)
    assert found.max_message_bytes == 128 << 20


def test_a_bound_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[comfyui]\nmax_file_bytes = 0\n")
    with pytest.raises(CommandFailed, match=r"comfyui\.max_file_bytes"):
        read_settings({}, config=str(file))
