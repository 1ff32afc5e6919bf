"""How many model loads first come, first served would have made of the demo's jobs.

Pure: it plays the jobs of a run again, with their measured times, on the same servers. A server that becomes idle takes
the oldest job of the highest priority that it may run, whatever its models, and keeps the models of its last job, as a
ComfyUI with the default cache does. Failures and crashes are not played, which favours first come, first served.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import msgspec


class PlayedJob(msgspec.Struct, frozen=True):
    """A job as it was submitted, with the time that its nodes took."""

    id: str
    priority: int
    models: frozenset[str]
    """The files that its loader nodes read."""
    work_s: float
    """What its other nodes take at speed 1."""
    submitted_s: float = 0.0
    after: str | None = None
    """It is submitted when this job has ended, instead of at `submitted_s`."""


class PlayedServer(msgspec.Struct, frozen=True):
    id: str
    speed: float
    load_s: Mapping[str, float]
    """The installed model files, and how long it reads each."""

    def may_run(self, job: PlayedJob) -> bool:
        return job.models <= self.load_s.keys()


class _Slot:
    """A server while the jobs are played."""

    def __init__(self, server: PlayedServer) -> None:
        self.server = server
        self.held: frozenset[str] = frozenset()
        self.loads = 0

    def run(self, job: PlayedJob) -> float:
        """Runs a job and returns how long that takes."""
        read = job.models - self.held
        self.held = job.models
        self.loads += len(read)
        return sum(self.server.load_s[name] for name in read) + job.work_s / self.server.speed


def count_first_come_first_served(jobs: Iterable[PlayedJob], servers: Iterable[PlayedServer]) -> int:
    """Plays the jobs and returns the number of model files that were read."""
    numbered = list(enumerate(jobs))
    followers: dict[str, list[int]] = {}
    arrivals: list[tuple[float, int]] = []
    for number, job in numbered:
        if job.after is None:
            arrivals.append((job.submitted_s, number))
        else:
            followers.setdefault(job.after, []).append(number)
    heapq.heapify(arrivals)
    slots = [_Slot(server) for server in servers]
    # Servers in the order in which they became idle: the choice among several has nothing to do with models.
    idle = list(range(len(slots)))
    running: list[tuple[float, int, int]] = []
    waiting: list[tuple[int, float, int]] = []
    while arrivals or running:
        now = min(events[0][0] for events in (arrivals, running) if events)
        while running and running[0][0] <= now:
            _, index, number = heapq.heappop(running)
            idle.append(index)
            for follower in followers.get(numbered[number][1].id, ()):
                heapq.heappush(arrivals, (now, follower))
        while arrivals and arrivals[0][0] <= now:
            _, number = heapq.heappop(arrivals)
            waiting.append((-numbered[number][1].priority, now, number))
        for entry in sorted(waiting):
            job = numbered[entry[2]][1]
            index = next((each for each in idle if slots[each].server.may_run(job)), -1)
            if index >= 0:
                idle.remove(index)
                waiting.remove(entry)
                heapq.heappush(running, (now + slots[index].run(job), index, entry[2]))
    return sum(slot.loads for slot in slots)
