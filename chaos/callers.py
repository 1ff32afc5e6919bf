"""A caller process: it submits jobs under references of its own, asks again after a lost answer, and waits for results.

What it was told is written down the moment it was told. In the end another life of it reads every job again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from chaos.bridge import BridgeClient, Look, look_at
from chaos.logs import Log
from chaos.made import made_from
from chaos.setting import Setting, opened_engine, play
from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Submitted
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import JobResult, Submission

_KINDS = ("Chaos", "ChaosToo", "ChaosAsWell")


class Door(Protocol):
    async def submit(self, submission: Submission) -> Submitted: ...
    async def look(self, job_id: JobId) -> Look: ...


class _OwnEngine:
    """The callers' door where there is no hub: the store itself, through an engine of the caller's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def submit(self, submission: Submission) -> Submitted:
        return await self._engine.submit(submission)

    async def look(self, job_id: JobId) -> Look:
        return await look_at(self._engine, job_id)


@asynccontextmanager
async def _door(setting: Setting) -> AsyncIterator[Door]:
    if setting.engines:
        yield BridgeClient(setting.sockets)
        return
    async with opened_engine(setting) as engine:
        yield _OwnEngine(engine)


def caller_process(
    setting: Setting, who: str, seed: int, jobs: int | None, window: int, longest_s: float
) -> None:
    """So many jobs, or (None) until it is asked to end; either way it waits for what it has submitted."""
    play(setting, who, _call(setting, who, seed, jobs, window, longest_s))


def reader_process(setting: Setting, who: str, jobs: list[str]) -> None:
    play(setting, who, _read_again(setting, who, jobs))


def submission(chance: random.Random, reference: str, longest_s: float) -> Submission:
    """Most jobs are short; some outlast a lease several times, so that heartbeats matter."""
    longest = chance.choices((0.05, 0.5, longest_s), (80, 15, 5))[0]
    seconds = chance.uniform(0.0, longest)
    # The nonce makes each job's graph, and so what is made from it, its own.
    inputs = {"seconds": round(seconds, 3), "nonce": f"{chance.getrandbits(64):016x}"}
    graph = {"1": {"class_type": chance.choice(_KINDS), "inputs": inputs}}
    return Submission(graph, reference=reference, priority=chance.choice((-1, 0, 0, 0, 1)))


async def _call(
    setting: Setting, who: str, seed: int, jobs: int | None, window: int, longest_s: float
) -> None:
    log = Log(setting.logs, who)
    chance = random.Random(seed)
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    numbers = _numbers(jobs, is_over)
    async with _door(setting) as door, asyncio.TaskGroup() as group:
        log.write("ready", role="caller")
        for _ in range(window):
            group.create_task(_one_after_the_other(door, log, who, chance, numbers, longest_s))
    log.write("over")


def _numbers(jobs: int | None, is_over: asyncio.Event) -> Iterator[int]:
    for number in itertools.count():
        if number == jobs or is_over.is_set():
            return
        yield number


async def _one_after_the_other(
    door: Door, log: Log, who: str, chance: random.Random, numbers: Iterable[int], longest_s: float
) -> None:
    for number in numbers:
        reference = f"{who}/{number}"
        asked = submission(chance, reference, longest_s)
        log.write("submitting", reference=reference, made=made_from(asked.workflow))
        job_id = await _submit(door, asked)
        log.write("acknowledged", reference=reference, job=job_id)
        await _await_end(door, log, reference, job_id)


async def _submit(door: Door, asked: Submission) -> JobId:
    while True:
        try:
            return (await door.submit(asked)).job_id
        except (Fault, OSError):
            # Whether it was taken is unknown. The reference makes it safe to ask again.
            await asyncio.sleep(0.05)


async def _await_end(door: Door, log: Log, reference: str, job_id: JobId) -> None:
    pause_s = 0.1
    while True:
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 1.0)
        try:
            found = await door.look(job_id)
        except (Fault, OSError):
            continue
        except Refusal as refusal:
            # An acknowledged job that is not there is what this is all about.
            log.write("seen", reference=reference, job=job_id, value=f"refused: {refusal.code.value}")
            return
        if found.phase.is_final:
            log.write(
                "seen", reference=reference, job=job_id, value=value_of(found), made=made_of(found.result)
            )
            return


def value_of(found: Look) -> str:
    """The execution whose result it is; or, in words that are no execution's, what became of the job instead."""
    if found.phase is not Phase.COMPLETED or found.result is None:
        return f"not completed: {found.phase.value}"
    return execution_of(found.result)


def result_of(execution: str, workflow: Mapping[str, Any]) -> JobResult:
    """What a worker makes of the graph that it was given."""
    return JobResult(outputs={"1": {"execution": [execution], "made": [made_from(workflow)]}})


def made_of(result: JobResult | None) -> str | None:
    """What a result was made from. Workers in Node.js give the graph back as they were given it."""
    if result is None:
        return None
    if given := result.outputs.get("9", {}).get("made_from"):
        return made_from(given[0])
    made = result.outputs.get("1", {}).get("made")
    return str(made[0]) if made else None


def execution_of(result: JobResult) -> str:
    """Workers in Node.js are an example's, and say no more than who they are."""
    made = result.outputs.get("1", {}).get("execution") or result.outputs.get("9", {}).get("text")
    return str(made[0]) if made else "not said"


async def _read_again(setting: Setting, who: str, jobs: list[str]) -> None:
    log = Log(setting.logs, who)
    left = iter(jobs)
    async with _door(setting) as door, asyncio.TaskGroup() as group:
        log.write("ready", role="caller")
        for _ in range(16):
            group.create_task(_read_some(door, log, left))
    log.write("over")


async def _read_some(door: Door, log: Log, jobs: Iterable[str]) -> None:
    for job in jobs:
        while True:
            try:
                found = await door.look(JobId(job))
                value, made = value_of(found), made_of(found.result)
                break
            except (Fault, OSError):
                await asyncio.sleep(0.05)
            except Refusal as refusal:
                value, made = f"refused: {refusal.code.value}", None
                break
        log.write("read_again", job=job, value=value, made=made)
