"""Tenants and their credits over the API: set up, changed, given credits, shown what they have."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace
from tests.hub._hub import TENANT, Answer, HubRig, hub_in_process, submission
from tests.tenancy._databases import tenant_schema
from tests.tenancy.test_moving import everything

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId, PollId, TenantId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.ledger import FlatPrice
from comfyfleet.model.tenant import Tenant, TenantTerms
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.policy import tenants as policy
from comfyfleet.tenancy.claims import Claim
from comfyfleet.tenancy.deletion import TenantDeletion
from comfyfleet.testing.contract.ledger_driver import LedgerDriver

ACME = "/api/tenants/acme"


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    databases = {"default": f"sqlite:///{tmp_path}/default.db", "other": f"sqlite:///{tmp_path}/other.db"}
    async with hub_in_process(databases=databases) as rig:
        yield rig


async def made(rig: HubRig, **terms: Any) -> dict[str, Any]:
    answer = await rig.post("/api/tenants", {"id": "acme", **terms})
    assert answer.status == 201, answer.content
    found: dict[str, Any] = answer.body
    return found


async def test_a_tenant_is_set_up_shown_and_changed(rig: HubRig) -> None:
    price = {"by": "gpu_second", "credits_per_second": 2, "most_seconds": 600, "base": 1}
    tenant = await made(rig, database="other", price=price, caps={"max_running": 3}, weight=2)
    assert (tenant["database"], tenant["state"], tenant["price"]) == ("other", "active", price)
    assert (await rig.get(ACME)).body == tenant
    assert (await rig.get("/api/tenants")).body["tenants"] == [tenant]
    changed = await rig.ask("PATCH", ACME, {"weight": 5, "location": {"region": "eu"}})
    assert changed.body == {**tenant, "weight": 5, "location": {"region": "eu"}}
    assert (await rig.ask("PATCH", ACME, {"price": None})).body["price"] is None
    for name in ("database", "pool"):
        assert (await rig.ask("PATCH", ACME, {name: "default"})).code == "invalid_request"


async def test_pool_is_the_old_name_of_database(rig: HubRig) -> None:
    """Programs that were written before go on."""
    for number, named in enumerate(({}, {"pool": "other"}, {"database": "other", "pool": "other"})):
        tenant = (await rig.post("/api/tenants", {"id": f"t{number}", **named})).body
        assert tenant["database"] == tenant["pool"] == named.get("pool", "default")
    both = {"database": "default", "pool": "other"}
    refused = await rig.post("/api/tenants", {"id": "acme", **both})
    assert refused.code == "invalid_request" and "`pool` is the old name" in refused.body["detail"]
    await made(rig)
    assert (await rig.post(f"{ACME}/move", both)).code == "invalid_request"
    missing = await rig.post(f"{ACME}/move", {})
    assert missing.code == "invalid_request" and "`database` is missing" in missing.body["detail"]
    assert (await rig.post(f"{ACME}/move", {"pool": "other"})).body["moving_to"] == "other"


async def test_the_list_goes_on_behind_a_page(rig: HubRig) -> None:
    for name in ("b", "a", "c"):
        assert (await rig.post("/api/tenants", {"id": name})).status == 201
    page = (await rig.get("/api/tenants?limit=2")).body
    assert [each["id"] for each in page["tenants"]] == ["a", "b"]
    rest = (await rig.get(f"/api/tenants?limit=2&cursor={page['cursor']}")).body
    assert [each["id"] for each in rest["tenants"]] == ["c"] and rest["cursor"] is None


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"id": "acme"}, "duplicate_differs"),
        ({"id": "default"}, "invalid_request"),
        ({"id": "a b"}, "invalid_request"),
        ({"id": "x", "database": "nowhere"}, "invalid_request"),
        ({"id": "x", "price": {"by": "flat", "credits": -1}}, "invalid_request"),
        (
            {
                "id": "x",
                "price": {"by": "gpu_second", "credits_per_second": 10**15, "most_seconds": 10},
            },
            "invalid_request",
        ),
        (
            {
                "id": "x",
                "allows_direct": True,
                "price": {"by": "output", "credits_each": 1, "most_outputs": 9},
            },
            "invalid_request",
        ),
        ({"id": "x", "weight": 0}, "invalid_request"),
        ({"id": "x", "unheard_of": 1}, "invalid_request"),
    ],
)
async def test_what_cannot_be_a_tenant_is_refused(rig: HubRig, body: dict[str, Any], code: str) -> None:
    await made(rig)
    assert (await rig.post("/api/tenants", body)).code == code
    assert len((await rig.get("/api/tenants")).body["tenants"]) == 1


async def test_without_databases_it_is_said_where_they_are_set_up() -> None:
    async with hub_in_process() as rig:
        answer = await rig.post("/api/tenants", {"id": "acme"})
        assert answer.code == "invalid_request" and "[databases]" in answer.body["detail"]


async def test_a_tenant_is_suspended_and_resumed(rig: HubRig) -> None:
    await made(rig)
    for verb, state in (("suspend", "suspended"), ("suspend", "suspended"), ("resume", "active")):
        assert (await rig.post(f"{ACME}/{verb}")).body["state"] == state


async def idle_worker(rig: HubRig, slots: int = 3) -> Callable[[], Awaitable[LeasedJob | None]]:
    gpu, polls = WorkerId("gpu"), itertools.count()
    await rig.engine.register(RegisterWorker(gpu, Capabilities((Service("comfyui"),), has_hub=True), slots))
    return lambda: rig.engine.poll(Poll(gpu, PollId(str(next(polls))), 0))


async def test_nothing_of_a_suspended_tenant_is_taken_or_leased_and_what_runs_may_end(rig: HubRig) -> None:
    await made(rig)
    poll = await idle_worker(rig)
    running, waiting = [await rig.submit(role=Role.TENANT) for _ in range(2)]
    leased = await poll()
    assert leased is not None and leased.job_id == running
    await rig.post(f"{ACME}/suspend")
    refused = await rig.post("/api/jobs", submission(), role=Role.TENANT)
    assert refused.code == "not_allowed" and "suspended" in refused.body["detail"]
    assert await poll() is None
    assert "held" in (await rig.get(f"/api/jobs/{waiting}/explain")).body["summary"]
    await rig.engine.complete(Completion(leased.ref, JobResult(), 1.0))
    assert (await rig.get(f"/api/jobs/{running}")).body["status"] == "completed"
    await rig.post(f"{ACME}/resume")
    leased = await poll()
    assert leased is not None and leased.job_id == waiting


async def test_a_tenant_runs_as_many_jobs_as_it_may(rig: HubRig) -> None:
    await made(rig, caps={"max_running": 1})
    poll = await idle_worker(rig)
    for _ in range(2):
        await rig.submit(role=Role.TENANT)
    assert await poll() is not None
    assert await poll() is None
    await rig.ask("PATCH", ACME, {"caps": {}})
    assert await poll() is not None
    assert await rig.engine.store.fair_share.terms() == [TenantTerms(TENANT)]


async def test_what_the_store_missed_of_tenants_it_is_told_later(rig: HubRig) -> None:
    """A hub died between the tenant and its terms."""
    await made(rig)
    await rig.tenant_services.tenants.change(TENANT, lambda tenant: replace(tenant, weight=3.0))
    shares = rig.engine.store.fair_share
    gone = TenantTerms(TenantId("gone"), 2.0)
    await shares.put_terms(gone)
    rig.hub.start()
    async with asyncio.timeout(60):
        while await shares.terms() != [TenantTerms(TENANT, 3.0)]:
            await asyncio.sleep(0.02)
    await rig.hub.finish()


# credits


async def balance(rig: HubRig, **more: Any) -> tuple[int, int, int, int]:
    found = (await rig.get(f"{ACME}/balance", **more)).body
    return found["balance"], found["held"], found["available"], found["pending"]


async def test_the_same_grant_twice_is_given_once(rig: HubRig) -> None:
    await made(rig)
    body = {"id": "payment/1", "amount": 100, "note": "paid"}
    first, again = [await rig.post(f"{ACME}/grants", body) for _ in range(2)]
    assert (first.status, again.status) == (201, 200)
    assert first.body == again.body
    assert await balance(rig) == (100, 0, 100, 0)
    assert (await rig.post(f"{ACME}/grants", {**body, "amount": 200})).code == "duplicate_differs"
    assert (await rig.post(f"{ACME}/grants", {"amount": 5})).status == 201
    assert (await balance(rig))[0] == 105


async def test_a_pending_grant_is_shown_and_counts_once_it_is_confirmed(rig: HubRig) -> None:
    await made(rig)
    for name in ("a/1", "b"):
        await rig.post(f"{ACME}/grants", {"id": name, "amount": 50, "pending": True})
    assert await balance(rig) == (0, 0, 0, 100)
    for _ in range(2):
        assert (await rig.post(f"{ACME}/grants/a%2F1/confirm")).body["state"] == "granted"
        assert (await rig.post(f"{ACME}/grants/b/void")).body["state"] == "void"
    assert await balance(rig) == (50, 0, 50, 0)
    assert (await rig.post(f"{ACME}/grants/a%2F1/void")).code == "wrong_phase"
    assert (await rig.post(f"{ACME}/grants/b/confirm")).code == "wrong_phase"
    assert (await rig.post(f"{ACME}/grants/c/confirm")).code == "not_found"
    states = [(each["id"], each["state"]) for each in (await rig.get(f"{ACME}/grants")).body["grants"]]
    # In the order of time: what was confirmed counts from then on.
    assert states == [("b", "void"), ("a/1", "granted")]


async def test_a_book_is_put_right_up_and_down_but_not_below_what_is_held(rig: HubRig) -> None:
    await made(rig)
    await rig.post(f"{ACME}/grants", {"amount": 100})
    down = {"id": "fix", "amount": -30, "note": "given by mistake"}
    first, again = [await rig.post(f"{ACME}/adjustments", down) for _ in range(2)]
    assert (first.status, again.status) == (201, 200)
    assert await balance(rig) == (70, 0, 70, 0)
    short = await rig.post(f"{ACME}/adjustments", {"amount": -71, "note": "too much"})
    assert short.status == 402 and short.body["available"] == 70
    assert (await rig.post(f"{ACME}/adjustments", {**down, "amount": -1})).code == "duplicate_differs"
    assert (await rig.post(f"{ACME}/adjustments", {"amount": 0, "note": "x"})).code == "invalid_request"


async def test_a_statement_goes_on_behind_a_number(rig: HubRig) -> None:
    await made(rig)
    for amount in (1, 2, 3):
        await rig.post(f"{ACME}/grants", {"amount": amount})
    page = (await rig.get(f"{ACME}/statement?limit=2")).body
    rest = (await rig.get(f"{ACME}/statement?limit=2&after={page['cursor']}")).body
    assert [each["balance"] for each in (*page["entries"], *rest["entries"])] == [1, 2, 3]
    assert rest["cursor"] is None


async def test_a_tenant_sees_its_own_credits_and_nobody_elses(rig: HubRig) -> None:
    await made(rig)
    await rig.post("/api/tenants", {"id": "other"})
    await rig.post(f"{ACME}/grants", {"amount": 7})
    _, stranger = await rig.hub.keys.create(Role.TENANT, tenant=TenantId("other"))
    assert (await balance(rig, role=Role.TENANT))[0] == 7
    for path in ("balance", "statement", "grants"):
        assert (await rig.get(f"{ACME}/{path}", role=Role.TENANT)).status == 200
        assert (await rig.get(f"{ACME}/{path}", key=stranger)).code == "not_found"
    assert (await rig.post(f"{ACME}/grants", {"amount": 7}, role=Role.TENANT)).code == "not_allowed"


async def test_a_receipt_says_what_each_round_was_held_for_and_cost(rig: HubRig) -> None:
    job_id = JobId(await rig.submit(role=Role.TENANT))
    path = f"/api/jobs/{job_id}/receipt"
    assert (await rig.get(path, role=Role.TENANT)).body["rounds"] == []
    await made(rig)
    await rig.post(f"{ACME}/grants", {"amount": 100})
    teller = LedgerDriver(await rig.tenant_services.databases.get("default"))
    opening = teller.opening(5, TENANT, job_id=job_id)
    await teller.database.open_round(msgspec.structs.replace(opening, price=FlatPrice(5)))
    await teller.end(opening.hold, Phase.FAILED)
    await teller.retry(opening.hold)
    found = (await rig.get(path, role=Role.TENANT)).body
    told = [(each["round"], each["status"], each["outcome"], each["held"]) for each in found["rounds"]]
    assert told == [(1, "failed", "refunded", 5), (2, "open", None, 5)]
    assert found["rounds"][0]["price"] == {"by": "flat", "credits": 5}
    assert (found["consumed"], found["held"]) == (0, 5)


async def test_a_job_costs_what_its_price_says_and_one_too_many_is_refused(rig: HubRig) -> None:
    await made(rig, price={"by": "flat", "credits": 5})
    await rig.post(f"{ACME}/grants", {"amount": 9})
    job_id = await rig.submit(role=Role.TENANT)
    assert await balance(rig, role=Role.TENANT) == (9, 5, 4, 0)
    short = await rig.post("/api/jobs", submission(), role=Role.TENANT)
    assert (short.status, short.code, short.body["needed"]) == (402, "credits_short", 5)
    gpu = WorkerId("gpu")
    await rig.engine.register(RegisterWorker(gpu, Capabilities((Service("comfyui"),), has_hub=True)))
    leased = await rig.engine.poll(Poll(gpu, PollId("1"), 0))
    assert leased is not None and leased.job_id == job_id
    await rig.engine.complete(Completion(leased.ref, JobResult({"2": {}}), 1.5))
    assert await balance(rig, role=Role.TENANT) == (4, 0, 4, 0)
    (round_,) = (await rig.get(f"/api/jobs/{job_id}/receipt", role=Role.TENANT)).body["rounds"]
    assert (round_["outcome"], round_["consumed"], round_["worker_id"]) == ("consumed", 5, "gpu")
    kinds = [each["kind"] for each in (await rig.get(f"{ACME}/statement", role=Role.TENANT)).body["entries"]]
    assert kinds == ["grant", "reserve", "consume"]


async def test_a_name_of_a_service_that_could_not_be_settled_is_refused(
    request: pytest.FixtureRequest,
) -> None:
    """PostgreSQL keeps no NUL in a text."""
    async with hub_in_process(databases={"default": tenant_schema(request.config)}) as rig:
        await made(rig, price={"by": "flat", "credits": 5})
        await rig.post(f"{ACME}/grants", {"amount": 9})
        answer = await rig.post("/api/jobs", submission(service="a\0b"), role=Role.TENANT)
        assert (answer.status, answer.code, answer.body["field"]) == (400, "invalid_request", "service")
        assert await balance(rig, role=Role.TENANT) == (9, 0, 9, 0)
        assert await rig.engine.store.unsettled(10) == []


# coming and going


async def until(rig: HubRig, is_so: Callable[[Answer], bool]) -> Answer:
    async with asyncio.timeout(60):
        while not is_so(answer := await rig.get(ACME)):
            await asyncio.sleep(0.05)
    return answer


async def test_a_tenant_moves_while_a_job_of_it_runs_and_is_charged_where_it_is_then(rig: HubRig) -> None:
    rig.hub.start()
    await made(rig, price={"by": "flat", "credits": 5})
    await rig.post(f"{ACME}/grants", {"amount": 100})
    job_id = await rig.submit(role=Role.TENANT, reference="mine")
    gpu = WorkerId("gpu")
    await rig.engine.register(RegisterWorker(gpu, Capabilities((Service("comfyui"),), has_hub=True)))
    leased = await rig.engine.poll(Poll(gpu, PollId("1"), 0))
    assert leased is not None
    begun = await rig.post(f"{ACME}/move", {"database": "other"})
    assert (begun.status, begun.body["state"], begun.body["moving_to"]) == (202, "moving", "other")
    refused = await rig.post("/api/jobs", submission(), role=Role.TENANT)
    assert refused.code == "unavailable" and "retry-after" in refused.headers
    assert (await rig.post(f"{ACME}/grants", {"amount": 1})).code == "unavailable"
    moved = (await until(rig, lambda answer: answer.body["state"] == "active")).body
    assert (moved["database"], moved["moving_to"]) == ("other", None)
    await rig.engine.complete(Completion(leased.ref, JobResult({"2": {}}), 1.0))
    assert await balance(rig) == (95, 0, 95, 0)
    assert (await rig.get(f"/api/jobs/{job_id}/result", role=Role.TENANT)).body["result"]["outputs"] == {
        "2": {}
    }
    again = await rig.post("/api/jobs", submission(reference="mine"), role=Role.TENANT)
    assert (again.status, again.body["id"]) == (200, job_id)
    assert (await rig.post(f"{ACME}/move", {"database": "nowhere"})).code == "invalid_request"
    await rig.hub.finish()


async def test_a_deleted_tenant_takes_its_jobs_keys_and_credits_along(tmp_path: Path) -> None:
    databases = {"default": f"sqlite:///{tmp_path}/default.db"}
    shredded: list[TenantId] = []

    async def shred(tenant: TenantId) -> None:
        shredded.append(tenant)

    async with hub_in_process(databases=databases, folder=tmp_path / "files", shred=shred) as rig:
        rig.hub.start()
        await made(rig, price={"by": "flat", "credits": 5})
        await rig.post(f"{ACME}/grants", {"amount": 100})
        job_ids = [await rig.submit(role=Role.TENANT) for _ in range(2)]
        file = await rig.post("/api/files", {"name": "x.png", "type": "image/png"}, role=Role.TENANT)
        assert (await rig.ask("DELETE", ACME)).code == "invalid_request"
        assert (await rig.ask("DELETE", f"{ACME}?confirm=other")).code == "invalid_request"
        gone = await rig.ask("DELETE", f"{ACME}?confirm=acme")
        assert (gone.status, gone.body["state"]) == (202, "leaving")
        assert (await rig.ask("PATCH", ACME, {"weight": 2})).status in (404, 409)
        await until(rig, lambda answer: answer.status == 404)
        assert (await rig.get("/api/jobs", role=Role.TENANT)).code == "unauthenticated"
        for job_id in job_ids:
            assert (await rig.get(f"/api/jobs/{job_id}")).body["status"] == "cancelled"
        assert (await rig.get(f"/api/files/{file.body['id']}")).code == "not_found"
        database = await rig.tenant_services.databases.get("default")
        assert not any((await everything(database)).values())
        assert shredded == [TENANT]
        async with asyncio.timeout(60):
            while await rig.engine.store.fair_share.terms():
                await asyncio.sleep(0.02)
        actions = [each["action"] for each in (await rig.get("/api/audit")).body["entries"]]
        assert "delete_tenant" in actions and "tenant_deleted" in actions
        # Whoever takes the name would see what is left of its jobs.
        refused = await rig.post("/api/tenants", {"id": "acme"})
        assert refused.code == "duplicate_differs" and "choose another name" in refused.body["detail"]
        await rig.hub.finish()


async def test_the_name_of_a_tenant_that_left_without_a_job_is_free_again(tmp_path: Path) -> None:
    async with hub_in_process(databases={"default": f"sqlite:///{tmp_path}/default.db"}) as rig:
        rig.hub.start()
        await made(rig)
        await rig.post(f"{ACME}/grants", {"amount": 100})
        assert (await rig.ask("DELETE", f"{ACME}?confirm=acme")).status == 202
        await until(rig, lambda answer: answer.status == 404)
        await made(rig)
        assert await balance(rig) == (0, 0, 0, 0)
        assert (await rig.post(f"{ACME}/grants", {"amount": 1})).status == 201
        await rig.hub.finish()


async def test_the_audit_log_tells_of_a_deletion_once_however_often_it_is_tried(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(rig)
    await rig.tenant_services.tenants.change(TENANT, lambda tenant: policy.start_deletion(tenant, "acme"))

    async def told() -> list[str]:
        entries = (await rig.get("/api/audit")).body["entries"]
        return [each["outcome"] for each in entries if each["action"] == "tenant_deleted"]

    async def later(self: TenantDeletion, tenant: Tenant, claim: Claim) -> None:
        raise Fault("its database is away")

    with monkeypatch.context() as patch:
        patch.setattr(TenantDeletion, "delete", later)
        for _ in range(3):
            await rig.hub._tenant_maintenance._process(TENANT)
    assert await told() == []
    await rig.hub._tenant_maintenance._process(TENANT)
    assert await told() == ["done"] and (await rig.get(ACME)).status == 404


async def test_what_a_hub_left_undone_is_taken_up_by_the_next_one(rig: HubRig) -> None:
    """It died after it had said what it was going to do."""
    await made(rig)
    await rig.post("/api/tenants", {"id": "leaver"})
    await rig.post(f"{ACME}/grants", {"amount": 7})
    now = rig.engine.now()
    await rig.tenant_services.tenants.change(TENANT, lambda tenant: policy.start_move(tenant, "other", now))
    deletion = TenantId("leaver")
    await rig.tenant_services.tenants.change(deletion, lambda tenant: policy.start_deletion(tenant, "leaver"))
    rig.hub.start()
    moved = await until(rig, lambda answer: answer.body["state"] == "active")
    assert moved.body["database"] == "other" and (await balance(rig))[0] == 7
    async with asyncio.timeout(60):
        while await rig.tenant_services.tenants.get_uncached(deletion) is not None:
            await asyncio.sleep(0.05)
    await rig.hub.finish()


async def test_a_hub_that_lacks_the_database_a_tenant_lies_in_does_not_begin_to_move_it(rig: HubRig) -> None:
    await made(rig)
    await rig.tenant_services.tenants.change(
        TENANT, lambda tenant: msgspec.structs.replace(tenant, database="elsewhere")
    )
    refused = await rig.post(f"{ACME}/move", {"database": "other"})
    assert (
        refused.code == "invalid_request" and "no tenant database 'elsewhere' here" in refused.body["detail"]
    )
    assert (await rig.get(ACME)).body["state"] == "active"


async def test_a_tenant_that_is_called_back_goes_on_where_it_was(rig: HubRig) -> None:
    await made(rig)
    await rig.post(f"{ACME}/grants", {"amount": 7})
    assert (await rig.post(f"{ACME}/move", {"database": "other"})).body["moving_to"] == "other"
    assert (await rig.post(f"{ACME}/move", {"database": "default"})).body["moving_to"] == "default"
    rig.hub.start()
    back = await until(rig, lambda answer: answer.body["state"] == "active")
    assert back.body["database"] == "default" and (await balance(rig))[0] == 7
    await rig.submit(role=Role.TENANT)
    await rig.hub.finish()
