"""Reports with a hundred thousand values: made safe like any other, while others have their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.hub._hub import running_hub
from tests.hub._watching import lease, register

from comfyfleet.hub.local_worker_api import has_many, sanitized
from comfyfleet.model.access import Role
from comfyfleet.model.job import JobResult, OutputFile

_BAD = {"filename": "../x.png", "url": "javascript:x"}
_FILE = OutputFile("2", "images", "../x.png")


@contextlib.asynccontextmanager
async def turns() -> AsyncIterator[list[None]]:
    """One for each turn that the event loop gave to somebody else."""
    taken: list[None] = []

    async def take() -> None:
        while True:
            await asyncio.sleep(0)
            taken.append(None)

    other = asyncio.ensure_future(take())
    await asyncio.sleep(0)
    taken.clear()
    try:
        yield taken
    finally:
        other.cancel()


@pytest.mark.parametrize(
    "result",
    [
        JobResult({"2": {"images": [_BAD] * 50_000}}),
        JobResult({"2": {str(number): {"images": [_BAD]} for number in range(20_000)}}),
        JobResult({str(number): {"images": [_BAD]} for number in range(20_000)}),
        JobResult({}, (_FILE,) * 20_000),
    ],
)
async def test_others_have_their_turn(result: JobResult) -> None:
    async with turns() as taken:
        safe = await sanitized(result)
        count = len(taken)
    assert count > 2
    assert "../" not in repr(safe)
    assert "javascript" not in repr(safe)


def test_many_is_told_from_few() -> None:
    assert not has_many([])
    assert not has_many([{"a": [1, (2, 3)]}, "text" * 1_000])
    assert has_many([[[[]] * 1_001]])
    assert has_many([{str(number): {} for number in range(1_001)}])
    assert has_many(["long" * 300_000])
    assert has_many([{"long" * 300_000: 1}])


async def test_a_large_result_reaches_its_caller_safe() -> None:
    async with running_hub() as rig:
        await register(rig)
        job_id = await rig.submit(role=Role.TENANT)
        held = (await lease(rig)).ref
        progress = {"kind": "output", "lease": held, "data": {"images": [_BAD] * 5_000}}
        assert (
            await rig.post("/api/worker/progress", {"reports": [progress]}, role=Role.WORKER)
        ).status == 200
        body = {"lease": held, "result": {"outputs": {"2": {"images": [_BAD] * 5_000}}}}
        assert (await rig.post("/api/worker/complete", body, role=Role.WORKER)).status == 200
        answer = await rig.get(f"/api/jobs/{job_id}/result", role=Role.TENANT)
    assert answer.status == 200
    assert answer.content.count(b'{"filename":"x.png","url":null}') == 5_000
