"""Calls that are sent together: one that fails has changed nothing, and the others are done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.model.dispatch import Phase
from comfyfleet.stores.redis import codec
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import StoreBench, completion


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with some_server() as server:
        yield server


@pytest.mark.parametrize("companions", [0, 3])
async def test_a_report_that_is_not_whole_has_not_ended_its_job(url: str, companions: int) -> None:
    bench = StoreBench(lambda clock: RedisStore(with_prefix(url), winding=clock))
    await bench.open()
    try:
        bad, *good = [(await bench.leased())[1] for _ in range(1 + companions)]
        arguments = codec.encode_finish(completion(bad))
        assert arguments is not None and isinstance(bench.store, RedisStore)
        ended = await asyncio.gather(
            bench.store._join("finish", *arguments[:11]),
            *(bench.store.write(completion(ref)) for ref in good),
            return_exceptions=True,
        )
        assert isinstance(ended[0], Exception), "it is told"
        dispatch = await bench.store.load(bad.job_id)
        assert dispatch is not None and dispatch.phase is Phase.LEASED
        assert [fact.kind.value for fact in await bench.store.facts(bad.job_id)] == ["queued", "leased"]
        for ref in good:
            dispatch = await bench.store.load(ref.job_id)
            assert dispatch is not None and dispatch.phase is Phase.COMPLETED
        counts = await bench.store.counts()
        assert (counts.by_phase[Phase.LEASED], counts.by_phase[Phase.COMPLETED]) == (1, companions)
        assert await bench.store.write(completion(bad)) is not None
    finally:
        await bench.store.close()
