"""What the README shows works when it is copied."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from PIL import Image

from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings

ROOT = Path(__file__).resolve().parents[2]


async def test_the_readmes_pool_example_runs_as_copied_and_saves_a_picture(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    code = found.group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 16
    workflows = tmp_path / "examples" / "workflows"
    workflows.parent.mkdir()
    workflows.symlink_to(ROOT / "examples" / "workflows")
    async with AsyncExitStack() as stack:
        # The one change: the ports, because these may be taken on this machine.
        program = code
        for port in (8188, 8189, 8190):
            server = await stack.enter_async_context(FakeComfyUI(FakeSettings(time_scale=0.02)))
            assert program.count(f"http://127.0.0.1:{port}") == 1
            program = program.replace(f"http://127.0.0.1:{port}", server.url)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "100.0 %" in out.decode()
    saved = re.findall(r"^saved (\S+)$", out.decode(), re.MULTILINE)
    assert saved
    for name in saved:
        with Image.open(tmp_path / name) as image:
            assert image.format == "PNG"
