"""An agent that reaches its hub over a wire: it behaves as in process, and brings real jobs to their end."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send
from tests.hub._hub import HubRig, running_hub, submission
from tests.worker import _scripted, test_agent, test_agent_servers, test_attempt
from tests.worker._comfyui import QUICK as QUICK_COMFYUI
from tests.worker._comfyui import picture
from tests.worker._scripted import ScriptedApi, no_http, quick, until

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock, SystemRandom
from comfyfleet.hub.app import Hub
from comfyfleet.hub.audit.log import AuditLog
from comfyfleet.hub.files.job_files import JobInputFiles
from comfyfleet.hub.http.body import LargeBodies
from comfyfleet.hub.http.credentials import Authenticator, WorkersByKey
from comfyfleet.hub.http.limits import ConnectionLimits, HubLimits, RequestRate
from comfyfleet.hub.http.pipeline import Handler, RequestPipeline, handlers_in
from comfyfleet.hub.http.server import HubServer, HubServerSettings
from comfyfleet.hub.websocket.agents import AgentSession
from comfyfleet.hub.worker_protocol import WorkerHandlers
from comfyfleet.model.access import Caller, Role
from comfyfleet.model.calls import Completion, Poll, RegisterWorker
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import WorkerApi
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.tenancy.keys import Keys
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.wire.routes import WORKER as WORKER_ROUTES
from comfyfleet.wire.websocket import AGENT_PROTOCOL
from comfyfleet.worker.agent import Agent, AgentStatus
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.simulated import SimulatedConnector
from comfyfleet.worker.transports.http import HttpWorkerApi
from comfyfleet.worker.transports.websocket import WebSocketWorkerApi

GPU = WorkerId("gpu-a")


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else []


TRANSPORTS: dict[str, type[HttpWorkerApi]] = {"http": HttpWorkerApi, "websocket": WebSocketWorkerApi}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> type[HttpWorkerApi]:
    return TRANSPORTS[request.param]


class Switchboard:
    """One server for all scripts: whoever is on the line is asked."""

    is_open = True
    limits = HubLimits()

    def __init__(self) -> None:
        self.url = ""
        self.transport: type[HttpWorkerApi] = HttpWorkerApi
        self.door: RequestPipeline | None = None
        self.handlers: dict[str, Handler] = {}

    def start(self) -> None:
        """Nothing goes out by itself."""

    def stop(self) -> None:
        """Nothing of its own is parked."""

    async def finish(self) -> None:
        """Nothing of its own runs."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.door is not None
        if scope["type"] == "http":
            await self.door(scope, receive, send)
            return
        await receive()
        await send({"type": "websocket.accept", "subprotocol": AGENT_PROTOCOL})
        rate = RequestRate(self.limits.requests_per_s, self.limits.burst, time.monotonic)

        async def identify() -> Caller:
            return Caller(Role.WORKER, "somebody")

        await AgentSession(
            self.handlers,
            identify,
            "",
            self.limits,
            rate,
            ConnectionLimits(self.limits),
            LargeBodies(self.limits),
            scope,
            send,
        ).run(receive)

    @asynccontextmanager
    async def reach(self, api: ScriptedApi) -> AsyncIterator[WorkerApi]:
        clock = SystemClock()
        known: dict[WorkerId, WorkerRecord] = {}

        async def register(call: RegisterWorker) -> WorkerRecord:
            known[call.worker_id] = await api.register(call)
            return known[call.worker_id]

        calls = ("poll", "heartbeat", "progress", "complete", "fail", "release", "commands", "unregister")

        async def knows_nodes(_: WorkerRecord) -> bool | None:
            return None

        engine = SimpleNamespace(
            register=register,
            knows_nodes=knows_nodes,
            known_worker=known.get,
            now=clock.now,
            rules=Rules(),
            store=SimpleNamespace(is_shared=False),
            **{name: getattr(api, name) for name in calls},
        )
        limits = HubLimits()
        keys = Keys(MemoryDocumentStore(), clock)
        credentials = Authenticator(keys, clock, limits, is_open=True)
        made = cast(Engine, engine)
        self.handlers = handlers_in(
            WorkerHandlers(made, limits.max_wait_s, None, JobInputFiles(made, None), WorkersByKey(made, keys))
        )
        routes = tuple(route for route in WORKER_ROUTES if route.roles)
        self.door = RequestPipeline(
            routes,
            self.handlers,
            credentials,
            limits,
            AuditLog(MemoryDocumentStore(), clock, SystemRandom()),
            ConnectionLimits(limits),
            lambda *_: None,
            LargeBodies(limits),
        )
        async with self.transport(self.url) as far:
            yield far


@pytest_asyncio.fixture(scope="module")
async def switchboard() -> AsyncIterator[Switchboard]:
    board = Switchboard()
    async with HubServer(cast(Hub, board), HubServerSettings(port=0)) as serving:
        board.url = serving.url
        yield board


# About calls without a wire: how quickly they return, what their cancelling does at the far end, an answer to
# somebody who has gone, and leases of half a second against the agent's own clock.
IN_PROCESS_ALONE = {
    "test_a_run_is_given_up_at_a_share_of_its_lease_without_a_confirmed_heartbeat",
    "test_heartbeats_extend_a_lease_beyond_its_first_duration",
    "test_a_heartbeat_that_hangs_is_given_up_in_time_for_another",
    "test_slots_that_never_wait_leave_room_for_the_rest_of_the_program",
    "test_a_lease_that_came_with_the_recall_of_its_poll_is_given_back_by_a_drain",
}


def behaviours() -> list[Any]:
    return [
        pytest.param(test, id=name.removeprefix("test_"))
        for module in (test_agent, test_agent_servers, test_attempt)
        for name, test in vars(module).items()
        if name.startswith("test_")
        and name not in IN_PROCESS_ALONE
        and inspect.iscoroutinefunction(test)
        and not inspect.signature(test).parameters
    ]


@pytest.mark.parametrize("behaviour", behaviours())
async def test_an_agent_behaves_over_a_wire_as_it_does_in_process(
    switchboard: Switchboard,
    transport: type[HttpWorkerApi],
    behaviour: Callable[[], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switchboard.transport = transport
    reach: Callable[[ScriptedApi], AbstractAsyncContextManager[WorkerApi]] = switchboard.reach
    monkeypatch.setattr(_scripted, "reach", reach)
    await behaviour()


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub() as rig:
        yield rig


async def final(rig: HubRig, job_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (answer := await rig.get(f"/api/jobs/{job_id}/result")).status == 202:
            await asyncio.sleep(0.01)
    found: dict[str, Any] = answer.body
    return found


async def test_a_job_of_a_caller_is_run_by_a_worker_that_knows_only_the_hubs_address(
    rig: HubRig, transport: type[HttpWorkerApi]
) -> None:
    async with (
        FakeComfyUI() as fake,
        transport(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, GPU, [ComfyUI(fake.url, QUICK_COMFYUI)], quick()),
    ):
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        made = await rig.post("/api/jobs", submission(workflow=picture(), require_workable=True))
        assert made.status == 201, made.content
        found = await final(rig, made.body["id"])
        assert found["status"] == "completed"
        assert found["result"]["files"][0]["filename"].endswith(".png")
    details = (await rig.get(f"/api/jobs/{made.body['id']}")).body
    assert (details["worker_id"], details["history"][0]["outcome"]) == ("gpu-a", "completed")
    assert (await rig.get("/api/workers/gpu-a")).body["status"] == "offline"


async def test_an_agent_is_drained_from_the_hub(rig: HubRig, transport: type[HttpWorkerApi]) -> None:
    async with (
        transport(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, GPU, [SimulatedConnector()], quick(heartbeat_s=1000.0)) as agent,
    ):
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        await rig.post("/api/workers/gpu-a/drain")
        await until(lambda: agent.state.status is AgentStatus.DRAINING)
        await until(lambda: rig.engine._matcher.idle_slots == 0)


async def test_an_agent_registers_again_with_a_hub_that_forgot_it(
    rig: HubRig, transport: type[HttpWorkerApi]
) -> None:
    async with (
        transport(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, GPU, [SimulatedConnector()], quick()),
    ):
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        await rig.engine.remove_worker(GPU)
        await until(lambda: rig.engine.known_worker(GPU) is not None and rig.engine._matcher.idle_slots == 1)
        job_id = await rig.submit()
        assert (await final(rig, job_id))["status"] == "completed"


async def test_a_refusal_arrives_as_the_refusal_it_was(rig: HubRig, transport: type[HttpWorkerApi]) -> None:
    async with transport(rig.url, rig.keys[Role.WORKER]) as api:
        with pytest.raises(Refusal) as refused:
            await api.poll(Poll(GPU, PollId("1"), 0))
        assert refused.value.code is RefusalCode.NOT_FOUND
    async with transport(rig.url, "cfk_0_0") as api:
        with pytest.raises(Refusal) as refused:
            await api.poll(Poll(GPU, PollId("1"), 0))
        assert refused.value.code is RefusalCode.UNAUTHENTICATED


@pytest.mark.parametrize("outputs", [{"9": {"a": nested(100)}}, {"9": {"a": 1 << 70}}], ids=["deep", "big"])
async def test_a_result_that_the_hub_cannot_read_is_refused_and_not_left_unanswered(
    rig: HubRig, transport: type[HttpWorkerApi], outputs: dict[str, Any]
) -> None:
    async with transport(rig.url, rig.keys[Role.WORKER], answer_s=2.0) as api:
        await api.register(RegisterWorker(GPU, Capabilities((Service("comfyui"),))))
        await rig.submit()
        job = await api.poll(Poll(GPU, PollId("1"), 5))
        assert job is not None
        with pytest.raises(Refusal) as refused:
            await api.complete(Completion(job.ref, JobResult(outputs)))
        assert refused.value.code is RefusalCode.INVALID_REQUEST


async def test_a_hub_that_is_away_is_a_fault(transport: type[HttpWorkerApi]) -> None:
    async with transport("http://127.0.0.1:9") as api:
        with pytest.raises(Fault, match=r"cannot reach the hub at http://127\.0\.0\.1:9: connection refused"):
            await api.poll(Poll(GPU, PollId("1"), 0))


async def test_what_speaks_no_http_is_a_fault_that_does_not_tell_the_key(
    transport: type[HttpWorkerApi],
) -> None:
    async with no_http() as url, transport(url, "cfk_our_secret") as api:
        with pytest.raises(Fault, match="Bad status line") as fault:
            await api.poll(Poll(GPU, PollId("1"), 0))
        assert "secret" not in repr(fault.value)


async def test_many_capabilities_travel_once_and_packed(rig: HubRig, transport: type[HttpWorkerApi]) -> None:
    names = frozenset(f"models/some-quite-long-name-{number}.safetensors" for number in range(5_000))
    capabilities = Capabilities((Service("comfyui", models=names),))
    async with transport(rig.url, rig.keys[Role.WORKER]) as api:
        record = await api.register(RegisterWorker(GPU, capabilities))
        assert record.capabilities == msgspec.structs.replace(capabilities, has_hub=True)
        assert await api.poll(Poll(GPU, PollId("1"), 0)) is None
