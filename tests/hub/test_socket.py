"""The WebSocket at /hub with a plain client: old callers, monitors, workers, and whatever else may be sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests._examples import examples
from tests.hub._hub import HubRig, graph, hub_in_process, running_hub
from tests.hub._watching import complete, lease, register, report
from tests.worker._scripted import until

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.hub.http.server import HubServer, HubServerSettings
from comfyfleet.model.access import Role
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.policy.rules import Rules
from comfyfleet.wire.websocket import ALIASES, KINDS

PAYLOAD = {"workflow": graph()}
CAPABILITIES = {"services": ["comfyui"]}


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub(rules=Rules(max_attempts=1)) as rig:
        yield rig


class Line:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def say(self, type_: str, **fields: Any) -> None:
        await self.socket.send_str(msgspec.json.encode({"type": type_, **fields}).decode())

    async def next(self) -> dict[str, Any]:
        message = await self.socket.receive(timeout=60)
        assert message.type is aiohttp.WSMsgType.TEXT, message
        heard: dict[str, Any] = msgspec.json.decode(message.data)
        return heard

    async def until(self, type_: str) -> dict[str, Any]:
        while (heard := await self.next())["type"] != type_:
            assert heard["type"] != "error", heard
        return heard

    async def ask(self, type_: str, **fields: Any) -> dict[str, Any]:
        await self.say(type_, **fields)
        return await self.next()


@asynccontextmanager
async def connected(rig: HubRig, role: Role = Role.ADMIN, path: str = "/hub") -> AsyncIterator[Line]:
    headers = {"authorization": f"Bearer {rig.keys[role]}"}
    async with rig.session.ws_connect(rig.url + path, headers=headers) as socket:
        yield Line(socket)


# old callers


async def test_a_full_queue_is_told_over_the_socket_too() -> None:
    async with running_hub(rules=Rules(max_waiting=1)) as rig, connected(rig) as line:
        await line.ask("submit_job", payload=PAYLOAD)
        await line.say("submit_job", payload=PAYLOAD, request_id=2)
        while (error := await line.next())["type"] == "job_progress":
            pass
        assert (error["code"], error["request_id"]) == ("queue_full", 2)
        assert error["problem"]["retry_after_s"] > 0


async def test_an_old_caller_submits_and_hears_of_its_job_without_asking(rig: HubRig) -> None:
    await register(rig)
    async with connected(rig, Role.TENANT) as line:
        submitted = await line.ask(
            "submit_job", job_type="comfyui", payload=PAYLOAD, customer_id="acme", message_id="m1"
        )
        assert (submitted["type"], submitted["status"], submitted["message_id"]) == (
            "job_submitted",
            "pending",
            "m1",
        )
        job_id = submitted["job_id"]
        assert (await rig.get(f"/api/jobs/{job_id}")).body["tenant"] == "acme"
        assert (await line.until("job_progress"))["status"] == "pending"
        job = await lease(rig)
        await report(rig, job, value=1, max=4, message="sampling")
        while (heard := await line.until("job_progress"))["progress"] == 0:
            pass
        assert {name: heard[name] for name in ("job_id", "progress", "percentage", "status", "message")} == {
            "job_id": job_id,
            "progress": 25.0,
            "percentage": 25.0,
            "status": "assigned",
            "message": "sampling",
        }
        await complete(rig, job)
        done = await line.until("job_completed")
        assert (done["job_id"], done["result"]) == (job_id, {"outputs": {"2": {"images": []}}})
    await until(lambda: (rig.hub.watched_jobs, rig.hub.sockets) == (0, 0))


async def test_what_old_callers_do_to_jobs_is_in_the_audit_log(rig: HubRig) -> None:
    async with connected(rig, Role.TENANT) as line:
        await line.say("submit_job", payload=PAYLOAD)
        job = (await line.until("job_submitted"))["job_id"]
        for change in ("pause_job", "resume_job", "cancel_job"):
            await line.say(change, job_id=job)
            await line.until("job_updated")
        await line.say("pause_job", job_id=job)
        assert (await line.until("error"))["code"] == "wrong_phase"
    noted = (await rig.get("/api/audit?kind=jobs")).body["entries"]
    assert [(each["action"], each["target"], each["role"]) for each in noted] == [
        (action, job, "tenant") for action in ("submit_job", "pause_job", "resume_job", "cancel_job")
    ]
    assert {each["address"] for each in noted} == {"127.0.0.1"}


async def test_progress_is_subscribed_to_and_the_end_of_a_job_is_told_at_once(rig: HubRig) -> None:
    job_id = await rig.submit()
    async with connected(rig) as line:
        assert (await line.ask("subscribe_progress", job_id=job_id))["status"] == "pending"
        updated = await line.ask("cancel", job_id=job_id)
        kinds = {updated["type"], (await line.next())["type"]}
        assert kinds == {"job_updated", "job_cancelled"}
        assert (await line.ask("subscribe_progress", job_id=job_id))["type"] == "job_cancelled"
        assert (await line.ask("retry_job", job_id=job_id))["status"] == "pending"
        assert (await line.ask("pause_job", job_id=job_id))["type"] == "job_updated"
        assert (await rig.get(f"/api/jobs/{job_id}")).body["is_paused"]
        assert (await line.ask("resume", job_id=job_id))["type"] == "job_updated"
        await line.ask("subscribe_progress", job_id=job_id)
        assert (await line.ask("unsubscribe_progress", job_id=job_id))["type"] == "unsubscribed"
        assert rig.hub.watched_jobs == 0


async def test_a_failed_job_is_told_with_its_error(rig: HubRig) -> None:
    async with connected(rig) as caller, connected(rig, Role.WORKER) as worker:
        await worker.ask("register_worker", worker_id="gpu-a", capabilities=CAPABILITIES)
        job_id = (await caller.ask("submit_job", payload=PAYLOAD))["job_id"]
        assert (await worker.ask("request_job", worker_id="gpu-a"))["job_id"] == job_id
        told = await worker.ask("fail_job", worker_id="gpu-a", job_id=job_id, error="the card is on fire")
        assert (told["type"], told["status"], told["will_retry"]) == ("job_failed", "failed", False)
        failed = await caller.until("job_failed")
        assert (failed["error"], failed["failure"]["kind"]) == ("the card is on fire", "unknown")


async def test_a_monitor_gets_what_there_is_and_then_every_event(rig: HubRig) -> None:
    await register(rig)
    async with connected(rig, Role.VIEWER) as line:
        begun = await line.ask("subscribe_monitor")
        assert (begun["type"], begun["workers"][0]["worker_id"]) == ("monitor_subscribed", "gpu-a")
        assert begun["stats"]["waiting"] == 0
        job_id = await rig.submit(metadata={"user": "42"})
        heard = await line.until("monitor_event")
        assert (heard["event"], heard["job_id"], heard["metadata"]) == ("queued", job_id, {"user": "42"})
        assert (await line.ask("unsubscribe_monitor"))["type"] == "monitor_unsubscribed"


async def test_a_monitor_of_one_tenant_hears_of_nobody_else(rig: HubRig) -> None:
    async with connected(rig, Role.TENANT) as line:
        assert (await line.ask("subscribe_monitor", tenant="other"))["code"] == "not_allowed"
        assert "workers" not in await line.ask("subscribe_monitor")
        await rig.submit()
        mine = await rig.submit(role=Role.TENANT)
        assert (await line.next())["job_id"] == mine


# workers


async def test_an_old_worker_registers_asks_reports_and_completes(rig: HubRig) -> None:
    async with connected(rig, Role.WORKER) as line:
        registered = await line.ask(
            "register_worker", worker_id="gpu-a", capabilities={**CAPABILITIES, "worker_id": "gpu-a"}
        )
        assert (registered["type"], registered["worker_id"]) == ("worker_registered", "gpu-a")
        assert (await line.ask("request_job", worker_id="gpu-a", capabilities=CAPABILITIES))[
            "type"
        ] == "no_job"
        job_id = await rig.submit(metadata={"user": "42"})
        assigned = await line.ask("request_job", worker_id="gpu-a")
        assert (assigned["type"], assigned["job_id"]) == ("job_assigned", job_id)
        assert assigned["job_data"]["payload"]["workflow"] == graph()
        assert assigned["job_data"]["service_type"] == "comfyui"
        await line.say("update_progress", worker_id="gpu-a", job_id=job_id, progress={"percentage": 40})
        beat = await line.ask("heartbeat", worker_id="gpu-a")
        assert (beat["type"], beat["jobs"]) == ("heartbeat_ack", [job_id])
        assert (await rig.get(f"/jobs/{job_id}/progress")).body["percentage"] == 40
        await line.say("update_progress", job_id=job_id, progress=60)
        result = {"images": ["a.png"]}
        done = await line.ask("complete_job", worker_id="gpu-a", job_id=job_id, result=result)
        assert (done["type"], done["status"]) == ("job_completed", "completed")
        assert (await rig.get(f"/api/jobs/{job_id}/result")).body["result"] == {"outputs": {"result": result}}


async def test_a_worker_is_told_whose_job_it_gets_how_urgent_it_is_and_what_it_needs(rig: HubRig) -> None:
    needs = {"hardware": {"gpu_memory_gb": 8.0}, "location": {"region": "eu"}}
    offers = {**CAPABILITIES, "hardware": {"gpu": {"memory_gb": 24}}, "location": {"region": "eu"}}
    await rig.submit(priority=5, requirements=needs, tenant="acme")
    async with connected(rig, Role.WORKER) as line:
        told = (await line.ask("request_job", worker_id="gpu-a", capabilities=offers))["job_data"]
        assert (told["tenant"], told["customer_id"], told["priority"]) == ("acme", "acme", 5)
        assert told["requirements"] == needs


async def test_a_request_counts_with_the_capabilities_that_it_names(rig: HubRig) -> None:
    job_id = await rig.submit(tenant="acme", requirements={"models": ["new.safetensors"]})
    had: dict[str, Any] = {**CAPABILITIES, "models": {"comfyui": ["old.safetensors"]}}
    has: dict[str, Any] = {**CAPABILITIES, "models": {"comfyui": ["old.safetensors", "new.safetensors"]}}
    async with connected(rig, Role.WORKER) as line:
        await line.ask("register_worker", worker_id="gpu-a", capabilities=had, max_concurrency=2)
        asked = {"worker_id": "gpu-a", "capabilities": had}
        assert (await line.ask("request_job", **asked))["type"] == "no_job"
        # It has the model now, and has shut its tenant out.
        closed = has | {"customer_access": {"isolation": "loose", "denied_customers": ["acme"]}}
        assert (await line.ask("request_job", worker_id="gpu-a", capabilities=closed))["type"] == "no_job"
        assert (await line.ask("request_job", worker_id="gpu-a", capabilities=has))["job_id"] == job_id
        assert (await rig.get("/api/workers/gpu-a")).body["slots"] == 2


async def test_a_worker_that_says_it_is_full_gets_nothing(rig: HubRig) -> None:
    async with connected(rig, Role.WORKER) as line:
        await line.ask("register_worker", worker_id="gpu-a", capabilities=CAPABILITIES, max_concurrency=2)
        job_id = await rig.submit()
        full = await line.ask("request_job", worker_id="gpu-a", current_load=2, wait_s=30, poll_id="p1")
        assert (full["type"], full["poll_id"]) == ("no_job", "p1")
        assert (await line.ask("request_job", worker_id="gpu-a", current_load=1))["job_id"] == job_id


async def test_a_request_parks_until_there_is_a_job_and_the_line_stays_open_meanwhile(rig: HubRig) -> None:
    async with connected(rig, Role.WORKER) as line:
        await line.say("request_job", worker_id="gpu-a", capabilities=CAPABILITIES, wait_s=10, poll_id="p1")
        assert (await line.ask("ping"))["type"] == "pong"
        job_id = await rig.submit()
        assigned = await line.until("job_assigned")
        assert (assigned["job_id"], assigned["poll_id"]) == (job_id, "p1")
        # The same poll gets the same lease, on another connection too.
        async with connected(rig, Role.WORKER) as other:
            again = await other.ask("request_job", worker_id="gpu-a", poll_id="p1")
            assert again["lease"] == assigned["lease"]


async def test_a_worker_is_told_at_once_that_its_job_is_cancelled_and_why(rig: HubRig) -> None:
    async with connected(rig, Role.WORKER) as line:
        await line.ask("register_worker", worker_id="gpu-a", capabilities=CAPABILITIES)
        job_id = await rig.submit()
        await line.ask("request_job", worker_id="gpu-a")
        await rig.post(f"/api/jobs/{job_id}/cancel")
        told = await line.until("job_cancelled")
        assert told["job_id"] == job_id and told["reason"]
        released = await line.ask("release_job", job_id=job_id, reason="cancelled")
        assert (released["type"], released["status"]) == ("job_released", "cancelled")
        await rig.post("/api/workers/gpu-a/drain")
        assert (await line.until("worker_command"))["action"] == "drain"


async def test_a_connection_that_ends_gives_a_parked_request_up_and_leaves_leases_to_a_new_one(
    rig: HubRig,
) -> None:
    async with connected(rig, Role.WORKER) as line:
        await line.ask("register_worker", worker_id="gpu-a", capabilities=CAPABILITIES, max_concurrency=2)
        job_id = await rig.submit()
        given = (await line.ask("request_job", worker_id="gpu-a"))["lease"]
        await line.say("request_job", worker_id="gpu-a", wait_s=30)
        await until(lambda: rig.engine._matcher.idle_slots == 1)
    await until(lambda: rig.engine._matcher.idle_slots == 0)
    async with connected(rig, Role.WORKER) as line:
        refused = await line.ask("complete_job", worker_id="gpu-a", job_id=job_id, result={})
        assert (refused["code"], refused["request"], refused["job_id"]) == (
            "lease_lost",
            "complete_job",
            job_id,
        )
        assert (await line.ask("heartbeat", worker_id="gpu-a", leases=[given]))["jobs"] == [job_id]
        assert (await line.ask("complete_job", job_id=job_id, lease=given))["status"] == "completed"


async def test_a_lease_that_is_over_is_told_as_a_cancelled_job(rig: HubRig) -> None:
    async with connected(rig, Role.WORKER) as line:
        await line.ask("register_worker", worker_id="gpu-a", capabilities=CAPABILITIES)
        job_id = await rig.submit()
        given = await line.ask("request_job", worker_id="gpu-a")
        dispatch = await rig.engine.store.load(JobId(job_id))
        assert dispatch is not None
        await rig.engine._failures.requeue_undelivered(dispatch)
        await line.say("heartbeat", worker_id="gpu-a")
        told = await line.until("job_cancelled")
        assert (told["job_id"], "lease has ended" in told["reason"]) == (given["job_id"], True)


async def test_a_key_of_one_worker_speaks_for_no_other(rig: HubRig) -> None:
    _, rig.keys[Role.WORKER] = await rig.hub.keys.create(Role.WORKER, worker_id=WorkerId("gpu-a"))
    async with connected(rig, Role.WORKER) as line:
        for kind in ("register_worker", "request_job", "heartbeat"):
            refused = await line.ask(kind, worker_id="gpu-b", capabilities=CAPABILITIES)
            assert refused["code"] == "not_allowed"


# who may do what


@pytest.mark.parametrize("role", list(Role))
async def test_a_message_is_for_its_roles_alone(rig: HubRig, role: Role) -> None:
    async with connected(rig, role) as line:
        for kind in (*KINDS, *ALIASES):
            allowed = role in KINDS[ALIASES.get(kind, kind)].roles
            heard = await line.ask(kind, job_id="nobody", worker_id="x")
            assert (heard.get("code") == "not_allowed") is not allowed, (kind, heard)


async def test_a_job_of_another_tenant_is_not_there(rig: HubRig) -> None:
    job_id = await rig.submit()
    async with connected(rig, Role.TENANT) as line:
        for kind in ("subscribe_progress", "cancel_job", "retry_job", "pause_job", "resume_job"):
            refused = await line.ask(kind, job_id=job_id)
            assert (refused["type"], refused["code"]) == ("error", "not_found")


async def test_without_a_key_or_at_another_place_there_is_no_connection(rig: HubRig) -> None:
    for path, headers, status in (
        ("/hub", {}, 401),
        ("/hub", {"authorization": "Bearer cfk_a_b"}, 401),
        ("/elsewhere", {"authorization": f"Bearer {rig.keys[Role.ADMIN]}"}, 404),
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await rig.session.ws_connect(rig.url + path, headers=headers)
        assert caught.value.status == status
    async with rig.session.ws_connect(f"{rig.url}/hub?token={rig.keys[Role.VIEWER]}") as socket:
        assert (await Line(socket).ask("ping"))["type"] == "pong"


async def test_an_open_hub_takes_no_page_of_another_site() -> None:
    async with running_hub(is_open=True) as rig:
        async with rig.session.ws_connect(f"{rig.url}/hub") as socket:
            assert (await Line(socket).ask("ping"))["type"] == "pong"
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await rig.session.ws_connect(f"{rig.url}/hub", headers={"origin": "http://evil.example"})


# old callers are asked to move


async def test_old_callers_can_be_warned_of_and_sent_away_while_workers_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_hub(legacy_websocket="warn") as rig, connected(rig) as line:
        for _ in range(2):
            assert (await line.ask("submit_job", payload=PAYLOAD, request_id=7))["request_id"] == 7
            await line.until("job_progress")
        warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert len(warned) == 1 and "moving-to-sse" in warned[0]
    async with running_hub(legacy_websocket="off") as rig, connected(rig) as line:
        for kind in [kind for kind in KINDS if KINDS[kind].is_old]:
            refused = await line.ask(kind, payload=PAYLOAD, job_id="x")
            assert refused["code"] == "not_allowed" and "moving-to-sse" in refused["message"]
        registered = await line.ask("register_worker", worker_id="gpu-a", capabilities=CAPABILITIES)
        assert registered["type"] == "worker_registered"


# whatever else


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "not JSON",
        "[]",
        "null",
        "7",
        '{"type": 7}',
        '{"type": "nonsense"}',
        "{}",
        '{"type": "submit_job"}',
        '{"type": "submit_job", "payload": {}, "nonsense": 1}',
        '{"type": "submit_job", "payload": {"workflow": {}}}',
        '{"type": "register_worker", "worker_id": "x", "capabilities": {}}',
        '{"type": "complete_job", "job_id": "x"}',
        '{"type": "update_progress", "job_id": "x", "progress": "half"}',
        '{"type": "heartbeat", "worker_id": "nobody"}',
        '{"type": "ping", "request_id": ' + "[" * 200 + "]" * 200 + "}",
        '{"type": "ping", "request_id": ' + "9" * 40 + "}",
        b"\xff\xfe",
    ],
)
async def test_a_frame_that_means_nothing_is_answered_with_an_error(rig: HubRig, frame: str | bytes) -> None:
    async with connected(rig) as line:
        await (line.socket.send_bytes(frame) if isinstance(frame, bytes) else line.socket.send_str(frame))
        heard = await line.next()
        assert (heard["type"], heard["code"] != "internal") == ("error", True), heard
        assert heard["message"]
        assert (await line.ask("ping"))["type"] == "pong"


async def test_a_frame_that_is_too_large_ends_the_connection_and_nothing_else() -> None:
    async with running_hub(limits=HubLimits(max_frame_bytes=10_000)) as rig:
        async with connected(rig) as line:
            await line.socket.send_str('{"type": "ping", "x": "' + "x" * 20_000 + '"}')
            message = await line.socket.receive(timeout=60)
            assert (message.type, line.socket.close_code) == (aiohttp.WSMsgType.CLOSE, 1009)
        assert (await rig.get("/health")).status == 200


async def test_more_messages_than_the_rate_are_refused_in_words() -> None:
    async with running_hub(limits=HubLimits(requests_per_s=1, burst=5)) as rig, connected(rig) as line:
        codes = [(await line.ask("ping")).get("code") for _ in range(10)]
        assert codes.count("rate_limited") >= 4


async def test_whoever_sends_and_never_reads_is_not_read_from_for_ever(rig: HubRig) -> None:
    # Answers pile up until the hub stops reading; memory has its bound.
    text = '{"type": "nonsense", "request_id": "' + "x" * 50_000 + '"}'
    async with connected(rig) as line:

        async def send() -> None:
            while True:
                await line.socket.send_str(text)

        sending = asyncio.create_task(send())
        (session,) = rig.hub._sockets._sessions
        await until(lambda: len(session._line._answers) > 256)
        sent = len(session._line._answers)
        await asyncio.wait({sending}, timeout=0.5)
        assert len(session._line._answers) == sent < 300 and not sending.done()
        sending.cancel()
        await asyncio.wait({sending})
        connection = line.socket._response.connection
        assert connection is not None and connection.transport is not None
        connection.transport.abort()
    await until(lambda: rig.hub.sockets == 0)


async def test_a_hub_that_ends_closes_its_sockets() -> None:
    async with hub_in_process() as rig:
        serving = HubServer(rig.hub, HubServerSettings(port=0, graceful_s=600))
        async with serving:
            rig.url = serving.url
            async with connected(rig, Role.WORKER) as line:
                await line.say("request_job", worker_id="gpu-a", capabilities=CAPABILITIES, wait_s=30)
                await until(lambda: rig.engine._matcher.idle_slots == 1)
                async with asyncio.timeout(60):
                    closing = asyncio.create_task(serving.close())
                    message = await line.socket.receive()
                    assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1012)
                    await closing
        await rig.close()


words = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10)
    | st.sampled_from([PAYLOAD, CAPABILITIES, "gpu-a", "nobody", 0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({field for kind in KINDS.values() for field in kind.body.__struct_fields__})


@pytest_asyncio.fixture(scope="module")
async def line() -> AsyncIterator[Line]:
    limits = HubLimits(max_wait_s=0.0, requests_per_s=1e6, burst=1_000_000)
    async with running_hub(limits=limits) as rig, connected(rig) as line:
        yield line


@settings(
    max_examples=examples(500),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(st.sampled_from(FIELDS), words, max_size=5),
    st.integers(0, 3),
)
async def test_no_frame_is_the_hubs_own_failure(
    line: Line, kind: str, fields: dict[str, Any], damage: int
) -> None:
    try:
        frame = msgspec.json.encode({"type": kind, **fields})
    except OverflowError:
        frame = repr({"type": kind, **fields}).encode("utf-8", "replace")
    if not damage:
        frame = frame[: len(frame) // 2] + b"\x00" + frame[len(frame) // 2 :]
    await line.socket.send_bytes(frame)
    await line.say("ping", request_id="after")
    while (heard := await line.next()).get("request_id") != "after" or heard["type"] != "pong":
        assert heard.get("code") != "internal", (frame, heard)
