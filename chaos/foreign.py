"""The worker in Node.js of examples/, unchanged, with a witness that writes down what it says.

It has no engine and knows the functions in Redis alone. Where there is no Node.js, no package registry or no such
example, the run takes place without it and says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from chaos.setting import LEASE_S, Setting

EXAMPLE = Path(__file__).parents[1] / "examples" / "redis-worker-node"
_WITNESS = Path(__file__).with_name("witness.mjs")
_OLDEST = 20
_INSTALL_S = 120.0


class CannotTakePart(Exception):
    """Why there is no worker in Node.js here."""


def prepare(folder: Path) -> list[str]:
    """The command that starts one, from a copy in this folder."""
    node = shutil.which("node")
    if node is None:
        raise CannotTakePart("there is no Node.js here")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(said.lstrip("v").split(".")[0]) < _OLDEST:
        raise CannotTakePart(f"Node.js is {said.strip()}, the example needs {_OLDEST} or newer")
    if not (EXAMPLE / "worker.js").exists():
        raise CannotTakePart(f"{EXAMPLE} is not there")
    copy = folder / "node"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("node_modules"))
    (copy / "node_modules").symlink_to(_packages() / "node_modules")
    return [node, "--import", _WITNESS.as_uri(), str(copy / "worker.js")]


def _packages() -> Path:
    """Installed once for each lock file, in the cache that the tests of the example use too."""
    lock = (EXAMPLE / "package-lock.json").read_bytes()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "comfyfleet-tests"
    folder = root / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if (folder / "node_modules").is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise CannotTakePart("there is no npm to install its package with")
    root.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=root))
    for name in ("package.json", "package-lock.json"):
        shutil.copy(EXAMPLE / name, making)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        subprocess.run(command, cwd=making, capture_output=True, timeout=_INSTALL_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(making, ignore_errors=True)
        raise CannotTakePart(f"its package could not be installed: {error}") from error
    with contextlib.suppress(OSError):
        making.rename(folder)
    return folder


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
