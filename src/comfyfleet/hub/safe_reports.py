"""What a worker reported, made safe for callers: small reports at once, large ones beside the event loop.

A report may hold some hundred thousand values. Looking through them takes seconds, in which nobody else must wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeVar

from comfyfleet.model.job import JobResult
from comfyfleet.policy.reports import safe_result

_FEW = 1_000
"""Looking through so many values takes about a millisecond."""
_TEXT = 10
"""Characters that take about as long as a value."""

T = TypeVar("T")


async def made_safe(result: JobResult) -> JobResult:
    is_large = len(result.files) > _FEW or has_many(result.outputs.values())
    return await apart(lambda: safe_result(result), is_large=is_large)


async def apart(work: Callable[[], T], *, is_large: bool) -> T:
    return await asyncio.to_thread(work) if is_large else work()


def has_many(values: Iterable[Any]) -> bool:
    """Many values, or much text. Looked at no further than needed to say so."""
    left, within = _FEW, [iter(values)]
    while within:
        for value in within[-1]:
            left -= 1
            if isinstance(value, str):
                left -= len(value) // _TEXT
            if left < 0:
                return True
            if isinstance(value, dict):
                within.append(chain.from_iterable(value.items()))
                break
            if isinstance(value, list | tuple):
                within.append(iter(value))
                break
        else:
            within.pop()
    return False
