"""Random days of tenants whose credits lie apart from the queue, on every pair of stores: whatever callers, workers,
time and crashes do, the book is right after every step, and in the end every hold is settled as its job ended.

A hub dies, or an answer is lost, between any two steps; several do something at the same instant, call by call in an
order that is chosen too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests._examples import examples
from tests.servers.postgres_database import empty_database
from tests.servers.redis_fixtures import some_server, with_prefix
from tests.tenancy._breaking import Kind
from tests.tenancy._databases import tenant_schema
from tests.tenancy._town import PRICES, WORKERS, Hub, SharedMemory, Town

from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import WorkerId
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.tenancy import reconciler

# How many days each pair gets: about twenty seconds. The first has two hubs and costs little.
PAIRS = {
    "memory+sqlite": 40,
    "sqlite+sqlite": 30,
    "sqlite+postgresql": 8,
    "redis+postgresql": 8,
    "postgresql+postgresql": 6,
}

tenants = st.integers(0, len(PRICES) - 1)
hubs = st.integers(0, 1)
workers = st.sampled_from(WORKERS)
pick = st.integers(0, 20)
failures = st.sampled_from([FailureKind.NODE_ERROR, FailureKind.INVALID_WORKFLOW])
kinds: st.SearchStrategy[Kind] = st.sampled_from(["crash", "crash", "fault"])
orders = st.none() | st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=8)
deeds = st.one_of(
    st.tuples(st.just("submit"), hubs, tenants),
    st.tuples(st.just("submit"), hubs, tenants),
    st.tuples(st.just("submit as"), hubs, tenants, st.sampled_from("xy")),
    st.tuples(st.just("cancel"), hubs, pick),
    st.tuples(st.just("cancel the next"), hubs),
    st.tuples(st.just("retry"), hubs, pick),
    st.tuples(st.just("pause"), hubs, pick),
    st.tuples(st.just("resume"), hubs, pick),
    st.tuples(st.just("release"), hubs, pick),
    st.tuples(st.just("take"), hubs, workers),
    st.tuples(st.just("complete"), hubs, pick, st.integers(0, 5)),
    st.tuples(st.just("run"), hubs, workers, st.integers(0, 5)),
    st.tuples(st.just("run"), hubs, workers, st.integers(0, 5)),
    st.tuples(st.just("fail"), hubs, pick, failures),
    st.tuples(st.just("relay"), hubs),
    st.tuples(st.just("reconcile"), hubs),
    st.tuples(st.just("sweep"), hubs),
)


class Days:
    """The servers that all days share."""

    def __init__(
        self, make_store: Callable[[], Callable[[Clock], Store]], databases: dict[str, str], count: int
    ) -> None:
        self.make_store = make_store
        """Answers, for each day, with a way to open a store that is empty at first."""
        self.databases = databases
        self.count = int(os.environ.get("COMFYFLEET_DAYS", count))
        self.runner = asyncio.Runner()
        self.numbers = itertools.count(1)


class Day(RuleBasedStateMachine):
    days: Days
    town: Town | None = None

    @initialize(
        granted=st.lists(st.sampled_from([15, 100, 300]), min_size=len(PRICES), max_size=len(PRICES)),
        first=st.lists(tenants, min_size=2, max_size=6),
    )
    def begin(self, granted: list[int], first: list[int]) -> None:
        async def begun() -> Town:
            town = Town(self.days.make_store(), self.days.databases, next(self.days.numbers))
            await town.begin()
            for tenant, amount in zip(town.tenants, granted, strict=True):
                await town.grant(tenant, amount)
            for place in first:
                await town.do(town.submit_alone(town.hubs[0], town.tenants[place]))
            return town

        self.town = self.days.runner.run(begun())

    @property
    def here(self) -> Town:
        assert self.town is not None
        return self.town

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        self.days.runner.run(self.here.do(work))

    def hub(self, number: int) -> Hub:
        return self.here.hub(number)

    @rule(deed=deeds)
    def one(self, deed: tuple[Any, ...]) -> None:
        self.do(self._deed(*deed))

    @rule(deed=deeds, order=orders)
    def two_hubs_do_the_same(self, deed: tuple[Any, ...], order: list[tuple[int, int]] | None) -> None:
        name, _, *more = deed
        both = [self._deed(name, hub, *more) for hub in range(2)]
        self.days.runner.run(self.here.do_at_once(both, order))

    @rule(tenant=tenants, moment=st.integers(3, 20))
    def cancel_what_is_being_submitted(self, tenant: int, moment: int) -> None:
        """The whole of the cancel, after so many calls of the submit."""
        town = self.here
        both = [town.submit(town.hub(0), town.tenants[tenant]), town.cancel_the_next(town.hub(1))]
        self.days.runner.run(town.do_at_once(both, [(0, moment), (1, 100)]))

    @rule(hub=hubs, worker=workers, left=st.integers(0, 8), kind=kinds, is_after=st.booleans(), order=orders)
    def die_while_it_ends(
        self,
        hub: int,
        worker: WorkerId,
        left: int,
        kind: Kind,
        is_after: bool,
        order: list[tuple[int, int]] | None,
    ) -> None:
        """And then every relay finds at once what was left."""
        self.do(self._run(hub, worker, lambda at: self._end_badly(at, left, kind, is_after)))
        relays = [self.here.relay(each) for each in (*self.here.hubs, self.here.hubs[0])]
        self.days.runner.run(self.here.do_at_once(relays, order))

    @rule(hub=hubs, worker=workers, left=st.integers(2, 8), kind=kinds, is_after=st.booleans())
    def die_while_it_ends_and_nobody_comes(
        self, hub: int, worker: WorkerId, left: int, kind: Kind, is_after: bool
    ) -> None:
        self.do(self._run(hub, worker, lambda at: self._end_badly(at, left, kind, is_after)))
        self.days.runner.run(self.here.pass_time(65.0))

    async def _end_badly(self, hub: Hub, left: int, kind: Kind, is_after: bool) -> None:
        hub.fate.arm(left, kind, is_after=is_after)
        await self.here.complete(hub, -1, 1)

    async def _run(self, hub: int, worker: WorkerId, end: Callable[[Hub], Awaitable[None]]) -> None:
        if await self.here.take(self.hub(hub), worker, is_alone=True):
            await end(self.hub(hub))

    @rule(many=st.lists(deeds, min_size=2, max_size=4), order=orders)
    def several_at_once(self, many: list[tuple[Any, ...]], order: list[tuple[int, int]] | None) -> None:
        self.days.runner.run(self.here.do_at_once([self._deed(*each) for each in many], order))

    @rule(hub=hubs, left=st.integers(0, 8), kind=kinds, is_after=st.booleans())
    def something_is_going_to_happen(self, hub: int, left: int, kind: Kind, is_after: bool) -> None:
        self.hub(hub).fate.arm(left, kind, is_after=is_after)

    @rule(seconds=st.sampled_from([0.5, 12.0, 65.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        self.days.runner.run(self.here.pass_time(seconds))

    @rule(number=pick)
    def a_relay_comes_late(self, number: int) -> None:
        self.do(self.here.come_late(number))

    async def _rested(self) -> None:
        await self.here.come_to_rest()
        await self.here.check_at_rest()

    async def _deed(self, name: str, hub_number: int, *more: Any) -> None:
        town, hub = self.here, self.hub(hub_number)
        match name, more:
            case "submit", (tenant,):
                await town.submit(hub, town.tenants[tenant])
            case "submit as", (tenant, reference):
                await town.submit(hub, town.tenants[tenant], reference)
            case "cancel", (number,):
                await town.cancel(hub, number)
            case "retry", (number,):
                await town.retry(hub, number)
            case "pause", (number,):
                await town.pause(hub, number)
            case "resume", (number,):
                await town.resume(hub, number)
            case "release", (number,):
                await town.release(hub, number)
            case "take", (worker,):
                await town.take(hub, worker)
            case "complete", (number, outputs):
                await town.complete(hub, number, outputs)
            case "run", (worker, outputs):
                if await town.take(hub, worker):
                    await town.complete(hub, -1, outputs)
            case "cancel the next", ():
                await town.cancel_the_next(hub)
            case "fail", (number, kind):
                await town.fail(hub, number, kind)
            case "relay", ():
                await town.relay(hub)
            case "reconcile", ():
                await town.reconcile(hub)
            case "sweep", ():
                await hub.engine.sweep()
            case _:
                raise AssertionError(name)

    @invariant()
    def every_book_is_right(self) -> None:
        if self.town is not None:
            self.days.runner.run(self.town.check())

    def teardown(self) -> None:
        if self.town is not None:
            try:
                self.days.runner.run(self._rested())
            finally:
                self.days.runner.run(self.town.end())


@pytest.fixture(params=PAIRS)
def days(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Days]:
    monkeypatch.setattr(reconciler, "LOOK_AGAIN_S", 0.0)
    central, apart = request.param.split("+")
    numbers = itertools.count(1)
    with ExitStack() as stack:
        if apart == "sqlite":
            databases = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
        else:
            databases = {
                "first": tenant_schema(request.config),
                "second": tenant_schema(request.config, is_second=True),
            }
        server = stack.enter_context(some_server()) if central == "redis" else ""

        def make() -> Callable[[Clock], Store]:
            if central == "memory":
                return SharedMemory().opened
            if central == "sqlite":
                path = tmp_path / f"fleet-{next(numbers)}.db"
                return lambda clock: SqliteStore(path, clock)
            if central == "redis":
                url = with_prefix(server)
                return lambda clock: RedisStore(url, winding=clock)
            database = empty_database(request.config)
            return lambda clock: PostgresStore(database, clock_for_tests=clock)

        days = Days(make, databases, PAIRS[request.param])
        try:
            yield days
        finally:
            days.runner.close()


@pytest.mark.hypothesis
def test_every_invariant_holds_after_every_step_of_any_day(days: Days) -> None:
    day = type("ThisDay", (Day,), {"days": days})
    run_state_machine_as_test(
        day,
        settings=settings(
            max_examples=examples(days.count),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
