"""The `DocumentStore` of one tenant, in its tenant database."""

from __future__ import annotations

from comfyfleet.model.ids import TenantId
from comfyfleet.ports import Document
from comfyfleet.stores.documents import check_document, check_start, is_name
from comfyfleet.tenancy.database.executor import Row, SqlExecutor, Work, row, rows
from comfyfleet.tenancy.database.tenant_rows import check_open

_THIS_DOCUMENT = "tenant = :tenant AND drawer = :collection AND name = :name"
_INSERT = (
    "INSERT INTO @documents (tenant, drawer, name, body, version) VALUES (:tenant, :collection, :name, :body, 1) "
    "ON CONFLICT (tenant, drawer, name) DO "
)


class TenantDocumentStore:
    def __init__(self, executor: SqlExecutor, tenant: TenantId) -> None:
        self._executor = executor
        self._tenant = tenant

    async def get(self, collection: str, name: str) -> Document | None:
        if not is_name(name):
            return None
        named = _named(self._tenant, collection, name)
        sql = f"SELECT name, body, version FROM @documents WHERE {_THIS_DOCUMENT}"
        found = await self._executor.read(lambda: row(sql, **named))
        return None if found is None else Document(*found)

    async def put(self, collection: str, name: str, body: bytes, *, version: int | None) -> bool:
        check_document(collection, name, body)
        return await self._executor.transact(lambda: _put(self._tenant, collection, name, body, version))

    async def remove(self, collection: str, name: str) -> bool:
        return is_name(name) and await self._executor.transact(
            lambda: _remove(self._tenant, collection, name)
        )

    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]:
        check_start(after)
        found: list[Row] = await self._executor.read(
            lambda: rows(
                "SELECT name, body, version FROM @documents "
                "WHERE tenant = :tenant AND drawer = :collection AND name > :after ORDER BY name LIMIT :limit",
                tenant=self._tenant,
                collection=collection,
                after=after,
                limit=limit,
            )
        )
        return [Document(*each) for each in found]

    async def collections(self) -> list[str]:
        sql = "SELECT DISTINCT drawer FROM @documents WHERE tenant = :tenant ORDER BY drawer"
        found: list[Row] = await self._executor.read(lambda: rows(sql, tenant=self._tenant))
        return [collection for (collection,) in found]


def _put(tenant: TenantId, collection: str, name: str, body: bytes, version: int | None) -> Work[bool]:
    if version == 0:
        sql = f"{_INSERT} NOTHING RETURNING version"
    elif version is None:
        sql = f"{_INSERT} UPDATE SET version = documents.version + 1, body = excluded.body RETURNING version"
    else:
        sql = (
            "UPDATE @documents SET version = version + 1, body = :body "
            f"WHERE {_THIS_DOCUMENT} AND version = :version RETURNING version"
        )
    values: dict[str, object] = {**_named(tenant, collection, name), "body": body}
    if version:
        values["version"] = version
    yield from check_open(tenant)
    return (yield from row(sql, **values)) is not None


def _remove(tenant: TenantId, collection: str, name: str) -> Work[bool]:
    yield from check_open(tenant)
    sql = f"DELETE FROM @documents WHERE {_THIS_DOCUMENT} RETURNING version"
    return (yield from row(sql, **_named(tenant, collection, name))) is not None


def _named(tenant: TenantId, collection: str, name: str) -> dict[str, str]:
    return {"tenant": tenant, "collection": collection, "name": name}
