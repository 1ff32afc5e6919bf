"""A worker whose server never answered: the hub lists it with the reason, gives it nothing, and forgets nothing."""

from __future__ import annotations

import pytest
from tests.engine._rig import Rig, offers
from tests.hub._hub import HubRig, running_hub
from tests.pool._fleet import QUICK_AGENT, QUICK_COMFYUI
from tests.worker._scripted import until

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Poll, RegisterWorker
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.worker import Capabilities, TenantAccess
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi
from comfyfleet.worker.transports.websocket import WebSocketWorkerApi

GPU = WorkerId("gpu")
REASON = "connection refused. Is ComfyUI running there"


def announced(**more: object) -> RegisterWorker:
    return RegisterWorker(GPU, Capabilities(()), 1, offline_reason=REASON, **more)  # type: ignore[arg-type]


async def listed(rig: HubRig) -> list[dict[str, object]]:
    found: list[dict[str, object]] = (await rig.get("/api/workers")).body["workers"]
    return found


@pytest.mark.parametrize("transport", [HttpWorkerApi, WebSocketWorkerApi])
async def test_a_hub_lists_a_worker_whose_server_never_answered(transport: type[HttpWorkerApi]) -> None:
    async with running_hub() as rig, transport(rig.url, rig.keys[Role.ADMIN]) as api:
        server = ComfyUI("http://127.0.0.1:9", QUICK_COMFYUI)
        declared = Capabilities((), tenant_access=TenantAccess("strict"))
        async with Agent(api, GPU, [server], QUICK_AGENT, declared):
            await until(lambda: rig.engine.known_worker(GPU) is not None)
            (worker,) = await listed(rig)
            assert (worker["id"], worker["status"], worker["services"]) == ("gpu", "offline", [])
            # No address of the server: whoever sees the worker need not know where that is.
            assert str(worker["offline_reason"]).startswith(REASON)
            assert "127.0.0.1" not in str(worker["offline_reason"])
            record = rig.engine.known_worker(GPU)
            assert record is not None and record.capabilities.tenant_access.isolation == "strict"
            with pytest.raises(Refusal) as refused:
                await api.poll(Poll(GPU, PollId("1"), 0))
            assert refused.value.code is RefusalCode.NOT_FOUND
        # It says that it has gone, as any worker does.
        (worker,) = await listed(rig)
        assert worker["offline_reason"] == "stopped"


async def test_a_registration_without_services_is_refused_unless_it_says_why() -> None:
    async with running_hub() as rig:
        body = {"worker_id": "gpu", "capabilities": {"services": []}}
        assert (await rig.post("/api/worker/register", body)).code == "invalid_request"
        answer = await rig.post("/api/worker/register", {**body, "offline_reason": REASON})
        assert answer.status == 200, answer.content


async def test_what_was_known_of_a_worker_stays_when_its_server_does_not_answer() -> None:
    async with Rig() as rig:
        await rig.engine.register(RegisterWorker(GPU, offers("KSampler"), 1))
        await rig.engine.register(announced())
        (worker,) = await rig.engine.workers()
        assert worker.is_offline and worker.offline_reason == REASON
        assert worker.capabilities == offers("KSampler")
        job_id = await rig.submit()
        summary = (await rig.engine.explain(job_id)).summary
        assert summary == f"no worker can take it now; the nearest, gpu, is offline: {REASON}"
        # Its server answers: it works again.
        await rig.engine.register(RegisterWorker(GPU, offers("KSampler"), 1))
        assert (await rig.take("gpu")).job_id == job_id


async def test_an_agent_that_cannot_work_takes_no_name_from_one_that_works() -> None:
    async with Rig() as rig:
        await rig.engine.register(RegisterWorker(GPU, offers("KSampler"), 1, instance="one"))
        with pytest.raises(Refusal, match="another agent works as 'gpu'"):
            await rig.engine.register(announced(instance="two"))
        (worker,) = await rig.engine.workers()
        assert not worker.is_offline


async def test_a_server_that_never_answered_keeps_no_fake_from_work() -> None:
    async with Rig() as rig:
        await rig.engine.register(announced())
        pretended = Capabilities(offers("KSampler").services, is_fake=True)
        await rig.engine.register(RegisterWorker(WorkerId("fake"), pretended, 1))
        job_id = await rig.submit()
        assert (await rig.take("fake")).job_id == job_id


async def test_a_submission_is_warned_with_the_reason() -> None:
    async with running_hub() as rig:
        await rig.engine.register(announced())
        answer = await rig.post(
            "/api/jobs", {"payload": {"workflow": {"1": {"class_type": "A", "inputs": {}}}}}
        )
        assert answer.body["warnings"] == [f"gpu is offline: {REASON}"]
