"""Jobs of other services than ComfyUI over the hub: every door, every store, the content of each result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.hub._hub import TENANT, HubRig, graph, hub_in_process, running_hub, submission
from tests.hub.test_socket import connected
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.client.client import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.canonical_json import canonical_json
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId
from comfyfleet.model.tenant import Tenant
from comfyfleet.pool.options import Server
from comfyfleet.pool.servers import PoolAgents
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.crypto.keyring import Keyring, MasterKeys
from comfyfleet.stores.crypto.store import encrypted_store
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.wire.bodies import InputBody
from comfyfleet.worker.connectors.registry import connect
from comfyfleet.worker.transports.http import HttpWorkerApi


def asks(payload: Any, service: str = "simulated", **fields: Any) -> dict[str, Any]:
    return {"service": service, "payload": payload, **fields}


def made(payload: dict[str, Any]) -> str:
    return sha256(canonical_json(payload)).hexdigest()


async def ended(rig: HubRig, job_id: str) -> None:
    async with asyncio.timeout(60):
        while not (await rig.engine.get(JobId(job_id))).dispatch.phase.is_final:
            await asyncio.sleep(0.01)


async def result_of(rig: HubRig, job_id: str) -> dict[str, Any]:
    await ended(rig, job_id)
    answer = (await rig.get(f"/api/jobs/{job_id}/result")).body
    assert answer["status"] == "completed", answer
    outputs: dict[str, Any] = answer["result"]["outputs"]
    return outputs


class Workers:
    """Agents of simulated services, with a connection each."""

    def __init__(self) -> None:
        self._agents = PoolAgents(lambda *_: None)
        self._apis: list[HttpWorkerApi] = []

    async def add(self, rig: HubRig, name: str = "sim", **settings: Any) -> None:
        self._apis.append(api := HttpWorkerApi((rig.url,), rig.keys[Role.WORKER]))
        await self._agents.add(api, Server(id=name, slots=4, connector=connect("simulated", "0", settings)))

    async def close(self) -> None:
        await self._agents.close()
        for api in self._apis:
            await api.close()


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    workers = Workers()
    yield workers
    await workers.close()


@pytest.fixture(params=["memory", "sqlite", "encrypted", "redis", "postgres"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HubRig]:
    def around(store: Store, clock: Clock) -> Store:
        masters = MasterKeys({"k1": b"1" * 32}, "k1")
        return encrypted_store(store, Keyring(store.documents, clock, lambda: masters))

    options: dict[str, Any] = {"folder": tmp_path / "files"}
    match request.param:
        case "encrypted":
            options |= {"around": around, "store_url": f"sqlite:///{tmp_path}/fleet.db"}
        case "sqlite":
            options["store_url"] = f"sqlite:///{tmp_path}/fleet.db"
        case "postgres":
            options["around"] = lambda *_: PostgresStore(emptied_database(request.config))
        case "redis":
            with some_server() as url:
                async with running_hub(store_url=with_prefix(url), **options) as rig:
                    yield rig
            return
    async with running_hub(**options) as rig:
        yield rig


async def test_what_a_caller_gets_was_made_from_what_it_sent(rig: HubRig, workers: Workers) -> None:
    await workers.add(rig)
    async with FleetClient(rig.url, rig.keys[Role.ADMIN]) as client:
        file = await client.upload(b"a picture", name="a.png")
        payload = {"seed": -1, "outputs": {"out": {"texts": ["héllo"]}}, "inputs": {"image": None}}
        jobs = await asyncio.gather(
            *(
                client.submit(
                    {**payload, "outputs": {"out": {"number": [number]}}},
                    service="simulated",
                    inputs=[InputBody("inputs", "image", file.id)],
                )
                for number in range(5)
            )
        )
        for number, job in enumerate(jobs):
            assert job.seeds is not None
            ran = {**payload, "outputs": {"out": {"number": [number]}}, "seed": job.seeds["seed"]}
            assert await result_of(rig, job.id) == {
                "out": {"number": [number]},
                "payload": {
                    "sha256": [made(ran)],
                    "seed": [job.seeds["seed"]],
                    "files": [["image", sha256(b"a picture").hexdigest()]],
                },
            }
            told = await client.payload(job.id)
            assert (told.service, told.payload) == ("simulated", {**ran, "seed": -1})
        assert len({job.workflow_hash for job in jobs}) == 1


async def test_a_payload_that_fails_twice_is_retried_until_it_runs(rig: HubRig, workers: Workers) -> None:
    await workers.add(rig, "one")
    await workers.add(rig, "two")
    await workers.add(rig, "three")
    payload = {"fail": {"kind": "transient", "times": 2}}
    answer = await rig.post("/api/jobs", asks(payload, retry_delay_s=0))
    assert (await result_of(rig, answer.body["id"]))["payload"]["sha256"] == [made(payload)]
    job = (await rig.get(f"/api/jobs/{answer.body['id']}")).body
    assert job["attempts"] == 3


async def test_a_job_with_unreadable_characters_is_stored_and_told_as_it_was(rig: HubRig) -> None:
    payload = {"a\u0001\u0085\u202e": ["\u0000 and \U0001f600", {"\u0000": None}], "": 1e-300}
    answer = await rig.post("/api/jobs", asks(payload, "nobody's"))
    assert answer.status == 201, answer.content
    told = (await rig.get(f"/api/jobs/{answer.body['id']}/payload")).body
    assert told["payload"] == payload
    named = await rig.post("/api/jobs", asks({"models": ["a\u0000b\n"]}))
    explained = await rig.get(f"/api/jobs/{named.body['id']}/explain")
    assert (named.status, explained.status) == (201, 200)


async def test_a_tenants_jobs_of_a_service_live_in_its_own_database(tmp_path: Path, workers: Workers) -> None:
    databases = {"first": f"sqlite:///{tmp_path}/tenants.db"}
    async with running_hub(databases=databases) as rig:
        await (await rig.tenant_services.databases.get("first")).create_account(TENANT)
        await rig.tenant_services.tenants.create(Tenant(TENANT, "first", 1.0, denied_models=("secret*",)))
        await workers.add(rig)
        payload = {"models": ["open"], "outputs": {"out": {"x": [1]}}}
        answer = await rig.post("/api/jobs", asks(payload), role=Role.TENANT)
        assert answer.status == 201, answer.content
        assert (await result_of(rig, answer.body["id"]))["payload"]["sha256"] == [made(payload)]
        refused = await rig.post("/api/jobs", asks({"models": ["secret.ckpt"]}), role=Role.TENANT)
        assert (refused.status, refused.code) == (403, "not_allowed")
        assert "the payload names the model 'secret.ckpt'" in refused.body["detail"]
        retried = await rig.post(f"/api/jobs/{answer.body['id']}/retry", role=Role.TENANT)
        assert retried.status == 409, "it has completed"
        await workers.close()


# one hub in this process


@pytest.fixture
async def plain() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


@pytest.mark.parametrize("old_name", ["service", "service_type", "job_type", "service_required"])
async def test_the_service_is_understood_under_every_name_that_brokers_use(
    plain: HubRig, old_name: str
) -> None:
    payload = {"prompt": "a cat", "workflow": {"steps": 3}, "nodes": [], "links": []}
    answer = await plain.post("/api/jobs", {old_name: "own", "payload": payload})
    assert answer.status == 201, answer.content
    told = (await plain.get(f"/api/jobs/{answer.body['id']}/payload")).body
    assert (told["service"], told["payload"]) == ("own", payload), "nothing in it was taken for a graph"


async def test_a_batch_and_a_quote_take_payloads_of_any_service(plain: HubRig) -> None:
    jobs = [asks({"seconds": 1}), submission(workflow=graph()), asks({"x": 1}, "own"), asks({"x": 1})]
    answer = (await plain.post("/api/jobs/batch", {"jobs": jobs})).body
    assert [each["status"] for each in answer["items"]] == [201, 201, 201, 422]
    quote = await plain.post("/api/jobs/quote", asks({"seconds": 1}))
    assert quote.body["workflow_hash"] == answer["items"][0]["job"]["workflow_hash"]
    assert quote.body["unworkable"] == ["no worker is connected"]


async def test_a_wrong_payload_is_a_problem_that_names_field_cause_and_next_step(plain: HubRig) -> None:
    answer = await plain.post("/api/jobs", asks({"seconds": "long"}))
    assert (answer.status, answer.code) == (422, "invalid_workflow")
    for word in ("payload.seconds", "Expected `float | null`, got `str`", "submit again"):
        assert word in answer.body["detail"]


async def test_a_repeat_of_a_payload_is_the_same_job(plain: HubRig) -> None:
    sent = asks({"seconds": 1, "outputs": {}})
    first = await plain.post("/api/jobs", sent, headers={"idempotency-key": "k"})
    turned = asks({"outputs": {}, "seconds": 1.0})
    again = await plain.post("/api/jobs", turned, headers={"idempotency-key": "k"})
    assert (first.status, again.status) == (201, 200) and again.body["id"] == first.body["id"]
    other = await plain.post("/api/jobs", asks({"seconds": 2}), headers={"idempotency-key": "k"})
    assert (other.status, other.code) == (409, "duplicate_differs")


async def test_a_payload_is_not_converted(plain: HubRig) -> None:
    answer = await plain.post(
        "/api/workflows/convert", {"service": "a1111", "workflow": {"route": "txt2img"}}
    )
    assert (answer.status, answer.code, answer.body["field"]) == (400, "invalid_request", "service")
    assert "submit it as it is" in answer.body["detail"]


async def test_the_hub_lists_services_with_schemas_and_workers(plain: HubRig) -> None:
    found = {each["name"]: each for each in (await plain.get("/api/services")).body["services"]}
    assert {"comfyui", "simulated"} <= found.keys()
    assert found["simulated"]["payload_schema"]["properties"]["seconds"]
    assert {each["workers"] for each in found.values()} == {0}


async def test_the_document_has_the_schema_of_each_payload(plain: HubRig) -> None:
    document = (await plain.get("/openapi.json", role=None)).body
    schemas = document["components"]["schemas"]
    assert schemas["Payload_simulated"]["properties"]["outputs"]
    assert "`simulated`: Payload_simulated" in schemas["SubmitBody"]["properties"]["payload"]["description"]
    text = json.dumps(document)
    named = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert named <= schemas.keys(), "every reference leads somewhere"


async def test_a_small_worker_is_told_which_models_of_a_service_wait(plain: HubRig) -> None:
    answer = await plain.post("/api/jobs", asks({"models": ["a"]}))
    assert answer.body["warnings"] == ["no worker is connected"]
    view = await plain.engine.get(JobId(answer.body["id"]))
    assert view.dispatch.phase is Phase.QUEUED


async def test_an_old_caller_submits_a_payload_over_the_websocket(workers: Workers) -> None:
    async with running_hub() as rig:
        await workers.add(rig)
        payload = {"outputs": {"out": {"x": [1]}}}
        async with connected(rig, Role.ADMIN) as line:
            told = await line.ask(
                "submit_job", service_required="simulated", payload=payload, message_id="m1"
            )
            assert told["type"] == "job_submitted", told
            assert (await result_of(rig, told["job_id"]))["payload"]["sha256"] == [made(payload)]
            refused = await line.ask("submit_job", service_required="simulated", payload={"x": 1})
            while refused["type"] not in ("error", "job_submitted"):
                refused = await line.next()
            assert refused["type"] == "error" and "unknown field `x`" in str(refused)
        await workers.close()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "deep": lambda: b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "NaN": lambda: b'{"a":NaN}',
    "infinite": lambda: b'{"a":1e999}',
    "huge number": lambda: b'{"a":' + b"9" * 5_000 + b"}",
    "no object": lambda: b"[1,2]",
    "text": lambda: b'"x"',
    "null": lambda: b"null",
    "not UTF-8": lambda: b'{"a":"\xff\xfe"}',
    "lone surrogate": lambda: b'{"a":"\\ud800"}',
    "cut off": lambda: b'{"a":[1,2',
}


@pytest.mark.parametrize("service", ["simulated", "own"])
@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_payload_is_refused_and_not_kept(plain: HubRig, kind: str, service: str) -> None:
    raw = b'{"service":"%s","payload":%s}' % (service.encode(), HOSTILE[kind]())
    answer = await plain.post("/api/jobs", raw=raw)
    assert answer.status in (400, 422), answer.content
    assert answer.code in ("invalid_request", "invalid_workflow")
    assert (await plain.get("/api/jobs")).body["jobs"] == []


async def test_a_payload_with_very_many_keys_is_read(plain: HubRig) -> None:
    payload = {str(number): number for number in range(100_000)}
    answer = await plain.post("/api/jobs", asks(payload, "own"))
    assert answer.status == 201, answer.content
    assert (await plain.engine.get(JobId(answer.body["id"]))).job.payload.workflow == payload
