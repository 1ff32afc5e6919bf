"""The audit log: every change with who, what and how it ended; nothing is changed that cannot be noted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import TENANT, HubRig, hub_in_process, submission
from tests.hub.test_jobs import ANYTHING

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemRandom
from comfyfleet.hub.audit.log import COLLECTION as WORKERS
from comfyfleet.hub.audit.log import COLLECTIONS, KEEP_S, AuditLog, Kind
from comfyfleet.model.access import AuditEntry, Role
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import WorkerId
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.stores.factory import open_store
from comfyfleet.testing.time import ManualClock
from comfyfleet.wire.keys import FORGET
from comfyfleet.wire.routes import ROUTES

HALF_A_DAY = 12 * 3600.0


async def nothing() -> None:
    """Done without a trace."""


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


async def entries(rig: HubRig, query: str = "") -> list[dict[str, Any]]:
    answer = await rig.get(f"/api/audit{query}")
    assert answer.status == 200
    return list(answer.body["entries"])


async def test_an_operation_is_noted_with_who_what_and_how_it_ended(rig: HubRig) -> None:
    await rig.post("/api/queue/pause", role=Role.OPERATOR, headers={"x-request-id": "r-1"})
    made = (await rig.post("/api/keys", {"role": "viewer"})).body["id"]
    await rig.ask("DELETE", f"/api/keys/{made}")
    await rig.post("/api/workers/nobody/drain")
    noted = await entries(rig)
    assert [(each["action"], each.get("target", ""), each["outcome"]) for each in noted] == [
        ("pause_queue", "", "done"),
        ("create_key", made, "done"),
        ("revoke_key", made, "done"),
        ("drain_worker", "nobody", "not_found"),
    ]
    assert (noted[0]["role"], noted[0]["request_id"]) == ("operator", "r-1")
    assert f"cfk_{noted[0]['key_id']}_" in rig.keys[Role.OPERATOR]
    assert await entries(rig, "?kind=jobs") == []


async def test_what_callers_do_to_jobs_is_noted_and_what_is_refused_is_not(rig: HubRig) -> None:
    job = await rig.submit(role=Role.TENANT)
    await rig.post(f"/api/jobs/{job}/cancel", role=Role.TENANT)
    assert (await rig.post("/api/jobs", {"payload": {}}, role=Role.TENANT)).status == 422
    await rig.post("/api/jobs/batch", {"jobs": [submission(), submission()]})
    await rig.get("/api/jobs")
    noted = await entries(rig, "?kind=jobs")
    assert [(each["action"], each["target"], each.get("tenant")) for each in noted[:2]] == [
        ("submit", job, TENANT),
        ("cancel_job", job, TENANT),
    ]
    assert noted[2]["action"] == "submit_batch" and noted[2]["target"].endswith("2 in all")
    assert len(noted) == 3 and await entries(rig) == []


async def test_many_changes_at_once_are_all_there_page_by_page(rig: HubRig) -> None:
    jobs = await asyncio.gather(*(rig.submit() for _ in range(120)))
    assert len(await rig.documents.listing(COLLECTIONS["jobs"], limit=1000)) < 100, "many in one document"
    found: list[str] = []
    cursor = ""
    while True:
        page = (await rig.get(f"/api/audit?kind=jobs&limit=7{cursor}")).body
        found += [each["target"] for each in page["entries"]]
        if page["cursor"] is None:
            break
        assert len(page["entries"]) == 7
        cursor = f"&cursor={page['cursor']}"
    assert sorted(found) == sorted(jobs)


async def test_a_list_begins_at_a_time(rig: HubRig) -> None:
    await rig.post("/api/queue/pause")
    (first,) = await entries(rig)
    assert await entries(rig, f"?since={first['at'] - 1}") == [first]
    assert await entries(rig, f"?since={first['at'] + 1}") == []
    assert (await rig.get("/api/audit?cursor=a.b")).code == "invalid_request"


async def test_an_operation_that_cannot_be_noted_is_not_done(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(*_: object, **__: object) -> bool:
        raise Fault("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(rig.documents, "put", full)
        assert (await rig.post("/api/queue/pause")).code == "unavailable"
        assert not await rig.engine.store.is_queue_paused()
        # A job is safe in the store by then: its caller hears so, and the process's log has the entry.
        with caplog.at_level(logging.ERROR, logger="comfyfleet.audit"):
            job = await rig.submit()
    assert job in caplog.text and "submit" in caplog.text
    assert rig.hub.audit.lost == 1


async def test_whoever_knocks_with_a_wrong_token_leaves_no_entry(rig: HubRig) -> None:
    made = (await rig.post("/api/enrolments", {"uses": 5})).body
    body = {"token": made["token"], "worker_id": "gpu-1"}
    assert (await rig.post("/api/worker/enrol", {**body, "token": "cfe_x_y"}, role=None)).status == 401
    assert (await rig.post("/api/worker/enrol", body, role=None)).status == 201
    assert [each["action"] for each in await entries(rig)] == ["create_enrolment", "worker_enrol"]
    assert (await rig.ask("DELETE", f"/api/enrolments/{made['id']}")).status == 204
    assert (await rig.post("/api/worker/enrol", body, role=None)).status == 401
    assert (await rig.ask("DELETE", f"/api/enrolments/{made['id']}")).code == "not_found"


async def test_a_worker_rotates_its_own_key(rig: HubRig) -> None:
    token = (await rig.post("/api/enrolments")).body["token"]
    first = (await rig.post("/api/worker/enrol", {"token": token, "worker_id": "gpu-1"}, role=None)).body
    second = (await rig.post("/api/worker/rotate", key=first["key"])).body
    assert second["id"] == first["id"] and second["worker_id"] == "gpu-1"
    body = {"worker_id": "gpu-1", "capabilities": {"services": ["comfyui"]}}
    assert (await rig.post("/api/worker/register", body, key=first["key"])).status == 401
    assert (await rig.post("/api/worker/register", body, key=second["key"])).status == 200


async def test_old_entries_are_forgotten_those_of_jobs_first() -> None:
    clock, documents = ManualClock(), MemoryDocumentStore()
    audit = AuditLog(documents, clock, SystemRandom())

    async def noted(kind: Kind) -> list[str]:
        return [each.entry.action for each in (await audit.page(kind, "", 10))[0]]

    entry = AuditEntry(0.0, "k", Role.ADMIN, "pause_queue")
    await audit.operation(entry, nothing, lambda _: None)
    await audit.job_change(entry, nothing, lambda _: "job")
    await clock.advance(KEEP_S["jobs"] + HALF_A_DAY)
    await audit.clean_up()
    assert (await noted("jobs"), await noted("operations")) == (["pause_queue"], ["pause_queue"])
    await clock.advance(1)
    await audit.clean_up()
    assert (await noted("jobs"), await noted("operations")) == ([FORGET], ["pause_queue"])
    await clock.advance(KEEP_S["operations"])
    await audit.operation(entry, nothing, lambda _: None)
    await audit.clean_up()
    assert await noted("operations") == ["pause_queue", FORGET]
    assert await noted("jobs") == [FORGET]


def test_every_route_that_changes_something_is_noted_but_what_workers_report() -> None:
    silent = {route.name for route in ROUTES if route.method != "GET" and route.audited is None}
    reports = (
        "register",
        "describe",
        "poll",
        "heartbeat",
        "progress",
        "complete",
        "fail",
        "release",
        "commands",
        "unregister",
    )
    assert silent == {f"worker_{name}" for name in reports} | {"put_content", "convert", "quote_job"}


async def test_workers_that_come_leave_and_are_lost_are_in_the_log() -> None:
    clock = ManualClock()
    async with hub_in_process(clock=clock) as rig:
        for name in ("gpu-a", "gpu-b"):
            await rig.engine.register(RegisterWorker(WorkerId(name), ANYTHING))
        await rig.engine.unregister(WorkerId("gpu-a"), "stopped")
        await clock.advance(61)
        await rig.engine.sweep()
        async with asyncio.timeout(60):
            while len(noted := (await rig.get("/api/audit")).body["entries"]) < 4:
                await clock.settle()
    told = [(each["action"], each["target"], each["role"], each["outcome"]) for each in noted]
    assert sorted(told) == [
        ("worker_left", "gpu-a", "worker", "done"),
        ("worker_lost", "gpu-b", "worker", "done"),
        ("worker_registered", "gpu-a", "worker", "done"),
        ("worker_registered", "gpu-b", "worker", "done"),
    ]


async def test_a_worker_that_was_removed_and_comes_again_is_in_the_log_again() -> None:
    async with hub_in_process() as rig:
        call, log = RegisterWorker(WorkerId("gpu-a"), ANYTHING), rig.hub._worker_log
        for _ in range(2):
            await rig.engine.register(call)
            await log.poll()
            await rig.engine.remove_worker(call.worker_id)
        await log.clean_up()
        assert len(await rig.documents.listing(WORKERS)) == 1, "it may be about to come again"
        await log.clean_up()
        assert await rig.documents.listing(WORKERS) == []
        await rig.hub.finish()
        noted = [(each["action"], each["target"]) for each in await entries(rig)]
    assert noted == [("worker_registered", "gpu-a")] * 2


async def test_workers_of_before_are_in_the_log_if_they_are_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    async with Engine(open_store(url, clock := ManualClock()), clock=clock) as engine:
        for name in ("gpu-a", "gpu-b"):
            for _ in range(3):
                await engine.register(RegisterWorker(WorkerId(name), ANYTHING))
                await engine.unregister(WorkerId(name), "stopped")
        await engine.register(RegisterWorker(WorkerId("gpu-a"), ANYTHING))
        await clock.advance(30)
    async with hub_in_process(store_url=url, clock=clock) as rig:
        await rig.hub._worker_log.poll()
        await rig.hub.finish()
        noted = [(each["action"], each["target"]) for each in await entries(rig)]
    assert noted == [("worker_registered", "gpu-a")]
