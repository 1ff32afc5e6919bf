"""What a worker is told at one engine reaches it at another: at once over the store's hints, at a heartbeat without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict
from redis.asyncio import Redis
from tests.engine._rig import graph, offers
from tests.engine.test_several_engines import Engines, register, take
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import Command, Poll, RegisterWorker, Release
from comfyfleet.model.dispatch import Phase, Readiness
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.factory import open_store
from comfyfleet.stores.redis.store import RedisStore

B = WorkerId("b")


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture(params=["redis", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return with_prefix(request.getfixturevalue("redis_url"))
    parts = conninfo_to_dict(emptied_database(request.config))
    return f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"


@asynccontextmanager
async def two_engines(url: str) -> AsyncIterator[tuple[Engine, Engine]]:
    """Rounds are rare, so whatever is quick came by a hint."""
    first, second = (
        Engine(open_store(url, SystemClock()), rules=Rules(round_s=30, sweep_s=30)) for _ in range(2)
    )
    async with first, second:
        await second.register(RegisterWorker(B, offers("KSampler")))
        await asyncio.wait_for(_hears(first, second), 60)
        yield first, second


async def _hears(first: Engine, second: Engine) -> None:
    """Until the second engine listens: a hint given before is lost."""
    while not await second.commands(B, 0.1):
        await first.store.send_command(B, Command("retry"))


async def test_a_cancel_asked_of_one_engine_reaches_the_worker_of_the_other_at_once(store_url: str) -> None:
    async with two_engines(store_url) as (first, second):
        job_id = (await first.submit(Submission(graph()))).job_id
        leased = await second.poll(Poll(B, PollId("p"), 0))
        assert leased is not None
        listening = asyncio.create_task(second.commands(B, 10))
        await asyncio.sleep(0)
        await first.cancel(job_id)
        told = await asyncio.wait_for(listening, 60)
        assert Command("cancel", job_id, leased.ref.number) in told


@pytest.mark.parametrize(
    ("asked", "action", "reason"), [("pause", "cancel", "paused"), ("retry", "retry", "")]
)
async def test_a_pause_or_retry_of_a_running_job_asked_of_one_engine_reaches_the_worker_of_the_other(
    store_url: str, asked: str, action: Literal["cancel", "retry"], reason: str
) -> None:
    async with two_engines(store_url) as (first, second):
        job_id = (await first.submit(Submission(graph()))).job_id
        leased = await second.poll(Poll(B, PollId("p"), 0))
        assert leased is not None
        listening = asyncio.create_task(second.commands(B, 60))
        await asyncio.sleep(0)
        await getattr(first, asked)(job_id)
        told = await asyncio.wait_for(listening, 60)
        assert Command(action, job_id, leased.ref.number, reason) in told
        assert (await second.release(Release(leased.ref, "cancelled"))).phase is Phase.QUEUED
        found = (await first.get(job_id)).dispatch
        assert found.standing is (Readiness.PAUSED if asked == "pause" else Readiness.IN_LANE)


async def test_a_drain_a_pause_and_its_end_are_heard_at_the_other_engine(store_url: str) -> None:
    async with two_engines(store_url) as (first, second):
        await first.submit(Submission(graph()))
        await first.pause_worker(B)
        assert await second.poll(Poll(B, PollId("p"), 0.2)) is None
        parked = asyncio.create_task(second.poll(Poll(B, PollId("q"), 10)))
        await asyncio.sleep(0)
        await first.pause_worker(B, False)
        leased = await asyncio.wait_for(parked, 60)
        assert leased is not None
        listening = asyncio.create_task(second.commands(B, 10))
        await asyncio.sleep(0)
        await first.drain_worker(B)
        told = await asyncio.wait_for(listening, 60)
        assert Command("drain") in told


async def test_a_refresh_asked_of_one_engine_reaches_the_worker_of_the_other(store_url: str) -> None:
    async with two_engines(store_url) as (first, second):
        listening = asyncio.create_task(second.commands(B, 10))
        await asyncio.sleep(0)
        await first.refresh_worker(B)
        assert Command("refresh") in await asyncio.wait_for(listening, 60)


async def test_without_any_hint_a_heartbeat_tells_of_the_cancel_and_of_the_drain() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        job_id = (await it.first.submit(Submission(graph()))).job_id
        leased = await it.second.poll(Poll(B, PollId("p"), 0))
        assert leased is not None
        await it.first.cancel(job_id)
        await it.first.drain_worker(B)
        await it.clock.advance(3)
        beat = await it.second.heartbeat(B, [leased.ref])
        assert beat.commands == (Command("cancel", job_id, leased.ref.number), Command("drain"))


async def test_what_is_told_to_a_worker_of_another_engine_is_not_kept_for_ever() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        for number in range(3):
            job_id = (await it.first.submit(Submission(graph(seed=number)))).job_id
            assert await take(it.second, "b", f"poll-{number}") == job_id
            await it.first.cancel(job_id)
        assert it.first._commands._pending == {}


async def test_a_pause_at_one_engine_is_not_undone_by_what_the_other_notes_of_the_worker() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        await it.first.submit(Submission(graph()))
        await it.first.pause_worker(B)
        await it.clock.settle()
        await it.second._context.fleet.record_failure(B)
        stored = await it.store.get_worker(B)
        assert stored is not None
        assert (stored.is_paused, stored.failed) == (True, 1)


async def test_an_idle_engine_does_not_take_another_engines_worker_for_lost() -> None:
    async with Engines(worker_lost_s=60) as it:
        await register(it.second, "b", "KSampler")
        await it.first.submit(Submission(graph()))
        for _ in range(10):
            await it.clock.advance(12)
            await it.second.heartbeat(B, [])
        stored = await it.store.get_worker(B)
        assert stored is not None
        assert not stored.is_offline


async def test_a_cancel_holds_though_nobody_could_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engines() as it:

        async def fail(*_: object) -> None:
            raise Fault("the store is away")

        monkeypatch.setattr(it.store, "send_command", fail)
        await register(it.second, "b", "KSampler")
        job_id = (await it.first.submit(Submission(graph()))).job_id
        assert await take(it.second, "b") == job_id
        assert (await it.first.cancel(job_id)).cancel_requested


async def test_a_worker_that_comes_back_is_not_told_what_it_was_told_in_an_earlier_life(
    store_url: str,
) -> None:
    """Behind several engines it was served by both: what it heard at one is still kept at the other."""
    async with two_engines(store_url) as (first, second):
        await first.heartbeat(B, [])
        await second.drain_worker(B)
        assert Command("drain") in (await second.heartbeat(B, [])).commands
        await second.unregister(B, "drained")
        await first.register(RegisterWorker(B, offers("KSampler")))
        assert (await first.heartbeat(B, [])).commands == ()


@pytest.mark.parametrize("is_to_all", [False, True])
async def test_a_drain_that_was_taken_back_before_the_worker_heard_of_it_is_not_told_any_more(
    is_to_all: bool,
) -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        await it.second.heartbeat(B, [])
        if is_to_all:
            await it.second.command_workers("drain")
            await it.second.command_workers("resume")
        else:
            await it.second.drain_worker(B)
            await it.second.resume_worker(B)
        assert (await it.second.heartbeat(B, [])).commands == ()
        await it.second.pause_worker(B)
        await it.second.drain_worker(B)
        await it.second.pause_worker(B, False)
        told = (await it.second.heartbeat(B, [])).commands
        assert Command("drain") in told, "the end of a pause is no end of a drain"


async def test_a_command_that_is_repeated_before_it_was_heard_is_told_once() -> None:
    async with Engines() as it:
        await register(it.second, "b", "KSampler")
        await it.second.heartbeat(B, [])
        for _ in range(50):
            await it.second.refresh_worker(B)
        assert (await it.second.heartbeat(B, [])).commands == (Command("refresh"),)


NONSENSE = (
    b'{"worker_id":"\xff","action":"drain"}',
    b'{"worker_id":"b","action":"drain","more":' + b"[" * 5000,
    b'{"worker_id":"b","command":{"action":"drain"},"more":' + b"[" * 5000,
    b'{"worker_id":"b","action":"dance","lease":1e999}',
    b"\xff\x00",
)


async def test_nonsense_on_the_channels_does_not_make_an_engine_deaf(store_url: str) -> None:
    async with two_engines(store_url) as (first, second):
        if store_url.startswith("redis"):
            assert isinstance(first.store, RedisStore)
            prefix = first.store._address.prefix
            async with Redis.from_url(store_url.partition("?")[0]) as redis:
                for text in NONSENSE:
                    for channel in ("workers:all", "hub:events", "news"):
                        assert await redis.publish(f"{prefix}channel:{channel}", text) >= 2
        else:
            async with await AsyncConnection.connect(store_url, autocommit=True) as connection:
                for text in NONSENSE:
                    readable = text.decode(errors="replace").replace("\0", "")
                    await connection.execute("SELECT pg_notify('comfyfleet_commands', %s)", (readable,))
        await first.refresh_worker(B)
        told: tuple[Command, ...] = ()
        async with asyncio.timeout(60):
            while Command("refresh") not in told:
                told = await second.commands(B, 60)


async def test_what_is_kept_for_a_worker_that_never_asks_again_has_a_bound() -> None:
    async with Engines() as it:
        await register(it.first, "b", "KSampler")
        await it.first.heartbeat(B, [])
        for number in range(1000):
            it.first._commands.on_command(B, Command("retry", JobId(str(number))))
        kept = (await it.first.heartbeat(B, [])).commands
        assert len(kept) == 100
        assert kept[-1] == Command("retry", JobId("999"))
