"""The stranger's path: the commands of docs/quickstart.md, as copied, lead to a picture on the disk."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from PIL import Image
from tests.acceptance._process import ROOT, read_until, run_program, started

_UP = ".venv/bin/comfyfleet up --fake 1"


def commands() -> list[str]:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_the_quickstart_leads_to_a_picture_with_its_own_commands(tmp_path: Path) -> None:
    every = commands()
    assert every[:2] == ["make install", _UP]
    assert len(every) <= 10 - len(["git clone", "cd"])
    # As in a clone: the folder of the examples, and the programs of this environment.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    # A stranger has an empty home and the hub's own port; here the latter may be taken.
    env = {"HOME": str(tmp_path / "home"), "XDG_DATA_HOME": "", "HUB_PORT": "", "COMFYFLEET_PORT": "0"}
    # It has not put the environment on its path either.
    env["PATH"] = os.defpath
    with started(*shlex.split(_UP), cwd=tmp_path, env=env) as hub:
        told = read_until(hub, lambda line: line.endswith(": online"))
        assert any("admin key: in " in line for line in told)
        following = [line.strip() for line in told if line.strip().startswith(".venv/bin/comfyfleet")]
        assert following, f"it does not say what to type next: {told}"
        for command in every[2:]:
            ended = run_program(*shlex.split(command), cwd=tmp_path, env=env)
            assert ended.returncode == 0, (command, ended.stderr)
            if " submit " in command:
                assert ended.stdout == "pictures/lighthouse_00001_.png\n"
    with Image.open(tmp_path / "pictures" / "lighthouse_00001_.png") as image:
        assert image.format == "PNG"


def test_the_readme_has_the_same_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in commands()[:3]:
        assert command in readme
