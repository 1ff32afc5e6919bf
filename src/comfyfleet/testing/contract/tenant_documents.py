"""The contract of tenant databases for small documents, separate for each tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from comfyfleet.model.ids import TenantId
from comfyfleet.ports import DocumentStore
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.testing.contract.documents import DocumentStoreContract

_OURS, _THEIRS = TenantId("acme"), TenantId("borg")


class TenantDocumentsContract(DocumentStoreContract):
    @pytest.fixture
    async def database(self, connect: Callable[[], TenantDatabase]) -> AsyncIterator[TenantDatabase]:
        database = connect()
        await database.open()
        yield database
        await database.close()

    @pytest.fixture
    def documents(self, database: TenantDatabase) -> DocumentStore:
        return database.documents(_OURS)

    async def test_documents_are_seen_by_their_tenant_alone(
        self, database: TenantDatabase, connect: Callable[[], TenantDatabase]
    ) -> None:
        ours, theirs = database.documents(_OURS), database.documents(_THEIRS)
        assert await ours.put("files", "a", b"ours", version=0)
        assert await theirs.get("files", "a") is None and await theirs.collections() == []
        assert not await theirs.remove("files", "a")
        assert await theirs.put("files", "a", b"theirs", version=0)
        assert [each.body for each in await ours.listing("files")] == [b"ours"]
        other = connect()
        await other.open()
        assert await other.documents(_OURS).put("files", "a", b"again", version=1)
        await other.close()
        assert not await ours.put("files", "a", b"late", version=1)
