"""What an attempt left on the disk that worker and server share: its own folders, by the id of its prompt.

ComfyUI has no route to remove a file, so only who shares its disk can. Every attempt has a folder of its own below
`input` and `output`, which nobody else writes to; nothing outside of these two is touched.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path


def remove_own(base: Path, subfolder: str, prompt_id: str, *, with_outputs: bool) -> None:
    """`base` is the server's folder, with `input` and `output` in it. What is not there is removed already."""
    # By construction; a name that leads elsewhere must never get here.
    assert str(uuid.UUID(prompt_id)) == prompt_id
    for kind in ("input", *(("output",) if with_outputs else ())):
        folder = base / kind / subfolder / prompt_id
        # A link would lead to what is somebody else's.
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
