"""What is left on the server: after thousands of jobs the keys the layout promises, and no others."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from tests.servers.redis_fixtures import own_server

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import ClassKey, JobId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.stores.redis.check import examine_redis
from comfyfleet.stores.redis.server import library_text
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import (
    FAST,
    FOR_FAST,
    QUEUED,
    SLOW,
    A,
    B,
    StoreBench,
    completion,
    failure,
    release,
    tenant,
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_server(is_durable=False) as server:
        yield server.url


@pytest.fixture
async def bench(url: str) -> AsyncIterator[StoreBench]:
    bench = StoreBench(lambda clock: RedisStore(url))
    store = bench.store
    assert isinstance(store, RedisStore)
    await store.open()
    await store.diagnose("FLUSHALL")
    await store.close()
    bench = StoreBench(lambda clock: RedisStore(url))
    await bench.open()
    yield bench
    await bench.store.close()


async def keys(bench: StoreBench) -> set[str]:
    assert isinstance(bench.store, RedisStore)
    found = await bench.store.diagnose("KEYS", "*")
    assert isinstance(found, list)
    return {key.decode() for key in found}


async def size(bench: StoreBench, key: str) -> int:
    assert isinstance(bench.store, RedisStore)
    found = await bench.store.diagnose("ZCARD", bench.store.prefix + key)
    assert isinstance(found, int)
    return found


async def test_the_heartbeat_of_a_worker_ends_with_what_was_heard_of_it_and_not_with_what_was_written(
    bench: StoreBench,
) -> None:
    store = bench.store
    assert isinstance(store, RedisStore)

    async def left_s() -> int:
        """-2: there is none."""
        left = await store.diagnose("TTL", store.prefix + f"worker:{A}:heartbeat")
        assert isinstance(left, int)
        return left

    now = await store.now()
    record = WorkerRecord(A, Capabilities((Service("comfyui"),)), FAST, 1, now - 40, now - 40)
    await store.put_worker(record)
    assert 0 < await left_s() <= 20, "it was heard of forty seconds ago"
    await store.put_worker(msgspec.structs.replace(record, last_seen_at=now))
    assert 50 < await left_s() <= 60
    await store.put_worker(msgspec.structs.replace(record, is_paused=True))
    assert 50 < await left_s() <= 60, "who writes has heard less than another"
    await store.put_worker(msgspec.structs.replace(record, is_offline=True))
    assert await left_s() == -2
    await store.put_worker(msgspec.structs.replace(record, last_seen_at=now - 70))
    assert await left_s() == -2


WORKERS = 20


async def soak(bench: StoreBench, jobs: int) -> None:
    """Lanes come and go: every job has a workflow of its own. Only one of two profiles is ever polled for."""

    async def work(number: int) -> None:
        worker, held = WorkerId(f"worker-{number}"), None
        for place in range(jobs // WORKERS):
            name = f"{number}-{place}"
            await bench.enqueue(
                workflow_hash=WorkflowHash(name), tenant=tenant(f"t{place % 3}"), reference=name
            )
            taken = held or await bench.lease_next(worker)
            held = None
            if taken is None:
                continue
            ref = taken.lease_ref()
            await bench.store.heartbeat([ref], 60.0)
            match place % 4:
                case 0:
                    await bench.store.write(failure(ref))
                case 1:
                    await bench.store.write(release(ref))
                    # Two for the one that came: what waits must not pile up, however long it lasts.
                    if (again := await bench.lease_next(worker)) is not None:
                        await bench.store.write(completion(again.lease_ref()))
                case _:
                    await bench.store.write(completion(ref))
                    held = await bench.lease_next(worker)
                    await bench.store.fair_share.charge(taken.tenant, 1.0)

    await asyncio.gather(*[work(number) for number in range(WORKERS)])


async def drain(bench: StoreBench) -> None:
    async def work(number: int) -> None:
        worker = WorkerId(f"worker-{number}")
        for held in await bench.store.leases_of(worker):
            assert await bench.store.write(completion(held.lease_ref())) is not None
        while (taken := await bench.lease_next(worker)) is not None:
            assert await bench.store.write(completion(taken.lease_ref())) is not None
        await bench.store.remove_worker(worker)

    await asyncio.gather(*[work(number) for number in range(WORKERS)])


async def purge(bench: StoreBench) -> None:
    horizon = await bench.store.now() + 1
    for phase in (Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED):
        while await bench.store.purge(phase, horizon, 500):
            pass


async def memory(bench: StoreBench) -> int:
    assert isinstance(bench.store, RedisStore)
    text = await bench.store.diagnose("INFO", "memory")
    assert isinstance(text, bytes)
    found = re.search(rb"used_memory_dataset:(\d+)", text)
    assert found is not None
    return int(found[1])


async def test_after_a_soak_and_a_purge_the_keys_are_those_that_are_promised(
    bench: StoreBench, url: str, pytestconfig: pytest.Config
) -> None:
    jobs, began = pytestconfig.getoption("--soak"), time.monotonic()
    await soak(bench, jobs)
    worked = time.monotonic()
    await drain(bench)
    counts = (await bench.store.counts()).by_phase
    assert counts[Phase.COMPLETED] + counts[Phase.FAILED] == jobs // WORKERS * WORKERS
    filled = (len(await keys(bench)), await memory(bench))
    await purge(bench)
    assert (await bench.store.counts()).by_phase == dict.fromkeys(Phase, 0)
    left = Counter(
        re.sub(r":(t\d|[0-9a-f]{16}|[0-9a-f]{24})(:|$).*", r":…", key) for key in await keys(bench)
    )
    standing = (
        "meta",
        "clients",
        "profiles",
        "profiles:sought",
        "classes",
        "classes:numbers",
        "classes:idle",
    )
    expected = {f"{{cf}}:{name}" for name in standing}
    expected |= {f"{{cf}}:profile:{profile}:classes" for profile in (FAST, SLOW)}
    expected |= {"{cf}:class:…", "{cf}:tenant:…", "{cf}:request:…"}
    assert expected <= left.keys() <= expected | {"{cf}:index:slow"}, left
    assert left["{cf}:request:…"] <= WORKERS + 1
    assert left["{cf}:tenant:…"] == 3
    assert left["{cf}:class:…"] == 2
    assert await size(bench, "index:slow") < 700, "a profile nobody polls for does not collect empty lanes"
    assert (await examine_redis(url))["problems"] == []
    # Shown with -s: the figures of a long soak.
    print(f"{jobs} jobs in {worked - began:.1f} s, {jobs / (worked - began):.0f} a second")
    print(
        f"before the purge {filled[0]} keys, {filled[1]} bytes; after {left.total()}, {await memory(bench)}"
    )


async def test_a_finished_job_leaves_its_own_keys_and_no_others(bench: StoreBench) -> None:
    for profile in (FAST, SLOW):
        assert await bench.lease_next(A, profile) is None
    before = await keys(bench)
    _, ref = await bench.leased()
    assert await bench.store.write(completion(ref)) is not None
    assert await bench.lease_next() is None, "who looks takes out of the index what has gone"
    assert await bench.lease_next(B, SLOW) is None
    own = f"{{cf}}:job:{ref.job_id}"
    made = {key for key in await keys(bench) - before if ":request:" not in key}
    assert made == {own, f"{own}:payload", f"{own}:log", f"{own}:result", "{cf}:jobs", "{cf}:jobs:completed"}
    assert isinstance(bench.store, RedisStore)
    await bench.store.drop_profiles([FAST, SLOW])
    assert "{cf}:profiles:sought" not in await keys(bench)


async def test_blocks_leave_nothing_when_they_are_over(bench: StoreBench) -> None:
    before = {key for key in await keys(bench) if ":request:" not in key}
    await bench.store.put_block(Block(B, "x", BlockReason.FAILURES, 1, 1.0))
    await bench.store.put_block(Block(B, "y", BlockReason.FAILURES, 1, 1e12))
    assert [block.target for block in await bench.store.expired_blocks()] == ["x"]
    await bench.store.remove_worker(B)
    assert {key for key in await keys(bench) if ":request:" not in key} == before


async def test_a_waiting_job_takes_at_most_a_kilobyte_beside_its_payload(bench: StoreBench) -> None:
    store = bench.store
    assert isinstance(store, RedisStore)

    count = 3000
    await bench.enqueue()
    before, payloads = await memory(bench), 0
    for number in range(count):
        job_id = JobId(f"0190f0e0-0000-7000-8000-{number:012x}")
        dispatch = Dispatch(
            job_id,
            ClassKey(FOR_FAST.key),
            WorkflowHash("f" * 64),
            0,
            queued_at=1763200135.123456,
            wake_at=1763286535.123456,
            expires_at=1763286535.123456,
        )
        job = Job(job_id, dispatch.tenant, dispatch.workflow_hash, 0.0, Submission({}))
        assert await store.enqueue(dispatch, job, QUEUED) is not None
        payload = await store.diagnose("MEMORY", "USAGE", f"{{cf}}:job:{job_id}:payload")
        assert isinstance(payload, int)
        payloads += payload
    each = (await memory(bench) - before - payloads) / count
    assert each <= 1024, each


def test_every_key_of_the_layout_is_used_and_every_command_is_as_old_as_redis_7() -> None:
    text = library_text()
    layout = text[: text.index("local REVISION")]
    body = text[text.index("local REVISION") :]
    for name in re.findall(r"^--   ([a-z]+)", layout, re.MULTILINE):
        assert f"'{name}" in body or f":{name}" in body, name
    commands = set(re.findall(r"call\('([A-Z]+)'", body))
    known = {
        *("GET", "SET", "MGET", "MSET", "APPEND", "DEL", "EXISTS", "EXPIRE", "TIME", "PUBLISH"),
        *("HGET", "HSET", "HDEL", "HGETALL", "HEXISTS", "HINCRBY", "XADD"),
        *("RPUSH", "LTRIM", "LLEN", "LRANGE", "LREM", "LPOP"),
        *("SADD", "SREM", "SMEMBERS", "SISMEMBER", "SINTER"),
        *("ZADD", "ZREM", "ZCARD", "ZCOUNT", "ZSCORE", "ZPOPMIN", "ZRANDMEMBER", "ZRANGE"),
        *("ZRANGEBYSCORE", "ZRANGEBYLEX", "ZREMRANGEBYSCORE", "ZMSCORE"),
    }
    assert commands == known


async def test_tenants_with_terms_leave_nothing_behind_but_their_shares(bench: StoreBench) -> None:
    for number, most in enumerate((2, 5, None)):
        await bench.store.fair_share.put_terms(TenantTerms(tenant(f"t{number}"), 1.0 + number, most))
    await soak(bench, 600)
    assert "{cf}:tenants:open" in await keys(bench)
    await drain(bench)
    for number in range(3):
        share = await bench.store.fair_share.get(tenant(f"t{number}"))
        assert (share.waiting, share.leased) == (0, 0)
    await purge(bench)
    left = {key for key in await keys(bench) if re.match(r"{cf}:(tenant|out:|terms|job)", key)}
    assert left == {"{cf}:terms", "{cf}:tenant:t0", "{cf}:tenant:t1", "{cf}:tenant:t2"}
