"""What the work at hand is about (request, trace, job, attempt, worker), for the lines it logs and the calls it makes.

It follows a task and the tasks that one starts. Nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from comfyfleet.model.trace import trace_id_of

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
