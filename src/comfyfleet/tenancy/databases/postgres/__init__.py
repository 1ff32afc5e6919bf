"""A tenant database in PostgreSQL, in a schema of its own; any number of processes share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import psycopg

from comfyfleet.model.errors import Fault
from comfyfleet.stores.postgres.pool import Connection, Pool, Step
from comfyfleet.tenancy.databases.postgres.migrating import known_migrations, migrate
from comfyfleet.tenancy.databases.shell import SqlTenantDatabase
from comfyfleet.tenancy.databases.work import Work, for_postgres

_Answer = TypeVar("_Answer")


class PostgresTenantDatabase(SqlTenantDatabase):
    def __init__(self, url: str, *, connections: int = 4) -> None:
        super().__init__(PostgresCarrier(url, connections))


class _Pool(Pool):
    async def _put_back(self, connection: Connection) -> None:
        try:
            await super()._put_back(connection)
        except asyncio.CancelledError:
            # Given up while its transaction was being taken back: nobody else would ever close it.
            await connection.close()
            raise


class PostgresCarrier:
    def __init__(self, url: str, connections: int) -> None:
        self._pool = _Pool(url, connections)

    async def open(self) -> None:
        connection = await self._pool.connect()
        try:
            async with connection:
                await migrate(connection, known_migrations())
        except psycopg.Error as error:
            raise Fault(
                f"PostgreSQL at {self._pool.address} hung up while a tenant database was being opened: "
                f"{' '.join(str(error).split())}; try again when it runs"
            ) from error

    async def close(self) -> None:
        await self._pool.close()

    async def transact(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        return await self._pool.transact(lambda step: _carry_out(step, begin()))

    async def read(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        return await self._pool.read(lambda step: _carry_out(step, begin()))

    async def snapshot(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        async def work(step: Step) -> _Answer:
            step.add("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return await _carry_out(step, begin())

        return await self._pool.transact(work)


async def _carry_out(step: Step, work: Work[_Answer]) -> _Answer:
    try:
        sql, values = next(work)
        while True:
            sql, values = work.send(await step.rows(for_postgres(sql), values))
    except StopIteration as end:
        answer: _Answer = end.value
        return answer
    finally:
        work.close()
