"""The first example of docs/tenants.md, copied into a shell in the folder of the clone: a tenant's job runs and is paid
for."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from tests.acceptance._process import ROOT, read_until, run_program, started


def examples() -> tuple[str, str]:
    """What is typed in the first terminal, and in the second."""
    page = (ROOT / "docs" / "tenants.md").read_text().partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2, "the page begins with a hub and with what is asked of it"
    return blocks[0].strip(), blocks[1]


def test_the_first_example_of_the_tenants_page_runs_as_copied(tmp_path: Path) -> None:
    up, rest = examples()
    folder = tmp_path / "empty"
    folder.mkdir()
    # As in a clone: the programs of this environment.
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    env = {
        "HOME": str(tmp_path / "home"),
        "XDG_DATA_HOME": "",
        "HUB_PORT": "",
        "COMFYFLEET_PORT": "0",
        "COLUMNS": "",
    }
    env["PATH"] = os.defpath
    with started(*shlex.split(up), cwd=folder, env=env) as hub:
        read_until(hub, lambda line: line.endswith(": online"))
        ended = run_program("sh", "-e", "-c", rest, cwd=folder, env=env)
    assert ended.returncode == 0, ended.stderr
    saved = list(folder.glob("*.png"))
    assert len(saved) == 1, "the job has left its picture"
    statement = ended.stdout[ended.stdout.index("number") :]
    assert "payment-17" in statement and "+1000" in statement
    assert re.search(r"\bconsume\b.*-5\b", statement), statement
