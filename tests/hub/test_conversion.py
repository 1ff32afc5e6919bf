"""A workflow of the editor is converted with what a live worker told, at whichever door it comes in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hub._hub import HubRig, running_hub
from tests.policy._editor import Editor
from tests.pool._fleet import QUICK_AGENT, QUICK_COMFYUI

from comfyfleet import FleetClient, Refusal, WorkflowPool
from comfyfleet.engine.node_catalogs import COLLECTION, SHARED_COLLECTION, NodeCatalogs
from comfyfleet.hub.local_worker_api import LocalWorkerApi
from comfyfleet.model.access import Role
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.model.node_classes import NodeCatalog, Widget
from comfyfleet.model.worker import Capabilities, Service, TenantAccess
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi

GPU = WorkerId("gpu")
SETTINGS = FakeSettings(time_scale=0.01)


def editors_workflow(kind: str = "EmptyImage") -> dict[str, Any]:
    editor = Editor()
    empty = editor.node(kind, [64, 64, 1, 255])
    reroute, saver = editor.node("Reroute"), editor.node("SaveImage", ["picture"])
    editor.wire(empty, 0, reroute, "")
    editor.wire(reroute, 0, saver, "images", "IMAGE")
    return editor.saved()


CONVERTED = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 255},
        "_meta": {"title": "EmptyImage"},
    },
    "3": {
        "class_type": "SaveImage",
        "inputs": {"filename_prefix": "picture", "images": ["1", 0]},
        "_meta": {"title": "SaveImage"},
    },
}


@asynccontextmanager
async def hub_with_agent(settings: FakeSettings = SETTINGS) -> AsyncIterator[tuple[HubRig, Agent]]:
    """The agent reaches its hub as from another machine."""
    async with (
        running_hub() as rig,
        FakeComfyUI(settings) as fake,
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, GPU, [ComfyUI(fake.url, QUICK_COMFYUI)], QUICK_AGENT) as agent,
    ):
        await agent.wait_for_first_check()
        yield rig, agent


async def test_a_worker_behind_http_lets_the_hub_convert() -> None:
    async with hub_with_agent() as (rig, _), FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
        assert await client.convert(editors_workflow()) == CONVERTED
        assert await client.convert(CONVERTED) == CONVERTED
        job = await client.submit(editors_workflow())
        result = await client.wait(job.id)
        assert result.status == "completed" and result.result is not None
        assert [file.filename.rpartition("/")[2][:7] for file in result.result.files] == ["picture"]
        # The same as the graph that it means, and repeatable like it.
        assert job.workflow_hash == (await client.submit(CONVERTED)).workflow_hash
        first = await client.submit(editors_workflow(), reference="mine")
        assert (await client.submit(editors_workflow(), reference="mine")).id == first.id
        (refused,) = await client.submit_many([editors_workflow("Nobodys")])
        assert isinstance(refused, Refusal) and refused.code.value == "unworkable"


async def test_an_agent_in_the_hubs_own_process_lets_it_convert_too(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeComfyUI(SETTINGS) as fake:
        assert rig.assets is not None
        inside = LocalWorkerApi(rig.engine, rig.assets)
        async with Agent(inside, GPU, [ComfyUI(fake.url, QUICK_COMFYUI)], QUICK_AGENT) as agent:
            await agent.wait_for_first_check()
            answer = await rig.post("/api/workflows/convert", {"workflow": editors_workflow()})
        assert (answer.status, answer.body["workflow"]) == (200, CONVERTED)


async def test_without_a_worker_that_has_the_nodes_it_says_which_are_missing() -> None:
    async with hub_with_agent() as (rig, agent):
        answer = await rig.post("/api/jobs", {"payload": {"workflow": editors_workflow("Nobodys")}})
        assert (answer.status, answer.code) == (422, "unworkable")
        assert answer.body["missing"] == ["Nobodys"]
        assert "none has Nobodys" in answer.body["detail"] and "Export (API)" in answer.body["detail"]
        await agent.stop()
        answer = await rig.post("/api/workflows/convert", {"workflow": editors_workflow()})
        assert answer.code == "unworkable" and "no connected worker can say" in answer.body["detail"]
        await rig.engine.remove_worker(GPU)
        assert await rig.documents.listing(COLLECTION) == await rig.documents.listing(SHARED_COLLECTION) == []


async def test_a_worker_of_other_tenants_is_not_asked() -> None:
    async with hub_with_agent() as (rig, agent):
        known = rig.engine.known_worker(GPU)
        assert known is not None
        await agent.stop()
        private = msgspec.structs.replace(
            known.capabilities, tenant_access=TenantAccess("strict", (TenantId("theirs"),))
        )
        await rig.engine.register(RegisterWorker(GPU, private))
        theirs = (await rig.post("/api/keys", {"role": "tenant", "tenant": "theirs"})).body["key"]
        body = {"workflow": editors_workflow()}
        assert (await rig.post("/api/workflows/convert", body, key=theirs)).status == 200
        answer = await rig.post("/api/workflows/convert", body, role=Role.TENANT)
        assert answer.code == "unworkable" and "no connected worker can say" in answer.body["detail"]
        assert (await rig.post("/api/jobs", {"payload": body}, role=Role.TENANT)).code == "unworkable"


async def test_a_worker_that_was_forgotten_tells_of_its_nodes_again() -> None:
    async with hub_with_agent() as (rig, _):
        await rig.engine.remove_worker(GPU)

        async with asyncio.timeout(60):
            while (await rig.post("/api/workflows/convert", {"workflow": editors_workflow()})).status != 200:
                await asyncio.sleep(0.02)


async def test_nobody_describes_a_worker_that_is_not_there() -> None:
    async with running_hub() as rig:
        body = {"worker_id": "nobody", "definitions": {"KSampler": [["seed", 0, "control"]]}}
        answer = await rig.post("/api/worker/describe", body, role=Role.WORKER)
        assert answer.code == "not_found"


async def test_many_nodes_are_kept_in_parts_and_come_back_whole() -> None:
    dice = random.Random(1)
    many: dict[str, tuple[Widget, ...]] = {
        f"Node{number}": (Widget("seed", default="".join(dice.choices("abcdefghij0123456789", k=100))),)
        for number in range(3_000)
    }
    async with running_hub() as rig:
        catalogs = NodeCatalogs(rig.engine._context)
        worker = await rig.engine.register(RegisterWorker(GPU, Capabilities((Service("comfyui"),))))
        await catalogs.describe(GPU, NodeCatalog(many))
        assert len(await rig.documents.listing(COLLECTION)) > 1
        assert await catalogs.definitions(worker) == many
        await catalogs.forget(GPU)
        assert await catalogs.definitions(worker) is None


async def test_what_would_unpack_without_end_is_not_kept() -> None:
    async with running_hub() as rig:
        with pytest.raises(Refusal, match="the limit is 16777216"):
            await rig.engine.describe(GPU, NodeCatalog({"Bomb": (Widget("x", default="x" * 17_000_000),)}))
        assert await rig.documents.listing(COLLECTION) == []


async def test_a_pool_converts_with_its_own_servers(tmp_path: Path) -> None:
    async with (
        FakeComfyUI(SETTINGS) as server,
        WorkflowPool([server.url], comfyui=QUICK_COMFYUI, agent=QUICK_AGENT) as pool,
    ):
        assert await pool.convert(editors_workflow()) == CONVERTED
        result = await pool.run(editors_workflow(), include_outputs=["3"])
        assert len(await pool.save(result, tmp_path)) == 1
        with pytest.raises(Refusal, match="none has Nobodys"):
            await pool.enqueue(editors_workflow("Nobodys"))
