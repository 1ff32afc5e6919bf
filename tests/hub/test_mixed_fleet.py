"""A hub with agents on servers of several ComfyUI releases: each job runs where it is accepted, at once."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.hub._hub import HubRig, running_hub
from tests.pool._fleet import QUICK_AGENT, QUICK_COMFYUI, text_to_image
from tests.pool.test_mixed_versions import MIDDLE, NEW, OLD, newer_sampler, saved_by_editor, scaled

from comfyfleet import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.node_classes import NodeCatalog, read_catalog
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi


class CountingApi(HttpWorkerApi):
    """Keeps the catalogs that go over the wire."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.bodies: list[Any] = []

    async def _send(self, name: str, body: Any, wait_s: float = 0.0) -> bytes | None:
        if name == "describe":
            self.bodies.append(body)
        return await super()._send(name, body, wait_s)


class OldHubApi(CountingApi):
    """Hears from the hub what one would say that knows no signatures."""

    async def register(self, call: RegisterWorker) -> WorkerRecord:
        record = await super().register(call)
        self._knows_nodes[call.worker_id] = None
        return record


class MixedFleet:
    def __init__(self, rig: HubRig) -> None:
        self.rig = rig
        self.doors: list[CountingApi] = []

    def sent(self) -> list[str]:
        """The signatures of the catalogs that went over the wire."""
        bodies = (body for door in self.doors for body in door.bodies)
        return [NodeCatalog(body.definitions, body.signatures).signature() for body in bodies]

    def client(self) -> FleetClient:
        return FleetClient(self.rig.url, self.rig.keys[Role.TENANT])


@asynccontextmanager
async def mixed(folder: Path, *releases: str) -> AsyncIterator[MixedFleet]:
    async with running_hub(folder=folder) as rig, AsyncExitStack() as stack:
        fleet = MixedFleet(rig)
        for number, release in enumerate(releases):
            fake = await stack.enter_async_context(
                FakeComfyUI(FakeSettings(version=release, time_scale=0.01))
            )
            api = await stack.enter_async_context(CountingApi(rig.url, rig.keys[Role.WORKER]))
            fleet.doors.append(api)
            name = WorkerId(f"{number}-{release}")
            agent = await stack.enter_async_context(
                Agent(api, name, [ComfyUI(fake.url, QUICK_COMFYUI)], QUICK_AGENT)
            )
            await agent.wait_for_first_check()
        yield fleet


async def made(client: FleetClient, workflow: dict[str, Any]) -> tuple[int, int]:
    """The width of the picture that came of it, and how many attempts it took."""
    job = await client.submit(workflow, max_attempts=1)
    ended = await client.wait(job.id, timeout=60)
    assert ended.status == "completed" and ended.result is not None, ended.error
    (file,) = ended.result.files
    picture = Image.open(io.BytesIO(await client.fetch(file)))
    return picture.width, (await client.get(job.id)).attempts


@pytest.mark.parametrize("releases", [(OLD, MIDDLE, NEW), (NEW, MIDDLE, OLD)])
async def test_each_job_goes_at_once_to_a_server_that_accepts_it(
    tmp_path: Path, releases: tuple[str, ...]
) -> None:
    async with mixed(tmp_path, *releases) as fleet, fleet.client() as client:
        widths = [64 + 8 * number for number in range(6)]
        workflows = [scaled(width) for width in widths] + [newer_sampler(width) for width in widths]
        found = await asyncio.gather(*(made(client, workflow) for workflow in workflows))
        assert found == [(width, 1) for width in widths * 2]


async def test_equal_nodes_are_sent_once_for_the_fleet(tmp_path: Path) -> None:
    async with mixed(tmp_path, MIDDLE, MIDDLE, OLD, MIDDLE, OLD) as fleet:
        assert len(fleet.sent()) == len(set(fleet.sent())) == 2


async def test_the_caller_reads_which_server_would_refuse_it(tmp_path: Path) -> None:
    async with mixed(tmp_path, OLD, MIDDLE) as fleet, fleet.client() as client:
        await fleet.rig.engine.pause_worker(WorkerId(f"1-{MIDDLE}"))
        graph = text_to_image()
        graph["3"]["inputs"]["sampler_name"] = "exp_heun_2_x0"
        job = await client.submit(graph)
        explained = await fleet.rig.engine.explain(JobId(job.id))
        reasons = {str(each.worker_id): each.reason for each in explained.workers}
        assert "its KSampler (node 3) does not list 'exp_heun_2_x0'" in reasons[f"0-{OLD}"]


async def test_a_hub_that_takes_no_signatures_is_told_of_the_widgets_alone(tmp_path: Path) -> None:
    async with (
        mixed(tmp_path) as fleet,
        FakeComfyUI(FakeSettings(version=MIDDLE)) as fake,
        OldHubApi(fleet.rig.url, fleet.rig.keys[Role.WORKER]) as api,
        Agent(api, WorkerId("a"), [ComfyUI(fake.url, QUICK_COMFYUI)], QUICK_AGENT) as agent,
        fleet.client() as client,
    ):
        await agent.wait_for_first_check()
        (told,) = api.bodies
        assert told.definitions and not told.signatures
        assert "2" in await client.convert(saved_by_editor(64))


async def test_of_more_nodes_than_a_hub_takes_in_it_is_told_the_widgets(tmp_path: Path) -> None:
    """Workflows of the editor are converted with them."""
    inputs = {f"value_{number}": ["FLOAT", {"min": 0.5, "max": 1.5}] for number in range(20)}
    content = {"input": {"required": inputs}, "output": ["IMAGE"], "python_module": "custom_nodes.many"}
    nodes = read_catalog({f"Class {number}": content for number in range(5_000)})
    name = WorkerId("large")
    service = Service("comfyui", node_classes=frozenset(nodes.definitions), signature=nodes.signature())
    async with running_hub(folder=tmp_path) as rig, CountingApi(rig.url, rig.keys[Role.WORKER]) as api:
        await api.register(RegisterWorker(name, Capabilities(services=(service,))))
        await api.describe(name, nodes)
        assert [bool(body.signatures) for body in api.bodies] == [True, False]


@pytest.mark.parametrize("releases", [(OLD, MIDDLE, NEW), (NEW, MIDDLE, OLD)])
async def test_workflows_of_the_editor_run_on_every_release_at_the_first_attempt(
    tmp_path: Path, releases: tuple[str, ...]
) -> None:
    async with mixed(tmp_path, *releases) as fleet, fleet.client() as client:
        widths = [64 + 8 * number for number in range(6)]
        workflows = [saved_by_editor(width, *((1,) if width % 16 else ())) for width in widths]
        found = await asyncio.gather(*(made(client, workflow) for workflow in workflows))
        assert found == [(width, 1) for width in widths]
