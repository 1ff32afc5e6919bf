"""What the Redis store asks of its server before it works on it: the library, no eviction, a known history."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from tests.servers.redis_fixtures import new_prefix, own_server, some_server, with_prefix
from tests.servers.redis_server import RedisServer

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.stores.factory import open_store
from comfyfleet.stores.redis.address import parse_address
from comfyfleet.stores.redis.client import RedisClient, RedisServerError
from comfyfleet.stores.redis.server import ensure_library, installed_revision, library_text, revision_of
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import StoreBench, completion
from comfyfleet.testing.leases import lease_next
from comfyfleet.testing.time import ManualClock


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with own_server(is_durable=False) as server:
        yield server


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisClient]:
    client = RedisClient(parse_address(url), "tests")
    await client.connect()
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def opened(store: RedisStore) -> AsyncIterator[RedisStore]:
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def of_revision(number: int) -> str:
    return re.sub(r"local REVISION = \d+", f"local REVISION = {number}", library_text())


# the library


async def test_a_missing_library_is_loaded_by_whoever_may(server: RedisServer) -> None:
    async with connected(server.url) as client:
        await client.call("FUNCTION", "FLUSH")
        assert await installed_revision(client.call) is None
        with pytest.raises(Fault, match=r"comfyfleet1 is missing .* an engine"):
            await ensure_library(client.call, may_load=False)
        assert await ensure_library(client.call) == revision_of(library_text())
        assert await ensure_library(client.call, may_load=False) == revision_of(library_text())


async def test_an_older_library_is_replaced_and_a_newer_one_is_left_alone(server: RedisServer) -> None:
    ours = revision_of(library_text())
    async with connected(server.url) as client:
        await client.call("FUNCTION", "LOAD", "REPLACE", of_revision(0))
        with pytest.raises(Fault, match=f"has revision 0, and {ours} is needed"):
            await ensure_library(client.call, may_load=False)
        assert await ensure_library(client.call) == ours
        await client.call("FUNCTION", "LOAD", "REPLACE", of_revision(ours + 1))
        assert await ensure_library(client.call) == ours + 1
        assert await installed_revision(client.call) == ours + 1
        await client.call("FUNCTION", "FLUSH")


async def test_a_fleet_of_an_older_revision_goes_on(server: RedisServer) -> None:
    """Its head did not say how large the payloads are, and neither did its jobs."""
    bench = StoreBench(lambda clock: RedisStore(with_prefix(server.url)))
    await bench.open()
    older = await bench.enqueue()
    async with connected(server.url) as client:
        head = f"{bench.store.prefix}meta"  # type: ignore[attr-defined]
        text = await client.call("GET", head)
        assert isinstance(text, bytes)
        run, _, payload_bytes = text.rpartition(b"\0")
        assert payload_bytes == b"0"
        await client.call("SET", head, run)
    assert (await bench.store.counts()).payload_bytes == 0
    await bench.store.open()
    assert bench.store.epoch == 1, "it is the same run of the same server"
    await bench.enqueue(payload_bytes=700)
    assert await bench.store.load(older.job_id) == older
    counts = await bench.store.counts()
    assert (counts.waiting, counts.payload_bytes) == (2, 700)
    await bench.store.close()


async def test_another_version_of_the_library_lives_beside_ours(server: RedisServer) -> None:
    other = library_text().replace("cf1_", "cf2_").replace("name=comfyfleet1", "name=comfyfleet2")
    async with connected(server.url) as client:
        await client.call("FUNCTION", "LOAD", "REPLACE", other)
        async with opened(RedisStore(with_prefix(server.url))) as store:
            assert await store.workers() == []
        assert await client.call("FCALL", "cf2_revision", 0) == revision_of(other)


async def test_a_library_that_disappears_is_a_loud_fault_and_gives_no_job(server: RedisServer) -> None:
    bench = StoreBench(lambda clock: RedisStore(with_prefix(server.url)))
    await bench.open()
    async with connected(server.url) as client:
        await bench.enqueue()
        await client.call("FUNCTION", "FLUSH")
        with pytest.raises(Fault, match="Function not found"):
            await lease_next(bench.store, bench.offer())
        await ensure_library(client.call)
        assert await bench.lease_next() is not None
    await bench.store.close()


async def test_a_fleet_nobody_opened_is_refused(server: RedisServer) -> None:
    async with connected(server.url) as client:
        await ensure_library(client.call)
        with pytest.raises(RedisServerError, match="CFCLOSED"):
            await client.call("FCALL", "cf1_now", 1, "{nobody}:meta", "", "", "")
        with pytest.raises(RedisServerError, match="CFCALL"):
            await client.call("FCALL", "cf1_now", 1, "{nobody}:other", "", "", "")


# time


async def test_only_a_fleet_opened_for_tests_takes_the_time_from_a_caller(server: RedisServer) -> None:
    url = with_prefix(server.url)
    async with opened(RedisStore(url)) as store:
        now = await store.now()
        meta = f"{parse_address(url).prefix}meta"
        with pytest.raises(RedisServerError, match="CFTIME"):
            await store.diagnose("FCALL", "cf1_now", 1, meta, "", "", "5.0")
        assert await store.now() >= now > 1e9
    with pytest.raises(Fault, match="CFTIME"):
        await RedisStore(url, winding=ManualClock()).open()


# the server


async def test_a_server_that_evicts_is_refused(server: RedisServer) -> None:
    async with connected(server.url) as client:
        await client.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with pytest.raises(Fault, match="set maxmemory-policy to noeviction"):
            await RedisStore(with_prefix(server.url)).open()
        await client.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
        async with opened(RedisStore(with_prefix(server.url))) as store:
            assert store.durability == "none"


@pytest.mark.parametrize(
    ("fsync", "durability"), [("always", "durable"), ("everysec", "everysec"), ("no", "none")]
)
async def test_durability_is_read_from_the_server(fsync: str, durability: str) -> None:
    with own_server("--appendonly", "yes", "--appendfsync", fsync, is_durable=False) as server:
        async with opened(RedisStore(with_prefix(server.url))) as store:
            assert store.durability == durability


async def test_a_server_that_is_not_there_is_told_with_what_to_do() -> None:
    with own_server(is_durable=False) as server:
        url = server.url
    with pytest.raises(Fault, match=r"no Redis answers at redis://127\.0\.0\.1:\d+/0 .*start it"):
        await RedisStore(url).open()


async def test_a_wrong_password_is_told_and_never_shown() -> None:
    with own_server("--requirepass", "secret-word", is_durable=False) as server:
        url = f"redis://:wrong-word@127.0.0.1:{server.port}/0"
        with pytest.raises(Fault, match="WRONGPASS") as caught:
            await RedisStore(url).open()
        assert "wrong-word" not in str(caught.value)
        async with opened(RedisStore(url.replace("wrong", "secret"))) as store:
            assert await store.workers() == []


async def test_a_full_server_refuses_a_write_as_a_whole_and_lets_old_jobs_be_purged() -> None:
    with own_server(is_durable=False) as server:
        bench = StoreBench(lambda clock: RedisStore(with_prefix(server.url)))
        await bench.open()
        store = bench.store
        assert isinstance(store, RedisStore)
        _, ended = await bench.leased()
        assert await store.write(completion(ended)) is not None
        _, ref = await bench.leased()
        await store.diagnose("CONFIG", "SET", "maxmemory", "100kb")
        with pytest.raises(Fault, match="OOM"):
            await bench.enqueue()
        with pytest.raises(Fault, match="OOM"):
            await store.write(completion(ref))
        assert await store.purge(Phase.COMPLETED, await store.now() + 1, 10) == 1
        await store.diagnose("CONFIG", "SET", "maxmemory", "0")
        assert (await store.counts()).by_phase == {**dict.fromkeys(Phase, 0), Phase.LEASED: 1}
        assert await store.write(completion(ref)) is not None
        await store.close()


# history


async def test_what_was_acknowledged_survives_a_killed_server_and_old_leases_are_told_apart() -> None:
    with own_server() as server:
        bench = StoreBench(lambda clock: RedisStore(with_prefix(server.url, "kept")))
        await bench.open()
        assert isinstance(bench.store, RedisStore)
        assert bench.store.durability == "durable"
        _, ref = await bench.leased()
        waiting = await bench.enqueue()
        assert ref.epoch == bench.store.epoch == 1
        server.kill()
        server.start()
        taken = await bench.lease_next()
        assert taken is not None
        assert taken.job_id == waiting.job_id
        assert taken.lease_ref().epoch == bench.store.epoch == 2
        assert await bench.store.write(completion(ref)) is not None, "a lease the server still knows is good"
        await bench.store.close()


async def test_the_epoch_stays_while_the_server_does(server: RedisServer) -> None:
    url = with_prefix(server.url)
    for _ in range(2):
        async with opened(RedisStore(url)) as store:
            assert store.epoch == 1


async def test_of_two_leases_under_one_poll_the_newer_owns_it(server: RedisServer) -> None:
    bench = StoreBench(lambda clock: RedisStore(with_prefix(server.url)))
    await bench.open()
    refs = []
    for _ in range(2):
        await bench.enqueue()
        written = await lease_next(bench.store, bench.offer(poll="one"))
        assert written is not None
        refs.append(written.dispatch.lease_ref())
    assert await bench.store.write(completion(refs[0])) is not None
    found = await bench.store.leased_by_poll(bench.polls[0])
    assert found is not None
    assert found.lease_ref() == refs[1]
    assert await bench.store.write(completion(refs[1])) is not None
    assert await bench.store.leased_by_poll(bench.polls[0]) is None
    await bench.store.close()


# addresses


def test_a_prefix_is_named_by_the_path_or_the_query() -> None:
    assert parse_address("redis://h").prefix == "{cf}:"
    assert parse_address("redis://h/3").database == 3
    assert parse_address("redis://h/fleet").prefix == "{fleet}:"
    both = parse_address("rediss://ann:s%40cret@h:7000/2/fleet?ca=/ca.pem")
    assert (both.database, both.prefix, both.username, both.password) == (2, "{fleet}:", "ann", "s@cret")
    assert (both.is_tls, both.authority, both.name) == (True, "/ca.pem", "rediss://h:7000/2")
    assert parse_address("redis://h/2?prefix=x").prefix == "{x}:"


@pytest.mark.parametrize(
    "url", ["redis://h/a/b", "redis://h/?prefix=a{b", "redis://h/?timeout=3", "http://h/"]
)
def test_a_url_that_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(Refusal):
        parse_address(url)


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_the_url_opens_the_redis_store(scheme: str) -> None:
    store = open_store(f"{scheme}://127.0.0.1/fleet", ManualClock())
    assert isinstance(store, RedisStore)
    assert (store.prefix, store.is_shared) == ("{fleet}:", True)


async def test_two_prefixes_are_two_fleets() -> None:
    with some_server() as url:
        first = StoreBench(lambda clock: RedisStore(with_prefix(url, new_prefix())))
        second = StoreBench(lambda clock: RedisStore(with_prefix(url, new_prefix())))
        for bench in (first, second):
            await bench.open()
        await first.enqueue()
        assert await second.lease_next() is None
        assert await first.lease_next() is not None
        for bench in (first, second):
            await bench.store.close()
