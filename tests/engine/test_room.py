"""How full the queue is: asked of a shared store once a second while there is plenty of room, else each time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from tests.engine._rig import graph, offers
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.local_bus import LocalBus
from comfyfleet.engine.submitter import QueueCapacity
from comfyfleet.engine.system import SystemRandom
from comfyfleet.model.calls import Poll, RegisterWorker
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.policy.failover import SmartFailover
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Counts
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.time import ManualClock


def counts(waiting: int, payload_bytes: int = 0) -> Counts:
    return Counts(waiting=waiting, delayed=0, paused=0, by_phase={}, payload_bytes=payload_bytes)


def room_in(rules: Rules) -> tuple[QueueCapacity, ManualClock]:
    clock = ManualClock()
    store = MemoryStore(clock)
    context = EngineContext(store, LocalBus(), clock, SystemRandom(), rules, SmartFailover(rules))
    return QueueCapacity(context), clock


async def test_what_was_heard_is_good_for_a_second() -> None:
    room, clock = room_in(Rules(max_waiting=10))
    assert not room.is_known()
    room.update(counts(4))
    await clock.advance(0.9)
    assert room.is_known()
    await clock.advance(0.2)
    assert not room.is_known()


@pytest.mark.parametrize("rules", [Rules(max_waiting=10), Rules(max_open_bytes=100)])
def test_a_queue_that_is_half_full_is_asked_each_time(rules: Rules) -> None:
    room, _ = room_in(rules)
    room.update(counts(0))
    for _ in range(5):
        assert room.is_known()
        room.take(10)
    assert not room.is_known()
    for _ in range(5):
        room.take(10)
    with pytest.raises(Refusal) as refused:
        room.take(10)
    assert refused.value.code is RefusalCode.QUEUE_FULL


# on Redis


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


class Calls:
    """Of one method, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Any, name: str) -> None:
        self.count = 0
        real = getattr(target, name)

        async def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return await real(*arguments, **options)

        monkeypatch.setattr(target, name, counted)


@pytest.fixture
async def engine(server_url: str) -> AsyncIterator[Engine]:
    async with Engine(RedisStore(with_prefix(server_url)), rules=Rules(max_waiting=30)) as engine:
        yield engine


async def test_a_shared_queue_takes_as_many_as_it_may_and_is_not_asked_for_each(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Calls(monkeypatch, engine.store, "counts")
    for number in range(15):
        await engine.submit(Submission(graph(seed=number)))
    assert asked.count <= 5, "once, or once more for each second that this took"
    for number in range(15):
        await engine.submit(Submission(graph(seed=number)))
    assert asked.count >= 15
    with pytest.raises(Refusal, match="the queue is full: 30 jobs wait"):
        await engine.submit(Submission(graph()))


@pytest.mark.parametrize("has_tenant_database", [False, True])
async def test_the_record_of_a_job_is_asked_for_together_with_its_lease_unless_it_lies_apart(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, has_tenant_database: bool
) -> None:
    """Of a tenant with a database of its own the lease reads the record itself, which is then the one to take."""
    worker, sent, steps = WorkerId("a"), graph(seed=5), list[str]()
    lease, get = engine.store.lease, engine.store.records.get

    async def leasing(*arguments: Any) -> Any:
        written = await lease(*arguments)
        steps.append("leased")
        assert written is not None
        dispatch = msgspec.structs.replace(written.dispatch, has_tenant_database=has_tenant_database)
        return msgspec.structs.replace(written, dispatch=dispatch)

    async def getting(*arguments: Any) -> Any:
        steps.append("asked")
        return await get(*arguments)

    await engine.register(RegisterWorker(worker, offers("KSampler"), 2))
    await engine.submit(Submission(sent))
    monkeypatch.setattr(engine.store, "lease", leasing)
    monkeypatch.setattr(engine.store.records, "get", getting)
    leased = await engine.poll(Poll(worker, PollId("p"), 0))
    assert leased is not None and leased.workflow == sent
    assert steps == ["asked", "leased", "asked"][: 3 if has_tenant_database else 2]
