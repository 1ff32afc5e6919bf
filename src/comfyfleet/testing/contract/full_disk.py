"""The store contract for media that can be full: a failed write leaves everything as it was.

It is a separate class because the memory store has no such medium. Subclasses provide a store and `no_room`,
which makes its medium refuse writes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import msgspec
import pytest

from comfyfleet.model.block import Block, BlockReason, Pair
from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import Change, Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import ProfileKey
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.model.worker import Capabilities, Service, WorkerDelta, WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta
from comfyfleet.ports import Store, TransferableStore
from comfyfleet.testing.contract.job_transfer import renamed
from comfyfleet.testing.contract.store_bench import (
    FAST,
    HASH,
    SLOW,
    A,
    B,
    StoreBench,
    UsesBench,
    completion,
    tenant,
)

NoRoom = Callable[[Store], AbstractAsyncContextManager[None]]
"""Inside it the store's medium refuses every write: a full disk, a server out of memory."""

Step = Callable[[], Awaitable[object]]

WORKER = WorkerRecord(A, Capabilities((Service("comfyui"),)), FAST, 1, 0.0, 0.0)


async def steps_of(bench: StoreBench) -> dict[str, Step]:
    """Every writing call, each prepared to succeed."""
    store = bench.store
    await store.put_worker(WORKER)
    assert await store.documents.put("keys", "known", b"1", version=0)
    await store.put_block(Block(A, "counted", BlockReason.FAILURES, 1))
    await store.put_block(Block(A, "over", BlockReason.FAILURES, 1, bench.clock.now() - 1))
    waiting = await bench.enqueue(reference="mine")
    _, ref = await bench.leased()
    _, ended = await bench.leased()
    written = await store.write(completion(ended))
    assert written is not None
    over = written.dispatch
    _, settled_later = await bench.leased(has_tenant_database=True)
    written = await store.write(completion(settled_later))
    assert written is not None
    unsettled = written.dispatch
    await bench.clock.advance(5)
    version = (await store.table()).version
    block = Block(A, HASH, BlockReason.FAILURES, 1, 1e12)
    cls = RequirementClass(Requirements(models=("new",)))
    own = await store.facts(waiting.job_id)
    record = await store.records.get(waiting.job_id)
    assert record is not None
    moved = renamed(JobSnapshot(waiting, record, tuple(own), ()), "moved")
    moving = cast("TransferableStore", store).job_transfer if hasattr(store, "job_transfer") else None
    return {
        **(
            {}
            if moving is None
            else {
                "import_jobs": lambda: moving.import_jobs([moved]),
                "discard": lambda: moving.discard([waiting, over]),
            }
        ),
        "enqueue": lambda: bench.enqueue(reference="new"),
        "lease": lambda: store.lease(waiting.job_id, bench.offer()),
        "lease_next": bench.lease_next,
        "write": lambda: store.write(completion(ref, blocks=(block,), lifted=(Pair(A, "counted"),))),
        "retry": lambda: bench.change(over, Change(phase=Phase.QUEUED, round=2)),
        "settle": lambda: bench.change(unsettled, Change(settled_at=5.0)),
        "cancel": lambda: bench.cancel(waiting),
        "heartbeat": lambda: store.heartbeat([ref], 60),
        "mark_late": lambda: store.mark_late(ended),
        "purge": lambda: store.purge(Phase.COMPLETED, 1e12, 10),
        "put_class": lambda: store.put_class(cls, [FAST], version=version),
        "put_profile": lambda: store.put_profile(ProfileKey("new"), [], version=version),
        "drop_profiles": lambda: store.drop_profiles([SLOW]),
        "put_worker": lambda: store.put_worker(WORKER),
        "add_worker": lambda: store.add_worker(msgspec.structs.replace(WORKER, worker_id=B)),
        "replace_worker": lambda: store.replace_worker(WORKER),
        "apply_worker_delta": lambda: store.apply_worker_delta(A, WorkerDelta(completed=1)),
        "add_workflow_stats": lambda: store.add_workflow_stats(WorkflowStatsDelta(HASH, "card", 1.0, 0.2, 8)),
        "remove_worker": lambda: store.remove_worker(A),
        "put_block": lambda: store.put_block(block),
        "lift": lambda: store.lift([Pair(A, "counted")]),
        "expired_blocks": store.expired_blocks,
        "put_workflow_stats": lambda: store.put_workflow_stats(WorkflowStats(HASH, {}, 12.0)),
        "charge": lambda: store.fair_share.charge(tenant("default"), 5.0),
        "put_terms": lambda: store.fair_share.put_terms(TenantTerms(tenant("ann"), 2.0, 1)),
        "pause_queue": lambda: store.pause_queue(True),
        "put a document": lambda: store.documents.put("keys", "new", b"1", version=0),
        "put over a document": lambda: store.documents.put("keys", "known", b"2", version=1),
        "remove a document": lambda: store.documents.remove("keys", "known"),
    }


class FullDiskContract(UsesBench):
    async def test_a_medium_that_takes_no_writes_leaves_everything_as_it_was(
        self, bench: StoreBench, no_room: NoRoom
    ) -> None:
        steps = await steps_of(bench)
        # A purge frees space, so a store may allow it.
        del steps["purge"]
        before = await _state(bench)
        for name, step in steps.items():
            async with no_room(bench.store):
                with pytest.raises(Fault):
                    await step()
            assert await _state(bench) == before, name

    async def test_with_room_again_everything_that_was_refused_goes_through(
        self, bench: StoreBench, no_room: NoRoom
    ) -> None:
        waiting = await bench.enqueue()
        _, ref = await bench.leased()
        async with no_room(bench.store):
            with pytest.raises(Fault):
                await bench.enqueue()
            with pytest.raises(Fault):
                await bench.store.write(completion(ref))
            with pytest.raises(Fault):
                await bench.lease_next()
        later = await bench.enqueue()
        assert await bench.store.write(completion(ref)) is not None
        assert await bench.peek() == [waiting.job_id, later.job_id]
        taken = await bench.lease_next()
        assert taken is not None
        assert (taken.job_id, taken.lease_number) == (waiting.job_id, 1)
        facts = await bench.store.facts(ref.job_id)
        assert [fact.number for fact in facts] == [1, 2, 3]


async def _state(bench: StoreBench) -> dict[str, Any]:
    """Without the polls of refused leases, which nobody holds."""
    state = await bench.state()
    state["polls"] = [found for found in state["polls"] if found is not None]
    state["workflow_stats"] = await bench.store.get_workflow_stats(HASH)
    state["documents"] = await bench.store.documents.listing("keys")
    return state
