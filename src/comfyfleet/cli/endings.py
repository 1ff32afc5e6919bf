"""How a command ends: its exit codes, the errors that carry one, and the loop that closes everything on a signal.

Commands raise; `main.py` alone prints the line and exits. Every command imports this, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Coroutine
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import click

T = TypeVar("T")


class ExitCode(IntEnum):
    """What a script may rely on; `docs/cli.md` tells it to people."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130
    TERMINATED = 143


class CommandFailed(Exception):
    """A command could not do its work. The message is the one line that the user sees."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code


class Terminated(Exception):
    """SIGTERM came, and everything was closed."""


def make_folder(folder: Path) -> None:
    """The place for `--out`, before anything is done that needs one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"cannot make {folder}: {error.strerror}", param_hint="--out") from error


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, and SIGTERM closes everything as Ctrl-C does: it ends in `Terminated`."""
    import asyncio

    return asyncio.run(_until_terminated(work))


async def _until_terminated(work: Coroutine[Any, Any, T]) -> T:
    import asyncio
    import contextlib
    import signal

    task = asyncio.current_task()
    assert task is not None, "a coroutine that runs has a task"
    is_terminated = False

    def terminate() -> None:
        nonlocal is_terminated
        # A second signal must not cut the closing short that the first one began.
        if not is_terminated:
            is_terminated = True
            task.cancel()

    loop = asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError):  # loops of Windows know no signals
        loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await work
    except asyncio.CancelledError:
        if is_terminated:
            raise Terminated from None
        raise
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGTERM)
