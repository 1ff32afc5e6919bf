"""What callers, workers and the conductor write down before and after each act: append-only files, one a process.

A line is on its way to the disk before the act it announces, and the time is the machine's monotonic clock, which all
processes share. These files are all the checker ever reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

What = Literal[
    # any process
    "ready",
    # a caller
    "submitting",
    "acknowledged",
    "seen",
    "read_again",
    "cancelled",
    "over",
    # a watcher
    "fact",
    "told",
    "came_back",
    # a worker
    "granted",
    "began",
    "finished",
    "reporting",
    "accepted",
    "refused",
    "unanswered",
    "stalled",
    "late_beat",
    # the conductor
    "killing",
    "up",
    "stopping",
    "continued",
]
Role = Literal["caller", "engine", "hub", "worker", "server", "database"]


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    at: float
    who: str
    """A process in one of its lives: `worker-3.2` is the third life of worker 3."""
    what: What
    role: Role | None = None
    """Of whom the line speaks, where the conductor writes it."""
    reference: str | None = None
    job: str | None = None
    round: int = 1
    lease: int = 0
    epoch: int = 0
    execution: str | None = None
    report: str | None = None
    """Which report: complete, fail, release, heartbeat, progress."""
    value: str | None = None
    made: str | None = None
    """Of a submit: what must be made of it. Of a lease: what is made from its graph. Of a look: what was made."""
    number: int = 0
    """Of a fact."""
    since: float | None = None
    is_bridged: bool = False
    """The worker speaks to an engine process, and is disturbed when that one dies."""


class Log:
    """One process's own file. Each line is one write at the end of it, so a kill leaves whole lines."""

    def __init__(self, folder: Path, who: str) -> None:
        self.who = who
        self._encoder = msgspec.json.Encoder()
        self._file = os.open(folder / f"{who}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, what: What, **values: object) -> None:
        line = msgspec.convert({"at": time.monotonic(), "who": self.who, "what": what, **values}, Line)
        os.write(self._file, self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_logs(folder: Path) -> list[Line]:
    """Everything that was written down, in the order of time."""
    decoder = msgspec.json.Decoder(Line)
    lines = [decoder.decode(text) for path in sorted(folder.glob("*.jsonl")) for text in _whole_lines(path)]
    return sorted(lines, key=lambda line: line.at)


def _whole_lines(path: Path) -> Iterator[bytes]:
    # A last line without an end was never finished: what it announces was not done.
    return iter(path.read_bytes().split(b"\n")[:-1])


class Tail:
    """Counts the lines with a mark in a file that grows, without reading anything twice."""

    def __init__(self, path: Path, mark: str) -> None:
        self._path = path
        self._mark = mark.encode()
        self._offset = 0
        self._rest = b""
        self.count = 0

    def look(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                found = self._rest + file.read()
                self._offset = file.tell()
            *lines, self._rest = found.split(b"\n")
            self.count += sum(self._mark in line for line in lines)
        return self.count
