"""Two hubs on one Redis: a job submitted at one, run by a worker at the other, watched at either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from redis.asyncio import Redis
from tests.hub._hub import HubRig, running_hub
from tests.hub._receiver import receiving
from tests.hub._watching import GPU, complete, lease, register, report, watching
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.model.access import Role
from comfyfleet.model.calls import FailureReport, Release
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.net.url_guard import AllowedHosts, UrlGuard
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.redis.store import RedisStore


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with some_server() as url:
        yield url


class Hubs:
    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self._url = url
        self._stack = stack
        self.a: HubRig
        self.b: HubRig

    async def another(self) -> HubRig:
        return await self._stack.enter_async_context(running_hub(store_url=self._url))


@pytest_asyncio.fixture
async def hubs(server: str) -> AsyncIterator[Hubs]:
    async with AsyncExitStack() as stack:
        hubs = Hubs(with_prefix(server), stack)
        hubs.a, hubs.b = await hubs.another(), await hubs.another()
        for rig in (hubs.a, hubs.b):
            assert isinstance(rig.engine.store, RedisStore)
            assert rig.engine.store._listener is not None
            async with asyncio.timeout(60):
                await rig.engine.store._listener.is_listening.wait()
        yield hubs


def progress(job_id: str) -> str:
    return f"/api/jobs/{job_id}/progress"


async def call(rig: HubRig, name: str, **body: Any) -> Any:
    answer = await rig.post(f"/api/worker/{name}", body, role=Role.WORKER)
    assert answer.status < 300, answer.content
    return answer.body if answer.content else None


async def test_a_job_submitted_at_one_hub_runs_at_the_other_and_is_watched_at_the_first(hubs: Hubs) -> None:
    await call(hubs.b, "register", worker_id="gpu-b", capabilities={"services": ["comfyui"]})
    polling = asyncio.create_task(call(hubs.b, "poll", worker_id="gpu-b", poll_id="1", wait_s=10))
    job_id = await hubs.a.submit()
    async with watching(hubs.a, progress(job_id)) as stream:
        leased = (await polling)["lease"]
        # The same poll at the other hub gets the same lease.
        assert (await call(hubs.a, "poll", worker_id="gpu-b", poll_id="1", wait_s=0))["lease"] == leased
        await call(hubs.b, "heartbeat", worker_id="gpu-b", leases=[leased])
        assert (await stream.until("leased")).data["data"]["worker_id"] == "gpu-b"
        news = {"lease": leased, "kind": "progress", "data": {"value": 1, "max": 4}}
        picture = {"lease": leased, "kind": "preview", "image": "/9g="}
        await call(hubs.b, "progress", reports=[news, picture])
        while (seen := await stream.until("progress")).data["value"] is None:
            pass
        assert (seen.data["percentage"], seen.data["worker_id"]) == (25.0, "gpu-b")
        await call(hubs.b, "progress", reports=[{**news, "data": {"value": 2, "max": 4}}, picture])
        assert (await stream.until("preview")).data["image"] == "/9g="
        await call(hubs.b, "complete", lease=leased, result={"outputs": {"2": {"text": ["done"]}}})
        *_, last = await stream.rest()
        assert last.data["result"] == {"outputs": {"2": {"text": ["done"]}}}
        assert [each.id for each in stream.facts] == [1, 2, 3]


async def test_facts_and_progress_of_another_hub_come_at_once(
    hubs: Hubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kept at the store once: whoever looks there finds the first, so what comes after it was told.
    monkeypatch.setattr("comfyfleet.engine.peers._KEEP_EVERY_S", 3600.0)
    await register(hubs.b)
    job_id = await hubs.a.submit()
    async with watching(hubs.a, progress(job_id)) as stream:
        await stream.until("progress")
        job = await lease(hubs.b)
        await stream.until("leased")
        for number in range(20):
            await report(hubs.b, job, value=number, max=20)
            async with asyncio.timeout(60):
                while (await stream.until("progress")).data["value"] != number:
                    pass
        await complete(hubs.b, job)
        await stream.rest()


async def test_a_lost_message_costs_at_most_a_second_and_no_fact(
    hubs: Hubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(message: bytes) -> None:
        """Said to nobody."""

    for rig in (hubs.a, hubs.b):
        monkeypatch.setattr(rig.engine.store.peer_channel, "publish", lost)
    await register(hubs.b)
    job_id = await hubs.a.submit()
    async with watching(hubs.a, progress(job_id)) as stream:
        await stream.until("progress")
        job = await lease(hubs.b)
        await stream.until("leased")
        # Kept at the store, at most one a second.
        await report(hubs.b, job, value=1, max=4)
        while (await stream.until("progress")).data["value"] != 1:
            pass
        await complete(hubs.b, job)
        assert (await stream.rest())[-1].kind == "completed"
        assert [each.id for each in stream.facts] == [1, 2, 3]


async def test_what_another_hub_told_is_not_told_back(hubs: Hubs, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    peer_channel = hubs.a.engine.store.peer_channel
    assert peer_channel is not None
    say = peer_channel.publish

    async def heard(message: bytes) -> None:
        said.append(msgspec.msgpack.decode(message))
        await say(message)

    monkeypatch.setattr(peer_channel, "publish", heard)
    await register(hubs.b)
    job_id = await hubs.b.submit()
    async with watching(hubs.a, progress(job_id)) as a, watching(hubs.b, progress(job_id)) as b:
        await a.until("progress")
        await b.until("progress")
        job = await lease(hubs.b)
        await a.until("leased")
        await report(hubs.b, job, value=1, max=4)
        while (await a.until("progress")).data["value"] != 1:
            pass
        await complete(hubs.b, job)
        await a.rest()
        await b.rest()
    assert {each["type"] for each in said} == {"wants"}


async def test_a_stream_begun_at_one_hub_goes_on_at_the_other(hubs: Hubs) -> None:
    job_id = await hubs.a.submit()
    async with watching(hubs.a, progress(job_id)) as stream:
        await hubs.b.post(f"/api/jobs/{job_id}/pause")
        last = (await stream.until("paused")).id
    await hubs.a.post(f"/api/jobs/{job_id}/resume")
    async with watching(hubs.b, progress(job_id), after=last) as stream:
        await hubs.a.post(f"/api/jobs/{job_id}/cancel")
        await stream.rest()
        assert [(each.kind, each.id) for each in stream.facts] == [("resumed", 3), ("cancelled", 4)]


async def test_whoever_comes_late_sees_the_newest_progress_at_any_hub(hubs: Hubs) -> None:
    await register(hubs.b)
    job_id = await hubs.a.submit()
    job = await lease(hubs.b)
    await report(hubs.b, job, value=3, max=4)
    store = hubs.b.engine.store
    assert isinstance(store, RedisStore)
    async with asyncio.timeout(60):
        while not await store.diagnose("EXISTS", f"{store.prefix}job:{job_id}:progress"):
            await asyncio.sleep(0.005)
    ttl = await store.diagnose("TTL", f"{store.prefix}job:{job_id}:progress")
    assert isinstance(ttl, int) and 0 < ttl <= 3600
    third = await hubs.another()
    for rig in (hubs.a, hubs.b, third):
        body = (await rig.get(f"/jobs/{job_id}/progress")).body
        assert (body["percentage"], body["worker_id"], body["lease"]) == (75.0, "gpu-a", 1)
    async with watching(third, progress(job_id)) as stream:
        assert (await stream.until("progress")).data["percentage"] == 75.0


async def test_progress_of_a_worker_that_has_redis_alone_reaches_watchers(hubs: Hubs) -> None:
    await register(hubs.b)
    job_id = await hubs.a.submit()
    ref = (await lease(hubs.b)).ref
    store = hubs.b.engine.store
    assert isinstance(store, RedisStore)
    shown = (ref.job_id, ref.round, ref.number, ref.epoch, ref.token)
    async with watching(hubs.a, progress(job_id)) as stream:
        for number in (1, 2):
            said = b'{"value": %d, "max": 4, "message": "from afar"}' % number
            assert await store._do("worker_progress", *shown, said) == 1
            while (seen := await stream.until("progress")).data["value"] != number:
                pass
            assert (seen.data["message"], seen.data["worker_id"]) == ("from afar", "gpu-a")
        assert await store._do("worker_complete", *shown, b'{"outputs": {}}') == 1
        assert (await stream.rest())[-1].kind == "completed"


async def test_progress_of_a_worker_that_has_redis_alone_is_dated_and_of_its_own_run(hubs: Hubs) -> None:
    await register(hubs.b)
    job_id = await hubs.a.submit()
    ref = (await lease(hubs.b)).ref
    store = hubs.b.engine.store
    assert isinstance(store, RedisStore)
    shown = (ref.job_id, ref.round, ref.number, ref.epoch, ref.token)
    assert await store._do("worker_progress", *shown, b'{"percentage": 40, "message": "half done"}') == 1
    told_before = await store.now()
    body = (await hubs.a.get(f"/jobs/{job_id}/progress")).body
    assert (body["percentage"], body["worker_id"], body["lease"]) == (40, "gpu-a", 1)
    assert body["updated_at"] <= told_before, "when its worker said so, not when it was asked"
    assert await store._do("worker_release", *shown, "declined") == 1
    again = await lease(hubs.b, poll_id="again")
    assert again.ref.number == 2
    body = (await hubs.a.get(f"/jobs/{job_id}/progress")).body
    assert (body["percentage"], body["message"], body["lease"]) == (None, None, 2), "of the run before"


async def test_the_fleets_stream_tells_of_the_runs_of_a_worker_that_has_redis_alone(hubs: Hubs) -> None:
    store = hubs.b.engine.store
    assert isinstance(store, RedisStore)
    await register(hubs.b)
    async with watching(hubs.a, "/api/events") as stream:
        await _until_heard(hubs, stream)
        job_id = await hubs.a.submit(metadata={"user": "42"})
        given = await store._do("worker_lease_next", GPU, "p1", "t1", 10)
        assert isinstance(given, list)
        shown = given[:5]
        assert await store._do("worker_heartbeat", *shown, 60) == 1
        assert await store._do("worker_progress", *shown, b'{"percentage": 50, "message": "half"}') == 1
        assert await store._do("worker_complete", *shown, b'{"outputs": {}}') == 1
        await stream.until("completed")
    told = [each for each in stream.seen if each.data.get("job_id") == job_id]
    assert [each.kind for each in told] == ["queued", "leased", "started", "progress", "completed"]
    assert {each.data["worker_id"] for each in told[1:]} == {GPU}
    assert [each.data.get("number") for each in told] == [1, 2, None, None, 3]
    assert told[1].data["data"]["attempt"] == 1
    assert told[3].data["data"] == {"percentage": 50, "message": "half"}
    assert all(each.data["metadata"] == {"user": "42"} for each in told)


async def test_the_runs_of_a_worker_that_has_redis_alone_are_watched_at_once(
    hubs: Hubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does is heard of, and not found by a look: nobody looks here."""
    monkeypatch.setattr("comfyfleet.engine.peers.RemoteFactPoller._look", _never)
    store = hubs.b.engine.store
    assert isinstance(store, RedisStore)
    await register(hubs.b)
    job_id = await hubs.a.submit()
    async with watching(hubs.a, progress(job_id)) as stream:
        await stream.until("progress")
        while not await store.diagnose("EXISTS", f"{store.prefix}watched"):
            await asyncio.sleep(0.01)
        given = await store._do("worker_lease_next", GPU, "p1", "t1", 10)
        assert isinstance(given, list)
        shown = given[:5]
        assert await store._do("worker_heartbeat", *shown, 60) == 1
        await stream.until("started")
        assert await store._do("worker_progress", *shown, b'{"value": 1, "max": 4}') == 1
        while (seen := await stream.until("progress")).data["value"] != 1:
            pass
        assert (seen.data["worker_id"], seen.data["lease"]) == (GPU, 1)
        assert await store._do("worker_release", *shown, 'no "room"') == 1
        assert (await stream.until("released")).data["data"] == {"reason": 'no "room"', "attempt": 1}
        assert [(each.id, each.kind) for each in stream.facts] == [
            (1, "queued"),
            (2, "leased"),
            (3, "released"),
        ]


async def _never(_: object) -> None:
    return


async def test_the_fleets_stream_tells_of_the_other_hubs_workers_and_jobs(hubs: Hubs) -> None:
    async with watching(hubs.a, "/api/events") as stream:
        await stream.until("resync")
        # Whoever begins to watch is known to the others a moment later.
        await _until_heard(hubs, stream)
        await register(hubs.b)
        assert (await stream.until("online")).data["worker_id"] == GPU
        job_id = await hubs.b.submit(metadata={"user": "42"})
        queued = await stream.until("queued")
        assert (queued.data["job_id"], queued.data["metadata"]) == (job_id, {"user": "42"})
        job = await lease(hubs.b)
        await report(hubs.b, job, ProgressKind.STARTED)
        assert (await stream.until("started")).data["worker_id"] == GPU


async def _until_heard(hubs: Hubs, stream: Any) -> None:
    relaying = hubs.b.engine._peer_bus
    async with asyncio.timeout(60):
        while relaying._everything_until < 0:
            await asyncio.sleep(0.005)


async def test_the_number_of_watchers_opens_no_connection_to_redis(hubs: Hubs) -> None:
    store = hubs.a.engine.store
    assert isinstance(store, RedisStore)
    jobs = [await hubs.a.submit() for _ in range(10)]
    before = await _connections(store)
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(watching(hubs.a, progress(job_id)))
            for job_id in jobs
            for _ in range(3)
        ]
        for stream in streams:
            await stream.until("progress")
        assert await _connections(store) == before


async def _connections(store: RedisStore) -> int:
    listed = await store.diagnose("CLIENT", "LIST")
    assert isinstance(listed, bytes)
    return listed.count(b"\n")


async def test_a_webhook_is_told_once_whichever_hub_knows_what(server: str) -> None:
    url = with_prefix(server)
    rules = Rules(round_s=0.05)
    allowed = AllowedHosts(["127.0.0.1"])
    async with (
        receiving() as receiver,
        running_hub(store_url=url, rules=rules, guard=UrlGuard(allowed)) as a,
        running_hub(store_url=url, rules=rules, guard=UrlGuard(allowed)) as b,
    ):
        await register(b)
        jobs = []
        for _ in range(10):
            jobs.append(await a.submit(webhook={"url": receiver.url, "events": ["queued", "completed"]}))
            await complete(b, await lease(b, poll_id=jobs[-1]))
        await receiver.until(20)
        async with asyncio.timeout(60):
            while set(await a.documents.collections()) & {"webhook_notes", "deliveries_due"}:
                await asyncio.sleep(0.01)
        told = [(each.said["data"]["id"], each.said["type"]) for each in receiver.came]
        wanted = [(job_id, kind) for job_id in jobs for kind in ("job.completed", "job.queued")]
        assert sorted(told) == sorted(wanted)
        # Both know of it, and either sends it again.
        found = (await b.get(f"/api/jobs/{jobs[0]}/deliveries")).body["deliveries"]
        assert (await a.get(f"/api/jobs/{jobs[0]}/deliveries")).body["deliveries"] == found


@pytest.mark.parametrize("is_completed", [True, False])
async def test_the_stream_of_a_job_tells_of_a_run_by_a_hubs_worker_too(
    hubs: Hubs, is_completed: bool
) -> None:
    job_id = await hubs.a.submit()
    await register(hubs.a)
    leased = await lease(hubs.a)
    await report(hubs.a, leased, ProgressKind.STARTED)
    await report(
        hubs.a, leased, ProgressKind.PROGRESS, value=1, max=4, percentage=12.5, message="step 1 of 4"
    )
    if is_completed:
        await complete(hubs.a, leased)
    else:
        await hubs.a.engine.retry(JobId(job_id))
        await hubs.a.engine.release(Release(leased.ref, "retry"))
    store = hubs.a.engine.store
    assert isinstance(store, RedisStore)
    last = "completed" if is_completed else "pending"
    async with asyncio.timeout(60):
        while True:
            found = await store.diagnose("XRANGE", f"{store._address.prefix}progress:{job_id}", "-", "+")
            assert isinstance(found, list)
            entries = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in found]
            if entries and entries[-1][b"status"] == last.encode():
                break
            await asyncio.sleep(0.01)
    assert [entry[b"status"].decode() for entry in entries] == ["started", "assigned", last]
    assert {entry[b"worker_id"].decode() for entry in entries} == {GPU}
    assert all(float(entry[b"timestamp"]) > 1e9 for entry in entries)
    assert msgspec.json.decode(entries[1][b"progress"])["value"] == 1
    assert (entries[1][b"percentage"], entries[1][b"message"]) == (b"12.5", b"step 1 of 4")


async def test_one_command_to_all_workers_and_events_of_the_system_are_read_on_redis(
    hubs: Hubs, server: str
) -> None:
    await register(hubs.a)
    await register(hubs.b, WorkerId("gpu-b"))
    assert await hubs.b.engine.commands(WorkerId("gpu-b"), 0) == ()
    store = hubs.a.engine.store
    assert isinstance(store, RedisStore)
    prefix = store._address.prefix
    async with Redis.from_url(server, protocol=2) as redis, redis.pubsub() as heard:
        await heard.subscribe(f"{prefix}channel:hub:events", f"{prefix}channel:workers:all")
        messages = heard.listen()
        async with asyncio.timeout(60):
            await anext(messages), await anext(messages)
            await hubs.a.post("/api/fleet/drain")
            await hubs.a.post("/api/queue/pause")
            seen: list[dict[str, Any]] = []
            while not any(each.get("event") == "queue_paused" for each in seen):
                data = (await anext(messages))["data"]
                seen += [msgspec.json.decode(data)] if data.startswith(b"{") else []
            (command,) = await hubs.b.engine.commands(WorkerId("gpu-b"), 60)
        assert command.action == "drain"
        (told,) = [each for each in seen if each.get("action") == "drain"]
        assert told["worker_id"] == "*" and told["timestamp"] > 1e9
        assert "workers_draining" in [each.get("event") for each in seen]
        for name in ("gpu-a", "gpu-b"):
            found: Any = await redis.xrange(f"{prefix}commands:{name}")
            assert [entry[b"action"] for _, entry in found] == [b"drain"]


async def test_the_words_of_a_failure_are_not_told_on_the_channel_that_every_worker_reads(
    hubs: Hubs, server: str
) -> None:
    """They may quote a prompt, and where jobs are sealed so are they."""
    await register(hubs.a)
    await hubs.a.submit()
    leased = await lease(hubs.a)
    store = hubs.a.engine.store
    assert isinstance(store, RedisStore)
    async with Redis.from_url(server, protocol=2) as redis, redis.pubsub() as heard:
        await heard.subscribe(f"{store._address.prefix}channel:hub:events")
        messages = heard.listen()
        async with asyncio.timeout(60), watching(hubs.a, "/api/events") as stream:
            await anext(messages)
            failure = Failure(FailureKind.NODE_ERROR, "the prompt 'my secret' is too long")
            await hubs.a.engine.fail(FailureReport(leased.ref, failure))
            await hubs.a.post("/api/queue/pause")
            seen: list[bytes] = []
            while not any(b"queue_paused" in each for each in seen):
                seen.append((await anext(messages))["data"])
            shown = await stream.until("blocked")
    (blocked,) = [msgspec.json.decode(each) for each in seen if b'"blocked"' in each]
    assert (blocked["worker_id"], blocked["data"]["reason"]) == ("gpu-a", "failures")
    assert not any(b"secret" in each for each in seen)
    assert "secret" in shown.data["data"]["message"], "operators read it at a hub"
