"""What is particular to agents on a WebSocket: one connection for all slots, lost and found again, never flooded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, running_hub
from tests.worker._scripted import quick, until

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, Poll, RegisterWorker
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.wire import worker as wire
from comfyfleet.wire.websocket import AGENT_KINDS, AGENT_MESSAGE_BYTES, AGENT_PROTOCOL
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.simulated import SimulatedConnector
from comfyfleet.worker.transports.websocket import WebSocketWorkerApi

GPU = WorkerId("gpu-a")
OFFER = RegisterWorker(GPU, Capabilities((Service("comfyui"),)), slots=8)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub() as rig:
        yield rig


def api_of(rig: HubRig) -> WebSocketWorkerApi:
    return WebSocketWorkerApi(rig.url, rig.keys[Role.WORKER])


@asynccontextmanager
async def connected(rig: HubRig, role: Role = Role.WORKER) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    headers = {"authorization": f"Bearer {rig.keys[role]}"}
    async with rig.session.ws_connect(
        rig.url + "/hub", headers=headers, protocols=(AGENT_PROTOCOL,)
    ) as socket:
        assert socket.protocol == AGENT_PROTOCOL
        yield socket


async def ask(socket: aiohttp.ClientWebSocketResponse, frame: Any) -> dict[str, Any]:
    await (socket.send_bytes(frame) if isinstance(frame, bytes) else socket.send_json(frame))
    answer: dict[str, Any] = await socket.receive_json(timeout=60)
    return answer


def result_of(text: str) -> JobResult:
    return JobResult(outputs={"9": {"text": [text]}})


async def cut_off(rig: HubRig) -> None:
    """As a network does that forgets its connections: nobody says goodbye."""
    sessions = list(rig.hub._sockets._sessions)
    for session in sessions:
        session.close()
    # The agent may be connected again before anyone counts: only these sessions must have ended.
    await until(lambda: not any(each in rig.hub._sockets._sessions for each in sessions))


async def test_all_slots_of_an_agent_share_one_connection(rig: HubRig) -> None:
    async with api_of(rig) as api, Agent(api, GPU, [SimulatedConnector()], quick(slots=50)):
        await until(lambda: rig.engine._matcher.idle_slots == 50)
        assert rig.hub.sockets == 1
    await until(lambda: (rig.hub.sockets, rig.engine._matcher.idle_slots) == (0, 0))


async def test_a_run_outlives_its_connection_and_is_reported_under_its_lease(rig: HubRig) -> None:
    release = asyncio.Event()

    async def waits(*_: object) -> JobResult:
        await release.wait()
        return JobResult(outputs={"9": {"text": ["done"]}})

    connector = SimulatedConnector(behaviour=waits)
    async with api_of(rig) as api, Agent(api, GPU, [connector], quick(slots=2)):
        job_id = await rig.submit()
        await until(lambda: connector.run_count == 1)
        for _ in range(3):
            await until(lambda: rig.hub.sockets == 1)
            await cut_off(rig)
        release.set()
        async with asyncio.timeout(60):
            while (await rig.get(f"/api/jobs/{job_id}/result")).status == 202:
                await asyncio.sleep(0.01)
    history = (await rig.get(f"/api/jobs/{job_id}")).body["history"]
    assert [(each["outcome"], connector.run_count) for each in history] == [("completed", 1)]


async def test_a_poll_that_is_given_up_is_no_idle_slot(rig: HubRig) -> None:
    async with api_of(rig) as api:
        await api.register(OFFER)
        polling = asyncio.create_task(api.poll(Poll(GPU, PollId("1"), 30)))
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        polling.cancel()
        await until(lambda: rig.engine._matcher.idle_slots == 0)
        # The line is still good, and the same poll may be asked again.
        job_id = await rig.submit()
        job = await api.poll(Poll(GPU, PollId("1"), 5))
        assert job is not None and job.job_id == job_id


async def test_a_lost_connection_is_a_fault_for_all_who_wait_on_it_and_the_next_call_connects(
    rig: HubRig,
) -> None:
    async with api_of(rig) as api:
        await api.register(OFFER)
        polls = [asyncio.create_task(api.poll(Poll(GPU, PollId(str(n)), 30))) for n in range(3)]
        await until(lambda: rig.engine._matcher.idle_slots == 3)
        await cut_off(rig)
        for failed in await asyncio.gather(*polls, return_exceptions=True):
            assert isinstance(failed, Fault)
        assert await api.poll(Poll(GPU, PollId("4"), 0)) is None


async def test_what_is_too_large_for_a_message_goes_over_http() -> None:
    # Nothing is large for one hub and small for another: the least that a hub may be told to take is what agents send.
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"max_frame_bytes": AGENT_MESSAGE_BYTES - 1}, HubLimits)
    async with (
        running_hub(limits=HubLimits(max_frame_bytes=AGENT_MESSAGE_BYTES)) as rig,
        api_of(rig) as api,
    ):
        await api.register(OFFER)
        for spare in (100, 0, -1_000_000):
            job_id = await rig.submit()
            job = await api.poll(Poll(GPU, PollId(str(spare)), 5))
            assert job is not None
            around = len(msgspec.json.encode(wire.CompleteBody(job.ref, result_of(""), 0.0)))
            words = result_of("x" * (AGENT_MESSAGE_BYTES - around - spare)).outputs
            await api.complete(Completion(job.ref, JobResult(outputs=words)))
            assert (await rig.get(f"/api/jobs/{job_id}/result")).body["result"]["outputs"] == words
        assert rig.hub.sockets == 1


async def test_a_result_cannot_claim_a_file_that_was_not_uploaded(rig: HubRig) -> None:
    file = {"node_id": "9", "kind": "images", "filename": "a.png", "file_id": "f_somebodys"}
    for protocols in ((AGENT_PROTOCOL,), ()):
        await rig.submit()
        async with rig.session.ws_connect(
            rig.url + "/hub",
            headers={"authorization": f"Bearer {rig.keys[Role.WORKER]}"},
            protocols=protocols,
        ) as socket:
            offer = {"worker_id": "gpu-a", "capabilities": {"services": [{"name": "comfyui"}]}}
            poll = {"worker_id": "gpu-a", "poll_id": f"p{len(protocols)}", "wait_s": 5}
            if not protocols:
                await ask(socket, {"type": "register_worker", **offer})
                given = await ask(socket, {"type": "request_job", **poll})
                end = {"type": "complete_job", "job_id": given["job_id"], "result": {"files": [file]}}
                answer = await ask(socket, end)
                assert answer["code"] == "invalid_request"
                continue
            await ask(socket, {"type": "register_worker", "request_id": 1, "body": offer})
            given = await ask(socket, {"type": "request_job", "request_id": 2, "body": poll})
            assert (given["type"], given["request_id"], given["status"]) == ("job_assigned", 2, 200)
            result = {"lease": given["body"]["lease"], "result": {"files": [file]}}
            answer = await ask(socket, {"type": "complete_job", "request_id": 3, "body": result})
            assert (answer["type"], answer["status"], answer["body"]["code"]) == (
                "error",
                400,
                "invalid_request",
            )


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"type":"request_job"}',
        b'{"type":"request_job","request_id":-1}',
        {"type": "nothing", "request_id": 1},
        {"type": "request_job", "request_id": 1},
        {"type": "request_job", "request_id": 1, "body": 7},
        {"type": "heartbeat", "request_id": 1, "body": {"worker_id": "gpu-a", "leases": [{}]}},
        b'{"type":"heartbeat","request_id":1,"body":' + b"[" * 500 + b"]" * 500 + b"}",
    ],
)
async def test_a_frame_that_means_nothing_is_refused_and_the_line_stays_good(rig: HubRig, frame: Any) -> None:
    async with connected(rig) as socket:
        answer = await ask(socket, frame)
        assert (answer["type"], answer["status"], answer["body"]["code"]) == ("error", 400, "invalid_request")
        await socket.send_json({"type": "withdraw", "request_id": 99})
        body = {"worker_id": "gpu-a"}
        answer = await ask(socket, {"type": "heartbeat", "request_id": 2, "body": body})
        assert (answer["request_id"], answer["body"]["code"]) == (2, "not_found")


async def test_a_call_is_for_workers_alone(rig: HubRig) -> None:
    async with connected(rig, Role.TENANT) as socket:
        for number, kind in enumerate(AGENT_KINDS):
            answer = await ask(socket, {"type": kind, "request_id": number, "body": {}})
            assert (answer["request_id"], answer["body"]["code"]) == (number, "not_allowed")


async def test_whoever_sends_and_never_reads_is_not_read_from_for_ever(rig: HubRig) -> None:
    async with connected(rig) as socket:
        frame = msgspec.json.encode({"type": "x" * 4_000, "request_id": 1}).decode()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                for _ in range(100_000):
                    await socket.send_str(frame)
        (session,) = rig.hub._sockets._sessions
        assert len(session._line._answers) < 1_000
        assert (await rig.get("/health")).status == 200
        socket._response.connection.transport.abort()  # type: ignore[union-attr]


async def test_a_wrong_key_is_refused_and_a_server_that_knows_no_agents_is_a_fault(rig: HubRig) -> None:
    async with WebSocketWorkerApi(rig.url, "cfk_0_0") as api:
        with pytest.raises(Refusal) as refused:
            await api.poll(Poll(GPU, PollId("1"), 0))
        assert refused.value.code is RefusalCode.UNAUTHENTICATED
    async with WebSocketWorkerApi(rig.url + "/elsewhere", rig.keys[Role.WORKER]) as api:
        with pytest.raises(Fault, match="refused the WebSocket"):
            await api.poll(Poll(GPU, PollId("1"), 0))


async def test_a_hub_that_turns_an_agent_away_is_not_asked_by_each_of_its_slots() -> None:
    asked = 0

    async def turn_away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.close()

    async with await asyncio.start_server(turn_away, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with WebSocketWorkerApi(f"http://127.0.0.1:{port}", "cfk_0_0") as api:
            for number in range(50):
                with pytest.raises(Fault):
                    await api.poll(Poll(GPU, PollId(str(number)), 0))
    assert 0 < asked < 5
