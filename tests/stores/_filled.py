"""A store with a past: jobs in every phase and standing, of several tenants and classes, with results and attempts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from comfyfleet.engine.system import SystemClock
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import Readiness
from comfyfleet.model.ids import JobId, WorkflowHash
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.ports import RecordQuery, Store, TransferableStore
from comfyfleet.stores.factory import open_store
from comfyfleet.testing.contract.job_transfer import whole
from comfyfleet.testing.contract.store_bench import (
    FAST,
    FOR_BOTH,
    FOR_FAST,
    HASH,
    SLOW,
    A,
    B,
    StoreBench,
    completion,
    failure,
    release,
    tenant,
)

BLOCK = Block(A, HASH, BlockReason.FAILURES, 2, 1e12)
LESSON = WorkflowStats(HASH, {}, 12.0)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[TransferableStore]:
    store = cast("TransferableStore", open_store(url, SystemClock()))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def fill(url: str, waiting: int, *, first_id: int = 0) -> None:
    bench = StoreBench(lambda _: open_store(url, SystemClock()))
    for _ in range(first_id):
        bench.new_number()
    await bench.open()
    store = bench.store
    for number in range(4):
        _, ref = await bench.leased(reference=f"ended-{number}", has_tenant_database=number > 1)
        assert await store.write((completion, failure)[number % 2](ref)) is not None
    _, ref = await bench.leased(reference="tried")
    assert await store.write(release(ref)) is not None
    cancelled = await bench.enqueue(FOR_FAST)
    assert await bench.cancel(cancelled) is not None
    later = SystemClock().now() + 9000
    await bench.enqueue(standing=Readiness.DELAYED, not_before=later, wake_at=later)
    await bench.enqueue(standing=Readiness.PAUSED)
    for number in range(waiting):
        await bench.enqueue(
            (FOR_FAST, FOR_BOTH)[number % 2],
            workflow_hash=WorkflowHash(f"hash-{number % 7}"),
            priority=(0, 0, 5)[number % 3],
            tenant=tenant(("ann", "bob")[number % 2]),
            reference=f"waiting-{number}",
        )
    await store.fair_share.charge(tenant("ann"), 30.0)
    await store.put_block(BLOCK)
    await store.put_workflow_stats(LESSON)
    await store.close()


async def histories(store: Store) -> dict[JobId, JobSnapshot]:
    """Of every job, in order of submission."""
    bench = StoreBench(lambda _: store)
    found: dict[JobId, JobSnapshot] = {}
    after = None
    while page := await store.records.listing(RecordQuery(limit=100, after=after)):
        after = page[-1].job_id
        for job in page:
            found[job.job_id] = await whole(bench, job.job_id)
    return found


async def leasing_order(store: Store) -> list[JobId]:
    """Takes everything that waits."""
    bench = StoreBench(lambda _: store)
    version = (await store.table()).version
    table = await store.table()
    for profile in (FAST, SLOW):
        if profile not in table.profiles:
            assert await store.put_profile(profile, list(table.classes), version=version)
            version += 1
    order = []
    while (taken := await bench.lease_next(B, FAST)) is not None:
        order.append(taken.job_id)
    return order
