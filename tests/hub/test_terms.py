"""What a tenant may ask for, over the wire: each no with its code, at every door that a job comes in by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.hub._hub import TENANT, HubRig, graph, hub_in_process, running_hub, submission
from tests.hub.test_conversion import editors_workflow
from tests.hub.test_socket import connected
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.hub.http.limits import COLLECTION, RateLimiter
from comfyfleet.hub.tenants.admission import TermsAdmission
from comfyfleet.model.access import Role
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.node_classes import NodeCatalog, Widget
from comfyfleet.model.requirement import LocationNeed
from comfyfleet.model.tenant import Tenant, TenantCaps, TenantState
from comfyfleet.model.worker import Capabilities, Location, Service
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.tenants import Tenants
from comfyfleet.testing.contract.ledger_driver import LedgerDriver
from comfyfleet.testing.time import ManualClock


def databases_in(folder: Path) -> dict[str, str]:
    return {"first": f"sqlite:///{folder}/tenants.db"}


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(databases=databases_in(tmp_path)) as rig:
        yield rig


async def set_up(rig: HubRig, **terms: Any) -> Tenant:
    await (await rig.tenant_services.databases.get("first")).create_account(TENANT)
    return await rig.tenant_services.tenants.create(Tenant(TENANT, "first", 1.0, **terms))


async def change(rig: HubRig, **terms: Any) -> None:
    await rig.tenant_services.tenants.change(TENANT, lambda tenant: msgspec.structs.replace(tenant, **terms))


def drawing(**inputs: Any) -> dict[str, Any]:
    return submission(workflow={"1": {"class_type": "KSampler", "inputs": inputs}})


# every no


NOES: list[tuple[dict[str, Any], dict[str, Any], int, str, str]] = [
    ({"state": TenantState.SUSPENDED}, submission(), 403, "not_allowed", "suspended"),
    ({"state": TenantState.LEAVING}, submission(), 403, "not_allowed", "deleted"),
    ({"state": TenantState.MOVING}, submission(), 503, "unavailable", "moved"),
    ({"node_classes": ("SaveImage",)}, submission(), 403, "not_allowed", "node 1 (KSampler)"),
    ({"denied_node_classes": ("KS*",)}, submission(), 403, "not_allowed", "node 1 (KSampler)"),
    ({"models": ("sdxl/*",)}, drawing(ckpt_name="sd15.ckpt"), 403, "not_allowed", "'sd15.ckpt'"),
    ({"denied_models": ("sd15*",)}, drawing(ckpt_name="a/sd15.ckpt"), 403, "not_allowed", "'a/sd15.ckpt'"),
    ({"caps": TenantCaps(max_nodes=1)}, submission(), 413, "too_large", "2 nodes"),
    ({"caps": TenantCaps(max_steps=30)}, drawing(steps=50), 413, "too_large", "50 steps"),
    (
        {"caps": TenantCaps(max_pixels=10**6)},
        drawing(width=2048, height=1024),
        413,
        "too_large",
        "2048 × 1024",
    ),
    ({"caps": TenantCaps(max_batch=4)}, drawing(batch_size=8), 413, "too_large", "8 pictures"),
    ({"caps": TenantCaps(max_steps=30)}, drawing(steps="lots"), 403, "not_allowed", "'steps'"),
    (
        {"location": LocationNeed("eu")},
        {**submission(), "requirements": {"location": {"region": "us"}}},
        403,
        "not_allowed",
        "'eu' only",
    ),
    ({"caps": TenantCaps(max_waiting=0)}, submission(), 503, "queue_full", "may have 0"),
    ({"caps": TenantCaps(submits_per_minute=0)}, submission(), 429, "rate_limited", "0 jobs a minute"),
]


@pytest.mark.parametrize(("terms", "body", "status", "code", "says"), NOES)
async def test_a_tenant_is_told_what_it_may_not(
    rig: HubRig, terms: dict[str, Any], body: dict[str, Any], status: int, code: str, says: str
) -> None:
    await set_up(rig, **terms)
    answer = await rig.post("/api/jobs", body, role=Role.TENANT)
    assert (answer.status, answer.code) == (status, code)
    assert says in answer.body["detail"]
    assert ("retry-after" in answer.headers) is (status in (429, 503))
    assert (await rig.get("/api/jobs")).body["jobs"] == []
    assert (await rig.post("/api/jobs", body)).status == 201, "an administrator's own jobs have no such terms"


async def test_within_its_terms_a_tenant_is_not_disturbed(rig: HubRig) -> None:
    caps = TenantCaps(10, 10, 10, 10, 10, 30, 1_048_576, 4)
    lists = {"node_classes": ("KSampler",), "models": ("sdxl/*",), "denied_models": ("*.ckpt",)}
    await set_up(rig, caps=caps, **lists)
    body = drawing(steps=30, width=1024, height=1024, batch_size=4, ckpt_name="sdxl/a.safetensors")
    answer = await rig.post("/api/jobs", body, role=Role.TENANT)
    assert answer.status == 201, answer.content


# every door


async def test_each_job_of_a_batch_is_judged_by_itself(rig: HubRig) -> None:
    await set_up(rig, caps=TenantCaps(max_steps=30, submits_per_minute=2))
    jobs = [drawing(steps=steps) for steps in (31, 20, 10, 5)]
    answer = await rig.post("/api/jobs/batch", {"jobs": jobs}, role=Role.TENANT)
    items = answer.body["items"]
    assert [item["status"] for item in items] == [413, 201, 201, 429]
    assert items[0]["problem"]["limit"] == 30 and items[3]["problem"]["retry_after_s"] > 0


async def test_the_old_websocket_passes_the_same_gate(tmp_path: Path) -> None:
    async with running_hub(databases=databases_in(tmp_path)) as rig, connected(rig, Role.TENANT) as line:
        await set_up(rig, denied_node_classes=("KSampler",))
        heard = await line.ask("submit_job", payload={"workflow": graph()})
        assert (heard["type"], heard["code"]) == ("error", "not_allowed")
        assert "node 1 (KSampler)" in heard["message"]
        assert (await rig.get("/api/jobs")).body["jobs"] == []


async def test_a_workflow_of_the_editor_is_judged_by_what_it_is_converted_to(rig: HubRig) -> None:
    await set_up(rig, caps=TenantCaps(max_pixels=64 * 63))
    services = (Service("comfyui", node_classes=frozenset({"EmptyImage", "SaveImage"})),)
    await rig.engine.register(RegisterWorker(WorkerId("gpu"), Capabilities(services)))
    widgets = tuple(Widget(name) for name in ("width", "height", "batch_size", "color"))
    definitions = {"EmptyImage": widgets, "SaveImage": (Widget("filename_prefix"),)}
    await rig.engine.describe(WorkerId("gpu"), NodeCatalog(definitions))
    answer = await rig.post("/api/jobs", submission(workflow=editors_workflow()), role=Role.TENANT)
    assert answer.code == "too_large" and "node 1 (EmptyImage)" in answer.body["detail"]


@pytest.mark.parametrize("door", ["/api/jobs/{}/retry", "/api/dead-letter/{}/retry"])
async def test_a_retry_by_hand_is_judged_by_the_terms_of_its_own_time(rig: HubRig, door: str) -> None:
    await set_up(rig)
    job_id = await rig.submit(role=Role.TENANT)
    await rig.post(f"/api/jobs/{job_id}/cancel", role=Role.TENANT)
    for terms, code in (
        ({"denied_node_classes": ("KSampler",)}, "not_allowed"),
        ({"denied_node_classes": (), "state": TenantState.SUSPENDED}, "not_allowed"),
        ({"state": TenantState.ACTIVE, "caps": TenantCaps(max_waiting=0)}, "queue_full"),
        ({"caps": TenantCaps(submits_per_minute=0)}, "rate_limited"),
    ):
        await change(rig, **terms)
        assert (await rig.post(door.format(job_id))).code == code
    location = LocationNeed("eu")
    await change(rig, caps=TenantCaps(), location=location, isolation="strict")
    assert (await rig.post(door.format(job_id))).status == 200
    dispatch = (await rig.engine.get(JobId(job_id))).dispatch
    needs = (await rig.engine.store.table()).classes[dispatch.class_key].requirements
    assert (needs.location, needs.isolation, needs.needs_hub) == (location, "strict", True)
    assert (await rig.post(door.format(job_id))).code == "wrong_phase"


async def test_a_repeat_is_answered_whatever_has_become_of_the_terms(rig: HubRig) -> None:
    await set_up(rig)
    key = {"idempotency-key": "once"}
    first = await rig.post("/api/jobs", submission(), role=Role.TENANT, headers=key)
    await change(rig, state=TenantState.SUSPENDED, isolation="strict", tier=5)
    again = await rig.post("/api/jobs", submission(), role=Role.TENANT, headers=key)
    assert (first.status, again.status) == (201, 200)
    assert again.body["id"] == first.body["id"]


# what its terms add


async def test_no_priority_is_above_the_ceiling_whoever_raises_it_and_the_tier_counts(rig: HubRig) -> None:
    await set_up(rig, tier=5, caps=TenantCaps(max_priority=20))

    async def priority(job_id: str) -> int:
        return (await rig.engine.get(JobId(job_id))).dispatch.priority

    low = await rig.submit(role=Role.TENANT, priority=3)
    high = await rig.submit(role=Role.TENANT, priority=900)
    near = await rig.submit(role=Role.TENANT, priority=10, deadline=rig.engine.now() + 5)
    assert [await priority(each) for each in (low, high, near)] == [8, 20, 20]
    for job_id, asked, expected in ((low, 10, 15), (low, 700, 20), (near, 1, 20)):
        await rig.ask("PATCH", f"/api/jobs/{job_id}", {"priority": asked}, role=Role.TENANT)
        assert await priority(job_id) == expected
    await rig.post(f"/api/jobs/{high}/cancel")
    await change(rig, caps=TenantCaps(max_priority=7))
    await rig.post(f"/api/jobs/{high}/retry")
    assert await priority(high) == 7


async def test_jobs_run_only_where_their_tenant_must_whatever_they_ask_for(rig: HubRig) -> None:
    await set_up(rig, location=LocationNeed("eu", ("gdpr",)))
    job_id = await rig.submit(role=Role.TENANT)
    for name, location in (
        ("us", Location("us", ("gdpr",))),
        ("eu", Location("eu")),
        ("good", Location("EU", ("GDPR",))),
    ):
        offers = Capabilities((Service("comfyui"),), location=location)
        body = {"worker_id": name, "capabilities": msgspec.to_builtins(offers)}
        await rig.post("/api/worker/register", body, role=Role.WORKER)
        poll = {"worker_id": name, "poll_id": "1", "wait_s": 0}
        answer = await rig.post("/api/worker/poll", poll, role=Role.WORKER)
        assert (answer.status == 200) is (name == "good"), name
    assert answer.body["lease"]["job_id"] == job_id


@pytest.mark.parametrize("allows_direct", [True, False])
async def test_only_a_tenant_that_allows_it_is_served_by_workers_without_a_hub(
    rig: HubRig, allows_direct: bool
) -> None:
    await set_up(rig, allows_direct=allows_direct)
    await rig.engine.register(RegisterWorker(WorkerId("direct"), Capabilities((Service("comfyui"),))))
    answer = await rig.post("/api/jobs", {**submission(), "require_workable": True}, role=Role.TENANT)
    assert answer.status == (201 if allows_direct else 422)
    if not allows_direct:
        assert "reads jobs directly from the store" in answer.body["detail"]


async def test_what_waits_for_a_hub_to_start_is_brought_in_under_the_terms(tmp_path: Path) -> None:
    started: dict[str, Any] = {
        "databases": databases_in(tmp_path),
        "store_url": f"sqlite:///{tmp_path}/fleet.db",
    }
    async with hub_in_process(**started) as rig:
        await set_up(rig, isolation="strict", location=LocationNeed("eu"))
    # As a crash between the two databases left it.
    database = open_tenant_database(databases_in(tmp_path)["first"])
    await database.open()
    job_id = (await LedgerDriver(database).submit(0, TENANT)).hold_id.job_id
    await database.close()
    async with hub_in_process(**started) as rig, asyncio.timeout(60):
        while (dispatch := await rig.engine.store.load(job_id)) is None:
            await asyncio.sleep(0.01)
        needs = (await rig.engine.store.table()).classes[dispatch.class_key].requirements
        assert (needs.isolation, needs.location.region, needs.needs_hub) == ("strict", "eu", True)


# how many, how often


async def test_open_jobs_are_counted_in_the_tenants_own_database(tmp_path: Path) -> None:
    async with hub_in_process(databases=databases_in(tmp_path)) as rig:
        await set_up(rig, caps=TenantCaps(max_waiting=3))
        teller = LedgerDriver(await rig.tenant_services.databases.get("first"))
        for _ in range(2):
            await teller.submit(0, TENANT)
        assert (await rig.post("/api/jobs", submission(), role=Role.TENANT)).status == 201
        answer = await rig.post("/api/jobs", submission(), role=Role.TENANT)
        assert (answer.code, answer.body["waiting"], answer.body["limit"]) == ("queue_full", 3, 3)


async def test_a_database_that_is_down_keeps_a_tenant_from_going_beyond_its_bound(rig: HubRig) -> None:
    await rig.tenant_services.tenants.create(Tenant(TENANT, "gone", 1.0, caps=TenantCaps(max_waiting=3)))
    answer = await rig.post("/api/jobs", submission(), role=Role.TENANT)
    assert answer.code == "unavailable" and "'gone'" in answer.body["detail"]


class Gate:
    """A gate on a real database with time wound by hand, and callers that come in through it."""

    def __init__(self, folder: Path, *, is_shared: bool) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.databases = TenantDatabases(databases_in(folder), self.clock, open_tenant_database)
        self._is_shared = is_shared
        self.admission_control = self.another()

    def another(self) -> TermsAdmission:
        """As at another hub."""
        tenants = Tenants(self.store.documents, self.clock, is_shared=self._is_shared)
        return TermsAdmission(
            tenants, self.databases, self.store.documents, self.clock, is_shared=self._is_shared
        )

    async def come(self, teller: LedgerDriver, *gates: TermsAdmission, count: int, **caps: int) -> int:
        """So many at once: how many got in."""
        tenant = Tenant(TENANT, "first", 1.0, caps=TenantCaps(**caps))
        await teller.database.create_account(TENANT)

        async def one(admission_control: TermsAdmission) -> bool:
            try:
                async with admission_control.admit(tenant):
                    await teller.submit(0, TENANT)
            except Refusal as refusal:
                assert refusal.code in (RefusalCode.QUEUE_FULL, RefusalCode.RATE_LIMITED)
                return False
            return True

        each = [gates[number % len(gates)] for number in range(count)]
        return sum(await asyncio.gather(*(one(admission_control) for admission_control in each)))


@pytest_asyncio.fixture
async def admission_control(tmp_path: Path) -> AsyncIterator[Gate]:
    admission_control = Gate(tmp_path, is_shared=False)
    yield admission_control
    await admission_control.databases.close()


async def test_of_many_that_come_at_once_exactly_those_get_in_that_there_is_room_for(
    admission_control: Gate,
) -> None:
    teller = LedgerDriver(await admission_control.databases.get("first"))
    held = await teller.submit(0, TENANT)
    assert (
        await admission_control.come(teller, admission_control.admission_control, count=50, max_waiting=30)
        == 29
    )
    await teller.end(held, Phase.CANCELLED)
    assert (
        await admission_control.come(teller, admission_control.admission_control, count=5, max_waiting=30)
        == 0
    ), "as it was counted a moment ago"
    await admission_control.clock.advance(1.0)
    assert (
        await admission_control.come(teller, admission_control.admission_control, count=5, max_waiting=30)
        == 1
    )
    assert (
        await admission_control.come(teller, admission_control.admission_control, count=5, max_waiting=32)
        == 2
    ), "a bound that changed counts at once"


async def test_whoever_fails_to_be_written_gives_its_room_back(admission_control: Gate) -> None:
    teller = LedgerDriver(await admission_control.databases.get("first"))
    tenant = Tenant(TENANT, "first", 1.0, caps=TenantCaps(max_waiting=1))
    with pytest.raises(Fault):
        async with admission_control.admission_control.admit(tenant):
            raise Fault("the disk is full")
    await admission_control.clock.advance(1.0)
    assert (
        await admission_control.come(teller, admission_control.admission_control, count=2, max_waiting=1) == 1
    )


async def test_nobody_is_counted_out_who_is_on_the_way_in(admission_control: Gate) -> None:
    teller = LedgerDriver(await admission_control.databases.get("first"))
    await teller.database.create_account(TENANT)
    tenant = Tenant(TENANT, "first", 1.0, caps=TenantCaps(max_waiting=1))
    async with admission_control.admission_control.admit(tenant):
        await admission_control.clock.advance(5.0)
        others = asyncio.create_task(
            admission_control.come(teller, admission_control.admission_control, count=3, max_waiting=1)
        )
        await admission_control.clock.settle()
        await teller.submit(0, TENANT)
    assert await others == 0


async def test_several_hubs_share_one_bound(tmp_path: Path) -> None:
    admission_control = Gate(tmp_path, is_shared=True)
    teller = LedgerDriver(await admission_control.databases.get("first"))
    got_in = await admission_control.come(
        teller,
        admission_control.admission_control,
        admission_control.another(),
        admission_control.another(),
        count=150,
        max_waiting=40,
    )
    assert 40 <= got_in <= 40 + 2 * (40 // 8 + 1)
    await admission_control.databases.close()


async def test_several_hubs_share_one_rate_and_hand_out_no_more_than_there_is(tmp_path: Path) -> None:
    admission_control = Gate(tmp_path, is_shared=True)
    teller = LedgerDriver(await admission_control.databases.get("first"))
    gates = (admission_control.admission_control, admission_control.another(), admission_control.another())
    assert await admission_control.come(teller, *gates, count=90, submits_per_minute=60) == 60
    assert [each.name for each in await admission_control.store.documents.listing(COLLECTION)] == [TENANT]
    await admission_control.clock.advance(10.0)
    assert await admission_control.come(teller, *gates, count=90, submits_per_minute=60) == 10
    await admission_control.databases.close()


async def test_who_has_no_turn_is_told_when_it_comes(admission_control: Gate) -> None:
    turns = RateLimiter(admission_control.store.documents, admission_control.clock, is_shared=False)
    for _ in range(30):
        await turns.take(TENANT, 30)
    for waited_s in (0.0, 0.5):
        await admission_control.clock.advance(waited_s)
        with pytest.raises(Refusal, match="30 jobs a minute") as refused:
            await turns.take(TENANT, 30)
        assert refused.value.details["retry_after_s"] == pytest.approx(2.0 - waited_s, abs=0.01)
    await admission_control.clock.advance(1.51)
    await turns.take(TENANT, 30)
    with pytest.raises(Refusal):
        await turns.take(TENANT, 30)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with some_server() as url:
        yield url


async def test_two_hubs_on_redis_count_together(server: str, tmp_path: Path) -> None:
    url, databases = with_prefix(server), databases_in(tmp_path)
    async with (
        hub_in_process(store_url=url, databases=databases) as here,
        hub_in_process(store_url=url, databases=databases) as there,
    ):
        await set_up(here, caps=TenantCaps(submits_per_minute=5))
        answers = await asyncio.gather(
            *(rig.post("/api/jobs", submission(), role=Role.TENANT) for rig in (here, there) * 6)
        )
        assert sorted(answer.status for answer in answers) == [201] * 5 + [429] * 7


async def test_terms_that_are_changed_over_the_wire_are_kept_to_by_jobs_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.tenancy.terms.REMEMBER_S", 0.0)
    async with running_hub(databases=databases_in(tmp_path)) as rig:
        await set_up(rig)
        high = await rig.submit(priority=50, role=Role.TENANT)
        ended = await rig.ask("PATCH", f"/api/tenants/{TENANT}", {"caps": {"max_priority": 10}})
        assert ended.status == 200, ended.content
        async with asyncio.timeout(60):
            while (await rig.engine.get(JobId(high))).dispatch.priority != 10:
                await asyncio.sleep(0.01)
        await rig.ask("PATCH", f"/api/tenants/{TENANT}", {"denied_node_classes": ["KSampler"]})
        async with asyncio.timeout(60):
            async for _ in rig.engine.watch(JobId(high)):
                """To its end."""
        assert (await rig.engine.get(JobId(high))).dispatch.phase is Phase.FAILED
