"""The errors about a setting name it, its value and what is allowed, and show no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.settings import read_settings


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PORT", "abc", "'abc' is not a whole number"),
        ("SLOTS", "0", "'0' is not a whole number of at least 1"),
        ("SLOTS", "5000", "'5000' is not a whole number of at most 1000"),
        ("SPEED", "fast", "'fast' is not a number"),
        ("OPEN", "perhaps", "'perhaps' is not true or false"),
        ("TRANSPORT", "pigeon", "'pigeon' is not allowed. Use one of: http, websocket"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value_and_what_is_allowed(
    name: str, value: str, words: str
) -> None:
    with pytest.raises(CommandFailed) as refused:
        read_settings({}, environment={f"COMFYFLEET_{name}": value})
    place = f"the setting {name.lower()!r} (environment COMFYFLEET_{name}) is not valid: "
    assert str(refused.value) == place + words


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("port = [1, 2]", "['1', '2'] is not a whole number"),
        ("store = 3", "'3' is not a text in quotes"),
        ("key = 31415926", "'…' is not a text in quotes"),
    ],
)
def test_a_wrong_value_in_the_file_is_told_without_a_secret(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "comfyfleet.toml"
    file.write_text(content + "\n")
    with pytest.raises(CommandFailed) as refused:
        read_settings({}, config=file, environment={})
    assert str(refused.value).endswith(f"is not valid: {words}")
