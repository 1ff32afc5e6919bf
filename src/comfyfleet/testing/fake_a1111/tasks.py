"""The memory of one process of the fake A1111 server: the lock, the task ids and the flags of the whole server.

As in the real server, nothing here is tidy: a task that fails stays active, one that fails before its start stays
pending, and an interrupt while idle is forgotten. `sampler.py` runs the tasks.
"""

from __future__ import annotations

import asyncio
import random
import string
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from comfyfleet.testing.fake_comfyui.clock import FakeClock

FINISHED_KEPT = 16


class FakeA1111Run(msgspec.Struct, eq=False):
    """One request that reached the sampler, kept for tests to look at."""

    task_id: str
    route: str
    body: dict[str, Any]
    outcome: Literal["running", "completed", "interrupted", "failed", "died"] = "running"
    """`died`: with the process."""
    model: str = ""
    steps_done: int = 0


class ServerFlags:
    """The state of the one run, and the flags that any client may set."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.skipped = self.interrupted = self.stopping_generation = False
        self.job = ""
        self.job_count = self.job_no = self.sampling_step = self.sampling_steps = 0
        self.job_timestamp = "0"
        self.time_start = clock.now()
        self.preview: bytes | None = None
        self.preview_id = 0

    def begin(self, job: str) -> None:
        self.skipped = self.interrupted = self.stopping_generation = False
        self.job, self.job_count, self.job_no, self.sampling_step = job, -1, 0, 0
        self.time_start = self._clock.now()
        self.job_timestamp = datetime.fromtimestamp(self.time_start, UTC).strftime("%Y%m%d%H%M%S")
        self.preview, self.preview_id = None, 0

    def next_job(self) -> None:
        self.job_no += 1
        self.sampling_step = 0

    def end(self) -> None:
        self.job, self.job_count = "", 0

    def share(self) -> float:
        if self.job_count <= 0:
            return 0.0
        steps = self.sampling_step / self.sampling_steps if self.sampling_steps else 0.0
        return min((self.job_no + steps) / self.job_count, 1.0)

    def listed(self) -> dict[str, Any]:
        return {
            "skipped": self.skipped,
            "interrupted": self.interrupted,
            "stopping_generation": self.stopping_generation,
            "job": self.job,
            "job_count": self.job_count,
            "job_timestamp": self.job_timestamp,
            "job_no": self.job_no,
            "sampling_step": self.sampling_step,
            "sampling_steps": self.sampling_steps,
        }

    def elapsed_s(self) -> float:
        return self._clock.now() - self.time_start


class TaskIds:
    """Which ids wait, which one is active, and the last finished ones."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.pending: dict[str, int] = {}
        self.current: str | None = None
        self.finished: list[str] = []
        self._count = 0

    def make(self, route: str) -> str:
        letters = string.ascii_uppercase + string.digits
        return f"task({route}-{''.join(self._chance.choices(letters, k=7))})"

    def add(self, task_id: str) -> None:
        self._count += 1
        self.pending[task_id] = self._count

    def start(self, task_id: str) -> None:
        self.current = task_id
        self.pending.pop(task_id, None)

    def finish(self, task_id: str) -> None:
        if self.current == task_id:
            self.current = None
        self.finished = [*self.finished, task_id][-FINISHED_KEPT:]

    def waiting(self) -> list[str]:
        return sorted(self.pending, key=self.pending.__getitem__)


class FakeProcess:
    """All that a process forgets when it dies."""

    def __init__(self, clock: FakeClock, chance: random.Random, threads: int) -> None:
        self.flags = ServerFlags(clock)
        self.tasks = TaskIds(chance)
        self.lock = asyncio.Lock()
        self.threads = asyncio.Semaphore(threads)
        self.changed = asyncio.Event()
        """Set when a fault or a flag may have changed, for a run that stalls."""
        self.option = ""
        """The checkpoint of the options, by its title."""
        self.loaded = ""
        self.request_times: list[float] = []
        self.work: set[asyncio.Task[Any]] = set()
        """Requests that make pictures, with or without a client that waits."""
