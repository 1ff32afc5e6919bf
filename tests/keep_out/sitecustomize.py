"""Keeps a Python process of the tests out of what is the user's own: home folder, data, hub and servers.

Python imports this by itself at its start, because `tests/_home.py` puts this folder on the `PYTHONPATH` of every
process that a test starts. What is tried in spite of it is refused there, and noted for the test, which then fails.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

VARIABLE = "TESTS_KEEP_OUT"
"""What to keep out of, as JSON: `homes` are not written to, except for `exempt`; `data` is not even read."""
OFFENCES = "TESTS_OFFENCES"
"""The file in which an offence is noted."""

PORTS = frozenset({3001, *range(8188, 8200)})
"""Where a user's own hub and ComfyUI servers are, unless somebody chose otherwise."""

_READING = frozenset({"os.listdir", "os.scandir"})
_WRITING = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink"})
_SOCKETS = frozenset({"socket.connect", "socket.bind"})
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def install() -> None:
    limits = json.loads(os.environ[VARIABLE])
    homes, data, exempt = (
        tuple(f"{folder}{os.sep}" for folder in limits[name]) for name in ("homes", "data", "exempt")
    )

    def is_off_limits(path: object, is_write: bool) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        name = os.fsdecode(path).removeprefix("file:")
        full = os.path.abspath(name) + os.sep  # noqa: PTH100
        if full.startswith(data):
            return True
        return is_write and full.startswith(homes) and not full.startswith(exempt)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            is_refused = is_off_limits(path, bool(flags & _CHANGES))
        elif event in _SOCKETS:
            is_refused = _is_users(arguments[1])
        elif event in _WRITING:
            # Where a link leads to is not touched by making it.
            paths = arguments[1:2] if event == "os.symlink" else arguments[:2]
            is_refused = any(is_off_limits(path, True) for path in paths)
        elif event in _READING or event == "sqlite3.connect":
            is_refused = is_off_limits(arguments[0], event == "sqlite3.connect")
        else:
            return
        if is_refused:
            _note(f"{event} {arguments!r}")
            raise PermissionError(f"tests keep out of what is the user's own: {event} {arguments!r}")

    sys.addaudithook(watch)


def _is_users(address: object) -> bool:
    return isinstance(address, tuple) and len(address) >= 2 and address[1] in PORTS


def _note(offence: str) -> None:
    file = os.environ.get(OFFENCES)
    if file:
        note = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(note, f"{offence} in {sys.argv}\n".encode())
        os.close(note)


if VARIABLE in os.environ and __name__ == "sitecustomize":
    install()
