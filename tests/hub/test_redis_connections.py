"""A hub on Redis reads over the same few connections, however many watch."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from redis.asyncio import Redis
from tests.hub._hub import running_hub
from tests.hub._watching import watching
from tests.servers.redis_fixtures import own_server

from comfyfleet.stores.redis.store import RedisStore

_JOBS = 20
_WATCHERS_EACH = 4


async def test_watchers_cost_no_connection_to_redis() -> None:
    with own_server(is_durable=False) as server:
        async with AsyncExitStack() as stack:
            hub = await stack.enter_async_context(running_hub(store_url=server.url))
            store = hub.engine.store
            assert isinstance(store, RedisStore) and store._listener is not None
            async with asyncio.timeout(60):
                await store._listener.is_listening.wait()
            redis = await stack.enter_async_context(Redis.from_url(server.url))
            jobs = [await hub.submit() for _ in range(_JOBS)]
            before = await _connections(redis)
            streams = [
                await stack.enter_async_context(watching(hub, f"/api/jobs/{job_id}/progress"))
                for job_id in jobs
                for _ in range(_WATCHERS_EACH)
            ]
            for stream in streams:
                await stream.until("queued")
            assert hub.hub.watchers == _JOBS * _WATCHERS_EACH
            # Each of them reads on: what happens now comes to all.
            for job_id in jobs:
                assert (await hub.post(f"/api/jobs/{job_id}/cancel")).status == 200
            for stream in streams:
                await stream.until("cancelled")
            assert await _connections(redis) == before


async def _connections(redis: Any) -> set[str]:
    return {client["id"] for client in await redis.client_list()}
