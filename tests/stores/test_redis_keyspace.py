"""What is left on the server: after thousands of jobs the keys the layout promises, and no others."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.servers.redis_fixtures import own_server

from comfyfleet.contract.bench import (
    FAST,
    FOR_FAST,
    QUEUED,
    SLOW,
    B,
    Bench,
    completion,
    failure,
    release,
    tenant,
)
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import ClassKey, JobId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.stores.redis.library import library_text
from comfyfleet.stores.redis.store import RedisStore


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_server(is_durable=False) as server:
        yield server.url


@pytest.fixture
async def bench(url: str) -> AsyncIterator[Bench]:
    bench = Bench(lambda clock: RedisStore(url))
    store = bench.store
    assert isinstance(store, RedisStore)
    await store.open()
    await store.diagnose("FLUSHALL")
    await store.close()
    bench = Bench(lambda clock: RedisStore(url))
    await bench.open()
    yield bench
    await bench.store.close()


async def keys(bench: Bench) -> set[str]:
    assert isinstance(bench.store, RedisStore)
    found = await bench.store.diagnose("KEYS", "*")
    assert isinstance(found, list)
    return {key.decode() for key in found}


async def size(bench: Bench, key: str) -> int:
    assert isinstance(bench.store, RedisStore)
    found = await bench.store.diagnose("ZCARD", bench.store.prefix + key)
    assert isinstance(found, int)
    return found


async def soak(bench: Bench, rounds: int) -> None:
    """Lanes come and go: every job has a workflow of its own. Only one of two profiles is ever polled for."""

    async def work(number: int) -> None:
        worker = WorkerId(f"worker-{number}")
        for place in range(rounds):
            name = f"{number}-{place}"
            await bench.enqueue(
                workflow_hash=WorkflowHash(name), tenant=tenant(f"t{place % 3}"), reference=name
            )
            taken = await bench.lease_next(worker)
            if taken is None:
                continue
            ref = taken.lease_ref()
            await bench.store.heartbeat([ref], 60.0)
            match place % 4:
                case 0:
                    await bench.store.write(failure(ref))
                case 1:
                    await bench.store.write(release(ref))
                case _:
                    await bench.store.finish_and_lease_next(completion(ref), bench.offer(worker))
                    await bench.store.charge_tenant(taken.tenant, 1.0)

    await asyncio.gather(*[work(number) for number in range(20)])


async def drain(bench: Bench) -> None:
    for number in range(20):
        for held in await bench.store.leases_of(WorkerId(f"worker-{number}")):
            assert await bench.store.write(completion(held.lease_ref())) is not None
        await bench.store.remove_worker(WorkerId(f"worker-{number}"))
    while (taken := await bench.lease_next()) is not None:
        assert await bench.store.write(completion(taken.lease_ref())) is not None


async def purge(bench: Bench) -> None:
    horizon = await bench.store.now() + 1
    for phase in (Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED):
        while await bench.store.purge(phase, horizon, 500):
            pass


async def test_after_a_soak_and_a_purge_the_keys_are_those_that_are_promised(bench: Bench) -> None:
    await soak(bench, 150)
    assert (await bench.store.counts()).by_phase[Phase.COMPLETED] > 1000
    await drain(bench)
    await purge(bench)
    assert (await bench.store.counts()).by_phase == dict.fromkeys(Phase, 0)
    left = Counter(
        re.sub(r":(t\d|[0-9a-f]{16}|[0-9a-f]{24})(:|$).*", r":…", key) for key in await keys(bench)
    )
    standing = ("meta", "clients", "profiles", "classes", "classes:numbers", "classes:idle")
    expected = {f"{{cf}}:{name}" for name in standing}
    expected |= {f"{{cf}}:profile:{profile}:classes" for profile in (FAST, SLOW)}
    allowed = {"{cf}:class:…", "{cf}:tenant:…", "{cf}:request:…", "{cf}:index:slow"}
    assert left.keys() <= expected | allowed, left
    assert left["{cf}:request:…"] <= 21
    assert left["{cf}:tenant:…"] == 3
    assert await size(bench, "index:slow") < 700, "a profile nobody polls for does not collect empty lanes"


async def test_a_finished_job_leaves_its_own_keys_and_no_others(bench: Bench) -> None:
    before = await keys(bench)
    _, ref = await bench.leased()
    assert await bench.store.write(completion(ref)) is not None
    assert await bench.lease_next() is None, "who looks takes out of the index what has gone"
    assert await bench.lease_next(B, SLOW) is None
    own = f"{{cf}}:job:{ref.job_id}"
    made = {key for key in await keys(bench) - before if ":request:" not in key}
    assert made == {own, f"{own}:payload", f"{own}:log", f"{own}:result", "{cf}:jobs", "{cf}:jobs:completed"}


async def test_blocks_leave_nothing_when_they_are_over(bench: Bench) -> None:
    before = {key for key in await keys(bench) if ":request:" not in key}
    await bench.store.put_block(Block(B, "x", BlockReason.FAILURES, 1, 1.0))
    await bench.store.put_block(Block(B, "y", BlockReason.FAILURES, 1, 1e12))
    assert [block.target for block in await bench.store.expired_blocks()] == ["x"]
    await bench.store.remove_worker(B)
    assert {key for key in await keys(bench) if ":request:" not in key} == before


async def test_a_waiting_job_takes_at_most_a_kilobyte_beside_its_payload(bench: Bench) -> None:
    store = bench.store
    assert isinstance(store, RedisStore)

    async def used() -> int:
        text = await store.diagnose("INFO", "memory")
        assert isinstance(text, bytes)
        found = re.search(rb"used_memory_dataset:(\d+)", text)
        assert found is not None
        return int(found[1])

    count = 3000
    await bench.enqueue()
    before, payloads = await used(), 0
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
    each = (await used() - before - payloads) / count
    assert each <= 1024, each


def test_every_key_of_the_layout_is_used_and_every_command_is_as_old_as_redis_7() -> None:
    text = library_text()
    layout = text[: text.index("local REVISION")]
    body = text[text.index("local REVISION") :]
    for name in re.findall(r"^--   ([a-z]+)", layout, re.MULTILINE):
        assert f"'{name}" in body or f":{name}" in body, name
    commands = set(re.findall(r"call\('([A-Z]+)'", body))
    known = {
        *("GET", "SET", "MGET", "MSET", "DEL", "EXISTS", "EXPIRE", "TIME", "PUBLISH"),
        *("HGET", "HSET", "HDEL", "HGETALL", "HEXISTS", "HINCRBY", "XADD"),
        *("RPUSH", "LTRIM", "LLEN", "LRANGE", "LREM", "LPOP"),
        *("SADD", "SREM", "SMEMBERS", "SISMEMBER"),
        *("ZADD", "ZREM", "ZCARD", "ZCOUNT", "ZSCORE", "ZPOPMIN", "ZRANDMEMBER", "ZRANGE"),
        *("ZRANGEBYSCORE", "ZRANGEBYLEX", "ZREMRANGEBYSCORE"),
    }
    assert commands == known
