"""The tables [connectors.NAME]: from the file, the environment and secret files; never printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.settings import ResolvedSettings, read_settings


def _read(folder: Path, text: str, **environment: str) -> ResolvedSettings:
    path = folder / "comfyfleet.toml"
    path.write_text(text)
    return read_settings(config=path, environment={"COMFYFLEET_DATA": str(folder), **environment})


def test_a_table_is_read_with_any_settings(tmp_path: Path) -> None:
    found = _read(tmp_path, '[connectors.simulated]\nmodels = ["a"]\nother = 3\n')
    assert found.connector("simulated") == {"models": ["a"], "other": 3}
    assert found.connector("comfyui") == {}


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        '[connectors.simulated]\nkey = "of the file"\n[connectors.my_own]\nkey = "x"\n',
        COMFYFLEET_CONNECTORS_SIMULATED_KEY="of the environment",
        COMFYFLEET_CONNECTORS_MY_OWN_API_KEY="k",
    )
    assert found.connector("simulated") == {"key": "of the environment"}
    assert found.connector("my_own") == {"key": "x", "api_key": "k"}
    assert found.unknown_variables == ()


def test_a_variable_of_a_connector_that_nobody_knows_is_an_unknown_one(tmp_path: Path) -> None:
    found = _read(tmp_path, "", COMFYFLEET_CONNECTORS_NOTHING_KEY="x")
    assert found.unknown_variables == ("COMFYFLEET_CONNECTORS_NOTHING_KEY",)


def test_a_secret_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-word\n")
    found = _read(tmp_path, f'[connectors.simulated]\nkey_file = "{tmp_path}/key"\n')
    assert found.connector("simulated") == {"key": "secret-word"}


def test_a_secret_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    found = _read(tmp_path, f'[connectors.simulated]\nkey_file = "{tmp_path}/nothing"\n')
    with pytest.raises(CommandFailed, match=r"'connectors\.simulated\.key_file'.*cannot read .*nothing"):
        found.connector("simulated")


def test_a_secret_and_its_file_are_not_given_together(tmp_path: Path) -> None:
    found = _read(tmp_path, '[connectors.simulated]\nkey = "a"\nkey_file = "b"\n')
    with pytest.raises(CommandFailed, match="'key' is given too"):
        found.connector("simulated")


def test_no_text_of_a_connector_is_shown(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        '[connectors.simulated]\nword = "secret-word"\nheaders = {a = "secret-word"}\nretries = 3\nkey_file = "/f"\n',
        COMFYFLEET_CONNECTORS_SIMULATED_TOKEN="secret-word",
    )
    shown = {name: value for name, value, _ in found.shown() if name.startswith("connectors.")}
    assert shown == {
        "connectors.simulated.headers": "…",
        "connectors.simulated.key_file": "/f",
        "connectors.simulated.retries": 3,
        "connectors.simulated.token": "…",
        "connectors.simulated.word": "…",
    }


def test_a_table_of_a_connector_that_is_not_here_is_refused_where_it_is_used(tmp_path: Path) -> None:
    found = _read(tmp_path, "[connectors.simulatd]\na = 1\n")
    with pytest.raises(CommandFailed, match="no connector 'simulatd' here; did you mean 'simulated'"):
        found.check_connectors()


@pytest.mark.parametrize("text", ["connectors = 3", "[connectors]\nsimulated = 3"])
def test_what_is_not_a_table_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="it is a table"):
        _read(tmp_path, text)


def test_the_limits_of_comfyui_servers_hold_for_a_service_too(tmp_path: Path) -> None:
    found = _read(tmp_path, "[comfyui]\nbroken_s = 7\n[connectors.comfyui]\nrequest_s = 3\n")
    assert found.connector("comfyui") == {"broken_s": 7.0, "request_s": 3}
