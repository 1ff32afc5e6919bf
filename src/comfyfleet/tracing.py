"""Context of the current work (request, trace, job, attempt, worker) for log lines and outgoing calls.

It follows a task and the tasks that this task starts. No decision depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from types import MappingProxyType
from typing import Any, TypeVar

from comfyfleet.model.errors import ComfyFleetError
from comfyfleet.model.ids import trace_id_of

T = TypeVar("T")

_ABOUT: ContextVar[Mapping[str, str]] = ContextVar("about", default=MappingProxyType({}))


@contextmanager
def log_fields(**known: str) -> Iterator[None]:
    """Add fields within the `with` block."""
    token = _ABOUT.set({**_ABOUT.get(), **known})
    try:
        yield
    finally:
        _ABOUT.reset(token)


def bind_log_fields(**known: str) -> None:
    """Add fields until the end of the task."""
    _ABOUT.set({**_ABOUT.get(), **known})


def begin(**known: str) -> None:
    """Replace all fields, for a task that serves one request after the other."""
    _ABOUT.set(known)


def in_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task without the current fields, because it outlives the request that starts it."""
    context = copy_context()
    context.run(begin)
    return asyncio.get_running_loop().create_task(work, name=name, context=context)


class BackgroundJob:
    """Runs `_run` in a task from `start` to `close`. Both can be called twice."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._running is None:
            self._running = in_background(self._run(), name=self._name)

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self) -> None:
        raise NotImplementedError


def log_failure(
    logger: logging.Logger, message: str, *arguments: object, error: BaseException | None = None
) -> None:
    """Log `error`, or the current exception, of work that continues. A fault of the environment and a refusal are one
    line; a bug has its traceback."""
    error = error or sys.exc_info()[1]
    if error is not None and _is_expected(error):
        logger.warning(f"{message}: %s", *arguments, _message(error))
    else:
        logger.error(message, *arguments, exc_info=error)


def _is_expected(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_expected, error.exceptions))
    return isinstance(error, ComfyFleetError)


def _message(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(map(_message, error.exceptions)))
    return str(error)


def traceparent() -> str | None:
    """The header for outgoing calls."""
    return _ABOUT.get().get("traceparent")


def fields() -> dict[str, str]:
    """The fields of a log line."""
    known = dict(_ABOUT.get())
    given = known.pop("traceparent", None)
    if given is not None:
        known["trace_id"] = trace_id_of(given)
    return known
