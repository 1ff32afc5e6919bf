"""Workers that are stopped while they hold leases, sleep beyond them, and report all the same.

An agent notices by its own clock that it slept too long and says nothing; such workers would prove little. The one here
is stubborn: it has no agent, takes leases and beats for them, and after a sleep tries every report there is, as an old,
foreign or broken worker might.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec

from chaos.callers import caller_process, result_of
from chaos.checker import Finding, check
from chaos.engines import engine_process
from chaos.kill_loop import QUIET_WITHIN_S, Teller, read_again
from chaos.logs import Log, Tail, read_logs
from chaos.setting import LEASE_S, Setting, play
from chaos.stage import Actor, Kind, Stage
from chaos.workers import (
    CAPABILITIES,
    LoggedApi,
    new_execution,
    note_stalls,
    told,
    worker_door,
    worker_process,
)
from comfyfleet.model.calls import (
    Completion,
    FailureReport,
    LeasedJob,
    Poll,
    ProgressReport,
    RegisterWorker,
    Release,
)
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import PollId, WorkerId

_TICK_S = 0.05
_RUN_S = 2.0
_BEAT_S = LEASE_S / 4
_REPORTED_WITHIN_S = 3.0
_INSISTING = '"report":"heartbeat"'


class Size(msgspec.Struct, frozen=True):
    store: Kind
    stops: int
    at_once: int = 20
    """So many stubborn workers are stopped at the same moment."""
    slots: int = 2
    direct: int = 4
    """So many of them have an engine of their own, which sleeps with them. None on SQLite, which has one owner."""
    sober_workers: int = 2
    engines: int = 2


def zombie_process(setting: Setting, who: str, name: str, slots: int, is_bridged: bool) -> None:
    play(setting, who, _haunt(setting, who, name, slots, is_bridged))


async def _haunt(setting: Setting, who: str, name: str, slots: int, is_bridged: bool) -> None:
    log = Log(setting.logs, who)
    async with worker_door(setting, is_bridged) as door:
        zombie = _Zombie(LoggedApi(door, log), WorkerId(name), slots, log, is_bridged)
        await zombie.register()
        log.write("ready", role="worker")
        async with asyncio.TaskGroup() as group:
            group.create_task(note_stalls(log))
            for _ in range(slots):
                group.create_task(zombie.live())


class _Zombie:
    def __init__(self, api: LoggedApi, worker_id: WorkerId, slots: int, log: Log, is_bridged: bool) -> None:
        self._api = api
        self._worker_id = worker_id
        self._slots = slots
        self._log = log
        self._is_bridged = is_bridged

    async def register(self) -> None:
        while True:
            try:
                await self._api.register(RegisterWorker(self._worker_id, CAPABILITIES, self._slots))
                return
            except (Fault, OSError):
                await asyncio.sleep(0.05)

    async def live(self) -> None:
        while True:
            try:
                job = await self._api.poll(Poll(self._worker_id, PollId(secrets.token_hex(8)), 5.0))
            except Refusal as refusal:
                if refusal.code is RefusalCode.NOT_FOUND:
                    await self.register()
                continue
            except (Fault, OSError):
                await asyncio.sleep(0.05)
                continue
            if job is not None:
                await self._run(job)

    async def _run(self, job: LeasedJob) -> None:
        execution = new_execution(job.ref)
        self._log.write("began", execution=execution, is_bridged=self._is_bridged, **told(job.ref))
        has_slept = await self._execute(job)
        self._log.write("finished", execution=execution, **told(job.ref))
        await self._try(lambda: self._api.complete(Completion(job.ref, result_of(execution, job.workflow))))
        if has_slept:
            await self._insist(job)

    async def _execute(self, job: LeasedJob) -> bool:
        """Whether it slept beyond its lease. Beats until then as it should, so that only a stop ends its lease."""
        began = before = time.monotonic()
        beaten = 0.0
        while before - began < _RUN_S:
            if before - beaten >= _BEAT_S:
                beaten = before
                await self._try(lambda: self._api.heartbeat(self._worker_id, [job.ref]))
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if now - before > LEASE_S:
                return True
            before = now
        return False

    async def _insist(self, job: LeasedJob) -> None:
        """Whatever else a worker can say about a lease."""
        failure = Failure(FailureKind.INVALID_WORKFLOW, "a zombie says that nobody can ever run this")
        await self._beat(job)
        await self._try(lambda: self._api.progress([ProgressReport(job.ref, ProgressKind.STARTED)]))
        await self._try(lambda: self._api.fail(FailureReport(job.ref, failure)))
        await self._try(lambda: self._api.release(Release(job.ref, "cancelled")))

    async def _beat(self, job: LeasedJob) -> None:
        """A beat for a lease that is over must not bring it back."""
        of = {"report": "heartbeat", **told(job.ref)}
        self._log.write("reporting", **of)
        with contextlib.suppress(Fault, OSError):
            beat = await self._api.heartbeat(self._worker_id, [job.ref])
            self._log.write("accepted" if job.ref in beat.alive else "refused", **of)

    @staticmethod
    async def _try(call: Callable[[], Awaitable[object]]) -> None:
        with contextlib.suppress(Refusal, Fault, OSError):
            await call()


# the run


class Haunted(msgspec.Struct, frozen=True):
    finding: Finding
    stops: int
    zombies: int
    """Stops after which the worker reported on a lease that had been over."""


def run(size: Size, seed: int, tell: Teller) -> Haunted:
    chance = random.Random(seed)
    with Stage(size.store, size.engines) as stage:
        for number in range(size.engines):
            stage.add(f"engine-{number}", "engine", engine_process, number)
        for number in range(size.sober_workers):
            # Somebody must take up what the sleeping ones hold, or their leases would be nobody else's.
            stage.add(f"worker-{number}", "worker", worker_process, f"worker-{number}", 8, True)
        zombies = [
            stage.add(name, "worker", zombie_process, name, size.slots, number >= size.direct)
            for number, name in enumerate(f"zombie-{number}" for number in range(size.at_once))
        ]
        window = 2 * size.at_once * size.slots
        caller = stage.add("caller", "caller", caller_process, seed, None, window, 0.5)
        stops, haunted = _stop_and_go(stage, zombies, size.stops, chance, tell)
        stage.ask_to_end(caller)
        stage.await_end(caller, QUIET_WITHIN_S)
        read_again(stage)
        return Haunted(check(read_logs(stage.setting.logs)), stops, haunted)


def _stop_and_go(
    stage: Stage, zombies: list[Actor], wanted: int, chance: random.Random, tell: Teller
) -> tuple[int, int]:
    """Stops them, all at a moment, until so many have come back with reports on leases that are over."""
    stage.await_ready([*stage.actors.values()])
    stories = {each.name: Tail(stage.setting.logs / f"{each.who}.jsonl", _INSISTING) for each in zombies}
    stops = haunted = 0
    while haunted < wanted:
        tell(f"{haunted} of {wanted} zombies")
        time.sleep(chance.uniform(0.5, 1.0))
        batch = zombies if wanted - haunted > len(zombies) else zombies[: wanted - haunted]
        for zombie in batch:
            stage.stop(zombie)
        time.sleep(LEASE_S + chance.uniform(1.0, 2.5))
        stage.check_alive()
        before = {zombie.name: stories[zombie.name].look() for zombie in batch}
        for zombie in batch:
            stage.carry_on(zombie)
        stops += len(batch)
        deadline = time.monotonic() + _REPORTED_WITHIN_S
        silent = list(batch)
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            silent = [each for each in silent if stories[each.name].look() == before[each.name]]
        haunted += len(batch) - len(silent)
    return stops, haunted
