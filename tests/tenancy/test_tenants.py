"""Tenants as they are set up, and the databases they are assigned to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.database import open_tenant_database, registry
from comfyfleet.tenancy.database.documents import TenantDocumentStore
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.tenants import COLLECTION, REMEMBER_S, TenantDirectory, Tenants
from comfyfleet.testing.time import ManualClock

ACME = TenantId("acme")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock)


def suspended(tenant: Tenant) -> Tenant:
    return msgspec.structs.replace(tenant, state=TenantState.SUSPENDED)


async def test_a_tenant_that_another_hub_made_is_never_taken_for_one_nobody_made(
    store: MemoryStore, clock: ManualClock
) -> None:
    here, there = (Tenants(store.documents, clock, is_shared=True) for _ in range(2))
    assert await here.get(ACME) is None
    made = await there.create(Tenant(ACME, "first", 1.0))
    assert await here.get(ACME) == made


async def test_a_change_at_another_hub_is_seen_after_a_moment(store: MemoryStore, clock: ManualClock) -> None:
    here, there = (Tenants(store.documents, clock, is_shared=True) for _ in range(2))
    await there.create(Tenant(ACME, "first", 1.0))
    await here.get(ACME)
    changed = await there.change(ACME, suspended)
    assert await there.get(ACME) == changed
    await clock.advance(REMEMBER_S)
    assert await here.get(ACME) == changed


async def test_a_name_is_taken_once_and_the_default_tenant_is_not_set_up(
    store: MemoryStore, clock: ManualClock
) -> None:
    tenants = Tenants(store.documents, clock, is_shared=False)
    await tenants.create(Tenant(ACME, "first", 1.0))
    for name in (ACME, DEFAULT_TENANT):
        with pytest.raises(Refusal):
            await tenants.create(Tenant(name, "second", 2.0))
    assert [each.database for each in await tenants.list_all()] == ["first"]


async def test_the_database_of_a_tenant_keeps_its_stored_name(store: MemoryStore, clock: ManualClock) -> None:
    before = b'{"tenant_id":"acme","pool":"first","created_at":1.0}'
    assert await store.documents.put(COLLECTION, ACME, before, version=0)
    tenants = Tenants(store.documents, clock, is_shared=True)
    assert await tenants.get(ACME) == Tenant(ACME, database="first", created_at=1.0)
    await tenants.change(ACME, lambda tenant: msgspec.structs.replace(tenant, database="second"))
    document = await store.documents.get(COLLECTION, ACME)
    assert document is not None and document.body == before.replace(b"first", b"second")


async def test_a_tenant_that_is_gone_is_not_there_to_be_changed(
    store: MemoryStore, clock: ManualClock
) -> None:
    tenants = Tenants(store.documents, clock, is_shared=False)
    await tenants.create(Tenant(ACME, "first", 1.0))
    await tenants.remove(ACME)
    assert await tenants.get(ACME) is None
    with pytest.raises(Refusal) as refused:
        await tenants.change(ACME, suspended)
    assert refused.value.code is RefusalCode.NOT_FOUND


async def test_a_database_is_opened_once_for_everybody(tmp_path: Path, clock: ManualClock) -> None:
    opened: list[str] = []

    def open_database(url: str) -> TenantDatabase:
        opened.append(url)
        return open_tenant_database(url)

    databases = TenantDatabases({"first": f"sqlite:///{tmp_path}/tenants.db"}, clock, open_database)
    assert await databases.get("first") is await databases.get("first")
    assert len(opened) == 1
    await databases.close()


async def test_a_database_that_cannot_be_opened_is_asked_again_a_little_later(
    tmp_path: Path, clock: ManualClock
) -> None:
    folder = tmp_path / "databases"
    databases = TenantDatabases({"first": f"sqlite:///{folder}/tenants.db"}, clock, open_tenant_database)
    folder.write_text("in the way")
    for _ in range(2):
        with pytest.raises(Fault):
            await databases.get("first")
    folder.unlink()
    folder.mkdir()
    await clock.advance(1.0)
    await databases.get("first")
    assert list(databases.used_names) == ["first"]
    await databases.close()


async def test_a_database_that_nobody_needs_is_not_made(
    tmp_path: Path, store: MemoryStore, clock: ManualClock
) -> None:
    databases = TenantDatabases(
        {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("a", "b")}, clock, open_tenant_database
    )
    homes = TenantDirectory(Tenants(store.documents, clock, is_shared=False), databases)
    await homes.open()
    assert not list(databases.used_names)
    await homes.tenants.create(Tenant(ACME, "b", 1.0))
    await homes.open()
    assert list(databases.used_names) == ["b"] and (tmp_path / "b.db").exists()
    assert not (tmp_path / "a.db").exists()
    await databases.close()


async def test_a_database_that_is_not_set_up_is_named(clock: ManualClock) -> None:
    databases = TenantDatabases({"first": "sqlite:///x.db"}, clock, open_tenant_database)
    with pytest.raises(Refusal, match="there is no tenant database 'second' here"):
        databases.check("second")
    with pytest.raises(Fault, match="second"):
        await databases.get("second")


async def test_documents_of_a_database_that_does_not_answer_are_given_up_too(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ANSWER_S", 0.05)
    never = asyncio.Event()

    async def stand_still(self: object, collection: str, name: str) -> None:
        await never.wait()

    monkeypatch.setattr(TenantDocumentStore, "get", stand_still)
    databases = TenantDatabases({"first": f"sqlite:///{tmp_path}/tenants.db"}, clock, open_tenant_database)
    documents = (await databases.get("first")).documents(ACME)
    async with asyncio.timeout(60):
        with pytest.raises(Fault, match="did not answer"):
            await documents.get("files", "one")
    assert databases.is_unreachable("first")
    await databases.close()
