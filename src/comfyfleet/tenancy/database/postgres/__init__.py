"""A tenant database in PostgreSQL, in its own schema. Any number of processes can share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import psycopg

from comfyfleet.model.errors import Fault
from comfyfleet.stores.migrations import migrations_of
from comfyfleet.stores.postgres.connections import ConnectionPool, SqlStep
from comfyfleet.stores.postgres.schema import Schema, migrate
from comfyfleet.tenancy.database.executor import Work, for_postgres
from comfyfleet.tenancy.database.sql_database import TenantDatabase

_Answer = TypeVar("_Answer")

# The lock number ("tenant" in ASCII) differs from the store's, which may be in the same database.
_SCHEMA = Schema("comfyfleet_tenants", 0x74656E616E74)


_CONNECTIONS = 4


class PostgresTenantDatabase(TenantDatabase):
    def __init__(self, url: str) -> None:
        super().__init__(PostgresExecutor(url))


class PostgresExecutor:
    def __init__(self, url: str) -> None:
        self._pool = ConnectionPool(url, _CONNECTIONS)

    async def open(self) -> None:
        connection = await self._pool.connect()
        try:
            async with connection:
                await migrate(connection, migrations_of(__name__), _SCHEMA)
        except psycopg.Error as error:
            raise Fault(
                f"PostgreSQL at {self._pool.address} closed the connection while opening a tenant database: "
                f"{' '.join(str(error).split())}; try again when it is running"
            ) from error

    async def close(self) -> None:
        await self._pool.close()

    async def transact(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        return await self._pool.transact(lambda step: _execute(step, begin()))

    async def read(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        return await self._pool.read(lambda step: _execute(step, begin()))

    async def snapshot(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        async def work(step: SqlStep) -> _Answer:
            step.add("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return await _execute(step, begin())

        return await self._pool.transact(work)


async def _execute(step: SqlStep, work: Work[_Answer]) -> _Answer:
    try:
        sql, values = next(work)
        while True:
            sql, values = work.send(await step.rows(for_postgres(sql), values))
    except StopIteration as end:
        answer: _Answer = end.value
        return answer
    finally:
        work.close()
