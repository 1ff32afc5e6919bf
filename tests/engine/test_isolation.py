"""No job is leased to a worker whose access list forbids it, whatever the job asks for and whoever leases it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from typing import Any, NamedTuple

import msgspec
import pytest
from tests.engine._rig import Rig, graph, offers
from tests.engine.test_foreign import DECLARED, NODE, Guest, engine_on, until
from tests.engine.test_several_engines import SharedStore
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, Poll, RegisterWorker
from comfyfleet.model.ids import JobId, PollId, TenantId, WorkerId
from comfyfleet.model.job import JobResult, Submission
from comfyfleet.model.requirement import Isolation, Requirements
from comfyfleet.model.worker import Capabilities, TenantAccess, WorkerDelta, WorkerRecord
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.postgres.store import PostgresStore
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.time import ManualClock

ACME = TenantId("acme")
ISOLATIONS: tuple[Isolation, ...] = ("strict", "loose", "none")
LISTS: dict[str, dict[str, Any]] = {
    "listed": {"allowed": (ACME,)},
    "not listed": {"allowed": (TenantId("other"),)},
    "denied": {"denied": (ACME,)},
    "listed and denied": {"allowed": (ACME,), "denied": (ACME,)},
}


class Cell(NamedTuple):
    """A worker, and which jobs of the tenant it may take, by what they ask for."""

    access: TenantAccess
    takes: frozenset[Isolation]


def expected(worker: Isolation, how: str) -> frozenset[Isolation]:
    """The table as docs/concepts.md has it, row by row."""
    if "denied" in how:
        return frozenset()
    if worker == "strict":
        return frozenset(ISOLATIONS) if how == "listed" else frozenset()
    return frozenset({"loose", "none"})


TABLE = [
    pytest.param(
        Cell(TenantAccess(worker, **LISTS[how]), expected(worker, how)), id=f"{worker} worker, {how}"
    )
    for worker, how in product(ISOLATIONS, LISTS)
]


def offering(access: TenantAccess) -> Capabilities:
    return msgspec.structs.replace(offers("KSampler"), tenant_access=access)


async def submit_each(engine: Engine) -> dict[JobId, Isolation]:
    made: dict[JobId, Isolation] = {}
    for isolation in ISOLATIONS:
        asked = Submission(graph(), tenant=ACME, requirements=Requirements(isolation=isolation))
        made[(await engine.submit(asked)).job_id] = isolation
    return made


@pytest.mark.parametrize("cell", TABLE)
@pytest.mark.parametrize("comes", ["before", "after"])
async def test_an_engine_keeps_to_the_table(cell: Cell, comes: str) -> None:
    async with Rig() as rig:
        worker = RegisterWorker(WorkerId("gpu"), offering(cell.access), 3)
        if comes == "before":
            await rig.engine.register(worker)
        made = await submit_each(rig.engine)
        if comes == "after":
            await rig.engine.register(worker)
        taken = set()
        while (leased := await rig.poll("gpu")) is not None:
            taken.add(made[leased.job_id])
        assert taken == cell.takes
        for job_id, asked in made.items():
            assert asked in taken or (await rig.engine.explain(job_id)).able == ()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with some_server() as url:
        yield url


async def test_a_worker_with_redis_alone_is_kept_to_the_table(server: str) -> None:
    url = with_prefix(server)
    async with engine_on(url) as engine, Guest(url) as guest:
        for number, parameters in enumerate(TABLE):
            (cell,) = parameters.values
            assert isinstance(cell, Cell)
            await guest.register({**DECLARED, "tenant_access": msgspec.to_builtins(cell.access)})
            made = await submit_each(engine)
            taken: set[Isolation] = set()
            while lease := await guest.call("lease_next", NODE, f"{number}-{len(taken)}", "token", 10):
                taken.add(made[JobId(lease[0])])
                assert await guest.call("complete", *lease[:5], "{}") == 1
            assert taken == cell.takes, parameters.id
            for job_id in made:
                await engine.cancel(job_id)


async def test_a_worker_with_redis_alone_gets_nothing_until_its_new_list_is_admitted(server: str) -> None:
    """What an engine has not seen cannot be kept to: it might shut out the very tenant whose job comes next."""
    url = with_prefix(server)
    async with Guest(url) as guest:
        async with engine_on(url) as engine:
            await guest.register()
            job_id = (await engine.submit(Submission(graph(), tenant=ACME))).job_id
        declared = {**DECLARED, "tenant_access": {"denied": [ACME]}}
        assert await guest.call("register", NODE, msgspec.json.encode(declared)) is None
        assert await guest.call("lease_next", NODE, "1", "token", 10) is None
        async with engine_on(url) as engine:
            await guest.register(declared)
            assert await guest.call("lease_next", NODE, "2", "token", 10) is None
            other = (await engine.submit(Submission(graph()))).job_id
            assert (await guest.take())[0] == other
            await guest.register()
            assert (await guest.take())[0] == job_id


# between the match and the lease


@asynccontextmanager
async def two_engines(kind: str, server: str, config: pytest.Config) -> AsyncIterator[tuple[Engine, Engine]]:
    """The first hears nothing of the other's workers by itself."""
    async with AsyncExitStack() as stack:
        if kind == "memory":
            clock = ManualClock()
            store = SharedStore(clock)
            pair = [Engine(store, rules=Rules(round_s=3600), clock=clock) for _ in range(2)]
        else:
            address = with_prefix(server) if kind == "redis" else emptied_database(config)
            made = RedisStore if kind == "redis" else PostgresStore
            pair = [Engine(made(address), rules=Rules(round_s=3600)) for _ in range(2)]
        yield await stack.enter_async_context(pair[0]), await stack.enter_async_context(pair[1])


@pytest.mark.parametrize("kind", ["memory", "redis", "postgres"])
async def test_a_worker_that_shut_a_tenant_out_at_another_engine_gets_no_job_of_it_here(
    kind: str, server: str, pytestconfig: pytest.Config
) -> None:
    async with two_engines(kind, server, pytestconfig) as (here, there):
        open_to_all, shut = offering(TenantAccess()), offering(TenantAccess(denied=(ACME,)))
        # One like it stays: so the profile that it had is still in the table.
        for name in ("gpu", "alike"):
            await here.register(RegisterWorker(WorkerId(name), open_to_all))
        first = (await here.submit(Submission(graph(), tenant=ACME))).job_id
        leased = await here.poll(Poll(WorkerId("gpu"), PollId("0"), 0))
        assert leased is not None and leased.job_id == first
        await there.register(RegisterWorker(WorkerId("gpu"), shut))
        second = (await here.submit(Submission(graph(), tenant=ACME))).job_id
        known = here.known_worker(WorkerId("gpu"))
        assert known is not None and known.capabilities == open_to_all, "nobody has told this engine"
        async with asyncio.timeout(60):
            assert await here.poll(Poll(WorkerId("gpu"), PollId("1"), 0)) is None
            known = here.known_worker(WorkerId("gpu"))
            assert known is not None and known.capabilities == shut, "it has looked"
            own = (await here.submit(Submission(graph()))).job_id
            leased = await here.poll(Poll(WorkerId("gpu"), PollId("2"), 0))
            assert leased is not None and leased.job_id == own
            leased = await here.poll(Poll(WorkerId("alike"), PollId("3"), 0))
            assert leased is not None and leased.job_id == second
        await until(lambda: _is_leased(here, second))


@pytest.mark.parametrize("kind", ["memory", "redis", "postgres"])
async def test_a_list_that_is_declared_while_another_engine_writes_of_the_worker_stands(
    kind: str, server: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_engines(kind, server, pytestconfig) as (here, there):
        gpu, shut = WorkerId("gpu"), offering(TenantAccess(denied=(ACME,)))
        await here.register(RegisterWorker(gpu, offering(TenantAccess())))
        await here.submit(Submission(graph(), tenant=ACME))
        leased = await here.poll(Poll(gpu, PollId("0"), 0))
        assert leased is not None
        look, note = here.store.get_worker, here.store.apply_worker_delta

        async def look_then_change(worker_id: WorkerId) -> WorkerRecord | None:
            monkeypatch.setattr(here.store, "get_worker", look)
            found = await look(worker_id)
            await there.register(RegisterWorker(gpu, shut))
            return found

        async def change_then_note(worker_id: WorkerId, delta: WorkerDelta) -> WorkerRecord | None:
            monkeypatch.setattr(here.store, "apply_worker_delta", note)
            await there.register(RegisterWorker(gpu, shut))
            return await note(worker_id, delta)

        # A run is noted with its worker, which is another by then.
        monkeypatch.setattr(here.store, "apply_worker_delta", change_then_note)
        await here.complete(Completion(leased.ref, JobResult()))
        stored = await here.store.get_worker(gpu)
        assert stored is not None and stored.capabilities == shut
        known = here.known_worker(gpu)
        assert known is not None and known.capabilities == shut
        await here.submit(Submission(graph(), tenant=ACME))
        async with asyncio.timeout(60):
            assert await here.poll(Poll(gpu, PollId("1"), 0)) is None
        await there.register(RegisterWorker(gpu, offering(TenantAccess())))
        monkeypatch.setattr(here.store, "get_worker", look_then_change)
        await here.pause_worker(gpu)
        stored = await here.store.get_worker(gpu)
        assert stored is not None and stored.capabilities == shut and stored.is_paused, "both were heard"


async def _is_leased(engine: Engine, job_id: JobId) -> bool:
    return (await engine.get(job_id)).dispatch.lease is not None
