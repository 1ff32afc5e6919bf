"""A job's stream and its progress, with plain HTTP: nothing missed, nothing twice, nobody slowed down."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, hub_in_process, running_hub
from tests.hub._watching import GPU, complete, lease, register, report, watching
from tests.worker._scripted import until

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.hub.http.server import HubServer, HubServerSettings
from comfyfleet.hub.streams.feed import Feed, FeedEntry
from comfyfleet.hub.streams.sse import Watcher
from comfyfleet.model.access import Role
from comfyfleet.model.calls import FailureReport, Release
from comfyfleet.model.errors import Fault
from comfyfleet.model.fact import ProgressEvent, ProgressKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Job
from comfyfleet.policy.rules import Rules

RECORD = {
    *("id", "status", "percentage", "value", "max", "step", "node", "message", "worker_id", "lease"),
    *("started_at", "updated_at", "estimated_completion"),
}


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub(rules=Rules(max_attempts=1)) as rig:
        await register(rig)
        yield rig


def progress(job_id: str) -> str:
    return f"/api/jobs/{job_id}/progress"


# one job


async def test_a_stream_tells_every_fact_and_ends_with_the_result(rig: HubRig) -> None:
    job_id = await rig.submit()
    async with watching(rig, progress(job_id)) as stream:
        assert (await stream.until("queued")).id == 1
        first = await stream.until("progress")
        assert first.data.keys() == RECORD and first.data["status"] == "queued"
        job = await lease(rig)
        assert (await stream.until("leased")).data["status"] == "leased"
        await report(rig, job, ProgressKind.STARTED)
        await stream.until("started")
        await report(rig, job, value=5, max=20, node="1", message="sampling", nodes_done=1)
        while (seen := await stream.until("progress")).data["value"] is None:
            pass
        assert seen.id is None
        assert {
            name: seen.data[name] for name in ("percentage", "value", "max", "step", "node", "message")
        } == {
            "percentage": 25.0,
            "value": 5,
            "max": 20,
            "step": 1,
            "node": "1",
            "message": "sampling",
        }
        assert (seen.data["worker_id"], seen.data["lease"]) == ("gpu-a", 1)
        await report(rig, job, ProgressKind.PREVIEW, b"\xff\xd8", node="1")
        assert (await stream.until("preview")).data["image"] == "/9g="
        await complete(rig, job)
        *_, last = await stream.rest()
        assert last.kind == "completed" and last.data["result"] == {"outputs": {"2": {"images": []}}}
        assert [each.id for each in stream.facts] == [1, 2, 3]


async def test_a_failed_job_ends_its_stream_with_the_failure(rig: HubRig) -> None:
    job_id = await rig.submit()
    async with watching(rig, progress(job_id)) as stream:
        job = await lease(rig)
        await rig.engine.fail(FailureReport(job.ref, Failure(FailureKind.INVALID_WORKFLOW, "no such node")))
        *_, last = await stream.rest()
        assert (last.kind, last.data["error"]["message"]) == ("failed", "no such node")
    async with watching(rig, progress(job_id)) as again:
        assert await again.rest() == stream.facts


async def test_a_stream_of_a_job_that_ended_says_so_once_and_then_nothing_is_left(rig: HubRig) -> None:
    job_id = await rig.submit()
    await rig.post(f"/api/jobs/{job_id}/cancel")
    async with watching(rig, progress(job_id)) as stream:
        assert [each.kind for each in await stream.rest()] == ["queued", "cancelled"]
    # A browser's EventSource asks again after an end, and stops for good at 204.
    left = await rig.get(progress(job_id), headers={"last-event-id": "2"})
    assert (left.status, left.content) == (204, b"")


async def test_a_job_that_is_retried_has_a_stream_again(rig: HubRig) -> None:
    job_id = await rig.submit()
    await rig.post(f"/api/jobs/{job_id}/cancel")
    await rig.post(f"/api/jobs/{job_id}/retry")
    async with watching(rig, progress(job_id)) as stream:
        await stream.until("progress")
        assert [(each.kind, each.data["round"]) for each in stream.facts] == [
            ("queued", 1),
            ("cancelled", 1),
            ("queued", 2),
        ]
        await rig.post(f"/api/jobs/{job_id}/cancel")
        assert (await stream.rest())[-1].id == 4


@pytest.mark.parametrize("after", [0, 1, 2, 3])
async def test_a_stream_goes_on_after_any_event(rig: HubRig, after: int) -> None:
    job_id = await rig.submit()
    for change in ("pause", "resume"):
        await rig.post(f"/api/jobs/{job_id}/{change}")
    async with watching(rig, progress(job_id), after=after) as stream:
        await stream.until("progress")
        assert [each.id for each in stream.facts] == [1, 2, 3][after:]
        await rig.post(f"/api/jobs/{job_id}/cancel")
        await stream.rest()
        assert [each.id for each in stream.facts] == [1, 2, 3, 4][after:]


async def test_a_number_from_the_future_skips_nothing_that_is_to_come(rig: HubRig) -> None:
    job_id = await rig.submit()
    async with watching(rig, f"{progress(job_id)}?last_event_id=99") as stream:
        await stream.until("progress")
        await rig.post(f"/api/jobs/{job_id}/cancel")
        assert (await stream.until("cancelled")).id == 2


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "9" * 40, "²"])
async def test_a_last_event_id_that_is_none_is_refused(rig: HubRig, number: str) -> None:
    job_id = await rig.submit()
    async with aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {rig.keys[Role.ADMIN]}", "last-event-id": number}
        async with session.get(rig.url + progress(job_id), headers=headers) as response:
            assert response.status == 400


async def test_many_changes_at_once_come_in_order_and_once(rig: HubRig) -> None:
    job_id = await rig.submit()
    async with watching(rig, progress(job_id)) as stream:
        await stream.until("queued")
        await asyncio.gather(
            *(rig.engine.set_priority(JobId(job_id), priority) for priority in range(1, 30)),
            return_exceptions=True,
        )
        await rig.post(f"/api/jobs/{job_id}/cancel")
        await stream.rest()
        numbers = [each.id for each in stream.facts]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 10


# which form


@pytest.mark.parametrize(
    ("path", "accept", "is_stream"),
    [
        ("/api/jobs/{}/progress", "*/*", True),
        ("/api/jobs/{}/progress", "text/event-stream", True),
        ("/api/jobs/{}/progress", "text/event-stream, application/json", True),
        ("/api/jobs/{}/progress", "application/json", False),
        ("/api/ai-jobs/{}/progress", "*/*", True),
        ("/jobs/{}/progress", "*/*", False),
        ("/jobs/{}/progress", "application/json", False),
        ("/jobs/{}/progress", "text/event-stream", True),
    ],
)
async def test_each_door_has_its_form_and_gives_the_other_when_asked(
    rig: HubRig, path: str, accept: str, is_stream: bool
) -> None:
    job_id = await rig.submit()
    await rig.post(f"/api/jobs/{job_id}/cancel")
    answer = await rig.get(path.format(job_id), headers={"accept": accept})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream" if is_stream else "application/json")
    if not is_stream:
        assert answer.body.keys() == RECORD and answer.body["status"] == "cancelled"


async def test_the_record_follows_a_job_and_estimates_from_what_was_learned(rig: HubRig) -> None:
    first = await rig.submit()
    job = await lease(rig)
    path = f"/jobs/{first}/progress"
    assert (await rig.get(path)).body["estimated_completion"] is None
    await report(rig, job, value=1, max=4)
    body = (await rig.get(path)).body
    assert (body["status"], body["percentage"], body["worker_id"]) == ("leased", 25.0, "gpu-a")
    await complete(rig, job, seconds=100)
    body = (await rig.get(path)).body
    assert (body["status"], body["percentage"]) == ("completed", 100.0)
    second = await rig.submit()
    await lease(rig, poll_id="2")
    body = (await rig.get(f"/jobs/{second}/progress")).body
    assert body["estimated_completion"] == pytest.approx(body["started_at"] + 100)


async def test_what_a_worker_says_nonsense_about_is_null(rig: HubRig) -> None:
    job_id = await rig.submit()
    job = await lease(rig)
    await report(rig, job, value="many", max=None, percentage=float("nan"), node=7, step=True, message=["x"])
    body = (await rig.get(f"/jobs/{job_id}/progress")).body
    assert (body["value"], body["percentage"], body["step"]) == (None, None, None)
    assert (body["node"], body["message"]) == ("7", "['x']")


# who


async def test_a_job_of_another_tenant_is_not_there(rig: HubRig) -> None:
    job_id = await rig.submit()
    for path in (f"/api/jobs/{job_id}/progress", f"/jobs/{job_id}/progress", "/api/jobs/nobody/progress"):
        assert (await rig.get(path, role=Role.TENANT)).code == "not_found"
    mine = await rig.submit(role=Role.TENANT)
    async with watching(rig, progress(mine), role=Role.TENANT) as stream:
        await stream.until("queued")


async def test_a_key_in_the_query_opens_a_stream(rig: HubRig) -> None:
    job_id = await rig.submit()
    url = f"{rig.url}{progress(job_id)}?token={rig.keys[Role.VIEWER]}&last_event_id=0"
    async with rig.session.get(url) as response:
        assert response.status == 200


# many, slow, gone


async def not_reading(rig: HubRig, path: str) -> socket.socket:
    """Asks for a stream and takes nothing of it."""
    host, port = rig.url.removeprefix("http://").split(":")
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, (host, int(port)))
    key = rig.keys[Role.ADMIN]
    request = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n\r\n"
    await loop.sock_sendall(slow, request.encode())
    await until(lambda: rig.hub.watchers == 1)
    return slow


async def test_any_number_of_watchers_share_one_reader(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = await rig.submit()
    read = 0
    facts = rig.engine.store.facts

    async def counted(job_id: JobId, after: int = 0) -> object:
        nonlocal read
        read += 1
        return await facts(job_id, after)

    monkeypatch.setattr(rig.engine.store, "facts", counted)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        headers = {"authorization": f"Bearer {rig.keys[Role.ADMIN]}"}

        async def watch() -> bytes:
            async with session.get(rig.url + progress(job_id), headers=headers) as response:
                return await response.read()

        watchers = [asyncio.create_task(watch()) for _ in range(50)]
        await until(lambda: rig.hub.watchers == 50)
        assert read <= 3
        await rig.post(f"/api/jobs/{job_id}/cancel")
        contents = await asyncio.gather(*watchers)
    assert all(content.count(b"\nid: ") + content.startswith(b"id: ") == 2 for content in contents)
    assert read <= 6
    await until(lambda: rig.hub.watchers == 0)


async def test_a_watcher_that_does_not_read_loses_progress_and_no_fact_and_slows_nobody(rig: HubRig) -> None:
    job_id = await rig.submit()
    loop, slow = asyncio.get_running_loop(), await not_reading(rig, progress(job_id))
    job = await lease(rig)
    many = 600
    async with watching(rig, progress(job_id)) as quick:
        await quick.until("progress")
        for number in range(many):
            await report(rig, job, value=number, max=many, message="x" * 20_000)
            if number % 50 == 49:
                while (seen := await quick.until("progress")).data["value"] != number:
                    pass
        assert seen.data["value"] == many - 1
        await complete(rig, job)
        assert (await quick.rest())[-1].kind == "completed"
    content = b""
    async with asyncio.timeout(60):
        while b"0\r\n\r\n" not in content[-7:]:
            content += await loop.sock_recv(slow, 1 << 20)
    slow.close()
    assert [content.count(f"\nid: {number}\n".encode()) for number in (1, 2, 3)] == [1, 1, 1]
    assert content.count(b"event: progress") < many - 100, "what it could not take was kept for it"


async def test_a_watcher_that_takes_nothing_for_long_is_closed() -> None:
    async with running_hub(limits=HubLimits(beat_s=0.05)) as rig:
        await register(rig)
        job_id = await rig.submit()
        job = await lease(rig)
        slow = await not_reading(rig, progress(job_id))
        async with asyncio.timeout(60):
            while rig.hub.watchers:
                await report(rig, job, message="x" * 100_000)
                await asyncio.sleep(0)
        slow.close()


async def test_news_of_a_lease_that_was_given_back_is_late_and_not_true(rig: HubRig) -> None:
    job_id = await rig.submit()
    job = await lease(rig)
    await rig.engine.release(Release(job.ref))
    rig.engine.bus.publish(
        ProgressEvent(JobId(job_id), ProgressKind.PROGRESS, 1.0, GPU, job.ref.number, {"value": 1})
    )
    async with watching(rig, progress(job_id)) as stream:
        assert (await stream.until("progress")).data["status"] == "queued"
        rig.engine.bus.publish(
            ProgressEvent(JobId(job_id), ProgressKind.PROGRESS, 1.0, GPU, job.ref.number, {"value": 1})
        )
        late = await stream.until("progress")
        assert (late.data["status"], late.data["value"]) == ("queued", None)


async def test_whoever_hangs_up_is_forgotten_with_his_room(rig: HubRig) -> None:
    job_id = await rig.submit()
    async with watching(rig, progress(job_id)) as stream:
        await stream.until("queued")
        assert (rig.hub.watchers, rig.hub.watched_jobs) == (1, 1)
    await until(lambda: (rig.hub.watchers, rig.hub.watched_jobs) == (0, 0))


async def test_an_idle_stream_says_that_it_lives() -> None:
    async with running_hub(limits=HubLimits(beat_s=0.02)) as rig:
        job_id = await rig.submit()
        async with watching(rig, progress(job_id)) as stream:
            reading = asyncio.create_task(stream.rest())
            await until(lambda: stream.comments >= 3)
            await rig.post(f"/api/jobs/{job_id}/cancel")
            assert (await reading)[-1].kind == "cancelled"


async def test_a_hub_that_ends_closes_its_streams_at_once() -> None:
    async with hub_in_process() as rig:
        serving = HubServer(rig.hub, HubServerSettings(port=0, graceful_s=600))
        async with serving:
            rig.url = serving.url
            job_id = await rig.submit()
            async with watching(rig, progress(job_id)) as stream, watching(rig, "/api/events") as fleet:
                await stream.until("progress")
                async with asyncio.timeout(60):
                    await serving.close()
                await stream.rest()
                await fleet.rest()
        await rig.close()


async def test_a_stream_goes_on_across_a_restart_without_gap_or_repeat(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    async with running_hub(store_url=url) as rig:
        job_id = await rig.submit()
        async with watching(rig, progress(job_id)) as stream:
            await rig.post(f"/api/jobs/{job_id}/pause")
            await stream.until("paused")
            seen = [each.id for each in stream.facts]
    async with running_hub(store_url=url) as rig:
        await register(rig)
        await rig.post(f"/api/jobs/{job_id}/resume")
        async with watching(rig, progress(job_id), after=seen[-1]) as stream:
            await stream.until("progress")
            await complete(rig, await lease(rig, GPU))
            await stream.rest()
            seen += [each.id for each in stream.facts]
            assert stream.seen[-1].kind == "completed"
    assert seen == [1, 2, 3, 4, 5]


# the fleet


async def test_the_fleets_stream_begins_with_resync_and_tells_of_jobs_and_workers(rig: HubRig) -> None:
    async with watching(rig, "/api/events") as stream:
        await stream.until("resync")
        await rig.submit(metadata={"user": "42"})
        queued = await stream.until("queued")
        assert (queued.data["tenant"], queued.data["metadata"]) == ("default", {"user": "42"})
        job = await lease(rig)
        assert (await stream.until("leased")).data["worker_id"] == "gpu-a"
        await report(rig, job, value=1, max=2)
        assert (await stream.until("progress")).data["data"] == {"value": 1, "max": 2}
        await complete(rig, job)
        assert (await stream.until("completed")).data["job_id"] == job.job_id
        await rig.engine.unregister(GPU, "gone")
        assert (await stream.until("offline")).data == {
            "kind": "offline",
            "at": stream.seen[-1].data["at"],
            "worker_id": "gpu-a",
            "data": {"reason": "gone"},
        }


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("kind=completed,offline", ["completed", "completed", "offline"]),
        ("worker=gpu-a&kind=leased", ["leased", "leased"]),
        ("worker=gpu-b", []),
        ("metadata[user]=42", ["queued", "leased", "completed"]),
        ("tenant=acme", ["leased", "completed"]),
        ("job={}", ["leased", "completed"]),
    ],
)
async def test_the_fleets_stream_is_filtered(rig: HubRig, query: str, expected: list[str]) -> None:
    # Submitted before anybody watched: whose it is is found out all the same.
    first = await rig.submit(metadata={"user": "41"}, role=Role.TENANT)
    async with (
        watching(rig, f"/api/events?{query.format(first)}") as stream,
        watching(rig, "/api/events?kind=offline") as end,
    ):
        await stream.until("resync")
        await complete(rig, await lease(rig))
        await rig.submit(metadata={"user": "42"})
        await complete(rig, await lease(rig, poll_id="2"))
        await rig.engine.unregister(GPU, "gone")
        await end.until("offline")
        rig.hub.stop()
        await stream.rest()
    assert [each.kind for each in stream.seen if each.kind != "resync"] == expected


async def test_a_tenants_key_hears_of_its_own_jobs_alone(rig: HubRig) -> None:
    refused = await rig.get("/api/events?tenant=other", role=Role.TENANT)
    assert refused.code == "not_allowed"
    async with watching(rig, "/api/events", role=Role.TENANT) as stream:
        await stream.until("resync")
        await rig.submit()
        await rig.engine.unregister(GPU, "gone")
        mine = await rig.submit(role=Role.TENANT)
        seen = await stream.until("queued")
        assert seen.data["job_id"] == mine and len(stream.seen) == 2


@pytest.mark.parametrize("answers", [True, False])
async def test_a_tenants_database_that_is_away_holds_up_nobodys_events(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr("comfyfleet.hub.streams.feed._LABEL_S", 0.05)
    away = await rig.submit(metadata={"user": "41"}, role=Role.TENANT)
    get, never = rig.engine.store.records.get, asyncio.Event()

    async def get_if_there(job_id: JobId) -> Job | None:
        if job_id != away:
            return await get(job_id)
        if answers:
            raise Fault("the database is away")
        await never.wait()
        raise AssertionError("nobody waits for so long")

    async with watching(rig, "/api/events") as stream:
        await stream.until("resync")
        with monkeypatch.context() as patch:
            patch.setattr(rig.engine.store.records, "get", get_if_there)
            await rig.engine.pause(JobId(away))
            told = (await stream.until("paused")).data
            assert (told["job_id"], told["tenant"], told.get("metadata")) == (away, "acme", None)
            await rig.submit(metadata={"user": "42"})
            assert (await stream.until("queued")).data["metadata"] == {"user": "42"}
        await rig.engine.resume(JobId(away))
        assert (await stream.until("resumed")).data["metadata"] == {"user": "41"}, (
            "and is heard of when it is back"
        )


async def test_whoever_cannot_follow_the_fleet_is_told_to_read_again() -> None:
    feed = Feed(keep=3)
    watcher = Watcher(feed, b"", lambda _: True)
    assert await watcher.next() == b"retry: 1000\n\n"
    for number in range(5):
        feed.add(FeedEntry("queued", {"number": number}))
    chunk = await watcher.next()
    assert chunk is not None
    assert chunk.startswith(b"event: resync\n") and chunk.count(b"event: queued") == 3
