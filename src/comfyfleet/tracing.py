"""What the work at hand is about (request, trace, job, attempt, worker), for the lines it logs and the calls it makes.

It follows a task and the tasks that one starts. Nothing is decided by it.
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

from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import trace_id_of

T = TypeVar("T")

_ABOUT: ContextVar[Mapping[str, str]] = ContextVar("about", default=MappingProxyType({}))


@contextmanager
def about(**known: str) -> Iterator[None]:
    """For as long as it is entered, beside what was known before."""
    token = _ABOUT.set({**_ABOUT.get(), **known})
    try:
        yield
    finally:
        _ABOUT.reset(token)


def note(**known: str) -> None:
    """From now on, to the end of the task."""
    _ABOUT.set({**_ABOUT.get(), **known})


def begin(**known: str) -> None:
    """As `note`, and forgets what was known before: a task that serves one request after the other begins anew."""
    _ABOUT.set(known)


def in_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task that outlives whatever starts it, and so is about nothing of it: its lines name no request of somebody who
    happened to come first."""
    context = copy_context()
    context.run(begin)
    return asyncio.get_running_loop().create_task(work, name=name, context=context)


def log_failure(
    logger: logging.Logger, message: str, *arguments: object, error: BaseException | None = None
) -> None:
    """The error, or the one at hand, in work that goes on: a fault of our surroundings (a store that is away) is one
    line, a defect comes with its traceback."""
    error = error or sys.exc_info()[1]
    if error is not None and _is_fault(error):
        logger.warning(f"{message}: %s", *arguments, _said(error))
    else:
        logger.error(message, *arguments, exc_info=error)


def _is_fault(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_fault, error.exceptions))
    return isinstance(error, Fault)


def _said(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(map(_said, error.exceptions)))
    return str(error)


def traceparent() -> str | None:
    """To go with calls to others."""
    return _ABOUT.get().get("traceparent")


def fields() -> dict[str, str]:
    """As a line of a log shows it."""
    known = dict(_ABOUT.get())
    given = known.pop("traceparent", None)
    if given is not None:
        known["trace_id"] = trace_id_of(given)
    return known
