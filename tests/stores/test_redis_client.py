"""Lost answers, silent servers and new connections: nothing runs twice, nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.servers.redis_fixtures import new_prefix, own_server
from tests.servers.redis_proxy import CuttingProxy
from tests.servers.redis_server import RedisServer

from comfyfleet.model.block import Block, BlockReason, Pair
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash
from comfyfleet.ports import Peek
from comfyfleet.stores.redis.address import parse_address
from comfyfleet.stores.redis.client import RedisClient
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import FOR_BOTH, StoreBench, completion


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with own_server(is_durable=False) as server:
        yield server


@pytest.fixture
async def proxy(server: RedisServer) -> AsyncIterator[CuttingProxy]:
    async with CuttingProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
async def bench(proxy: CuttingProxy) -> AsyncIterator[StoreBench]:
    bench = StoreBench(lambda clock: RedisStore(f"redis://127.0.0.1:{proxy.port}/0?prefix={new_prefix()}"))
    await bench.open()
    yield bench
    await bench.store.close()


async def test_a_job_is_taken_in_once_though_the_answer_was_lost(
    bench: StoreBench, proxy: CuttingProxy
) -> None:
    proxy.cut_after = 0
    job = await bench.enqueue()
    assert proxy.cuts == 1
    assert (await bench.store.counts()).waiting == 1
    assert [fact.number for fact in await bench.store.facts(job.job_id)] == [1]


async def test_a_repeated_lease_finds_the_same_lease_and_takes_no_second_job(
    bench: StoreBench, proxy: CuttingProxy
) -> None:
    first, second = await bench.enqueue(), await bench.enqueue()
    proxy.cut_after = 0
    taken = await bench.store.lease(first.job_id, bench.offer())
    assert proxy.cuts == 1
    assert taken is not None
    assert (taken.dispatch.job_id, taken.dispatch.lease_number) == (first.job_id, 1)
    assert await bench.peek() == [second.job_id]


async def test_an_end_is_written_once_though_the_answer_was_lost(
    bench: StoreBench, proxy: CuttingProxy
) -> None:
    _, ref = await bench.leased()
    proxy.cut_after = 0
    finished = await bench.store.write(completion(ref))
    assert proxy.cuts == 1
    assert finished is not None
    assert (finished.dispatch.phase, [fact.number for fact in finished.facts]) == (Phase.COMPLETED, [3])


async def test_what_a_repeat_answers_is_what_was_done_though_the_world_moved_on(
    bench: StoreBench, proxy: CuttingProxy
) -> None:
    """The answer is remembered, not found out again."""
    await bench.store.put_block(Block(WorkerId("a"), "x", BlockReason.OPERATOR, 1, 1e12))
    proxy.cut_after = 0
    lifted = await bench.store.lift([Pair(WorkerId("a"), "x")])
    assert proxy.cuts == 1
    assert [block.target for block in lifted] == ["x"]


async def test_a_copy_that_arrives_when_its_slot_has_gone_on_does_nothing(bench: StoreBench) -> None:
    """A network may deliver what was sent over a connection given up long ago, after all that came later."""
    assert isinstance(bench.store, RedisStore)
    ann, head = TenantId("ann"), f"{bench.store.prefix}meta"
    for number in (9, 10):
        await bench.store.diagnose("FCALL", "cf1_charge_tenant", 1, head, "somebody:0", number, "", ann, 1.0)
    with pytest.raises(Fault, match="CFREPEATED"):
        await bench.store.diagnose("FCALL", "cf1_charge_tenant", 1, head, "somebody:0", 9, "", ann, 1.0)
    assert (await bench.store.fair_share.get(ann)).virtual_time == 2.0


async def test_a_storm_of_cuts_doubles_and_loses_nothing(bench: StoreBench, proxy: CuttingProxy) -> None:
    chance = random.Random(7)
    ann = TenantId("ann")
    # A new connection asks for five answers before it works: some of these cut it while it is set up.
    proxy.plan = iter([chance.randrange(12) for _ in range(40)])
    proxy.cut_after = 3

    async def work() -> None:
        for _ in range(20):
            await bench.store.fair_share.charge(ann, 1.0)
            await bench.enqueue(tenant=ann)

    await asyncio.gather(*[work() for _ in range(20)])
    assert proxy.cuts > 10
    proxy.cut_after = None
    assert (await bench.store.counts()).waiting == 400
    seen = await bench.candidates(WorkerId("a"), bench.offer().profile, 1)
    assert seen[0].virtual_time == 400.0
    sequences = {job.sequence for job_id in bench.jobs if (job := await bench.store.load(job_id)) is not None}
    assert sequences == set(range(1, 401))


async def test_remembered_answers_take_as_many_keys_as_calls_at_a_time(bench: StoreBench) -> None:
    store = bench.store
    assert isinstance(store, RedisStore)
    for _ in range(50):
        await bench.enqueue()
    alone = await _requests(store)
    assert alone == 1
    await asyncio.gather(*[bench.enqueue() for _ in range(30)])
    assert await _requests(store) <= 31


async def test_a_client_that_is_gone_for_a_day_is_forgotten_with_its_answers(
    server: RedisServer, bench: StoreBench
) -> None:
    store = bench.store
    assert isinstance(store, RedisStore)
    await asyncio.gather(*[store.fair_share.charge(TenantId("ann"), 1.0) for _ in range(5)])
    clients = await store.diagnose("ZRANGE", f"{store.prefix}clients", 0, -1)
    assert isinstance(clients, list)
    (client,) = clients
    again = RedisStore(f"{server.url}?prefix={store.prefix.strip('{}:')}")
    await again.open()
    assert await _requests(store) == 5, "seen today"
    await again.close()
    await store.diagnose("ZADD", f"{store.prefix}clients", 1, client)
    again = RedisStore(f"{server.url}?prefix={store.prefix.strip('{}:')}")
    await again.open()
    assert await _requests(store) == 0
    await again.close()
    await bench.enqueue()
    assert await store.diagnose("ZRANGE", f"{store.prefix}clients", 0, -1) == [client], "noted again"


async def _requests(store: RedisStore) -> int:
    keys = await store.diagnose("KEYS", f"{store.prefix}request:*")
    assert isinstance(keys, list)
    return len(keys)


async def test_calls_wait_while_the_server_is_away_and_are_answered_when_it_is_back() -> None:
    with own_server() as server:
        bench = StoreBench(lambda clock: RedisStore(f"{server.url}?prefix=back"))
        await bench.open()
        server.kill()
        waiting = [asyncio.ensure_future(bench.enqueue()) for _ in range(5)]
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done
        server.start()
        assert len({(await each).job_id for each in waiting}) == 5
        assert (await bench.store.counts()).waiting == 5
        await bench.store.close()


async def test_a_silent_server_ends_in_a_fault_that_says_the_outcome_is_unknown(
    server: RedisServer, proxy: CuttingProxy
) -> None:
    client = RedisClient(
        parse_address(f"redis://127.0.0.1:{proxy.port}/0"), "tests", patience_s=1.0, silence_s=0.4
    )
    await client.connect()
    try:
        proxy.is_mute = True
        with pytest.raises(Fault, match="the call may have taken effect"):
            await client.call("PING")
        assert proxy.connections > 1, "a silent connection is given up for a new one"
        proxy.is_mute = False
        assert await client.call("PING") == b"PONG"
    finally:
        await client.close()


async def test_calls_that_are_given_up_leave_their_slots_to_others(proxy: CuttingProxy) -> None:
    store = RedisStore(f"redis://127.0.0.1:{proxy.port}/0?prefix={new_prefix()}", patience_s=0.5)
    await store.open()
    try:
        proxy.is_mute = True
        given_up = await asyncio.gather(
            *[store.fair_share.charge(TenantId("ann"), 1.0) for _ in range(5)], return_exceptions=True
        )
        assert [type(each) for each in given_up] == [Fault] * 5
        proxy.is_mute = False
        await asyncio.gather(*[store.fair_share.charge(TenantId("ann"), 1.0) for _ in range(5)])
        keys = await store.diagnose("KEYS", f"{store.prefix}request:*")
        assert isinstance(keys, list)
        assert sorted(int(key.rpartition(b":")[2]) for key in keys) == [0, 1, 2, 3, 4]
    finally:
        await store.close()


async def test_a_closed_store_answers_with_a_fault_and_may_be_closed_again(bench: StoreBench) -> None:
    pending = asyncio.ensure_future(bench.store.counts())
    await asyncio.sleep(0)
    await bench.store.close()
    with pytest.raises(Fault, match="closed before"):
        await pending
    with pytest.raises(Fault, match="is closed"):
        await bench.store.counts()
    await bench.store.close()


async def test_an_abandoned_call_does_not_take_anothers_answer(bench: StoreBench) -> None:
    abandoned = asyncio.ensure_future(bench.store.fair_share.charge(TenantId("ann"), 1.0))
    await asyncio.sleep(0)
    abandoned.cancel()
    assert (await bench.enqueue()).class_key == FOR_BOTH.key
    assert await bench.store.is_queue_paused() is False


# hints


async def test_another_process_that_takes_a_job_in_wakes_those_who_listen(
    server: RedisServer, proxy: CuttingProxy
) -> None:
    prefix = new_prefix()
    woken = asyncio.Event()
    listening = RedisStore(f"redis://127.0.0.1:{proxy.port}/0?prefix={prefix}")
    listening.listen(woken.set)
    await listening.open()
    bench = StoreBench(lambda clock: RedisStore(f"{server.url}?prefix={prefix}"))
    await bench.open()
    try:
        async with asyncio.timeout(60):
            await woken.wait()  # at the start of the subscription: something may have come before it
            look = Peek(bench.offer().profile, WorkerId("a"), 1, 1, 0.0)
            assert await listening.peek(look) == []
            woken.clear()
            await bench.enqueue(workflow_hash=WorkflowHash("x"))
            await woken.wait()
        seen = await listening.peek(look)
        assert [each.job_id for each in seen] == bench.jobs
    finally:
        await bench.store.close()
        await listening.close()


# TLS


def self_signed(folder: Path) -> tuple[Path, Path]:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


async def test_the_store_speaks_tls_and_trusts_only_whom_it_is_told_to(
    server: RedisServer, tmp_path: Path
) -> None:
    """The server of the tests has no TLS; a proxy before it has."""
    key, certificate = self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with CuttingProxy(server.port, tls) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?prefix={new_prefix()}"
        with pytest.raises(Fault, match="CERTIFICATE_VERIFY_FAILED"):
            await RedisStore(url).open()
        woken = asyncio.Event()
        store = RedisStore(f"{url}&ca={certificate}")
        store.listen(woken.set)
        await store.open()
        assert await store.workers() == []
        async with asyncio.timeout(60):
            await woken.wait()
        await store.close()
