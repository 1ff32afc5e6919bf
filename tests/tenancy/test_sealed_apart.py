"""Tenants of one database whose jobs are sealed: a key that does not open is felt by its own tenant alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.tenancy._tenant_services import ACME, BORG, Fleet, one_fleet

from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId
from comfyfleet.stores.crypto.keyring import KEEP_S, Keyring, MasterKeys, WrappedKey
from comfyfleet.stores.factory import DATA_KEYS
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.database.encrypted import encrypted_database
from comfyfleet.testing.time import ManualClock

MASTERS = MasterKeys({"k1": b"1" * 32}, "k1")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fleet(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Fleet]:
    store = MemoryStore(clock)
    keyring = Keyring(store.documents, clock, lambda: MASTERS)
    async with one_fleet(
        store, clock, tmp_path, around=lambda each: encrypted_database(each, keyring)
    ) as fleet:
        for tenant in (ACME, BORG):
            await fleet.tenant(tenant, granted=100)
        yield fleet


async def damage(fleet: Fleet, clock: ManualClock, tenant: TenantId) -> None:
    """The key of its payloads does not open any more, and nobody has it in memory."""
    documents = fleet.central.documents
    for document in await documents.listing(DATA_KEYS):
        if document.name.startswith(f"{tenant}/"):
            kept = msgspec.json.decode(document.body, type=WrappedKey)
            broken = msgspec.structs.replace(kept, wrapped=b"x" * len(kept.wrapped))
            await documents.put(DATA_KEYS, document.name, msgspec.json.encode(broken), version=None)
    await clock.advance(KEEP_S)


async def test_a_database_is_not_away_because_one_tenants_key_does_not_open(
    fleet: Fleet, clock: ManualClock
) -> None:
    job_id = await fleet.submit(ACME)
    await damage(fleet, clock, ACME)
    with pytest.raises(Fault, match="does not open"):
        await fleet.engine.get(job_id)
    assert not fleet.tenant_services.databases.is_unreachable("first")
    await fleet.submit(BORG)
    await fleet.check(BORG)


async def test_a_job_that_cannot_be_opened_keeps_none_behind_it_out_of_the_queue(
    fleet: Fleet, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise Fault("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(fleet.central, "enqueue", away)
        await fleet.submit(ACME)
        behind = await fleet.submit(BORG)
    await damage(fleet, clock, ACME)
    await fleet.relay.run_once(at_once=True)
    assert (await fleet.engine.stats()).waiting == 1
    assert await fleet.central.load(behind) is not None
