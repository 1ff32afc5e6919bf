"""What one tenant's jobs met keeps that tenant's jobs off a worker, and nobody else's until a second tenant met it."""

from __future__ import annotations

import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.errors import Refusal
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash

ANN, BOB, EVE = TenantId("ann"), TenantId("bob"), TenantId("eve")


async def blocked_tenants(rig: Rig) -> list[TenantId | None]:
    return [block.tenant for block in await rig.engine.blocks() if block.reason is not BlockReason.JOB]


@pytest.mark.parametrize("kind", [FailureKind.NODE_ERROR, FailureKind.OUT_OF_MEMORY, FailureKind.CRASHED])
async def test_a_tenants_failing_input_keeps_nobody_else_from_the_same_graph(kind: FailureKind) -> None:
    async with Rig() as rig:
        for name in "ab":
            await rig.worker(name)
        await rig.submit(graph(width=100_000), tenant=EVE, retry_delay_s=0)
        for name in "ab":
            await rig.fail(await rig.take(name), kind)
        of_bob = await rig.submit(graph(width=512), tenant=BOB)
        assert (await rig.take("a")).job_id == of_bob
        assert await blocked_tenants(rig) == [EVE, EVE]
        again = await rig.submit(graph(width=100_000), tenant=EVE)
        assert await rig.poll("b") is None
        explanation = await rig.engine.explain(again)
        assert "blocked for this workflow of tenant eve" in explanation.workers[0].reason


async def test_what_two_tenants_met_counts_for_everybody() -> None:
    async with Rig() as rig:
        await rig.worker("a", "KSampler", "Other")
        for tenant in (ANN, BOB):
            await rig.submit(tenant=tenant, max_attempts=1)
            await rig.fail(await rig.take("a"))
        assert await blocked_tenants(rig) == [ANN, BOB, None]
        await rig.submit(tenant=EVE)
        assert await rig.poll("a") is None
        other = await rig.submit(graph("Other"), tenant=EVE)
        assert (await rig.take("a")).job_id == other


async def test_each_tenants_failures_are_counted_on_their_own() -> None:
    async with Rig(max_failures_before_block=3) as rig:
        await rig.worker("a")
        for tenant in (ANN, BOB, ANN, BOB):
            await rig.submit(tenant=tenant, max_attempts=1)
            await rig.fail(await rig.take("a"))
        assert {
            (block.tenant, block.failures, block.blocked_until) for block in await rig.engine.blocks()
        } == {
            (ANN, 2, None),
            (BOB, 2, None),
        }
        await rig.submit(tenant=ANN, max_attempts=1)
        await rig.fail(await rig.take("a"))
        of_bob = await rig.submit(tenant=BOB)
        await rig.submit(tenant=ANN)
        assert (await rig.take("a")).job_id == of_bob
        assert await rig.poll("a") is None


async def test_a_success_lifts_the_tenants_block_and_everybodys_but_not_another_tenants() -> None:
    async with Rig() as rig:
        await rig.worker("a", slots=3)
        for tenant in (ANN, BOB, EVE):
            await rig.submit(tenant=tenant, max_attempts=1)
        of_ann, of_bob, of_eve = [await rig.take("a") for _ in range(3)]
        await rig.fail(of_ann)
        await rig.fail(of_bob)
        assert await blocked_tenants(rig) == [ANN, BOB, None]
        await rig.complete(of_eve)
        assert await blocked_tenants(rig) == [ANN, BOB]


async def test_what_a_server_lacks_counts_for_everybody_at_once() -> None:
    async with Rig() as rig:
        await rig.worker("a", models=("x.safetensors",))
        await rig.submit(graph(model="x.safetensors"), tenant=ANN, max_attempts=1)
        await rig.fail(await rig.take("a"), FailureKind.MISSING_MODEL, missing=("x.safetensors",))
        assert await blocked_tenants(rig) == [None]
        await rig.submit(graph(model="x.safetensors"), tenant=BOB)
        assert await rig.poll("a") is None


async def test_a_missing_file_that_only_a_value_names_is_the_tenants_own_matter() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.submit(graph(text="nowhere.safetensors"), tenant=EVE, max_attempts=1)
        await rig.fail(await rig.take("a"), FailureKind.MISSING_MODEL, missing=("nowhere.safetensors",))
        of_bob = await rig.submit(graph(text="a cat"), tenant=BOB)
        assert (await rig.take("a")).job_id == of_bob


async def test_one_tenant_cannot_have_a_worker_quarantined_for_all() -> None:
    async with Rig() as rig:
        kinds = [f"Kind{number}" for number in range(40)]
        await rig.worker("a", "Good", *kinds)
        for kind in kinds:
            await rig.submit(graph(kind), tenant=EVE, max_attempts=1)
            await rig.fail(await rig.take("a"))
        assert rig.fleet_events("quarantined") == []
        of_bob = await rig.submit(graph(kinds[0]), tenant=BOB)
        leased = await rig.take("a")
        assert leased.job_id == of_bob
        await rig.fail(leased)
        for kind in kinds[1:16]:
            await rig.submit(graph(kind), tenant=BOB, max_attempts=1)
            await rig.fail(await rig.take("a"))
        assert len(rig.fleet_events("quarantined")) == 1, "two tenants have seen it fail"


async def test_a_block_without_a_tenant_counts_for_everybody_until_it_ends() -> None:
    """As a store from before tenants had blocks of their own holds them."""
    async with Rig() as rig:
        await rig.worker("a")
        of_ann = await rig.submit(tenant=ANN)
        workflow_hash: WorkflowHash = (await rig.engine.get(of_ann)).dispatch.workflow_hash
        until = rig.clock.now() + 60
        await rig.store.put_block(Block(WorkerId("a"), workflow_hash, BlockReason.FAILURES, 1, until))
        assert await rig.poll("a") is None
        parked = rig.park("a")
        await rig.clock.advance(60)
        leased = parked.result()
        assert leased is not None and leased.job_id == of_ann


async def test_lifting_a_workflow_by_hand_lifts_it_for_every_tenant() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        for tenant in (ANN, BOB):
            await rig.submit(tenant=tenant, max_attempts=1)
            await rig.fail(await rig.take("a"))
        first = (await rig.engine.blocks())[0]
        assert await rig.engine.unblock(WorkerId("a"), first.target), "one tenant's alone"
        assert await blocked_tenants(rig) == [BOB, None]
        assert await rig.engine.unblock(WorkerId("a"), first.workflow_hash)
        assert await blocked_tenants(rig) == []
        assert [event.data["tenant"] for event in rig.fleet_events("unblocked")] == [ANN, BOB, None]


async def test_no_worker_may_have_the_name_that_stands_for_all() -> None:
    async with Rig() as rig:
        with pytest.raises(Refusal, match="stands for every worker"):
            await rig.worker("*")


async def test_a_tenants_huge_picture_sends_nobody_elses_to_the_bigger_card() -> None:
    async with Rig() as rig:
        await rig.worker("small", vram_gb=12)
        await rig.worker("big", vram_gb=24)
        await rig.submit(graph(width=100_000), tenant=EVE)
        await rig.fail(await rig.take("small"), FailureKind.OUT_OF_MEMORY)
        await rig.complete(await rig.take("big"))
        of_bob = await rig.submit(graph(width=512), tenant=BOB)
        assert (await rig.take("small")).job_id == of_bob
        again = await rig.submit(graph(width=100_000), tenant=EVE)
        assert await rig.poll("small") is None
        assert (await rig.take("big")).job_id == again
