"""What was added so that ids, times and pages are of one form everywhere; what was there before stays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest_asyncio
from tests.hub._hub import HubRig, hub_in_process

from comfyfleet.hub.streams.feed import EventFilter, FeedEntry
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.wire.progress import EventsQuery, FleetBody


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(databases={"default": f"sqlite:///{tmp_path}/tenants.db"}) as rig:
        yield rig


async def walked(rig: HubRig, path: str, name: str, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        answer = await rig.get(f"{path}?limit={limit}{cursor}")
        assert answer.status == 200, answer.content
        assert len(answer.body[name]) <= limit
        found += answer.body[name]
        if answer.body.get("cursor") is None:
            return found
        cursor = f"&cursor={quote(answer.body['cursor'], safe='')}"


async def test_an_explanation_and_a_registration_have_an_id_beside_the_name_of_before(rig: HubRig) -> None:
    job_id = await rig.submit()
    told = (await rig.get(f"/api/jobs/{job_id}/explain")).body
    assert told["id"] == told["job_id"] == job_id
    body = {"worker_id": "gpu-a", "capabilities": {"services": ["comfyui"]}}
    registered = (await rig.post("/api/worker/register", body)).body
    assert registered["id"] == registered["worker_id"] == "gpu-a"


async def test_workers_and_blocks_come_all_at_once_or_page_by_page(rig: HubRig) -> None:
    for number in (3, 1, 2, 0):
        offer = Capabilities((Service("comfyui"),))
        await rig.engine.register(RegisterWorker(WorkerId(f"gpu {number}/é"), offer))
    everybody = (await rig.get("/api/workers")).body
    assert len(everybody["workers"]) == 4 and "cursor" not in everybody
    paged = await walked(rig, "/api/workers", "workers", 3)
    assert [each["id"] for each in paged] == [f"gpu {number}/é" for number in range(4)]
    blocks = (await rig.get("/api/blocks")).body
    assert blocks == {"blocks": []}
    assert (await rig.get("/api/blocks?limit=0")).code == "invalid_request"
    job_id = await rig.submit()
    assert (await rig.get(f"/api/jobs/{job_id}/deliveries?limit=1")).body == {
        "deliveries": [],
        "cursor": None,
    }


async def test_a_statement_goes_on_by_its_cursor(rig: HubRig) -> None:
    await rig.post("/api/tenants", {"id": "acme"})
    for number in range(5):
        await rig.post("/api/tenants/acme/grants", {"amount": 10, "id": f"g{number}"})
    path = "/api/tenants/acme/statement"
    entries = await walked(rig, path, "entries", 2)
    assert [each["number"] for each in entries] == [1, 2, 3, 4, 5]
    assert [each["balance_after"] for each in entries] == [10, 20, 30, 40, 50]
    assert [each["number"] for each in (await rig.get(f"{path}?after=3")).body["entries"]] == [4, 5]
    assert (await rig.get(f"{path}?cursor=x")).code == "invalid_request"


async def test_an_enrolment_says_when_it_was_made(rig: HubRig) -> None:
    made = (await rig.post("/api/enrolments", {"uses": 2})).body
    (listed,) = (await rig.get("/api/enrolments")).body["enrolments"]
    assert made["created_at"] == listed["created_at"]
    assert (made["uses"], made["uses_left"]) == (2, 2)


def test_events_are_chosen_by_the_names_of_today_and_of_before() -> None:
    ours, theirs = (
        FeedEntry("leased", FleetBody("leased", 1.0, job_id, worker_id))
        for job_id, worker_id in (("a", "gpu-a"), ("b", "gpu-b"))
    )
    for query in (EventsQuery(job="a"), EventsQuery(job_id="a"), EventsQuery(worker_id="gpu-a")):
        wanted = EventFilter(query, None)
        assert wanted(ours) and not wanted(theirs)
