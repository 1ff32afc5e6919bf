"""Documents in one table. A write is one transaction that compares the version under a lock."""

from __future__ import annotations

from comfyfleet.ports import Document
from comfyfleet.stores.documents import check_document, check_start, is_name
from comfyfleet.stores.postgres.connections import ConnectionPool, Values

_GET = "SELECT name, body, version FROM comfyfleet.documents WHERE drawer = %s AND name = %s"

_PUT_NEW = """
INSERT INTO comfyfleet.documents (drawer, name, version, body) VALUES (%(drawer)s, %(name)s, 1, %(body)s)
ON CONFLICT (drawer, name) DO NOTHING RETURNING version
"""

_PUT = """
INSERT INTO comfyfleet.documents AS d (drawer, name, version, body) VALUES (%(drawer)s, %(name)s, 1, %(body)s)
ON CONFLICT (drawer, name) DO UPDATE SET version = d.version + 1, body = excluded.body RETURNING version
"""

_PUT_OVER = """
UPDATE comfyfleet.documents SET version = version + 1, body = %(body)s
WHERE drawer = %(drawer)s AND name = %(name)s AND version = %(version)s RETURNING version
"""

_REMOVE = "DELETE FROM comfyfleet.documents WHERE drawer = %s AND name = %s RETURNING version"

_LIST = """
SELECT name, body, version FROM comfyfleet.documents WHERE drawer = %s AND name > %s ORDER BY name LIMIT %s
"""

_COLLECTIONS = "SELECT DISTINCT drawer FROM comfyfleet.documents ORDER BY drawer"


class PostgresDocumentStore:
    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    async def get(self, collection: str, name: str) -> Document | None:
        found = await self._pool.fetch(_GET, (collection, name)) if is_name(name) else []
        return Document(*found[0]) if found else None

    async def put(self, collection: str, name: str, body: bytes, *, version: int | None) -> bool:
        check_document(collection, name, body)
        query = _PUT if version is None else _PUT_NEW if version == 0 else _PUT_OVER
        values = {"drawer": collection, "name": name, "body": body, "version": version}
        return await self._has_changed(query, values)

    async def remove(self, collection: str, name: str) -> bool:
        return is_name(name) and await self._has_changed(_REMOVE, (collection, name))

    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]:
        check_start(after)
        return [Document(*row) for row in await self._pool.fetch(_LIST, (collection, after, limit))]

    async def collections(self) -> list[str]:
        return [row[0] for row in await self._pool.fetch(_COLLECTIONS)]

    async def _has_changed(self, query: str, values: Values) -> bool:
        return await self._pool.transact(lambda step: step.row(query, values)) is not None
