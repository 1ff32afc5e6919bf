"""What appears on a server becomes known to the hub: when somebody asks, and by itself while a job waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, running_hub, submission
from tests.hub.test_agent_over_a_wire import GPU, TRANSPORTS, final
from tests.pool._fleet import text_to_image
from tests.worker._comfyui import QUICK as QUICK_COMFYUI
from tests.worker._scripted import quick, until

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Command, HeartbeatReply, RegisterWorker
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings
from comfyfleet.wire import worker as wire
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi

NEW = "new.safetensors"
RARELY = quick(inventory_interval_s=3600.0, missing_interval_s=3600.0, seek_interval_s=0.05)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub() as rig:
        yield rig


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> type[HttpWorkerApi]:
    return TRANSPORTS[request.param]


@asynccontextmanager
async def one_server(rig: HubRig, transport: type[HttpWorkerApi]) -> AsyncIterator[FakeComfyUI]:
    async with (
        FakeComfyUI(FakeSettings(time_scale=0.02)) as fake,
        transport(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, GPU, [ComfyUI(fake.url, QUICK_COMFYUI)], RARELY),
    ):
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        yield fake


def has(rig: HubRig, model: str) -> Callable[[], bool]:
    def found() -> bool:
        worker = rig.engine.known_worker(GPU)
        return worker is not None and model in (worker.capabilities.services[0].models or ())

    return found


async def test_a_worker_that_is_told_to_refresh_tells_what_its_server_has_by_now(
    rig: HubRig, transport: type[HttpWorkerApi]
) -> None:
    async with one_server(rig, transport) as fake:
        fake.faults.added_models = {"checkpoints": {NEW: 1.0}}
        told = await rig.post("/api/workers/gpu-a/refresh")
        assert (told.status, told.body["id"]) == (200, "gpu-a")
        await until(has(rig, NEW))


async def test_a_model_that_a_job_waits_for_is_noticed_by_an_agent_far_away(
    rig: HubRig, transport: type[HttpWorkerApi]
) -> None:
    async with one_server(rig, transport) as fake:
        made = await rig.post("/api/jobs", submission(workflow=text_to_image(NEW)))
        assert made.body["warnings"] == [f"gpu-a does not have the model '{NEW}'"]
        await until(lambda: fake.stats.requests.get("/models/checkpoints", 0) >= 5)
        assert fake.stats.requests["/object_info"] == 1
        fake.faults.added_models = {"checkpoints": {NEW: 1.0}}
        assert (await final(rig, made.body["id"]))["status"] == "completed"


async def test_a_worker_that_is_away_or_unknown_cannot_be_refreshed(rig: HubRig) -> None:
    assert (await rig.post("/api/workers/gpu-a/refresh")).code == "not_found"
    async with one_server(rig, HttpWorkerApi):
        pass
    refused = await rig.post("/api/workers/gpu-a/refresh")
    assert (refused.code, "offline" in refused.body["detail"]) == ("not_found", True)


@pytest.mark.parametrize("role", [Role.TENANT, Role.WORKER, Role.VIEWER])
async def test_only_operators_refresh_a_worker(rig: HubRig, role: Role) -> None:
    refused = await rig.post("/api/workers/gpu-a/refresh", key=rig.keys[role])
    assert refused.code == "not_allowed"


async def test_a_worker_is_told_of_what_its_own_tenants_wait_for_alone(rig: HubRig) -> None:
    """Another one's models are nobody's business, and no look would help."""
    async with one_server(rig, HttpWorkerApi):
        worker = rig.engine.known_worker(GPU)
        assert worker is not None
        shut = msgspec.structs.replace(
            worker.capabilities,
            tenant_access=msgspec.structs.replace(
                worker.capabilities.tenant_access, isolation="strict", allowed=("acme",)
            ),
        )
        await rig.engine.register(RegisterWorker(GPU, shut))
        await rig.post("/api/jobs", submission(workflow=text_to_image(NEW)))
        assert (await rig.engine.heartbeat(GPU, ())).missing == ()


def test_a_worker_passes_over_a_command_that_it_does_not_know() -> None:
    """A newer hub may have more of them; the leases that the same answer confirms are confirmed."""
    text = (
        b'{"duration_s":60,"commands":[{"action":"dance"},{"action":"drain"}],"missing":["x.pt"],"later":1}'
    )
    assert wire.heartbeat_reply(msgspec.json.decode(text, type=wire.HeartbeatAnswer)) == HeartbeatReply(
        60, commands=(Command("drain"),), missing=("x.pt",)
    )


async def test_who_listens_is_called_at_once_when_a_job_comes_that_it_could_take_but_for_a_model(
    rig: HubRig,
) -> None:
    async with one_server(rig, HttpWorkerApi):
        async with asyncio.timeout(60):
            listening = asyncio.create_task(rig.engine.commands(GPU, 60))
            await asyncio.sleep(0)
            await rig.post("/api/jobs", submission(workflow=text_to_image(NEW)))
            assert await listening == ()
            assert (await rig.engine.heartbeat(GPU, ())).missing == (NEW,)


async def test_a_worker_is_told_of_a_bounded_number_of_names_none_of_them_long(rig: HubRig) -> None:
    async with one_server(rig, HttpWorkerApi):
        for number in range(60):
            await rig.post("/api/jobs", submission(workflow=text_to_image(f"{number}.safetensors")))
        await rig.post("/api/jobs", submission(workflow=text_to_image("x" * 4_000 + ".safetensors")))
        names = (await rig.engine.heartbeat(GPU, ())).missing
        assert len(names) == 50 and max(map(len, names)) < 300
