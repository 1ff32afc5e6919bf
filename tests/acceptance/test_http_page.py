"""The commands of docs/http.md, copied into a shell in the folder of the clone, lead from a key to a picture."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image
from tests.acceptance._process import ROOT, read_until, run_program, started
from tests.acceptance.test_up import url_in


def commands() -> tuple[str, str]:
    """The command of the first terminal, and those of the second."""
    up, *rest = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "http.md").read_text(), re.DOTALL)
    return up.strip(), "".join(rest)


def test_the_commands_of_the_http_page_lead_from_a_key_to_a_picture(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs the program curl")
    up, rest = commands()
    # As in a clone: the folder of the examples, and the programs of this environment.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    env = {"HOME": str(tmp_path / "home"), "XDG_DATA_HOME": "", "HUB_PORT": "", "COMFYFLEET_PORT": "0"}
    env["PATH"] = os.defpath
    with started(*shlex.split(up), cwd=tmp_path, env=env) as hub:
        url = url_in(read_until(hub, lambda line: line.endswith(": online")))
        # The one change: the port, because 3001 may be taken on this machine.
        script = rest.replace("http://127.0.0.1:3001", url)
        assert script != rest
        ended = run_program("sh", "-e", "-c", script, cwd=tmp_path, env=env)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    assert '{"jobs":[],"cursor":null}' in ended.stdout
    assert "event: completed" in ended.stdout
    assert "urn:comfyfleet:problem" not in ended.stdout
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "completed"
    with Image.open(tmp_path / "large.png") as image:
        assert image.format == "PNG"
