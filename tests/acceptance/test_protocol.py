"""Every promise of the protocol from outside: a hub process, plain HTTP and a WebSocket, the old spellings included.

What each route does in detail is in tests/hub; here a stranger with the page of the protocol in hand walks along it.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.acceptance._process import CLI, read_until, started
from tests.hub._watching import Stream

GRAPH = {
    "1": {"class_type": "KSampler", "inputs": {"seed": 7}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
}
JOB_DOORS = ("/api/jobs", "/jobs", "/api/ai-jobs")
PROGRESS = {
    "id",
    "status",
    "percentage",
    "value",
    "max",
    "step",
    "node",
    "message",
    "worker_id",
    "lease",
    "started_at",
    "updated_at",
    "estimated_completion",
}

# One hub for all of them: whoever pauses its queue would stop the others.
pytestmark = pytest.mark.xdist_group("protocol")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Its address and its owner's key."""
    folder = tmp_path_factory.mktemp("hub")
    env = {"COMFYFLEET_DATA": str(folder), "REDIS_URL": "", "HUB_REDIS_URL": ""}
    with started(*CLI, "hub", "--port", "0", env=env) as process:
        read_until(process, lambda line: line.startswith("The hub answers at"))
        known = json.loads((Path(folder) / "hub.json").read_text())
        yield known["url"], known["key"]


class Stranger:
    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session = session
        self.url = url
        self.key = key

    async def ask(self, method: str, path: str, body: Any = None, expect: int = 200, **headers: str) -> Any:
        sent = {
            "authorization": f"Bearer {self.key}",
            **{name.replace("_", "-"): text for name, text in headers.items()},
        }
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        async with self._session.request(method, self.url + path, data=data, headers=sent) as response:
            content = await response.read()
            assert response.status == expect, (path, response.status, content)
            kind = response.headers.get("content-type", "")
            assert expect < 400 or kind == "application/problem+json"
        return json.loads(content) if "json" in kind else content

    async def submit(self, door: str = "/api/jobs", **fields: Any) -> str:
        made = await self.ask("POST", door, {"payload": {"workflow": GRAPH}, **fields}, expect=201)
        assert made["id"] == made["jobId"]
        assert made["status"] == "queued"
        return str(made["id"])

    async def call(self, name: str, expect: int = 200, **body: Any) -> Any:
        return await self.ask("POST", f"/api/worker/{name}", body, expect)

    async def leased(self, worker: str, service: str) -> Any:
        """A worker of its own service, so that tests do not take each other's jobs."""
        given = await self.call(
            "poll", worker_id=worker, poll_id="1", wait_s=10, capabilities={"services": [service]}
        )
        await self.call("heartbeat", worker_id=worker, leases=[given["lease"]])
        return given

    @asynccontextmanager
    async def stream(self, path: str, **headers: str) -> AsyncIterator[Stream]:
        """With the key in the address, as a browser has to."""
        mark = "&" if "?" in path else "?"
        async with self._session.get(f"{self.url}{path}{mark}token={self.key}", headers=headers) as response:
            assert response.status == 200, await response.text()
            yield Stream(response)

    @asynccontextmanager
    async def socket(self) -> AsyncIterator[Line]:
        async with self._session.ws_connect(f"{self.url}/hub?token={self.key}") as socket:
            yield Line(socket)


class Line:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def say(self, **message: Any) -> None:
        await self._socket.send_json(message)

    async def until(self, *kinds: str) -> dict[str, Any]:
        while True:
            heard: dict[str, Any] = await self._socket.receive_json(timeout=60)
            if heard["type"] in kinds:
                return heard
            assert heard["type"] != "error", heard


@pytest_asyncio.fixture
async def stranger(hub: tuple[str, str]) -> AsyncIterator[Stranger]:
    async with aiohttp.ClientSession() as session:
        yield Stranger(session, *hub)


# callers


@pytest.mark.parametrize("door", JOB_DOORS)
async def test_a_job_is_submitted_found_and_listed_at_every_door(stranger: Stranger, door: str) -> None:
    job_id = await stranger.submit(door, service="nobody", metadata={"door": door})
    assert (await stranger.ask("GET", f"{door}/{job_id}"))["status"] == "queued"
    listed = await stranger.ask("GET", f"{door}?metadata[door]={door}&status=pending&limit=10")
    assert [job["id"] for job in listed["jobs"]] == [job_id]
    batch = {"jobs": [{"payload": GRAPH, "service": "nobody"}, {"payload": {}}]}
    answered = await stranger.ask("POST", f"{door}/batch", batch)
    assert [item["status"] for item in answered["items"]] == [201, 422]


@pytest.mark.parametrize("name", ["service", "service_type", "job_type", "service_required"])
async def test_a_service_and_a_customer_go_by_their_old_names(stranger: Stranger, name: str) -> None:
    job_id = await stranger.submit(**{name: "elsewhere", "customer_id": "somebody else"})
    job = await stranger.ask("GET", f"/api/jobs/{job_id}")
    # The key is an administrator's, who submits for anybody.
    assert (job["service"], job["tenant"]) == ("elsewhere", "somebody else")


async def test_a_submission_is_repeated_under_its_key_packed_or_not(stranger: Stranger) -> None:
    body = json.dumps({"payload": {"workflow": GRAPH}, "service": "nobody"}).encode()
    first = await stranger.ask("POST", "/api/jobs", body, 201, idempotency_key="again")
    packed = gzip.compress(body)
    second = await stranger.ask(
        "POST", "/jobs", packed, 200, idempotency_key="again", content_encoding="gzip"
    )
    assert first["id"] == second["id"]
    other = {"payload": {"workflow": GRAPH}, "service": "nobody", "priority": 9}
    problem = await stranger.ask("POST", "/api/jobs", other, 409, idempotency_key="again")
    assert problem["code"] == "duplicate_differs"


@pytest.mark.parametrize("door", ["/api/jobs", "/jobs"])
async def test_a_waiting_job_obeys_at_both_doors(stranger: Stranger, door: str) -> None:
    job = f"{door}/{await stranger.submit(service='nobody')}"
    assert (await stranger.ask("PATCH", job, {"priority": 7}))["priority"] == 7
    assert (await stranger.ask("POST", f"{job}/pause"))["is_paused"] is True
    assert (await stranger.ask("POST", f"{job}/resume"))["is_paused"] is False
    explained = await stranger.ask("GET", f"{job}/explain")
    assert explained["summary"]
    assert (await stranger.ask("GET", f"{job}/result", expect=202))["status"] == "queued"
    assert (await stranger.ask("POST", f"{job}/cancel"))["status"] == "cancelled"
    assert (await stranger.ask("POST", f"{job}/retry"))["status"] == "queued"
    assert (await stranger.ask("POST", f"{job}/pause"))["is_paused"] is True
    await stranger.ask("POST", f"{job}/cancel")


async def test_progress_is_a_stream_at_one_door_and_a_record_at_the_other(stranger: Stranger) -> None:
    job_id = await stranger.submit(service="watched")
    record = await stranger.ask("GET", f"/jobs/{job_id}/progress")
    assert record.keys() == PROGRESS
    assert await stranger.ask("GET", f"/api/jobs/{job_id}/progress", accept="application/json") == record
    async with (
        stranger.stream(f"/api/jobs/{job_id}/progress") as one,
        stranger.stream(f"/jobs/{job_id}/progress", accept="text/event-stream") as other,
    ):
        given = await stranger.leased("watcher", "watched")
        progress = {"lease": given["lease"], "kind": "progress", "data": {"value": 1, "max": 4}}
        await stranger.call("progress", reports=[progress])
        while (seen := await one.until("progress")).data["percentage"] is None:
            pass
        assert (seen.data["percentage"], seen.data["worker_id"]) == (25.0, "watcher")
        result = {"outputs": {"2": {"text": ["done"]}}}
        await stranger.call("complete", lease=given["lease"], result=result)
        for stream in (one, other):
            last = (await stream.rest())[-1]
            assert (last.kind, last.data["result"]) == ("completed", result)
            assert [fact.id for fact in stream.facts] == [1, 2, 3]
    async with stranger.stream(f"/api/jobs/{job_id}/progress", **{"last-event-id": "2"}) as stream:
        assert [fact.id for fact in await stream.rest() if fact.id] == [3]
    assert (await stranger.ask("GET", f"/api/jobs/{job_id}/result"))["result"] == result


async def test_a_running_job_is_cancelled_at_once_in_words_and_later_in_deed(stranger: Stranger) -> None:
    job_id = await stranger.submit(service="cancelled")
    given = await stranger.leased("canceller", "cancelled")
    asked = await stranger.ask("POST", f"/api/jobs/{job_id}/cancel")
    assert (asked["status"], asked["cancel_requested"]) == ("leased", True)
    commands = (await stranger.call("commands", worker_id="canceller", wait_s=5))["commands"]
    assert [(command["action"], command["job_id"]) for command in commands] == [("cancel", job_id)]
    await stranger.call("release", lease=given["lease"], reason="cancelled")
    assert (await stranger.ask("GET", f"/api/jobs/{job_id}"))["status"] == "cancelled"


@pytest.mark.parametrize(
    "status", ["queued", "pending", "leased", "running", "assigned", "active", "completed"]
)
async def test_a_status_is_asked_for_in_any_spelling(stranger: Stranger, status: str) -> None:
    assert "jobs" in await stranger.ask("GET", f"/api/jobs?status={status}&limit=1")


async def test_a_file_is_announced_put_verified_and_fetched(stranger: Stranger) -> None:
    content = b"a picture"
    digest = hashlib.sha256(content).hexdigest()
    made = await stranger.ask(
        "POST", "/api/files", {"name": "a.png", "type": "image/png", "size": 9, "sha256": digest}, 201
    )
    await stranger.ask("POST", f"/api/files/{made['id']}/complete", expect=409)
    assert made["link"]["method"] == "PUT"
    await stranger.ask("PUT", made["link"]["url"], content)
    whole = await stranger.ask("POST", f"/api/files/{made['id']}/complete")
    assert (whole["is_complete"], whole["kind"], whole["sha256"]) == (True, "input", digest)
    assert await stranger.ask("GET", whole["link"]["url"]) == content
    assert await stranger.ask("GET", whole["link"]["url"], expect=206, range="bytes=2-") == content[2:]
    processed = await stranger.ask("POST", "/api/files", {"source": made["id"]}, 201)
    assert (await stranger.ask("GET", f"/api/files/{processed['id']}"))["source"] == made["id"]


async def test_health_figures_and_statistics(stranger: Stranger) -> None:
    for path in ("/health", "/health/ready", "/health/live"):
        assert (await stranger.ask("GET", path))["status"] == "ok"
    assert b"comfyfleet_" in await stranger.ask("GET", "/metrics")
    stats = await stranger.ask("GET", "/api/stats")
    assert {"waiting", "leased", "completed", "failed", "cancelled", "workers"} <= stats.keys()
    assert (await stranger.ask("GET", "/openapi.json"))["openapi"].startswith("3.1")


async def test_the_queue_stands_still_and_goes_on(stranger: Stranger) -> None:
    assert (await stranger.ask("POST", "/api/queue/pause"))["is_paused"] is True
    await stranger.submit(service="paused")
    services = {"services": ["paused"]}
    nothing = await stranger.call(
        "poll", 204, worker_id="pauser", poll_id="1", wait_s=0, capabilities=services
    )
    assert nothing == b""
    assert (await stranger.ask("POST", "/api/queue/resume"))["is_paused"] is False
    assert await stranger.leased("pauser", "paused")


# the fleet


async def test_workers_are_seen_at_both_doors_and_told_what_to_do(stranger: Stranger) -> None:
    registered = await stranger.call(
        "register",
        worker_id="gpu-a",
        environment="self_hosted",
        capabilities={
            "services": ["fleet"],
            "hardware": {"gpu": {"count": 1, "memory_gb": 24, "model": "RTX 4090"}},
            "models": {"fleet": ["flux1-dev.safetensors"]},
            "customer_access": {"isolation": "loose"},
        },
        max_concurrency=2,
    )
    assert (registered["slots"], registered["lost_after_s"]) == (2, 60.0)
    assert registered["heartbeat_s"] > 0
    for door in ("/api/workers", "/workers"):
        assert "gpu-a" in [each["id"] for each in (await stranger.ask("GET", door))["workers"]]
        worker = await stranger.ask("GET", f"{door}/gpu-a")
        assert (worker["status"], worker["environment"], worker["current_jobs"]) == (
            "idle",
            "self_hosted",
            [],
        )
        assert {"connected_at", "last_seen_at", "completed", "failed", "per_hour"} <= worker.keys()
    for command, status in (("pause", "paused"), ("resume", "idle"), ("drain", "draining")):
        assert (await stranger.ask("POST", f"/api/workers/gpu-a/{command}"))["status"] == status
    beat = await stranger.call("heartbeat", worker_id="gpu-a", leases=[])
    assert "drain" in [command["action"] for command in beat["commands"]]
    await stranger.ask("DELETE", "/api/workers/gpu-a", expect=204)


async def test_the_fleets_stream_is_filtered_by_job_and_by_kind(stranger: Stranger) -> None:
    async with stranger.stream("/api/events?kind=queued,cancelled&metadata[who]=me") as stream:
        await stream.until("resync")
        await stranger.submit(service="nobody")
        job_id = await stranger.submit(service="nobody", metadata={"who": "me"})
        assert (await stream.until("queued")).data["job_id"] == job_id
        await stranger.ask("POST", f"/api/jobs/{job_id}/cancel")
        assert (await stream.until("cancelled")).data["job_id"] == job_id
        assert [each.kind for each in stream.seen] == ["resync", "queued", "cancelled"]


async def test_a_worker_over_http_completes_asks_for_the_next_and_fails_it(stranger: Stranger) -> None:
    first = await stranger.submit(service="trying")
    second = await stranger.submit(service="trying")
    given = await stranger.leased("trier", "trying")
    assert given["lease"]["job_id"] == given["job"]["id"] == first
    assert (given["lease"]["number"], given["duration_s"] > 0) == (1, True)
    again = await stranger.call("poll", worker_id="trier", poll_id="1", wait_s=0)
    assert again["lease"] == given["lease"]
    settled = await stranger.call("complete", lease=given["lease"], result={}, next={"poll_id": "2"})
    assert settled["status"] == "completed"
    following = settled["next"]
    assert following["job"]["id"] == second
    failure = {"kind": "transient", "message": "the card was busy"}
    settled = await stranger.call("fail", lease=following["lease"], failure=failure)
    assert (settled["status"], settled["will_retry"]) == ("queued", True)
    late = await stranger.call("complete", 409, lease=following["lease"], result={})
    assert late["code"] == "lease_lost"


# the WebSocket


async def test_old_callers_submit_watch_and_command_over_the_websocket(stranger: Stranger) -> None:
    async with stranger.socket() as line, stranger.socket() as worker:
        await line.say(type="subscribe_monitor")
        assert "workers" in await line.until("monitor_subscribed")
        submitted = {"job_type": "old", "payload": {"workflow": GRAPH}, "customer_id": "x", "priority": 1}
        await line.say(type="submit_job", request_id="r", **submitted)
        made = await line.until("job_submitted")
        assert (made["status"], made["request_id"]) == ("pending", "r")
        job_id = made["job_id"]
        for word in ("pause", "resume"):
            await line.say(type=f"{word}_job", job_id=job_id)
            assert (await line.until("job_updated"))["status"] == "pending"

        old = {"services": ["old"]}
        await worker.say(type="register_worker", worker_id="old", capabilities=old)
        await worker.until("worker_registered")
        await worker.say(type="request_job", worker_id="old", wait_s=10)
        given = await worker.until("job_assigned")
        assert (given["job_id"], given["job_data"]["service_type"]) == (job_id, "old")
        await worker.say(type="update_progress", job_id=job_id, progress=50)
        while (heard := await line.until("job_progress"))["progress"] != 50:
            pass
        assert heard["status"] == "assigned"
        await worker.say(type="heartbeat", worker_id="old")
        assert (await worker.until("heartbeat_ack"))["jobs"] == [job_id]
        await worker.say(type="complete_job", job_id=job_id, result={"anything": 1})
        assert (await worker.until("job_completed"))["status"] == "completed"
        assert (await line.until("job_completed"))["job_id"] == job_id
        await worker.say(type="request_job", worker_id="old")
        await worker.until("no_job")


async def test_a_worker_over_the_websocket_hears_why_its_job_is_cancelled_and_fails_another(
    stranger: Stranger,
) -> None:
    async with stranger.socket() as line, stranger.socket() as worker:
        await worker.say(type="register_worker", worker_id="told", capabilities={"services": ["told"]})
        await worker.until("worker_registered")
        ids = []
        for _ in range(2):
            await line.say(type="submit_job", service_type="told", payload=GRAPH, max_attempts=1)
            ids.append((await line.until("job_submitted"))["job_id"])
        await worker.say(type="request_job", worker_id="told", wait_s=10)
        first = (await worker.until("job_assigned"))["job_id"]
        await line.say(type="cancel", job_id=first)
        assert (await line.until("job_updated"))["cancel_requested"] is True
        told = await worker.until("job_cancelled")
        assert told["job_id"] == first and told["reason"]
        await worker.say(type="release_job", job_id=first, reason="cancelled")
        await line.until("job_cancelled")
        await worker.say(type="request_job", worker_id="told", wait_s=10)
        second = (await worker.until("job_assigned"))["job_id"]
        assert {first, second} == set(ids)
        await worker.say(type="fail_job", job_id=second, error="no luck")
        assert (await line.until("job_failed"))["error"] == "no luck"
        await line.say(type="retry_job", job_id=second)
        assert (await line.until("job_updated"))["status"] == "pending"
        await line.say(type="what is this")
        assert (await line.until("error"))["code"] == "invalid_request"


async def test_whoever_has_no_key_is_told_so_everywhere(hub: tuple[str, str]) -> None:
    url, _ = hub
    async with aiohttp.ClientSession() as session:
        for path in ("/api/jobs", "/jobs", "/api/workers", "/api/events", "/metrics", "/"):
            async with session.get(url + path) as response:
                assert response.status == 401, path
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await asyncio.wait_for(session.ws_connect(f"{url}/hub"), 60)
