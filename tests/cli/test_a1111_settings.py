"""The settings of the A1111 connector as an operator writes them."""

from __future__ import annotations

from pathlib import Path

from comfyfleet.cli.settings import read_settings
from comfyfleet.worker.connectors.a1111 import A1111
from comfyfleet.worker.connectors.registry import connect


def test_a_password_comes_from_a_file_and_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2\n")
    config = tmp_path / "settings.toml"
    lines = [
        "[connectors.a1111]",
        'user = "me"',
        "exclusive = false",
        f'password_file = "{tmp_path}/password"',
    ]
    config.write_text("\n".join(lines))
    found = read_settings({}, config=config, environment={"COMFYFLEET_DATA": str(tmp_path)})
    connector = connect("a1111", "http://gpu-a:7860", found.connector("a1111"))
    assert isinstance(connector, A1111)
    assert (connector.settings.user, connector.settings.password) == ("me", "hunter2")
    assert connector.settings.exclusive is False
    assert "hunter2" not in str(list(found.shown()))
