"""A caller process of many tenants: it submits what costs credits, changes its mind about some of it, and about that
once more."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec

from chaos.bridge import BridgeClient, Look
from chaos.callers import made_of, submission, value_of
from chaos.logs import Log
from chaos.made import made_from
from chaos.setting import Setting, play
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId

_Answer = TypeVar("_Answer")

_CANCELLED, _RETRIED = 0.1, 0.4
"""Of all jobs; and of those that were cancelled in time."""
_PAUSE_S = 0.05
_NOT_YET = frozenset({RefusalCode.UNAVAILABLE, RefusalCode.NOT_FOUND})
"""A job that was taken while the store was away is found once a relay has brought it there."""


def tenant_of(number: int) -> TenantId:
    return TenantId(f"tenant-{number:03d}")


def payer_process(
    setting: Setting, who: str, seed: int, jobs: int, window: int, longest_s: float, tenants: int
) -> None:
    play(setting, who, _pay(setting, who, seed, jobs, window, longest_s, tenants))


async def _pay(
    setting: Setting, who: str, seed: int, jobs: int, window: int, longest_s: float, tenants: int
) -> None:
    log = Log(setting.logs, who)
    chance = random.Random(seed)
    numbers = iter(range(jobs))
    door = BridgeClient(setting.sockets)
    log.write("ready", role="caller")
    async with asyncio.TaskGroup() as group:
        for _ in range(window):
            group.create_task(_one_after_the_other(door, log, who, chance, numbers, longest_s, tenants))
    log.write("over")


async def _one_after_the_other(
    door: BridgeClient,
    log: Log,
    who: str,
    chance: random.Random,
    numbers: Iterator[int],
    longest_s: float,
    tenants: int,
) -> None:
    for number in numbers:
        reference = f"{who}/{number}"
        asked = submission(chance, reference, longest_s)
        asked = msgspec.structs.replace(asked, tenant=tenant_of(number % tenants))
        log.write("submitting", reference=reference, made=made_from(asked.workflow))
        job_id = (await _until_answered(partial(door.submit, asked))).job_id
        log.write("acknowledged", reference=reference, job=job_id)
        if chance.random() < _CANCELLED:
            await asyncio.sleep(chance.uniform(0, 0.3))
            await _until_answered(partial(door.cancel, job_id))
        found = await _ended(door, job_id)
        if found.phase is Phase.CANCELLED and chance.random() < _RETRIED:
            found = await _retried(door, job_id)
        if found.phase is Phase.CANCELLED:
            log.write("cancelled", reference=reference, job=job_id)
        # Counted, too, as finished.
        log.write("seen", reference=reference, job=job_id, value=value_of(found), made=made_of(found.result))


async def _retried(door: BridgeClient, job_id: JobId) -> Look:
    try:
        await _until_answered(partial(door.retry, job_id))
    except Refusal as refusal:
        # The answer to the first was lost, and by now the job goes on.
        if refusal.code is not RefusalCode.WRONG_PHASE:
            raise
    return await _ended(door, job_id)


async def _ended(door: BridgeClient, job_id: JobId) -> Look:
    for pause_s in itertools.chain((0.1, 0.15, 0.2, 0.3, 0.5), itertools.repeat(1.0)):
        await asyncio.sleep(pause_s)
        found = await _until_answered(partial(door.look, job_id))
        if found.phase.is_final:
            return found
    raise AssertionError("never the last")


async def _until_answered(call: Callable[[], Awaitable[_Answer]]) -> _Answer:
    while True:
        try:
            return await call()
        except (Fault, OSError):
            pass
        except Refusal as refusal:
            if refusal.code not in _NOT_YET:
                raise
        await asyncio.sleep(_PAUSE_S)
