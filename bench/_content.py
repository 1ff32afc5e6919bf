"""What was run for a job is what was submitted as that job: a bench that is fast at mixing them up measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

Content = TypeVar("Content")


class Mixed(Exception):
    """A job ran with something else than was submitted as it."""


def check_content(asked: Mapping[str, Content], ran: Iterable[tuple[str, Content]]) -> int:
    """How many were compared. Called when the clock does not run."""
    compared = 0
    for job_id, content in ran:
        if asked.get(job_id) != content:
            raise Mixed(f"job {job_id} was submitted with {asked.get(job_id)!r} and ran with {content!r}")
        compared += 1
    return compared
