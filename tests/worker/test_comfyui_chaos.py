"""Many attempts on one server in trouble: none hangs, none runs twice, none is left behind."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.worker._comfyui import Attempt, eventually, leased, queue_of, server_and_connector, slow, tuned

from comfyfleet.model.failure import FailureKind, ServiceFailed
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.connectors.comfyui import ComfyUI

JOBS = 25


async def trouble(fake: FakeComfyUI, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(chance.uniform(0.02, 0.2))
        match chance.choice(["drop", "deaf", "stumble", "lose", "slow", "restart"]):
            case "drop":
                fake.faults.drop_sockets = True
            case "deaf":
                fake.faults.deaf_sockets = True
                await asyncio.sleep(0.1)
                fake.faults.deaf_sockets = False
            case "stumble":
                fake.faults.fail_requests = chance.randint(1, 3)
            case "lose":
                fake.faults.lost_answer_manner = "drop"
                fake.faults.lose_submit_answers = 1
            case "slow":
                fake.faults.slow_answer_s = 0.1
                await asyncio.sleep(0.1)
                fake.faults.slow_answer_s = 0.0
            case "restart" if chance.random() < 0.4:
                await fake.restart()


async def one(connector: ComfyUI, number: int, chance: random.Random) -> FailureKind | None:
    """How the attempt ended; every fourth is cancelled at some moment, one way or the other."""
    await asyncio.sleep(chance.uniform(0, 1.2))
    attempt = Attempt(connector, leased(slow(steps=chance.randint(1, 4), step_seconds=0.02, seed=number)))
    is_cancelled = number % 4 == 0
    if is_cancelled:
        await asyncio.sleep(chance.uniform(0, 0.3))
        if chance.random() < 0.5:
            attempt.task.cancel()
            await asyncio.wait({attempt.task})
        await connector.cancel_job(attempt.job)
    try:
        assert (await attempt.result()).files
    except ServiceFailed as failed:
        assert is_cancelled or failed.failure.kind is not FailureKind.INTERRUPTED
        return failed.failure.kind
    except asyncio.CancelledError:
        assert is_cancelled
    return None


@pytest.mark.parametrize(("seed", "version"), [(1, "0.7.0"), (2, "0.33.0")])
async def test_nothing_hangs_runs_twice_or_is_left_behind(seed: int, version: str) -> None:
    chance = random.Random(seed)
    settings = tuned(unreachable_s=3.0, unresponsive_s=4.0, poll_s=0.2, accept_s=2.0)
    async with server_and_connector(settings, version=version) as (fake, connector):
        troublemaker = asyncio.create_task(trouble(fake, chance))
        kinds = await asyncio.gather(*(one(connector, number, chance) for number in range(JOBS)))
        troublemaker.cancel()
        await asyncio.wait({troublemaker})
        await fake.start(port=fake.port)
        fake.faults.change({"deaf_sockets": False, "fail_requests": 0, "slow_answer_s": 0.0})

        async def is_empty() -> bool:
            return not await queue_of(fake, connector)

        await eventually(is_empty)
        assert set(kinds) <= {
            None,
            FailureKind.INTERRUPTED,
            FailureKind.CRASHED,
            FailureKind.TRANSIENT,
            FailureKind.ACCEPT_TIMEOUT,
        }
        # A busy machine may answer too late; of the others, enough must come through.
        answered = JOBS - kinds.count(FailureKind.ACCEPT_TIMEOUT)
        assert kinds.count(None) > answered / 3
        assert set(fake.stats.prompts_run.values()) == {1}
        assert not connector._runs
