"""Node.js for the example worker; where there is none, the tests that need it are skipped with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from chaos.node import EXAMPLE, CannotTakePart, packages
from chaos.node import node as find_node


def node() -> str | None:
    try:
        return find_node()
    except CannotTakePart:
        return None


def worker_folder(tmp_path: Path) -> Path:
    """A copy of the example with its packages, or a skip."""
    try:
        find_node()
        installed = packages()
    except CannotTakePart as reason:
        pytest.skip(str(reason))
    for name in ("worker.js", "package.json"):
        shutil.copy(EXAMPLE / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(installed / "node_modules")
    return tmp_path
