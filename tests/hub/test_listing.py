"""The list of jobs over plain HTTP: pages, orders, filters."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, graph, hub_in_process


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


@pytest.mark.parametrize("order", ["", "&order=newest", "&order=oldest"])
async def test_a_list_is_walked_page_by_page_without_gap_or_repeat(rig: HubRig, order: str) -> None:
    made = [await rig.submit() for _ in range(7)]
    seen: list[str] = []
    cursor = ""
    while True:
        page = (await rig.get(f"/api/jobs?limit=3{order}{cursor}")).body
        if not seen:
            # Who comes meanwhile is seen by those who go towards the newest, and does not shift the others' pages.
            made.append(await rig.submit())
        seen += [job["id"] for job in page["jobs"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert seen == (made if "oldest" in order else made[-2::-1])


async def test_a_cursor_is_good_in_both_orders(rig: HubRig) -> None:
    made = [await rig.submit() for _ in range(5)]
    cursor = (await rig.get("/api/jobs?limit=3")).body["cursor"]
    assert cursor == made[2]
    back = (await rig.get(f"/api/jobs?order=oldest&cursor={cursor}")).body["jobs"]
    assert [job["id"] for job in back] == made[3:]
    assert (await rig.get("/api/jobs?order=sideways")).code == "invalid_request"


@pytest.mark.parametrize("status", ["queued", "pending", "QUEUED"])
async def test_a_status_filters_in_any_spelling(rig: HubRig, status: str) -> None:
    waiting = await rig.submit()
    gone = await rig.submit()
    await rig.post(f"/api/jobs/{gone}/cancel")
    found = (await rig.get(f"/api/jobs?status={status}")).body["jobs"]
    assert [job["id"] for job in found] == [waiting]
    assert (await rig.get("/api/jobs?status=flying")).code == "invalid_request"


async def test_a_list_is_filtered_by_metadata_hash_and_time(rig: HubRig) -> None:
    first = await rig.submit(metadata={"user": "42", "age": 7}, workflow=graph("A"))
    second = await rig.submit(metadata={"user": "43"}, workflow=graph("B"))
    jobs = {job["id"]: job for job in (await rig.get("/api/jobs")).body["jobs"]}

    async def found(query: str) -> list[str]:
        return [job["id"] for job in (await rig.get(f"/api/jobs?{query}")).body["jobs"]]

    assert await found("metadata[user]=42") == [first]
    assert await found("metadata.age=7&metadata.user=42") == [first]
    assert await found("metadata[user]=nobody") == []
    assert await found(f"workflow_hash={jobs[second]['workflow_hash']}") == [second]
    assert await found(f"submitted_after={jobs[second]['submitted_at']}") == [second]
    assert await found(f"submitted_before={jobs[second]['submitted_at']}") == [first]
    assert await found("submitted_after=2100-01-01T00:00:00Z") == []


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=x",
        "stauts=failed",
        "limit=1&limit=2",
        "submitted_after=soon",
        "submitted_after=null",
    ],
)
async def test_a_query_that_means_nothing_is_refused(rig: HubRig, query: str) -> None:
    assert (await rig.get(f"/api/jobs?{query}")).code == "invalid_request"


async def test_a_list_says_nothing_of_a_job_that_only_a_look_at_it_would_tell(rig: HubRig) -> None:
    job_id = await rig.submit()
    await rig.post(f"/api/jobs/{job_id}/pause")
    (listed,) = (await rig.get("/api/jobs")).body["jobs"]
    looked_at = (await rig.get(f"/api/jobs/{job_id}")).body
    assert looked_at["is_paused"] is True
    assert listed.keys().isdisjoint({"attempts", "is_paused", "cancel_requested"})
    assert listed == {name: looked_at[name] for name in listed}
