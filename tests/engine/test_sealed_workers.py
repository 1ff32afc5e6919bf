"""Who takes jobs from a sealed store without its keys: refused at the door, and no job is the worse for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.exceptions import ResponseError
from tests.engine._rig import graph, offers
from tests.engine.test_foreign import NODE, Guest
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet import WorkflowPool
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import Poll, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.pool.servers import StoreWorkers
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.crypto.keyring import Keyring, MasterKeys
from comfyfleet.stores.crypto.store import encrypted_store
from comfyfleet.stores.redis.store import RedisStore

MASTERS = MasterKeys({"k1": b"1" * 32}, "k1")


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture
def url(server_url: str) -> str:
    return with_prefix(server_url)


def encryption(store: Store, clock: Clock) -> Store:
    return encrypted_store(store, Keyring(store.documents, clock, lambda: MASTERS))


def sealed_engine(url: str) -> Engine:
    return Engine(encryption(RedisStore(url), SystemClock()))


async def test_a_worker_that_has_redis_alone_is_told_that_it_cannot_open_anything(url: str) -> None:
    async with sealed_engine(url) as engine, Guest(url) as guest:
        with pytest.raises(ResponseError, match="CFDECLARED the jobs of this fleet are encrypted"):
            await guest.register()
        assert await engine.store.get_worker(NODE) is None


async def test_one_that_was_admitted_before_there_was_a_key_gets_no_sealed_job(url: str) -> None:
    async with Guest(url) as guest:
        async with Engine(RedisStore(url)):
            await guest.register()
        async with sealed_engine(url) as engine:
            job_id = (await engine.submit(Submission(graph()))).job_id
            with pytest.raises(ResponseError, match="CFWORKER no engine has admitted"):
                await guest.call("lease_next", NODE, "poll", "token", 10)
            assert (await engine.get(job_id)).dispatch.phase is Phase.QUEUED


async def test_an_engine_without_the_key_gives_the_job_back_unharmed(url: str) -> None:
    async with Engine(RedisStore(url)) as keyless, sealed_engine(url) as engine:
        await keyless.register(RegisterWorker(WorkerId("gpu"), offers("KSampler")))
        job_id = (await engine.submit(Submission(graph(text="fox")))).job_id
        with pytest.raises(Fault, match="this process has no key"):
            await keyless.poll(Poll(WorkerId("gpu"), PollId("one"), 5.0))
        view = await engine.get(job_id)
        assert (view.dispatch.phase, view.dispatch.charged) == (Phase.QUEUED, 0)
        leased = await engine.poll(Poll(WorkerId("gpu"), PollId("two"), 5.0))
        assert leased is not None and leased.workflow["1"]["inputs"]["text"] == "fox"


async def test_pools_and_direct_workers_without_the_key_do_not_start(url: str) -> None:
    async with sealed_engine(url) as engine:
        await engine.submit(Submission(graph()))
        with pytest.raises(Refusal, match="encrypted, and this process has no key"):
            async with WorkflowPool((), store=url):
                pass
        with pytest.raises(Refusal, match="encrypted, and this process has no key"):
            async with StoreWorkers((), store=url, on_state=lambda *_: None):
                pass
        async with StoreWorkers((), store=url, on_state=lambda *_: None, encryption=encryption):
            pass
