"""SIGINT and SIGTERM for programs that serve: the first one is a request, the second an order.

Logs on standard error: lines for people, or an object a line for machines, each with what it is about.

Whoever logs says what happened; request, trace, job, attempt and worker come from `tracing.py`. Keys and passwords are
struck out here once more, whoever let them slip in.
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
    """Use it as a context manager, inside a loop."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _heard():
            with contextlib.suppress(NotImplementedError):  # loops of Windows know no signals
                loop.add_signal_handler(number, self._hear, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _heard():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)

    def _hear(self, number: int) -> None:
        self.came.append(number)
        self._changed.set()

    async def before(self, work: Coroutine[Any, Any, T], count: int) -> tuple[T] | None:
        """What the work answers. None: so many signals came before, and it was cancelled."""
        task = asyncio.create_task(work)
        while len(self.came) < count:
            self._changed.clear()
            heard = asyncio.create_task(self._changed.wait())
            await asyncio.wait({task, heard}, return_when=asyncio.FIRST_COMPLETED)
            heard.cancel()
            if task.done():
                return (task.result(),)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    async def wait(self, count: int = 1) -> None:
        while len(self.came) < count:
            self._changed.clear()
            await self._changed.wait()


def _heard() -> tuple[signal.Signals, ...]:
    return (signal.SIGINT, signal.SIGTERM)


_SECRETS = (
    (re.compile(r"\b(cf[a-z]_)[\w-]{4,}"), r"\1…"),
    (re.compile(r"(?i)\b(bearer|basic) [\w.~+/=-]+"), r"\1 …"),
    (re.compile(r"(?i)([?&](?:token|key|signature)=)[^&\s\"']+"), r"\1…"),
    (re.compile(r"(\w://)[^/@\s\"']+@"), r"\1…@"),
    (re.compile(r"""(["']?token["']?\s*[:=]\s*["'])[^"']+"""), r"\1…"),
)
_TALKATIVE = ("asyncio", "uvicorn", "websockets", "aiohttp", "multipart")
"""Below warnings these tell of sockets and frames, with all that is in them."""


def struck_out(text: str) -> str:
    for form, instead in _SECRETS:
        text = form.sub(instead, text)
    return text


class TextFormatter(LineFormatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def _struck_out(self, text: str) -> str:
        return struck_out(text)

    def _about(self) -> str:
        about = " ".join(f"{name}={value}" for name, value in tracing.fields().items())
        return f" [{about}]" if about else ""


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": struck_out(record.getMessage()),
            **tracing.fields(),
        }
        if record.exc_info:
            told["traceback"] = struck_out(self.formatException(record.exc_info))
        return escaped(msgspec.json.encode(told).decode(), is_line=True)


def set_up(level: str, format_: str) -> None:
    """In place of what was set up before; debugging, once asked for, stays."""
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format_ == "json" else TextFormatter())
    is_debugging = root.level == logging.DEBUG
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if is_debugging else level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
