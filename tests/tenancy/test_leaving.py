"""A deleted tenant leaves nothing behind, whoever dies at which step; its neighbour keeps everything."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

import pytest
from tests.tenancy._mortal import Deadline, Killed, Mortal
from tests.tenancy.test_moving import everything, fill

from comfyfleet.model.access import Role
from comfyfleet.model.block import EVERY_WORKER, UNTIL_LIFTED, Block, BlockReason, tenant_target
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, TenantId, WorkflowHash
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.model.webhook import Delivery
from comfyfleet.policy import tenants as policy
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.claims import CLAIM_S, COLLECTION, claim
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import AccountFrozen, PostingResult
from comfyfleet.tenancy.deletion import TenantDeletion, TenantResources
from comfyfleet.tenancy.keys import Keys
from comfyfleet.tenancy.tenants import TenantDirectory, Tenants
from comfyfleet.tenancy.webhook_outbox import WebhookOutbox
from comfyfleet.tenancy.webhooks import Webhooks
from comfyfleet.testing.contract.ledger_driver import ACME, BORG, LedgerDriver
from comfyfleet.testing.time import ManualClock


class Site:
    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.deadline = Deadline()
        self.store = MemoryStore(self.clock)
        urls = {name: f"sqlite:///{folder}/{name}.db" for name in ("first", "second")}
        self.databases = TenantDatabases(
            urls,
            self.clock,
            lambda url: cast(TenantDatabase, Mortal(open_tenant_database(url), self.deadline)),
        )
        documents = cast(Any, Mortal(self.store.documents, self.deadline))
        self.tenants = Tenants(documents, self.clock, is_shared=True)
        self.keys, self.webhooks = Keys(documents, self.clock), Webhooks(documents, self.clock)
        self.deliveries = WebhookOutbox(documents)
        self.shredded: list[TenantId] = []
        self.erased: list[TenantId] = []
        self.deletion = TenantDeletion(
            self.store,
            TenantDirectory(self.tenants, self.databases),
            self.keys,
            self.webhooks,
            self.deliveries,
            TenantResources(cancel=self.cancel, erase_files=self.erase_files, crypto_shred=self.shred),
            self.clock.advance,
        )

    async def cancel(self, job_id: JobId) -> None:
        raise Refusal(RefusalCode.NOT_FOUND, f"there is no job {job_id}")

    async def shred(self, tenant: TenantId) -> None:
        self.shredded.append(tenant)

    async def erase_files(self, tenant: TenantId) -> None:
        self.erased.append(tenant)

    async def settle(self) -> LedgerDriver:
        """Two tenants who have something of everything, and no open job."""
        database = await self.databases.get("first")
        driver = await fill(database)
        for hold in await database.open_holds(10.0, 100):
            await driver.database.end_round(driver.ending(hold, Phase.CANCELLED))
        for tenant in (ACME, BORG):
            await self.tenants.create(Tenant(tenant, "first", 1.0))
            await self.keys.create(Role.TENANT, tenant=tenant)
            await self.webhooks.create(tenant, "https://hooks.example")
            await self.webhooks.rotate(tenant, 0, "secret")
            target = tenant_target(WorkflowHash("hash"), tenant)
            await self.store.put_block(
                Block(EVERY_WORKER, target, BlockReason.SERVER_DIED, 2, UNTIL_LIFTED, made_at=1.0)
            )
            job = JobId(f"01900000-0000-7000-8000-{tenant:0>12}")
            await self.deliveries.add(
                Delivery(job, 1, "job", tenant, "https://x", FactKind.COMPLETED, 1, 1.0, 1.0)
            )
        return driver

    async def leave(self) -> None:
        tenant = await self.tenants.get_uncached(ACME)
        assert tenant is not None and tenant.state is TenantState.LEAVING
        mine = await claim(self.store.documents, self.clock, ACME)
        assert mine is not None
        await self.deletion.delete(tenant, mine)
        await self.deletion.forget(ACME)

    async def documents(self) -> dict[str, int]:
        documents = self.store.documents
        return {
            collection: len(await documents.listing(collection))
            for collection in await documents.collections()
        }


def going(tenant: Tenant) -> Tenant:
    return policy.start_deletion(tenant, tenant.tenant_id)


async def test_everything_of_a_tenant_goes_whoever_dies_on_the_way(tmp_path: Path) -> None:
    for steps in range(1, 500, 3):
        folder = tmp_path / str(steps)
        folder.mkdir()
        site = Site(folder)
        await site.settle()
        neighbour = await everything(await site.databases.get("first"), BORG)
        await site.tenants.change(ACME, going)
        site.deadline.left = steps
        try:
            await site.leave()
            is_over = True
        except Killed:
            is_over = False
            site.deadline.left = None
            await site.clock.advance(CLAIM_S)
            if await site.tenants.get_uncached(ACME) is not None:
                await site.leave()
        site.deadline.left = None
        database = await site.databases.get("first")
        assert await site.tenants.get_uncached(ACME) is None
        assert not any((await everything(database)).values())
        assert await everything(database, BORG) == neighbour
        await LedgerDriver(database).check(BORG)
        assert set(site.shredded) == set(site.erased) == {ACME}
        assert [block.tenant for block in await site.store.blocks()] == [BORG]
        keys = {key.tenant: key.revoked_at is not None for key in await site.keys.listing()}
        assert keys == {ACME: True, BORG: False}
        left = await site.documents()
        assert (left["webhooks"], left["webhook_secrets"], left["deliveries"], left["tenants"]) == (
            1,
            1,
            1,
            1,
        )
        with pytest.raises(AccountFrozen):
            await LedgerDriver(database, "late").submit(0)
        await site.databases.close()
        if is_over:
            assert steps > 20
            return
    raise AssertionError("it has fewer steps")


async def test_a_tenant_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.settle()
    await site.tenants.change(ACME, going)
    await site.leave()
    database = await site.databases.get("first")
    await database.create_account(ACME)
    driver = LedgerDriver(database, "new")
    assert (await database.account(ACME)).balance == 0
    await driver.grant(5)
    await driver.submit(5)
    await driver.check()
    assert [each.number for each in await database.statement(ACME, after=0, limit=9)] == [1, 2]
    assert (await site.documents()).get(COLLECTION) is None
    await site.databases.close()


async def test_open_jobs_are_waited_for_and_what_cannot_end_now_is_gone_on_with_later(tmp_path: Path) -> None:
    site = Site(tmp_path)
    driver = await site.settle()
    hold = await driver.submit(1)
    await site.tenants.change(ACME, going)
    with pytest.raises(Fault, match="the hub deletes the tenant later"):
        await site.leave()
    assert await driver.is_open(hold.hold_id), "nothing is erased while a job goes on"
    await driver.end(hold, Phase.CANCELLED)
    await site.clock.advance(CLAIM_S)
    await site.leave()
    assert await site.tenants.get_uncached(ACME) is None
    await site.databases.close()


async def test_a_tenant_that_is_deleted_on_its_way_to_another_database_can_still_settle_its_jobs(
    tmp_path: Path,
) -> None:
    """Whoever moved it has closed its book, and an open job is refunded in a book that is open."""
    site = Site(tmp_path)
    driver = await site.settle()
    hold = await driver.submit(1)
    await site.tenants.change(ACME, lambda tenant: policy.start_move(tenant, "second", 2.0))
    for name in ("first", "second"):
        assert await (await site.databases.get(name)).freeze_account(ACME, 1)
    await site.tenants.change(ACME, going)
    refunded: list[PostingResult] = []

    async def relay(seconds: float) -> None:
        await site.clock.advance(seconds)
        if not refunded:
            with contextlib.suppress(AccountFrozen):
                refunded.append((await driver.end(hold, Phase.CANCELLED)).outcome)
                await driver.check()

    site.deletion._sleep = relay
    await site.leave()
    assert refunded == [PostingResult.DONE]
    assert await site.tenants.get_uncached(ACME) is None
    for name in ("first", "second"):
        database = await site.databases.get(name)
        assert not any((await everything(database)).values())
        assert await database.fence_of(ACME) is not None, "nothing that comes late is written there"
    await site.databases.close()


def test_without_its_name_said_again_nothing_is_deleted() -> None:
    for confirm in (None, "", "borg"):
        with pytest.raises(Refusal, match="confirm=acme"):
            policy.start_deletion(Tenant(ACME, "first", 1.0), confirm)
