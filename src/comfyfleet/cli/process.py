"""Signals and logs of a program that serves (`up`, `hub`, `worker`).

The first SIGINT or SIGTERM asks it to finish, the second stops it at once. Logs go to standard error as text or JSON
lines. `tracing.py` adds the request, trace, job, attempt and worker. Keys and passwords are removed from every line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from comfyfleet import tracing
from comfyfleet.cli.output import LineFormatter, escaped

T = TypeVar("T")


class Signals:
    """Use it as a context manager, inside an event loop."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _handled():
            with contextlib.suppress(NotImplementedError):  # event loops on Windows have no signal handlers
                loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _handled():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)

    def _receive(self, number: int) -> None:
        self.received.append(number)
        self._changed.set()

    async def before(self, work: Coroutine[Any, Any, T], count: int) -> tuple[T] | None:
        """The result of the work. None: `count` signals came first, and the work was cancelled."""
        task = asyncio.create_task(work)
        while len(self.received) < count:
            self._changed.clear()
            signalled = asyncio.create_task(self._changed.wait())
            await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
            if task.done():
                return (task.result(),)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    async def wait(self, count: int = 1) -> None:
        while len(self.received) < count:
            self._changed.clear()
            await self._changed.wait()


def _handled() -> tuple[signal.Signals, ...]:
    return (signal.SIGINT, signal.SIGTERM)


_SECRETS = (
    (re.compile(r"\b(cf[a-z]_)[\w-]{4,}"), r"\1…"),
    (re.compile(r"(?i)\b(bearer|basic) [\w.~+/=-]+"), r"\1 …"),
    (re.compile(r"(?i)([?&](?:token|key|signature)=)[^&\s\"']+"), r"\1…"),
    (re.compile(r"(\w://)[^/@\s\"']+@"), r"\1…@"),
    (re.compile(r"""(["']?token["']?\s*[:=]\s*["'])[^"']+"""), r"\1…"),
)
_VERBOSE = ("asyncio", "uvicorn", "websockets", "aiohttp", "multipart")
"""Below warnings, these log sockets and frames with their content."""


def without_secrets(text: str) -> str:
    for form, instead in _SECRETS:
        text = form.sub(instead, text)
    return text


class TextFormatter(LineFormatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def _without_secrets(self, text: str) -> str:
        return without_secrets(text)

    def _about(self) -> str:
        about = " ".join(f"{name}={value}" for name, value in tracing.fields().items())
        return f" [{about}]" if about else ""


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
            **tracing.fields(),
        }
        if record.exc_info:
            entry["traceback"] = without_secrets(self.formatException(record.exc_info))
        return escaped(msgspec.json.encode(entry).decode(), is_line=True)


def set_up(level: str, format_: str) -> None:
    """Replaces the handlers before. --debug stays in force."""
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format_ == "json" else TextFormatter())
    is_debugging = root.level == logging.DEBUG
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if is_debugging else level.upper())
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(logging.WARNING)
