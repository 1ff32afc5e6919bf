"""A program that talks to a hub through the client: refusals are refusals, and repeats do nothing twice."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from tests.hub._hub import HubRig, graph, running_hub

from comfyfleet import Fault, FleetClient, Refusal, RefusalCode, SyncFleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.ledger import FlatPrice
from comfyfleet.wire.bodies import WebhookBody
from comfyfleet.wire.credits import GrantView
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.simulated import SimulatedConnector


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub() as rig:
        yield rig


@pytest_asyncio.fixture
async def client(rig: HubRig) -> AsyncIterator[FleetClient]:
    async with FleetClient(rig.url, rig.keys[Role.ADMIN], patience_s=2.0) as client:
        yield client


def code_of(error: pytest.ExceptionInfo[Refusal]) -> RefusalCode:
    return error.value.code


async def test_a_job_is_submitted_changed_looked_at_and_cancelled(client: FleetClient) -> None:
    made = await client.submit(graph(), priority=3, metadata={"user": "42"})
    assert (made.status, made.is_repeat) == ("queued", False)
    assert (await client.set_priority(made.id, 7)).priority == 7
    assert (await client.pause(made.id)).is_paused
    assert not (await client.resume(made.id)).is_paused
    assert (await client.explain(made.id)).summary
    assert [job.id for job in (await client.jobs(metadata={"user": "42"})).jobs] == [made.id]
    assert (await client.cancel(made.id)).status == "cancelled"
    assert (await client.wait(made.id, timeout=60)).status == "cancelled"
    assert (await client.retry(made.id)).status == "queued"


async def test_webhooks_are_set_up_refused_and_looked_after(client: FleetClient) -> None:
    made = await client.create_webhook("https://example.com/hook", events=["queued"], name="billing")
    assert [each.id for each in (await client.webhooks()).webhooks] == [made.id]
    assert (await client.rotate_webhook_secret()).secret.startswith("whsec_")
    await client.delete_webhook(made.id)
    for webhook in ("http://127.0.0.1/", WebhookBody("http://[::1]/")):
        with pytest.raises(Refusal) as refused:
            await client.submit(graph(), webhook=webhook)
        assert code_of(refused) is RefusalCode.INVALID_REQUEST
    job = await client.submit(graph(), webhook=WebhookBody("https://example.com/", (FactKind.LATE,)))
    assert (await client.deliveries(job.id)).deliveries == ()
    assert (await client.deliveries(status="given_up")).deliveries == ()
    with pytest.raises(Refusal) as refused:
        await client.resend_delivery(f"{job.id}_1_job")
    assert code_of(refused) is RefusalCode.NOT_FOUND


async def test_a_job_is_watched_to_its_end(rig: HubRig, client: FleetClient) -> None:
    async with Agent(rig.engine, WorkerId("gpu"), [SimulatedConnector()]):
        made = await client.submit(graph())
        kinds = [update.kind async for update in client.watch(made.id)]
        ended = await client.wait(made.id, timeout=60)
    assert kinds[-1] == "completed"
    assert ended.status == "completed" and ended.result is not None
    assert [worker.id for worker in await client.workers()] == ["gpu"]
    assert (await client.stats()).completed == 1


async def test_the_same_key_is_the_same_job_and_the_same_reference_too(client: FleetClient) -> None:
    first = await client.submit(graph(), idempotency_key="once")
    assert (await client.submit(graph(), idempotency_key="once")).id == first.id
    own = await client.submit(graph(), reference="mine")
    assert (await client.submit(graph(), reference="mine")).id == own.id != first.id
    with pytest.raises(Refusal) as refused:
        await client.submit(graph(seed=8), reference="mine")
    assert code_of(refused) is RefusalCode.DUPLICATE_DIFFERS


async def test_many_jobs_go_in_batches_and_each_has_its_own_answer(client: FleetClient) -> None:
    told: list[tuple[int, int]] = []
    workflows = [graph(seed=number) for number in range(450)] + [{"1": {"inputs": {}}}]
    found = await client.submit_many(workflows, priority=2, on_progress=lambda *done: told.append(done))
    assert told == [(200, 451), (400, 451), (451, 451)]
    assert len({job.id for job in found if not isinstance(job, Refusal)}) == 450
    assert isinstance(found[-1], Refusal) and found[-1].code is RefusalCode.INVALID_WORKFLOW
    assert len([job async for job in client.every_job(limit=100)]) == 450


async def test_a_refusal_comes_back_with_its_code(rig: HubRig, client: FleetClient) -> None:
    with pytest.raises(Refusal) as refused:
        await client.get("nobody's")
    assert code_of(refused) is RefusalCode.NOT_FOUND
    with pytest.raises(Refusal) as refused:
        async for _ in client.watch("nobody's"):
            pass
    assert code_of(refused) is RefusalCode.NOT_FOUND
    async with FleetClient(rig.url, rig.keys[Role.VIEWER]) as viewer:
        with pytest.raises(Refusal) as refused:
            await viewer.submit(graph())
    assert code_of(refused) is RefusalCode.NOT_ALLOWED
    async with FleetClient(rig.url) as stranger:
        with pytest.raises(Refusal) as refused:
            await stranger.stats()
    assert code_of(refused) is RefusalCode.UNAUTHENTICATED


async def test_keys_are_made_used_and_revoked(rig: HubRig, client: FleetClient) -> None:
    made = await client.create_key("tenant", tenant="acme", name="theirs")
    async with FleetClient(rig.url, made.key) as tenant:
        await tenant.submit(graph())
        assert (await client.jobs(tenant="acme")).jobs[0].tenant == "acme"
        assert made.id in {key.id for key in (await client.keys()).keys}
        await client.revoke_key(made.id)
        with pytest.raises(Refusal) as refused:
            await tenant.stats()
    assert code_of(refused) is RefusalCode.UNAUTHENTICATED


async def test_tenants_are_set_up_and_given_credits(tmp_path: Path) -> None:
    databases = {"default": f"sqlite:///{tmp_path}/tenants.db"}
    async with running_hub(databases=databases) as rig, FleetClient(rig.url, rig.keys[Role.ADMIN]) as client:
        made = await client.create_tenant("acme", price=FlatPrice(5), caps={"max_running": 2})
        assert (made.price, made.caps.max_running) == (FlatPrice(5), 2)
        assert (await client.change_tenant("acme", weight=3)).price == FlatPrice(5)
        assert [each.id for each in (await client.tenants()).tenants] == ["acme"]
        assert (await client.suspend_tenant("acme")).state == "suspended"
        assert (await client.resume_tenant("acme")).state == (await client.tenant("acme")).state == "active"
        first, again = [await client.grant_credits("acme", 100, grant_id="p") for _ in range(2)]
        assert first == again
        await client.grant_credits("acme", 10, grant_id="q", pending=True)
        await client.grant_credits("acme", 10, grant_id="r", pending=True)
        assert (await client.confirm_grant("acme", "q")).state == "granted"
        assert (await client.void_grant("acme", "r")).state == "void"
        listed = (await client.grants("acme")).grants
        assert sorted(listed, key=lambda each: each.at) == list(listed) and len(listed) == 3
        page, paged = await client.grants("acme", limit=1), list[GrantView]()
        while page.cursor is not None:
            paged += page.grants
            page = await client.grants("acme", page.cursor, limit=1)
        assert paged == list(listed), "page by page the same, in the order of time"
        assert (await client.adjust_credits("acme", -20, "a mistake")).balance == 90
        assert (await client.balance("acme")).available == 90
        assert [each.balance for each in (await client.statement("acme", 1)).entries] == [10, -20]
        assert (await client.delete_tenant("acme", confirm="acme")).state == "leaving"
        with pytest.raises(Refusal, match="the tenant's terms are not valid"):
            await client.change_tenant("acme", wait=3)


async def test_the_queue_and_the_workers_are_told_what_to_do(rig: HubRig, client: FleetClient) -> None:
    assert (await client.pause_queue()).is_paused
    assert not (await client.resume_queue()).is_paused
    async with Agent(rig.engine, WorkerId("gpu/0"), [SimulatedConnector()]) as agent:
        await agent.wait_for_first_check()
        assert (await client.pause_worker("gpu/0")).status == "paused"
        assert (await client.resume_worker("gpu/0")).status == "idle"
    await client.remove_worker("gpu/0")
    assert await client.workers() == ()
    assert await client.blocks() == ()
    assert (await client.dead_letter()).jobs == ()
    assert await client.purge_dead() == 0


def test_an_address_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(Refusal, match="is not the address of a hub"):
        FleetClient("127.0.0.1:3001")


async def test_a_hub_that_is_away_is_a_fault_once_patience_is_over() -> None:
    async with FleetClient("http://127.0.0.1:9", patience_s=0.2) as client:
        with pytest.raises(Fault, match=r"cannot reach the hub at http://127\.0\.0\.1:9: connection refused"):
            await client.stats()


async def test_a_hub_without_tls_and_a_name_that_nobody_has_are_told_as_what_they_are(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FleetClient(rig.url.replace("http:", "https:"), patience_s=0.2) as client:
        with pytest.raises(Fault, match=r"TLS fails \(.*\)\. Is it http:// there\?"):
            await client.stats()

    async def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    async with FleetClient("http://hub.example:3001", patience_s=0.2) as client:
        with pytest.raises(Fault, match="Name or service not known"):
            await client.stats()


class Flaky:
    """A hub that loses its first answers, and counts what it was asked."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.retries = 0
        self.lose = 2
        self.url = ""

    async def submit(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers["idempotency-key"])
        return self._answer(request)

    async def retry(self, request: web.Request) -> web.Response:
        self.retries += 1
        return self._answer(request)

    def _answer(self, request: web.Request) -> web.Response:
        if self.lose:
            self.lose -= 1
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"id": "1", "status": "queued", "workflow_hash": "w", "jobId": "1"})

    async def busy(self, request: web.Request) -> web.Response:
        if self.lose:
            self.lose -= 1
            body = {"code": "rate_limited", "status": 429, "title": "x", "type": "x", "retry_after_s": 0.01}
            return web.Response(status=429, body=msgspec.json.encode(body))
        return web.json_response({"workers": []})


@pytest_asyncio.fixture
async def flaky() -> AsyncIterator[Flaky]:
    hub = Flaky()
    app = web.Application()
    app.router.add_post("/api/jobs", hub.submit)
    app.router.add_post("/api/jobs/1/retry", hub.retry)
    app.router.add_get("/api/workers", hub.busy)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield hub
    await runner.cleanup()


async def test_a_submission_whose_answer_is_lost_is_repeated_under_the_same_key(flaky: Flaky) -> None:
    async with FleetClient(flaky.url, patience_s=5) as client:
        assert (await client.submit(graph())).id == "1"
    assert len(flaky.keys) == 3
    assert len(set(flaky.keys)) == 1


async def test_what_would_be_done_twice_is_not_repeated(flaky: Flaky) -> None:
    async with FleetClient(flaky.url, patience_s=5) as client:
        with pytest.raises(Fault, match="closed without an answer"):
            await client.retry("1")
    assert flaky.retries == 1


async def test_a_hub_that_says_not_now_is_asked_again(flaky: Flaky) -> None:
    async with FleetClient(flaky.url, patience_s=5) as client:
        assert await client.workers() == ()
    assert flaky.lose == 0


async def test_a_script_without_a_loop_gets_the_same_answers(rig: HubRig, tmp_path: Path) -> None:
    path = tmp_path / "workflow.json"
    path.write_bytes(msgspec.json.encode(graph()))

    def script() -> tuple[str, list[str], int]:
        with SyncFleetClient(rig.url, rig.keys[Role.ADMIN]) as client:
            made = client.submit(path, metadata={"from": "a file"})
            client.cancel(made.id)
            kinds = [update.kind for update in client.watch(made.id)]
            with pytest.raises(Refusal):
                client.get("nobody's")
            return client.wait(made.id).status, kinds, len(list(client.every_job()))

    status, kinds, jobs = await asyncio.to_thread(script)
    assert (status, kinds[-1], jobs) == ("cancelled", "cancelled", 1)


def test_a_script_without_a_loop_has_every_method() -> None:
    def methods(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}

    assert methods(SyncFleetClient) == methods(FleetClient)


def test_a_closed_client_says_so() -> None:
    client = SyncFleetClient()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.stats()


async def test_a_hub_that_goes_away_in_the_middle_of_a_batch_loses_nothing_that_was_taken(
    rig: HubRig, client: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = client._link.ask
    calls = 0

    async def second_fails(name: str, *more: Any, **given: Any) -> Any:
        nonlocal calls
        calls += name == "submit_batch"
        if calls == 2:
            raise Fault("the hub did not answer")
        return await ask(name, *more, **given)

    monkeypatch.setattr("comfyfleet.client.client._BATCH_SIZE", 2)
    monkeypatch.setattr(client._link, "ask", second_fails)
    found = await client.submit_many([graph()] * 5, idempotency_key="night")
    taken = [each.id for each in found if not isinstance(each, Refusal)]
    refused = [each for each in found if isinstance(each, Refusal)]
    assert (len(taken), len(refused)) == (2, 3)
    assert {each.code for each in refused} == {RefusalCode.UNAVAILABLE}
    assert "unknown" in refused[0].message
    calls = 2
    again = await client.submit_many([graph()] * 5, idempotency_key="night")
    assert [each.id for each in again if not isinstance(each, Refusal)][:2] == taken
    assert (await rig.get("/api/stats")).body["waiting"] == 5
