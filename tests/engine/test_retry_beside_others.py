"""A retry by hand while the job changes: what it prepares is for the round that it begins, or it looks again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.engine._rig import Rig

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Submission


def after_its_look(rig: Rig, job_id: JobId, step: Callable[[], Awaitable[Any]]) -> None:
    """Once: when the job has been read, before anything is written."""
    attempts = rig.store.attempts

    async def read(each: JobId) -> Any:
        found = await attempts(each)
        if each == job_id and rig.store.attempts is read:
            rig.store.attempts = attempts  # type: ignore[method-assign]
            await step()
        return found

    rig.store.attempts = read  # type: ignore[method-assign, assignment]


def announced(rig: Rig) -> list[tuple[JobId, int]]:
    told: list[tuple[JobId, int]] = []

    async def hear(_: Submission, job_id: JobId, round_: int) -> None:
        told.append((job_id, round_))

    rig.engine.announce_to(hear)
    return told


async def test_a_job_that_is_cancelled_meanwhile_waits_for_what_it_waited_for_and_is_announced() -> None:
    async with Rig() as rig:
        told = announced(rig)
        await rig.worker("a")
        first = await rig.submit()
        second = await rig.submit(after=(first,))
        after_its_look(rig, second, lambda: rig.engine.cancel(second))
        assert (await rig.engine.retry(second)).phase is Phase.QUEUED
        dispatch = (await rig.engine.get(second)).dispatch
        assert (dispatch.round, dispatch.awaits_jobs) == (2, True)
        assert told == [(first, 1), (second, 1), (second, 2)]
        leased = await rig.take("a")
        assert leased.job_id == first
        assert await rig.poll("a") is None, "the second waits for the first"
        await rig.complete(leased)
        await rig.settle()
        assert (await rig.take("a")).job_id == second


async def test_a_running_job_that_fails_meanwhile_gets_a_new_round() -> None:
    async with Rig(max_attempts=1) as rig:
        told = announced(rig)
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        after_its_look(rig, job_id, lambda: rig.fail(leased))
        assert (await rig.engine.retry(job_id)).phase is Phase.QUEUED
        assert (await rig.engine.get(job_id)).dispatch.round == 2
        assert told == [(job_id, 1), (job_id, 2)]


@pytest.mark.parametrize("kind", ["retried", "completed"])
async def test_a_round_that_somebody_else_began_and_ended_meanwhile_is_looked_at(kind: str) -> None:
    async with Rig(max_attempts=1) as rig:
        told = announced(rig)
        await rig.worker("a")
        job_id = await rig.submit()
        await rig.engine.cancel(job_id)

        async def another() -> None:
            await rig.engine.retry(job_id)
            if kind == "completed":
                await rig.complete(await rig.take("a"))
            else:
                await rig.engine.cancel(job_id)

        after_its_look(rig, job_id, another)
        if kind == "completed":
            with pytest.raises(Exception, match="cannot retry a job that is completed"):
                await rig.engine.retry(job_id)
            return
        await rig.engine.retry(job_id)
        assert (await rig.engine.get(job_id)).dispatch.round == 3
        assert dict.fromkeys(told) == dict.fromkeys([(job_id, 1), (job_id, 2), (job_id, 3)])
