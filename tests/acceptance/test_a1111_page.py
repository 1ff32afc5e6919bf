"""The first example of docs/a1111.md, copied into two shells: a payload runs on a fake server."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from PIL import Image
from tests.acceptance._process import ROOT, read_until, run_program, started

from comfyfleet.testing.fake_a1111 import FakeSubject, drawn_pixels, pixels_of


def test_the_first_example_of_the_a1111_page_runs_as_copied(tmp_path: Path) -> None:
    (block, *_) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "a1111.md").read_text(), re.DOTALL)
    up, submit = block.strip().splitlines()
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    env = {"HOME": str(tmp_path / "home"), "XDG_DATA_HOME": "", "HUB_PORT": "", "COMFYFLEET_PORT": "0"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    with started(*shlex.split(up), cwd=folder, env=env) as hub:
        read_until(hub, lambda line: line.endswith(": online"))
        ended = run_program(*shlex.split(submit), cwd=folder, env=env)
    assert ended.returncode == 0, ended.stderr
    (path,) = (folder / "pictures").iterdir()
    with Image.open(path) as picture:
        text = str(picture.info["parameters"])
    seed = re.search(r"Seed: (\d+)", text)
    assert seed is not None and f"uses the seed {seed[1]}" in ended.stderr
    subject = FakeSubject(prompt="a lighthouse at dawn", negative_prompt="fog", seed=int(seed[1]), steps=20)
    assert pixels_of(path.read_bytes()) == drawn_pixels(subject)
