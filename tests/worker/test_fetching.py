"""Files are moved a few at a time, and the first that fails ends the others."""

from __future__ import annotations

import asyncio

import pytest

from comfyfleet.worker.job_files import gather_bounded


async def test_a_few_go_at_a_time_and_the_answers_keep_their_order() -> None:
    under_way = most = 0

    async def move(number: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(20 - number):
            await asyncio.sleep(0)
        under_way -= 1
        return number

    assert await gather_bounded([move(number) for number in range(20)]) == list(range(20))
    assert most == 4


async def test_the_first_that_fails_ends_the_others_before_it_is_told() -> None:
    ended: list[str] = []

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("stuck")

    async def fails() -> None:
        raise ValueError("this one")

    works = [stuck(), stuck(), stuck(), fails()]
    with pytest.raises(ValueError, match="this one"):
        await gather_bounded(works)
    assert ended.count("stuck") == 3


async def test_whoever_is_cancelled_leaves_nothing_under_way() -> None:
    started = asyncio.Event()
    ended: list[str] = []

    async def stuck() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("stuck")

    async with asyncio.TaskGroup() as group:
        moving = group.create_task(gather_bounded([stuck() for _ in range(6)]))
        await started.wait()
        moving.cancel()
    assert moving.cancelled() and len(ended) == 4
