"""A plain queue of jobs on simulated servers, for the policies that are not ComfyFleet's engine.

It keeps lanes, idle servers and events. A `DispatchPolicy` decides which job begins where. Priority and fair share
come before every policy, as they do in the engine.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from comfyfleet.simulation.world import DETECTION_S, ServerSpec, SimulatedJob, SimulatedServer

Lane = deque[SimulatedJob]
_WINDOW_LANES = 32
_QUANTUM_S = 30.0
_ARRIVAL, _END, _LEAVES, _RETURNS, _REQUEUE = range(5)


class _Event(NamedTuple):
    at_s: float
    kind: int
    order: int
    made: int
    restarts: int
    """How often the job had been lost when this event was made."""
    server: SimulatedServer | None
    job: SimulatedJob | None


class DispatchPolicy(Protocol):
    def arrived(self, queue: QueueSimulation, job: SimulatedJob) -> bool:
        """True: the policy has put the job into the queue of a server."""

    def dispatch(self, queue: QueueSimulation) -> None: ...


class QueueSimulation:
    def __init__(
        self,
        specs: Sequence[ServerSpec],
        jobs: Sequence[SimulatedJob],
        policy: DispatchPolicy,
        weights: dict[str, float] | None = None,
    ) -> None:
        self.servers = [SimulatedServer(index, spec) for index, spec in enumerate(specs)]
        self.idle = list(self.servers)
        self.jobs, self.policy, self.weights = jobs, policy, weights or {}
        self.now_s = 0.0
        self._lanes: dict[tuple[int, str, str], Lane] = {}
        self._virtual: dict[str, float] = defaultdict(float)
        self._events: list[_Event] = []
        self._made = 0

    def run(self) -> None:
        for job in self.jobs:
            self._at(job.arrives_s, _ARRIVAL, None, job)
        for server in self.servers:
            for leaves, returns in server.spec.absences:
                self._at(leaves, _LEAVES, server)
                self._at(returns, _RETURNS, server)
        while self._events:
            self.now_s = self._events[0][0]
            while self._events and self._events[0][0] <= self.now_s:
                self._handle(heapq.heappop(self._events))
            if self.idle:
                self.policy.dispatch(self)

    def views(self) -> Iterator[list[Lane]]:
        """What a policy sees, a priority at a time, highest first: the lanes with the oldest heads, of tenants within a
        quantum of the least served one."""
        for priority in sorted({key[0] for key in self._lanes}, reverse=True):
            keys = [key for key in self._lanes if key[0] == priority]
            if self.weights:
                least = min(self._virtual[key[1]] for key in keys)
                keys = [key for key in keys if self._virtual[key[1]] <= least + _QUANTUM_S]
            keys.sort(key=lambda key: self._lanes[key][0].number)
            yield [self._lanes[key] for key in keys[:_WINDOW_LANES]]

    def begin(self, server: SimulatedServer, job: SimulatedJob, *, is_queued: bool = True) -> None:
        if is_queued:
            key = _lane(job)
            lane = self._lanes[key]
            if lane[0] is job:
                lane.popleft()
            else:
                lane.remove(job)
            if not lane:
                del self._lanes[key]
        load_s, run_s = server.begin(job, self.now_s)
        if self.weights:
            self._virtual[job.tenant] += (load_s + run_s) / self.weights.get(job.tenant, 1.0)
        self.idle.remove(server)
        self._at(self.now_s + load_s + run_s, _END, server, job)

    def _at(
        self, at_s: float, kind: int, server: SimulatedServer | None = None, job: SimulatedJob | None = None
    ) -> None:
        self._made += 1
        # Jobs that end come after jobs that arrive at the same time, in the order of their numbers.
        order, restarts = (self._made, 0) if job is None else (job.number, job.restarts)
        heapq.heappush(self._events, _Event(at_s, kind, order, self._made, restarts, server, job))

    def _handle(self, event: _Event) -> None:
        server, job = event.server, event.job
        if job is None:
            assert server is not None
            if event.kind == _LEAVES:
                self._leave(server)
            else:
                server.is_away = False
                self._free(server)
        elif server is None:
            if event.kind == _ARRIVAL:
                self._arrive(job)
            else:
                self._enter(job)
        elif job.restarts == event.restarts:
            # Otherwise a death took the job away before this end.
            job.end_s, server.job = self.now_s, None
            self._free(server)

    def _arrive(self, job: SimulatedJob) -> None:
        if self.weights and self._lanes and not any(key[1] == job.tenant for key in self._lanes):
            # No credit is banked while a tenant is idle.
            least = min(self._virtual[key[1]] for key in self._lanes)
            self._virtual[job.tenant] = max(self._virtual[job.tenant], least)
        self._enter(job)

    def _enter(self, job: SimulatedJob) -> None:
        if not self.policy.arrived(self, job):
            lane = self._lanes.setdefault(_lane(job), deque())
            if lane and lane[-1].number > job.number:
                lane.insert(bisect_left([each.number for each in lane], job.number), job)
            else:
                lane.append(job)

    def _leave(self, server: SimulatedServer) -> None:
        server.is_away = True
        server.restart()
        if server in self.idle:
            self.idle.remove(server)
        if (job := server.job) is not None:
            server.job = None
            job.restarts += 1
            self._at(self.now_s + DETECTION_S, _REQUEUE, None, job)

    def _free(self, server: SimulatedServer) -> None:
        if not server.is_away and server not in self.idle:
            places = [each.index for each in self.idle]
            self.idle.insert(bisect_left(places, server.index), server)


def _lane(job: SimulatedJob) -> tuple[int, str, str]:
    return job.priority, job.tenant, job.workflow.name
