"""A run of a worker with a Redis client alone: its beginning, its stream, and how it is stopped."""

from __future__ import annotations

import json

import pytest
from redis import Redis
from tests.servers.redis_server import RedisServer
from tests.stores.test_redis_workers import Worker, admit, bench, server, worker

from comfyfleet.model.dispatch import AttemptOutcome, Change, Phase, Readiness
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import A, StoreBench

__all__ = ["bench", "server", "worker"]


async def test_a_cancelled_job_ends_with_the_reason_of_its_cancel(bench: StoreBench, worker: Worker) -> None:
    await admit(bench)
    job = await bench.enqueue()
    assert worker.lease_next("p1") == job.job_id
    dispatch = await bench.store.load(job.job_id)
    assert dispatch is not None
    stop = Change(cancel_requested_at=1.0, cancel_reason='the "customer" left')
    assert await bench.change(dispatch, stop) is not None
    assert worker.call("release", *worker.lease, "cancelled") == 1
    fact = (await bench.store.facts(job.job_id))[-1]
    assert (fact.kind.value, fact.data) == ("cancelled", {"reason": 'the "customer" left'})
    ended = await bench.store.load(job.job_id)
    assert ended is not None and ended.cancel_reason == 'the "customer" left'


@pytest.mark.parametrize(("asked", "standing"), [("pause", Readiness.PAUSED), ("retry", Readiness.IN_LANE)])
async def test_a_job_that_is_to_be_stopped_is_paused_or_back_in_line_when_it_is_released(
    bench: StoreBench, worker: Worker, asked: str, standing: Readiness
) -> None:
    await admit(bench)
    job, later = await bench.enqueue(), await bench.enqueue()
    assert worker.lease_next("p1") == job.job_id
    dispatch = await bench.store.load(job.job_id)
    assert dispatch is not None
    stop = Change(pause_requested_at=1.0) if asked == "pause" else Change(retry_requested_at=1.0)
    assert await bench.change(dispatch, stop) is not None
    assert worker.call("heartbeat", *worker.lease, 60) == 2, "to be stopped"
    assert worker.call("progress", *worker.lease, "{}") == 2
    for _ in range(2):
        assert worker.call("release", *worker.lease, "cancelled") == 1
    after = await bench.store.load(job.job_id)
    assert after is not None
    assert (after.phase, after.standing, after.stop, after.releases) == (Phase.QUEUED, standing, None, 0)
    assert await bench.peek() == ([] if asked == "pause" else [job.job_id]) + [later.job_id]
    (attempt,) = await bench.store.attempts(job.job_id)
    assert attempt.outcome is AttemptOutcome.CANCELLED
    assert [fact.kind.value for fact in await bench.store.facts(job.job_id)][-1] == (
        "paused" if asked == "pause" else "released"
    )


async def test_a_job_has_started_with_the_first_heartbeat_and_its_stream_tells_of_each_step(
    bench: StoreBench, worker: Worker
) -> None:
    await admit(bench)
    job = await bench.enqueue()
    assert worker.lease_next("p1") == job.job_id
    assert worker.call("heartbeat", *worker.lease, 60) == 1
    record = await bench.store.records.get(job.job_id)
    assert record is not None
    started_at = record.started_at
    assert started_at == pytest.approx(await bench.store.now(), abs=60)
    assert worker.call("heartbeat", *worker.lease, 60) == 1
    assert worker.call("progress", *worker.lease, '{"percentage": 25, "message": "step 1 of 4"}') == 1
    assert worker.call("progress", *worker.lease, '{"percentage": [1], "message": {}, "at": 7}') == 1
    assert worker.call("complete", *worker.lease, "{}") == 1
    record = await bench.store.records.get(job.job_id)
    assert record is not None and record.started_at == started_at
    found = worker.send("XREAD", "STREAMS", f"{{cf}}:progress:{job.job_id}", "0")
    assert isinstance(found, list)
    entries = [entry for _, entry in found[0][1]]
    assert [(entry["status"], entry["worker_id"], entry["progress"]) for entry in entries] == [
        ("started", A, "{}"),
        ("assigned", A, '{"percentage": 25, "message": "step 1 of 4"}'),
        ("assigned", A, '{"percentage": [1], "message": {}, "at": 7}'),
        ("completed", A, "{}"),
    ]
    assert [(entry.get("percentage"), entry.get("message")) for entry in entries] == [
        (None, None),
        ("25", "step 1 of 4"),
        (None, None),
        (None, None),
    ]
    times = [float(entry["timestamp"]) for entry in entries]
    assert times == sorted(times) and times[0] == started_at


async def test_a_job_that_was_completed_without_a_heartbeat_started_with_its_lease(
    bench: StoreBench, worker: Worker
) -> None:
    await admit(bench)
    job = await bench.enqueue()
    assert worker.lease_next("p1") == job.job_id
    leased = await bench.store.load(job.job_id)
    assert leased is not None and leased.lease is not None
    assert worker.call("complete", *worker.lease, "{}") == 1
    record = await bench.store.records.get(job.job_id)
    assert record is not None and record.started_at == leased.lease.leased_at


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_what_a_run_does_is_told_to_engines_while_somebody_watches_and_else_to_nobody(
    bench: StoreBench, worker: Worker, server: RedisServer, is_allowed: bool
) -> None:
    assert isinstance(bench.store, RedisStore)
    await admit(bench)
    unwatched, watched = await bench.enqueue(), await bench.enqueue()
    with Redis(port=server.port, decode_responses=True) as other, other.pubsub() as heard:
        if not is_allowed:
            other.execute_command("ACL", "SETUSER", "gpu-a", "resetchannels")
        heard.subscribe("{cf}:channel:workers:all")
        assert (heard.get_message(timeout=60) or {})["type"] == "subscribe"
        assert worker.lease_next("p1") == unwatched.job_id
        assert worker.call("complete", *worker.lease, "{}") == 1
        await bench.store.peer_channel.watch()
        assert worker.lease_next("p2") == watched.job_id
        assert worker.lease_next("p2") == watched.job_id, "asked again, told once"
        assert worker.call("heartbeat", *worker.lease, 60) == 1
        assert worker.call("heartbeat", *worker.lease, 60) == 1
        assert worker.call("progress", *worker.lease, '{"percentage": 25}') == 1
        assert worker.call("progress", *worker.lease, '{"message": "%s"}' % ("long " * 10_000)) == 1
        assert worker.call("complete", *worker.lease, "{}") == 1
        other.publish("{cf}:channel:workers:all", "the end")
        told = []
        while (message := heard.get_message(timeout=60)) is not None and message["data"] != "the end":
            told.append(json.loads(message["data"]))
    if not is_allowed:
        assert told == [], "the worker went on all the same"
        return
    assert [(each["event"], each["number"]) for each in told] == [
        ("leased", 2),
        ("started", 0),
        ("progress", 0),
        ("completed", 3),
    ]
    assert {(each["job_id"], each["worker_id"], each["lease"]) for each in told} == {(watched.job_id, A, 1)}
    assert told[2]["data"] == {"percentage": 25}
    numbered = [(fact.kind.value, fact.number) for fact in await bench.store.facts(watched.job_id)]
    assert numbered == [("queued", 1), ("leased", 2), ("completed", 3)]
