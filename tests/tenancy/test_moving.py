"""A tenant moves to another database whole or not at all, whoever dies when; SQLite and PostgreSQL, both ways."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import psycopg
import pytest
from tests.engine._rig import graph
from tests.engine.test_several_engines import SharedStore
from tests.tenancy._databases import tenant_schema
from tests.tenancy._mortal import Deadline, Killed, Mortal
from tests.tenancy._tenant_services import Fleet

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind, FailureText
from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import JobResult
from comfyfleet.model.ledger import RunEntry
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.policy import accounting
from comfyfleet.policy import tenants as policy
from comfyfleet.ports import RecordQuery
from comfyfleet.stores.crypto.keyring import Keyring, MasterKeys
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.claims import CLAIM_S, Claim, claim
from comfyfleet.tenancy.database import open_tenant_database, tenant_rows
from comfyfleet.tenancy.database.encrypted import encrypted_database
from comfyfleet.tenancy.database.executor import Row, for_postgres
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.tenant_rows import PARTS
from comfyfleet.tenancy.database.values import AccountFrozen
from comfyfleet.tenancy.relocation import TenantRelocation
from comfyfleet.tenancy.tenants import TenantLocation, Tenants
from comfyfleet.testing.contract.ledger_driver import ACME, BORG, LedgerDriver
from comfyfleet.testing.time import ManualClock


class Site:
    """Two databases, and a hub that moves tenants between them."""

    def __init__(
        self, urls: dict[str, str], open_database: Callable[[str], TenantDatabase] = open_tenant_database
    ) -> None:
        self.clock = ManualClock()
        self.deadline = Deadline()
        self.documents = MemoryStore(self.clock).documents
        self.databases = TenantDatabases(
            urls,
            self.clock,
            lambda url: cast(TenantDatabase, Mortal(open_database(url), self.deadline)),
        )
        mortal = cast(Any, Mortal(self.documents, self.deadline))
        self.tenants = Tenants(mortal, self.clock, is_shared=True)
        self.relocation = TenantRelocation(self.tenants, self.databases, self.clock.advance)

    async def database(self, name: str) -> TenantDatabase:
        return await self.databases.get(name)

    async def claimed(self, tenant: TenantId = ACME) -> Claim:
        found = await claim(self.documents, self.clock, tenant)
        assert found is not None
        return found

    async def begin(self, database: str = "second") -> Tenant:
        now = self.clock.now()
        return await self.tenants.change(ACME, lambda tenant: policy.start_move(tenant, database, now))

    async def go_on(self) -> Tenant:
        """As a hub does that finds the tenant on its way."""
        mine = await self.claimed()
        tenant = await self.tenants.get_uncached(ACME)
        assert tenant is not None
        if tenant.state is TenantState.MOVING:
            tenant = await self.relocation.move(tenant, mine)
        if tenant.moved_from is not None:
            tenant = await self.relocation.clean_up(tenant, mine)
        await mine.release()
        return tenant


@asynccontextmanager
async def site(
    urls: dict[str, str], open_database: Callable[[str], TenantDatabase] = open_tenant_database
) -> AsyncIterator[Site]:
    made = Site(urls, open_database)
    await made.tenants.create(Tenant(ACME, "first", 1.0))
    await made.tenants.create(Tenant(BORG, "first", 1.0))
    try:
        yield made
    finally:
        await made.databases.close()


async def fill(database: TenantDatabase) -> LedgerDriver:
    """Something of every kind, and another tenant beside it."""
    driver = LedgerDriver(database)
    for tenant in (BORG, ACME):
        await database.create_account(tenant)
        await driver.grant(1_000, tenant, "given")
        ended = await driver.submit(80, tenant)
        run = RunEntry(
            ended.hold_id, tenant, WorkflowHash("h"), "comfyui", "completed", 3.0, WorkerId("gpu"), 1, 9, 30
        )
        ending = msgspec.structs.replace(driver.ending(ended, Phase.COMPLETED, 30), run=run)
        await database.end_round(ending)
        failed = await driver.submit(10, tenant)
        await driver.end(failed, Phase.FAILED)
        await driver.retry(failed)
        running = await driver.submit(7, tenant)
        await database.mark_sent(running.hold_id)
        await database.stage(running.hold_id, "attempt/1", JobResult({"1": {}}), 4.0)
        said = FailureText(Failure(FailureKind.NODE_ERROR, "it broke"), {"message": "it broke"})
        await database.save_failure(running.hold_id, "attempt/0", said, 4.0)
        for number in range(3):
            pending = accounting.grant(f"pending {number}", tenant, 5, 1.0, is_pending=True)
            await database.grant(pending, None)
        await database.void(tenant, "pending 1")
        await database.adjust(accounting.posting_of(accounting.adjust("fix", tenant, -5, 2.0, "ж\u2028")))
        for collection in ("files", "other"):
            await database.documents(tenant).put(collection, "name", b"\x00body", version=0)
    return driver


async def everything(database: TenantDatabase, tenant: TenantId = ACME) -> dict[str, list[Row]]:
    return {part: await database.rows_of(tenant, part, after=None, limit=1_000) for part in PARTS}


Urls = dict[str, str]


@pytest.fixture(params=["sqlite to sqlite", "sqlite to postgresql", "postgresql to sqlite"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Urls:
    kinds = str(request.param).split(" to ")
    return {
        name: tenant_schema(request.config) if kind == "postgresql" else f"sqlite:///{tmp_path}/{name}.db"
        for name, kind in zip(("first", "second"), kinds, strict=True)
    }


async def test_a_tenant_moves_with_everything_of_its_own_and_goes_on_there(urls: Urls) -> None:
    async with site(urls) as here:
        first, second = await here.database("first"), await here.database("second")
        await fill(first)
        before, neighbour = await everything(first), await everything(first, BORG)
        assert all(before.values()), "there is something of every kind"
        ledger = await first.ledger(ACME)
        await here.begin()
        moved = await here.go_on()
        assert (moved.database, moved.state, moved.moving_to, moved.moved_from) == (
            "second",
            "active",
            None,
            None,
        )
        assert await everything(second) == before
        assert await second.ledger(ACME) == ledger and accounting.problems(ledger) == []
        assert not any((await everything(first)).values())
        assert await everything(first, BORG) == neighbour
        # Work goes on where it is now …
        driver = LedgerDriver(second, "later")
        for hold in await second.open_holds(10.0, 9):
            await driver.end(hold, Phase.COMPLETED, 1)
        await driver.submit(5)
        await driver.check()
        numbers = [each.number for each in await second.statement(ACME, after=0, limit=100)]
        assert numbers == list(range(1, len(numbers) + 1))
        # … and nothing that comes late is written where it was.
        with pytest.raises(AccountFrozen):
            await LedgerDriver(first, "late").submit(0)
        with pytest.raises(AccountFrozen):
            await first.documents(ACME).put("files", "late", b"", version=0)
        await here.begin("first")
        assert (await here.go_on()).database == "first"
        await LedgerDriver(first).check()
        await LedgerDriver(first, "again").submit(0)


@pytest.mark.parametrize("is_before", [False, True], ids=["after a step", "before a step"])
async def test_whoever_dies_at_any_step_another_finishes_it(tmp_path: Path, is_before: bool) -> None:
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    async with site(urls) as here:
        assert await killed_again_and_again(here, is_before, 1) > 50


async def test_whoever_dies_between_a_file_and_a_server_another_finishes_it(urls: Urls) -> None:
    async with site(urls) as here:
        assert await killed_again_and_again(here, False, 7) > 5


async def killed_again_and_again(here: Site, is_before: bool, stride: int) -> int:
    """Back and forth, dying so many steps later each time, until nobody dies any more; how often."""
    await fill(await here.database("first"))
    target, source = "second", "first"
    before = await everything(await here.database("first"))
    died = 0
    for steps in range(1, 500, stride):
        await here.begin(target)
        here.deadline.left, here.deadline.is_before = steps, is_before
        try:
            await here.go_on()
            return died
        except Killed:
            died += 1
        here.deadline.left = None
        await here.clock.advance(CLAIM_S)
        moved = await here.go_on()
        assert (moved.database, moved.state, moved.moved_from) == (target, "active", None), steps
        assert await everything(await here.database(target)) == before, steps
        left = await everything(await here.database(source))
        assert not any(left.values()), steps
        await LedgerDriver(await here.database(target)).check()
        target, source = source, target
    raise AssertionError("a move has fewer steps")


async def test_what_is_sealed_moves_as_it_is_and_opens_there(urls: Urls) -> None:
    keyring = Keyring(MemoryDocumentStore(), ManualClock(), lambda: MasterKeys({"k1": b"1" * 32}, "k1"))
    async with site(urls, lambda url: encrypted_database(open_tenant_database(url), keyring)) as here:
        await fill(await here.database("first"))
        source, target = await here.database("first"), await here.database("second")
        jobs = await source.listing(RecordQuery(tenant=ACME, limit=9))
        before = await everything(source)
        assert b"class_type" not in b"".join(each[6] for each in before["jobs"]), "payloads are sealed"
        await here.begin()
        await here.go_on()
        assert await everything(target) == before
        assert await target.listing(RecordQuery(tenant=ACME, limit=9)) == jobs
        assert jobs[0].result is not None and "1" in jobs[0].payload.workflow


async def test_once_a_book_is_closed_nothing_is_written_whoever_was_on_his_way(urls: Urls) -> None:
    """Others write as fast as they can while it is closed; each write is there by then, or is refused."""
    others = [open_tenant_database(urls["first"]) for _ in range(3)]
    for each in others:
        await each.open()
    database = others.pop()
    await database.create_account(ACME)
    running = await LedgerDriver(database, "running").submit(0)
    refused = []

    async def write(other: TenantDatabase, name: str) -> None:
        driver, number = LedgerDriver(other, name), itertools.count()
        steps: list[Callable[[], Awaitable[object]]] = [
            lambda: driver.submit(0),
            lambda: driver.grant(1),
            lambda: other.documents(ACME).put("files", f"{name} {next(number)}", b"", version=0),
            lambda: other.stage(running.hold_id, f"{name} {next(number)}", JobResult(), 1.0),
            lambda: other.grant(
                accounting.grant(f"{name} {next(number)}", ACME, 1, 1.0, is_pending=True), None
            ),
        ]
        for step in itertools.cycle(steps):
            try:
                await step()
            except AccountFrozen:
                refused.append(name)
                return

    async with asyncio.TaskGroup() as group:
        for number, each in enumerate(others):
            group.create_task(write(each, f"writer {number}"))
        while len(await database.statement(ACME, after=0, limit=50)) < 20:
            await asyncio.sleep(0)
        assert await database.freeze_account(ACME, 1)
        closed = await everything(database)
    assert len(refused) == len(others)
    assert await everything(database) == closed
    assert await database.unfreeze_account(ACME, 1)
    await LedgerDriver(database).check()
    for each in (*others, database):
        await each.close()


async def test_a_book_is_closed_once_all_who_found_it_open_have_written(
    request: pytest.FixtureRequest,
) -> None:
    url = tenant_schema(request.config)
    database = open_tenant_database(url)
    await database.open()
    await database.create_account(ACME)
    async with await psycopg.AsyncConnection.connect(url) as other:
        await other.execute(for_postgres(tenant_rows.LOOK).encode(), {"tenant": ACME})
        await LedgerDriver(database).grant(5)
        closing = asyncio.ensure_future(database.freeze_account(ACME, 1))
        await asyncio.wait({closing}, timeout=0.5)
        assert not closing.done(), "whoever looked has not written yet"
        await other.rollback()
        assert await closing
    await database.close()


async def test_what_is_not_the_same_on_the_other_side_is_not_switched_to(tmp_path: Path) -> None:
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    async with site(urls) as here:
        await fill(await here.database("first"))
        before = await everything(await here.database("first"))
        await here.begin()
        # What somebody left there long ago is in the way, and is cleared away.
        target = await here.database("second")
        await target.freeze_account(ACME, 1)
        stale = before["postings"][0]
        await target.import_rows(ACME, 1, "postings", [(*stale[:3], 999_999, *stale[4:])])
        assert (await here.go_on()).database == "second"
        assert await everything(target) == before


async def test_a_book_that_is_wrong_is_not_moved(tmp_path: Path) -> None:
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    async with site(urls) as here:
        await fill(await here.database("first"))
        with sqlite3.connect(tmp_path / "first.db") as spoiled:
            spoiled.execute("UPDATE accounts SET balance = balance + 1 WHERE tenant = 'acme'")
        await here.begin()
        with pytest.raises(Exception, match="its ledger is wrong"):
            await here.go_on()
        tenant = await here.tenants.get_uncached(ACME)
        assert tenant is not None and tenant.database == "first"


async def test_two_names_of_one_database_are_not_copied_and_nothing_is_erased(tmp_path: Path) -> None:
    urls = dict.fromkeys(("first", "second"), f"sqlite:///{tmp_path}/one.db")
    async with site(urls) as here:
        await fill(await here.database("first"))
        before = await everything(await here.database("first"))
        await here.begin()
        assert (await here.go_on()).database == "second"
        assert await everything(await here.database("second")) == before
        await LedgerDriver(await here.database("second"), "later").submit(5)


async def test_a_tenant_is_called_back_before_it_has_arrived(tmp_path: Path) -> None:
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    async with site(urls) as here:
        driver = await fill(await here.database("first"))
        await here.begin()
        here.deadline.left = 12
        with pytest.raises(Killed):
            await here.go_on()
        here.deadline.left = None
        with pytest.raises(AccountFrozen):
            await driver.submit(1)
        await here.clock.advance(CLAIM_S)
        await here.begin("first")
        back = await here.go_on()
        assert (back.database, back.state, back.moved_from) == ("first", "active", None)
        assert not any((await everything(await here.database("second"))).values())
        await driver.submit(1)
        await driver.check()


async def test_of_two_that_move_the_same_tenant_the_older_changes_nothing(tmp_path: Path) -> None:
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    async with site(urls) as here:
        await fill(await here.database("first"))
        tenant = await here.begin()
        older = await here.claimed()
        assert await claim(here.documents, here.clock, ACME) is None, "it is claimed"
        await here.clock.advance(CLAIM_S)
        newer = await here.claimed()
        target = await here.database("second")
        assert await target.freeze_account(ACME, newer.fence)
        assert not await target.freeze_account(ACME, older.fence)
        assert not await target.import_rows(ACME, older.fence, "jobs", [])
        assert not await target.unfreeze_account(ACME, older.fence)
        assert await target.erase(ACME, older.fence, 9) is None
        with pytest.raises(Exception, match="another hub has taken over"):
            await here.relocation.move(tenant, older)
        await here.relocation.move(tenant, newer)
        with pytest.raises(Refusal) as refused:
            await here.tenants.change(ACME, lambda found: policy.complete_move(found, tenant, is_copied=True))
        assert refused.value.code is RefusalCode.WRONG_PHASE


# nothing is forgotten


def described() -> dict[str, set[str]]:
    return {part: set(each.columns) for part, each in tenant_rows.PARTS.items()}


NOT_A_TENANTS = {"accounts", "inbox", "migrations", "sqlite_sequence"}


async def test_every_table_of_a_file_moves_with_every_column(tmp_path: Path) -> None:
    database = open_tenant_database(f"sqlite:///{tmp_path}/tenants.db")
    await database.open()
    await database.close()
    with sqlite3.connect(tmp_path / "tenants.db") as file:
        names = [name for (name,) in file.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        tables = {name: {row[1] for row in file.execute(f"PRAGMA table_info({name})")} for name in names}
    assert {name: tables[name] for name in tables.keys() - NOT_A_TENANTS} == described()


async def test_every_table_of_a_schema_moves_with_every_column(request: pytest.FixtureRequest) -> None:
    url = tenant_schema(request.config)
    database = open_tenant_database(url)
    await database.open()
    await database.close()
    tables: dict[str, set[str]] = {}
    with psycopg.connect(url) as connection:
        for table, column in connection.execute(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'comfyfleet_tenants'"
        ):
            tables.setdefault(table, set()).add(column)
    assert {name: tables[name] for name in tables.keys() - NOT_A_TENANTS} == described()


# a hub that has not heard of it yet


@pytest.fixture
async def hubs(tmp_path: Path) -> AsyncIterator[tuple[Fleet, Fleet]]:
    """The tenant has moved with a job of its own, which runs. The first hub moved it; to the second it lives where it
    did, until it asks the store."""
    clock = ManualClock()
    store = SharedStore(clock)
    databases = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    async with Fleet(store, clock, databases) as here, Fleet(store, clock, databases, seed=1) as there:
        await here.tenant(granted=100)
        for hub in (here, there):
            await hub.worker()
        yield here, there


async def move(here: Fleet, there: Fleet, *, is_tidied: bool) -> None:
    old = await there.tenant_services.tenants.get_uncached(ACME)
    mine = await claim(here.central.documents, here.clock, ACME)
    assert mine is not None and old is not None
    relocation = TenantRelocation(
        here.tenant_services.tenants, here.tenant_services.databases, cast(ManualClock, here.clock).advance
    )
    gone = await here.tenant_services.tenants.change(
        ACME, lambda found: policy.start_move(found, "second", 1.0)
    )
    moved = await relocation.move(gone, mine)
    if is_tidied:
        await relocation.clean_up(moved, mine)
    there.tenant_services.tenants._remember(ACME, old)


@pytest.mark.parametrize("is_tidied", [False, True])
async def test_a_result_is_read_where_its_tenant_lives_now(
    hubs: tuple[Fleet, Fleet], is_tidied: bool
) -> None:
    here, there = hubs
    job_id = await here.submit()
    leased = await here.take()
    await move(here, there, is_tidied=is_tidied)
    await here.complete(leased)
    view = await there.engine.get(job_id)
    assert view.dispatch.phase is Phase.COMPLETED
    assert view.job.result is not None and view.job.result.files, "completed, and nothing to show"
    assert view.job.payload.workflow == graph()


async def test_a_result_is_not_left_where_its_tenant_lived(
    hubs: tuple[Fleet, Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that stood still between looking where its tenant lives and writing there."""
    here, there = hubs
    job_id = await here.submit()
    leased = await there.take()
    old = await there.tenant_services.directory.locate(ACME)
    await move(here, there, is_tidied=True)

    async def lived(_: TenantId) -> TenantLocation | None:
        return old

    with monkeypatch.context() as patched:
        patched.setattr(there.tenant_services.directory, "locate", lived)
        with pytest.raises(Fault, match="has just moved to database 'second'"):
            await there.complete(leased)
    await there.complete(leased)
    view = await here.engine.get(job_id)
    assert view.job.result is not None and view.job.result.files


async def test_a_job_is_not_taken_for_unknown_where_its_tenant_lived(hubs: tuple[Fleet, Fleet]) -> None:
    here, there = hubs
    job_id = await here.submit()
    await move(here, there, is_tidied=True)
    assert await there.poll() is None
    assert (await here.engine.get(job_id)).dispatch.phase is Phase.QUEUED
    await cast(ManualClock, here.clock).advance(5.0)
    await there.complete(await there.take())
    assert (await here.engine.get(job_id)).dispatch.phase is Phase.COMPLETED
