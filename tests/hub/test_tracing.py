"""Every line about a job has its request, trace, job and attempt, from caller to attempt; and none has a secret."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from tests.hub._hub import HubRig, hub_in_process, running_hub, submission
from tests.hub.test_agent_over_a_wire import TRANSPORTS, final
from tests.worker._comfyui import QUICK as QUICK_COMFYUI
from tests.worker._comfyui import lab_fail, picture
from tests.worker._scripted import quick, until

from comfyfleet.cli import process
from comfyfleet.client.client import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import JobId, WorkerId, parse_traceparent, trace_id_of, traceparent_of
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.tracing import log_fields
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi

GPU = WorkerId("gpu-a")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> type[HttpWorkerApi]:
    return TRANSPORTS[request.param]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a program with the most talkative settings logs."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in process._VERBOSE}
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    process.set_up("debug", "json")
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    for name, each in levels.items():
        logging.getLogger(name).setLevel(each)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def ran(rig: HubRig, transport: type[HttpWorkerApi], workflow: Any, **headers: str) -> str:
    async with (
        FakeComfyUI() as fake,
        transport(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(api, GPU, [ComfyUI(fake.url, QUICK_COMFYUI)], quick()),
    ):
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        made = await rig.post("/api/jobs", submission(workflow=workflow, max_attempts=1), headers=headers)
        assert made.status == 201, made.content
        await final(rig, made.body["id"])
    return str(made.body["id"])


async def test_a_trace_is_carried_from_the_caller_to_the_attempt_and_back(
    written: io.StringIO, transport: type[HttpWorkerApi]
) -> None:
    async with running_hub() as rig:
        job_id = await ran(rig, transport, picture(), traceparent=TRACEPARENT, **{"x-request-id": "mine-1"})
        job = (await rig.get(f"/api/jobs/{job_id}")).body
    assert job["trace_id"] == TRACE
    told = {
        (line["logger"], line["message"]): line for line in lines(written) if line.get("job_id") == job_id
    }
    submitted = told["comfyfleet.hub.jobs", "submitted"]
    assert (submitted["request_id"], submitted["trace_id"]) == ("mine-1", TRACE)
    attempt = job["history"][0]["id"]
    for logger, message in [
        ("comfyfleet.hub.worker_protocol", "leased to gpu-a"),
        ("comfyfleet.worker.agent", "comfyui starts the job"),
        ("comfyfleet.worker.agent", "the job has ended"),
        ("comfyfleet.hub.worker_protocol", "completed"),
    ]:
        line = told[logger, message]
        assert (line["trace_id"], line["attempt_id"]) == (TRACE, attempt), line


async def test_a_trace_is_taken_from_the_client_and_from_a_message_of_the_socket_too() -> None:
    graph = submission()["payload"]["workflow"]
    async with running_hub() as rig, FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
        made = [(await client.submit(graph, traceparent=TRACEPARENT)).id]
        for each in await client.submit_many([graph], traceparent=TRACEPARENT):
            assert not isinstance(each, Refusal)
            made.append(each.id)
        headers = {"authorization": f"Bearer {rig.keys[Role.TENANT]}"}
        async with rig.session.ws_connect(rig.url + "/hub", headers=headers) as socket:
            for trace in (TRACEPARENT, 7):
                await socket.send_json(
                    {"type": "submit_job", "payload": {"workflow": graph}, "traceparent": trace}
                )
                while (said := await socket.receive_json(timeout=60))["type"] != "job_submitted":
                    pass
                made.append(said["job_id"])
        traces = [(await client.get(job_id)).trace_id for job_id in made]
    assert traces == [TRACE, TRACE, TRACE, made[-1].replace("-", "")]


async def test_the_services_error_and_traceback_are_kept_with_the_attempt_and_logged_with_it(
    written: io.StringIO, transport: type[HttpWorkerApi]
) -> None:
    async with running_hub() as rig:
        job_id = await ran(rig, transport, lab_fail("ValueError"))
        job = (await rig.get(f"/api/jobs/{job_id}")).body
    (attempt,) = job["history"]
    error = attempt["error"]
    assert (error["kind"], error["node_id"], error["node_type"]) == ("node_error", "1", "LabFail")
    assert error["exception_type"] and any(
        "Traceback" in line or "File" in line for line in error["traceback"]
    )
    assert job["error"] == error
    own = trace_id_of(traceparent_of(JobId(job_id), None))
    assert job["trace_id"] == own == job_id.replace("-", ""), "without a caller's trace it is the job's own"
    told = [line for line in lines(written) if line["message"].startswith("failed (node_error)")]
    assert [(line["trace_id"], line["attempt_id"]) for line in told] == [(own, attempt["id"])]


async def test_what_a_worker_says_of_a_failure_is_kept_within_bounds() -> None:
    async with hub_in_process() as rig:
        job_id = await rig.submit()
        offer = {"worker_id": "gpu-a", "capabilities": {"services": [{"name": "comfyui"}]}}
        await rig.post("/api/worker/register", offer)
        given = (await rig.post("/api/worker/poll", {"worker_id": "gpu-a", "poll_id": "1"})).body
        failure = {
            "kind": "node_error",
            "message": "m" * 200_000,
            "traceback": ["t" * 10_000] * 50,
            "node_errors": {"1": "e" * 200_000},
        }
        await rig.post("/api/worker/fail", {"lease": given["lease"], "failure": failure})
        answer = await rig.get(f"/api/jobs/{job_id}")
        assert len(answer.content) < 120_000
        assert answer.body["history"][0]["error"]["traceback"][-1].startswith("ttt")


async def test_a_repeat_with_another_trace_is_the_same_job() -> None:
    async with running_hub() as rig:
        first = await rig.post("/api/jobs", submission(reference="a"), headers={"traceparent": TRACEPARENT})
        again = await rig.post("/api/jobs", submission(reference="a"))
        assert (again.status, again.body["id"]) == (200, first.body["id"])
        batch = {"jobs": [submission(), submission()]}
        many = await rig.post("/api/jobs/batch", batch, headers={"traceparent": TRACEPARENT})
        for item in many.body["items"]:
            assert (await rig.get(f"/api/jobs/{item['job']['id']}")).body["trace_id"] == TRACE


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (TRACEPARENT, TRACEPARENT),
        (f" {TRACEPARENT} ", TRACEPARENT),
        ("cc" + TRACEPARENT[2:] + "-what-comes-later", "cc" + TRACEPARENT[2:]),
        ("ff" + TRACEPARENT[2:], None),
        (TRACEPARENT.upper(), None),
        (TRACEPARENT.replace(TRACE, "0" * 32), None),
        (TRACEPARENT.replace("00f067aa0ba902b7", "0" * 16), None),
        (TRACEPARENT[:-1], None),
        ("\n" * 1_000, None),
        ("", None),
        (None, None),
    ],
)
def test_what_is_no_trace_is_passed_over(given: str | None, kept: str | None) -> None:
    assert parse_traceparent(given) == kept


def test_a_job_whose_id_is_no_uuid_has_a_trace_as_well() -> None:
    made = traceparent_of(JobId("somebody's own"), None)
    assert parse_traceparent(made) == made == traceparent_of(JobId("somebody's own"), None)


async def test_no_key_token_or_password_is_ever_logged(
    written: io.StringIO, transport: type[HttpWorkerApi]
) -> None:
    tokens: list[str] = []
    async with running_hub() as rig:
        invited = (await rig.post("/api/enrolments", {"uses": 1})).body["token"]
        job_id = await ran(rig, transport, picture())
        await rig.get(f"/?token={rig.keys[Role.ADMIN]}")
        dispatch = await rig.engine.store.load(JobId(job_id))
        assert dispatch is not None
        headers = {"authorization": f"Bearer {rig.keys[Role.WORKER]}"}
        async with rig.session.ws_connect(rig.url + "/hub", headers=headers) as line:
            offer = {"worker_id": "gpu-a", "capabilities": {"services": [{"name": "comfyui"}]}}
            await line.send_json({"type": "register_worker", **offer})
            await line.receive_json()
            await rig.submit()
            await line.send_json({"type": "request_job", "worker_id": "gpu-a"})
            tokens.append((await line.receive_json())["lease"]["token"])
        async with rig.session.ws_connect(f"{rig.url}/hub?token={rig.keys[Role.ADMIN]}"):
            pass
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await rig.session.ws_connect(f"{rig.url}/hub?token={rig.keys[Role.ADMIN]}x")
        secrets = [*rig.keys.values(), invited, *tokens]
    logging.getLogger("careless").error("Bearer %s at redis://me:hunter2@host", secrets[0])
    await asyncio.sleep(0)
    text = written.getvalue()
    assert "careless" in text and "comfyfleet.access" in text
    for secret in (*secrets, "hunter2"):
        assert secret not in text


def test_a_line_for_people_says_what_it_is_about_too(
    monkeypatch: pytest.MonkeyPatch, written: io.StringIO
) -> None:
    monkeypatch.setattr(sys, "stderr", written)
    process.set_up("info", "text")
    with log_fields(job_id="j1", traceparent=TRACEPARENT):
        logging.getLogger("somebody").info("hello")
    assert written.getvalue().endswith(f"INFO somebody: hello [job_id=j1 trace_id={TRACE}]\n")
