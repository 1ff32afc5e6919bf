"""Many jobs in one request: each is answered by itself, and what was taken is not lost."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, hub_in_process, submission

from comfyfleet.model.calls import Submitted
from comfyfleet.model.job import Submission
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.sqlite.writer import Batch


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


async def test_each_job_of_a_batch_has_its_own_answer(rig: HubRig) -> None:
    jobs = [submission(), {"payload": {}}, {"nonsense": 1}, submission(priority=2)]
    answer = await rig.post("/api/jobs/batch", {"jobs": jobs})
    assert answer.status == 200
    body = answer.body
    assert [item["status"] for item in body["items"]] == [201, 422, 400, 201]
    assert [item.get("problem", {}).get("code") for item in body["items"]] == [
        None,
        "invalid_workflow",
        "invalid_request",
        None,
    ]
    assert (body["accepted"], body["refused"]) == (2, 2)


async def test_a_thousand_jobs_are_a_batch_and_one_more_is_not(rig: HubRig) -> None:
    answer = await rig.post("/api/jobs/batch", {"jobs": [submission()] * 1000})
    assert answer.body["accepted"] == 1000
    assert (await rig.post("/api/jobs/batch", {"jobs": [submission()] * 1001})).code == "invalid_request"
    assert (await rig.post("/api/jobs/batch", {"jobs": []})).code == "invalid_request"
    assert (await rig.get("/api/stats")).body["waiting"] == 1000


async def test_a_batch_that_is_sent_again_makes_nothing_new(rig: HubRig) -> None:
    key = {"Idempotency-Key": "night-1"}
    jobs = {"jobs": [submission(), submission()]}
    first = await rig.post("/api/jobs/batch", jobs, headers=key)
    again = await rig.post("/api/jobs/batch", jobs, headers=key)
    assert [item["job"]["id"] for item in again.body["items"]] == [
        item["job"]["id"] for item in first.body["items"]
    ]
    assert [item["status"] for item in again.body["items"]] == [200, 200]


async def test_a_job_that_the_hub_stumbles_over_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with hub_in_process(store_url=f"sqlite:///{tmp_path}/fleet.db") as rig:
        submit = rig.engine.submit

        async def stumbling(given: Submission, **options: Any) -> Submitted:
            if given.priority == 7:
                raise ZeroDivisionError("a defect")
            return await submit(given, **options)

        monkeypatch.setattr(rig.engine, "submit", stumbling)
        jobs = [submission(priority=priority) for priority in (1, 2, 7, 3)]
        answer = await rig.post("/api/jobs/batch", {"jobs": jobs})
        assert [item["status"] for item in answer.body["items"]] == [201, 201, 500, 201]
        problem = answer.body["items"][2]["problem"]
        assert problem["code"] == "internal" and "a defect" not in str(problem)


@pytest.mark.parametrize("url", ["memory:", "sqlite:///{}/fleet.db"], ids=["memory", "sqlite"])
async def test_a_batch_fills_the_queue_to_the_brim_and_is_finished_by_its_repeat(
    url: str, tmp_path: Path
) -> None:
    key = {"Idempotency-Key": "batch-1"}
    async with hub_in_process(rules=Rules(max_waiting=70), store_url=url.format(tmp_path)) as rig:
        batch = {"jobs": [submission() for _ in range(100)]}
        answer = (await rig.post("/api/jobs/batch", batch, headers=key)).body
        assert (answer["accepted"], answer["refused"]) == (70, 30)
        refused = answer["items"][-1]
        assert (refused["status"], refused["problem"]["code"]) == (503, "queue_full")
        assert refused["problem"]["retry_after_s"] > 0
        taken = [item["job"]["id"] for item in answer["items"] if "job" in item]
        for job_id in taken[:30]:
            await rig.post(f"/api/jobs/{job_id}/cancel")
        again = (await rig.post("/api/jobs/batch", batch, headers=key)).body
        assert (again["accepted"], again["refused"]) == (100, 0)
        assert [item["job"]["id"] for item in again["items"][:70]] == taken, "what was taken is not lost"


async def test_of_a_batch_that_the_store_takes_in_part_no_word_says_that_nothing_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the store says of a write that failed is said of that one job, and is true of it."""
    # One after the other, so that the disk is full in the middle.
    monkeypatch.setattr("comfyfleet.hub.jobs._PART_BYTES", 1)
    write = Batch.write

    def to_a_disk_that_fills(batch: Batch, database: sqlite3.Connection) -> None:
        if any(reference == "too late" for _, _, _, reference, *_ in batch.added):
            raise sqlite3.OperationalError("database or disk is full")
        write(batch, database)

    monkeypatch.setattr(Batch, "write", to_a_disk_that_fills)
    async with hub_in_process(store_url=f"sqlite:///{tmp_path}/fleet.db") as rig:
        jobs = [submission(), submission(reference="too late"), submission()]
        answer = await rig.post("/api/jobs/batch", {"jobs": jobs})
        assert [item["status"] for item in answer.body["items"]] == [201, 503, 201]
        detail = answer.body["items"][1]["problem"]["detail"]
        assert "disk is full" in detail and "This was not written" in detail
        assert "nothing was" not in answer.content.decode().lower()
        assert len((await rig.get("/api/jobs")).body["jobs"]) == 2
