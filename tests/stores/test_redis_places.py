"""Places, lengths of lanes and expected seconds on Redis, beside fleets, engines and workers that do not know them."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.model.dispatch import Candidate, Readiness
from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.ports import Peek
from comfyfleet.stores.redis.check import examine_redis
from comfyfleet.stores.redis.codec import as_list, encode_enqueue
from comfyfleet.stores.redis.dispatches import as_bytes, decode_dispatch
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import FAST, FOR_FAST, QUEUED, A, StoreBench, release, tenant

_NEW = ("place", "run_s", "load_s")


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture
def url(server_url: str) -> str:
    return with_prefix(server_url)


@pytest.fixture
async def bench(url: str) -> AsyncIterator[StoreBench]:
    bench = StoreBench(lambda _: RedisStore(url))
    await bench.open()
    yield bench
    await bench.store.close()


def _redis(bench: StoreBench) -> RedisStore:
    assert isinstance(bench.store, RedisStore)
    return bench.store


async def _seen(bench: StoreBench) -> list[Candidate]:
    return await bench.store.peek(Peek(FAST, A, 10, 32, 30.0))


def _as_before(text: bytes) -> bytes:
    """The text of a dispatch as an engine from before revision 24 writes it."""
    for at in range(len(text) - 4):
        if text[at + 4 :].startswith(b"\xde") and struct.unpack_from("<I", text, at)[0] == len(text) - at - 4:
            values = msgspec.msgpack.decode(text[at + 4 :])
            rest = msgspec.msgpack.encode({name: values[name] for name in values if name not in _NEW})
            return text[:at] + struct.pack("<I", len(rest)) + rest
    raise AssertionError("the rest is the last part of a dispatch")


async def _make_older(bench: StoreBench) -> None:
    store = _redis(bench)
    call, prefix = store._client.call, store.prefix
    for job_id in bench.jobs:
        key = f"{prefix}job:{job_id}"
        await call("SET", key, _as_before(as_bytes(await call("GET", key))))
    head = as_bytes(await call("GET", f"{prefix}meta"))
    assert b" c\0" in head
    await call("SET", f"{prefix}meta", head.replace(b" 0 0 inf c\0", b"\0").replace(b" c\0", b"\0"))
    await call("DEL", f"{prefix}jobs:waiting")


@pytest.mark.parametrize("is_fair", [False, True])
async def test_a_fleet_from_before_is_counted_once(bench: StoreBench, url: str, is_fair: bool) -> None:
    if is_fair:
        await bench.store.fair_share.put_terms(TenantTerms(tenant("ann"), 2.0))
    for priority in (0, 0, 0, -4, 9):
        await bench.enqueue(priority=priority)
    await bench.enqueue(FOR_FAST, workflow_hash=WorkflowHash("other"))
    await bench.enqueue(standing=Readiness.PAUSED)
    _, ref = await bench.leased(priority=900)
    await _make_older(bench)
    assert [(each.waiting, each.place) for each in await _seen(bench)] == [(n, 0) for n in (1, 3, 3, 3, 1, 1)]
    assert (await bench.enqueue()).place == 5
    assert (await bench.enqueue(priority=9)).place == 1
    written = await bench.store.write(release(ref))
    assert written is not None and written.dispatch.place == 0
    offer = msgspec.structs.replace(bench.offer(), run_s=3.0, load_s=0.25)
    again = await bench.store.lease(ref.job_id, offer)
    assert again is not None and again.dispatch.lease is not None
    assert (again.dispatch.lease.run_s, again.dispatch.lease.load_s) == (3.0, 0.25)
    assert await bench.store.load(ref.job_id) == again.dispatch
    assert (await bench.enqueue(priority=900)).place == 0
    assert (await examine_redis(url))["problems"] == []


async def test_opening_a_fleet_from_before_counts_it(bench: StoreBench) -> None:
    await bench.enqueue()
    await _make_older(bench)
    await bench.store.open()
    store = _redis(bench)
    assert await store._client.call("HGETALL", f"{store.prefix}jobs:waiting") == [b"0", b"1"]


async def test_an_engine_from_before_enqueues_and_looks_as_it_did(bench: StoreBench) -> None:
    store, template = _redis(bench), await bench.enqueue()
    dispatch = msgspec.structs.replace(template, job_id="older", sequence=0, place=0)
    arguments = encode_enqueue(dispatch, bench.job(dispatch), QUEUED)
    arguments[1], arguments[6] = _after_head(_as_before(bytes(16) + as_bytes(arguments[1]))), "1 0"
    assert len(as_bytes(await store._do("enqueue", *arguments))) == 16, "sequence and time, and no more"
    rows = as_list(await store._do("peek", FAST, A, 5, 32, "30.0", "skipped"))
    assert [decode_dispatch(as_list(row)[0]).job_id for row in rows] == [template.job_id, "older"]
    leased = await store._do("lease", "older", A, FAST, "poll", "token", "10.0 30.0")
    found = decode_dispatch(leased)
    assert found.lease is not None and (found.place, found.lease.run_s, found.lease.load_s) == (0, 0.0, 0.0)
    assert (await bench.enqueue()).place == 1


def _after_head(text: bytes) -> bytes:
    return text[16:]


async def test_a_lease_of_a_direct_worker_expects_no_seconds(bench: StoreBench) -> None:
    job = await bench.enqueue(place=1)
    offer = msgspec.structs.replace(bench.offer(), run_s=2.0, load_s=20.0)
    first = await bench.store.lease(job.job_id, offer)
    assert first is not None and await bench.store.write(release(first.dispatch.lease_ref())) is not None
    capabilities = Capabilities((Service("comfyui"),))
    await bench.store.put_worker(WorkerRecord(A, capabilities, FAST, 1, 1.0, 1.0))
    assert await _redis(bench)._do("worker_lease_next", A, "poll", "token", 10) is not None
    (held,) = await bench.store.leases_of(A)
    assert held.lease is not None and (held.lease.run_s, held.lease.load_s) == (0.0, 0.0)
    assert held.place == 1
    assert (await bench.enqueue()).place == 0


async def test_a_check_finds_a_wrong_count_of_waiting_jobs(bench: StoreBench, url: str) -> None:
    await bench.enqueue(priority=3)
    assert (await examine_redis(url))["problems"] == []
    store = _redis(bench)
    await store._client.call("HINCRBY", f"{store.prefix}jobs:waiting", 3, 1)
    (problem,) = (await examine_redis(url))["problems"]
    assert "waiting jobs are miscounted" in problem


async def test_no_count_is_left_when_nobody_waits(bench: StoreBench) -> None:
    for priority in (-3, 0, 8):
        await bench.enqueue(priority=priority)
    while await bench.lease_next() is not None:
        pass
    store = _redis(bench)
    assert await store._client.call("EXISTS", f"{store.prefix}jobs:waiting") == 0
