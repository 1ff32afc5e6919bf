"""Jobs go through the fleet while engines, workers and the server are killed at random moments and come back.

The moments are drawn from a seed, as places in the row of finished jobs: so kills are spread over the whole run,
however fast the machine is, and there is always work under way. When all is quiet, every job is read once more.
"""

from __future__ import annotations

import heapq
import random
import sys
import time
from collections.abc import Callable

import msgspec

from chaos import foreign
from chaos.callers import caller_process, reader_process
from chaos.checker import Finding, check
from chaos.engines import engine_process
from chaos.logs import Role, Tail, read_logs
from chaos.node import CannotTakePart
from chaos.stage import Actor, Kind, Stage
from chaos.workers import worker_process

QUIET_WITHIN_S = 120.0
"""A fleet in which nothing moves for so long has lost what it still owes."""
_POLL_S = 0.02

Teller = Callable[[str], None]


class Size(msgspec.Struct, frozen=True):
    """How many of what. A worker that is not bridged has an engine of its own on the store."""

    store: Kind
    jobs: int
    engine_kills: int = 0
    worker_kills: int = 0
    server_kills: int = 0
    engines: int = 2
    bridged_workers: int = 2
    direct_workers: int = 4
    node_workers: int = 0
    """Workers in Node.js, without an engine; on Redis alone."""
    slots: int = 4
    window: int = 64
    longest_s: float = 3.0


def planned(size: Size) -> dict[Role, int]:
    return {"engine": size.engine_kills, "worker": size.worker_kills, "server": size.server_kills}


class Killed(msgspec.Struct, frozen=True):
    finding: Finding
    kills: dict[Role, int]
    node_executions: int
    without_node: str
    """Why nobody in Node.js took part, though some should have."""


def run(size: Size, seed: int, tell: Teller) -> Killed:
    chance = random.Random(seed)
    with Stage(size.store, size.engines) as stage:
        without_node = set_up(stage, size)
        caller = stage.add("caller", "caller", caller_process, seed, size.jobs, size.window, size.longest_s)
        loop = Loop(stage, caller, size, chance, tell, planned(size))
        loop.run()
        read_again(stage)
        lines = read_logs(stage.setting.logs)
        by_node = sum(line.what == "began" and line.who.startswith("node-") for line in lines)
        finding = check(lines)
        if not finding.is_clean:
            # Said here and not in the result: where they lie is of interest on this machine alone.
            print(f"not clean: the logs are kept in {stage.keep_logs()}", file=sys.stderr)
        return Killed(finding, stage.kills, by_node, without_node)


def set_up(stage: Stage, size: Size) -> str:
    for number in range(size.engines):
        stage.add(f"engine-{number}", "engine", engine_process, number)
    for number in range(size.bridged_workers + size.direct_workers):
        name = f"worker-{number}"
        stage.add(name, "worker", worker_process, name, size.slots, number < size.bridged_workers)
    if not size.node_workers:
        return ""
    try:
        command = foreign.prepare(stage.setting.folder)
    except CannotTakePart as reason:
        return str(reason)
    # They load no functions: somebody with an engine has to be there before them.
    stage.await_ready(list(stage.actors.values())[:1])
    for number in range(size.node_workers):
        name = f"node-{number}"
        stage.add(name, "worker", foreign.node_process, name, size.slots, command)
    return ""


class Loop:
    """`kills`: how many of whom."""

    def __init__(
        self,
        stage: Stage,
        caller: Actor,
        size: Size,
        rng: random.Random,
        tell: Teller,
        kills: dict[Role, int],
    ) -> None:
        self._stage = stage
        self._caller = caller
        self._size = size
        self._chance = rng
        self._tell = tell
        self._finished = Tail(stage.setting.logs / f"{caller.who}.jsonl", "seen")
        kinds = [kind for kind, count in kills.items() for _ in range(count)]
        # The last tenth of the jobs runs in peace, so that the last kill is felt by something.
        self._due = sorted(((rng.uniform(0, 0.9 * size.jobs), kind) for kind in kinds), reverse=True)
        self._returning: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._server_is_up = True

    def run(self) -> None:
        changed_at, before = time.monotonic(), -1
        while not self._stage.has_ended(self._caller):
            time.sleep(_POLL_S)
            finished = self._finished.look()
            if finished != before or self._returning:
                changed_at, before = time.monotonic(), finished
            elif time.monotonic() - changed_at > QUIET_WITHIN_S:
                # The checker will name what is missing.
                return
            self._stage.check_alive()
            self._tell(f"{finished} of {self._size.jobs} jobs, {len(self._due)} kills to come")
            self._bring_back()
            while self._due and self._due[-1][0] <= finished and self._strike(self._due[-1][1]):
                self._due.pop()
        self._tell(f"{self._size.jobs} jobs, waiting for the last to come back")
        while self._returning:
            time.sleep(_POLL_S)
            self._bring_back()

    def _strike(self, kind: Role) -> bool:
        """False: there is nobody to be killed just now."""
        if kind == "server":
            if not self._server_is_up:
                return False
            self._server_is_up = False
            self._stage.kill_server()
            self._later(self._chance.uniform(0.0, 1.0), self._start_server)
            return True
        alive = [
            actor
            for actor in self._stage.actors.values()
            if actor.role == kind and self._stage.is_ready(actor)
        ]
        if not alive:
            return False
        actor = self._chance.choice(alive)
        self._stage.kill(actor)
        self._later(self._chance.uniform(0.0, 0.5), lambda: self._stage.start(actor))
        return True

    def _start_server(self) -> None:
        self._stage.start_server()
        self._server_is_up = True

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._returning, (time.monotonic() + seconds, self._count, act))

    def _bring_back(self) -> None:
        while self._returning and self._returning[0][0] <= time.monotonic():
            heapq.heappop(self._returning)[2]()


def read_again(stage: Stage) -> None:
    """When all is quiet: another caller looks at every job once more, and must see what the first one saw."""
    acknowledged = [
        line.job for line in read_logs(stage.setting.logs) if line.what == "acknowledged" and line.job
    ]
    stage.await_end(stage.add("reader", "caller", reader_process, acknowledged), QUIET_WITHIN_S)
