"""The worker in Node.js of examples/, unchanged, with a witness that writes down what it says.

It has no engine and knows the functions in Redis alone. Where there is no Node.js, no package registry or no such
example, the run takes place without it and says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
from pathlib import Path

from chaos.node import EXAMPLE, CannotTakePart, node, packages
from chaos.setting import LEASE_S, Setting

_WITNESS = Path(__file__).with_name("witness.mjs")


def prepare(folder: Path) -> list[str]:
    """The command that starts one, from a copy in this folder."""
    if not (EXAMPLE / "worker.js").exists():
        raise CannotTakePart(f"{EXAMPLE} is not there")
    binary, installed = node(), packages()
    copy = folder / "node"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("node_modules"))
    (copy / "node_modules").symlink_to(installed / "node_modules")
    return [binary, "--import", _WITNESS.as_uri(), str(copy / "worker.js")]


def node_process(setting: Setting, who: str, name: str, slots: int, command: list[str]) -> None:
    """Becomes the worker: what kills the one kills the other."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    said = os.open(setting.logs / f"{who}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(said, 1)
    os.dup2(said, 2)
    told = {
        "CHAOS_LOG": str(setting.logs / f"{who}.jsonl"),
        "CHAOS_WHO": who,
        "REDIS_URL": setting.url,
        "WORKER": name,
        "SLOTS": str(slots),
        "LEASE_S": str(LEASE_S),
        "WORK_MS": "100",
    }
    os.execve(command[0], command, os.environ | told)
