"""`comfyfleet` as `pip install .` leaves it: a program in which what the extras bring cannot be imported.

Takes command lines as JSON from standard input, and prints the exit code and the standard error of each.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

from comfyfleet.cli.exit_codes import PACKAGES
from comfyfleet.cli.main import main

MISSING = {module for modules in PACKAGES.values() for module in modules} | {"uvloop"}


class _Bare(MetaPathFinder):
    """In place of the finder for installed packages."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        return None if name.partition(".")[0] in MISSING else PathFinder.find_spec(name, path, target)


def run(arguments: list[str]) -> tuple[int, str]:
    told = io.StringIO()
    code: object = 0
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
    return (code if isinstance(code, int) else 1), told.getvalue()


if __name__ == "__main__":
    assert not MISSING.intersection(sys.modules), "something heavy was imported before anything was asked"
    sys.meta_path[sys.meta_path.index(PathFinder)] = _Bare()
    print(json.dumps([run(arguments) for arguments in json.load(sys.stdin)]))
