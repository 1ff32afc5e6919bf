"""Everything that lies in a database, as bytes, for whoever looks for a text in it."""

from __future__ import annotations

from pathlib import Path

import psycopg
from psycopg import sql
from redis.asyncio import Redis


def in_files(folder: Path) -> bytes:
    """A SQLite file with its log beside it."""
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file())


def in_postgres(url: str) -> bytes:
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "SELECT schemaname, tablename FROM pg_tables WHERE schemaname LIKE 'comfyfleet%'"
        ).fetchall()
        assert tables
        rows = [
            row
            for names in tables
            for row in connection.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(*names)))
        ]
    return repr(rows).encode()


async def in_redis(url: str) -> bytes:
    """Read key by key: what the server dumps of them is compressed."""
    found: list[object] = []
    async with Redis.from_url(url.partition("?")[0]) as redis:
        async for key in redis.scan_iter():
            match await redis.type(key):
                case b"string":
                    found.append(await redis.get(key))
                case b"hash":
                    found.append(await redis.hgetall(key))
                case b"list":
                    found.append(await redis.lrange(key, 0, -1))
                case b"set":
                    found.append(await redis.smembers(key))
                case b"zset":
                    found.append(await redis.zrange(key, 0, -1))
                case b"stream":
                    found.append(await redis.xrange(key))
    assert found
    return repr(found).encode()
