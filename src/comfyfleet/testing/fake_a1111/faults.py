"""The faults of a fake server of the A1111 family, as values that a test may change at any time."""

from __future__ import annotations

import msgspec


class A1111Faults(msgspec.Struct, kw_only=True):
    """All are off by default. Counters count down."""

    out_of_memory: int = 0
    """This many runs raise `OutOfMemoryError`."""
    fail_runs: int = 0
    """This many runs raise a `ValueError`."""
    stall_at_step: int | None = None
    """Runs stop at this step until the switch is cleared, or until they are interrupted."""
    ignores_interrupts: bool = False
    """A script that does not look at the flag: the run goes on to its end."""
    crash_at_step: int | None = None
    """The process dies when a run reaches this step. Once."""
    lose_answers: int = 0
    """This many runs lose the connection to their client at once and go on."""
    loads_wrong_model: bool = False
    """Another checkpoint than the one that was asked for is used, without an error."""
    missing_checkpoints: list[str] = msgspec.field(default_factory=list)
    """Files that are no longer there."""
    is_starting: bool = False
    """The port is open and no checkpoint is listed yet."""
    drop_pictures: int = 0
    """Each answer has this many pictures less than ordered."""
    deaf_paths: list[str] = msgspec.field(default_factory=list)
    """Requests to these path prefixes get no answer until the prefix is removed."""
    slow_answer_s: float = 0.0
    """Wall-clock seconds before each answer to `slow_paths`."""
    slow_paths: list[str] = msgspec.field(default_factory=list)
    """Empty: all paths."""
    endless_paths: list[str] = msgspec.field(default_factory=list)
    """Answers to these path prefixes never end."""
    garbage_paths: list[str] = msgspec.field(default_factory=list)
    """Answers to these path prefixes are not JSON."""
    redirect_paths: list[str] = msgspec.field(default_factory=list)
    redirect_to: str = ""


def path_matches(path: str, prefixes: list[str]) -> bool:
    return any(path.startswith(prefix) for prefix in prefixes)
