"""Poison workflows: when a workflow that kills servers is refused, and when its tenant is paused.

A server's execution thread or process may die while it runs a graph (`Failure.server_died`). The job gets one more try.
After the second death no worker runs the workflow for this tenant until an operator lifts the block. An expired lease
does not count, because the agent's machine may only have lost its network.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec

from comfyfleet.model.block import EVERY_WORKER, UNTIL_LIFTED, Block, BlockReason, tenant_target
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkflowHash
from comfyfleet.policy.rules import Rules


def refusal_of(dispatch: Dispatch, server_deaths: int, now: float) -> Block:
    """The block that keeps the workflow from every worker, for the tenant of this job."""
    _, for_tenant, _ = dispatch.block_targets
    return Block(EVERY_WORKER, for_tenant, BlockReason.SERVER_DIED, server_deaths, UNTIL_LIFTED, made_at=now)


def death_of(dispatch: Dispatch, server_deaths: int, now: float) -> Block:
    """A count of deaths without a block, for a job that is not tried again."""
    return msgspec.structs.replace(refusal_of(dispatch, server_deaths, now), blocked_until=None)


def deaths_lately(known: Block | None, rules: Rules, now: float) -> int:
    """The recent deaths of a tenant's workflow, from its stored block."""
    is_fresh = known is not None and now - known.made_at < rules.poison_window_s
    return known.failures if known is not None and is_fresh else 0


def is_refusing(block: Block) -> bool:
    return (
        block.worker_id == EVERY_WORKER
        and block.reason is BlockReason.SERVER_DIED
        and block.blocked_until is not None
    )


def why_refused(workflow_hash: WorkflowHash, tenant: TenantId) -> str:
    whose = "" if tenant == DEFAULT_TENANT else f" of tenant {tenant!r}"
    by_hand = f"`comfyfleet blocks lift '*' {tenant_target(workflow_hash, tenant)}`"
    in_program = f'`pool.unblock("*", "{workflow_hash}")`'
    return (
        f"servers died while they ran this workflow{whose}, so it is refused until an operator lifts the block: "
        f"{by_hand}, or {in_program} in a program"
    )


def check_refused(workflow_hash: WorkflowHash, tenant: TenantId, refused: Set[str]) -> None:
    """Raise a refusal if the tenant's workflow is blocked."""
    if refused and tenant_target(workflow_hash, tenant) in refused:
        raise Refusal(
            RefusalCode.INVALID_WORKFLOW, why_refused(workflow_hash, tenant), workflow_hash=workflow_hash
        )


def failure_of_poison(failure: Failure, dispatch: Dispatch) -> Failure:
    """The failure of the job that killed the last server."""
    why = why_refused(dispatch.workflow_hash, dispatch.tenant)
    return msgspec.structs.replace(failure, message=f"{failure.message.rstrip('.')}; {why}")


def failure_of_waiting(dispatch: Dispatch) -> Failure:
    """The failure of waiting jobs of the same tenant and workflow."""
    return Failure(FailureKind.INVALID_WORKFLOW, why_refused(dispatch.workflow_hash, dispatch.tenant))


def is_to_be_paused(tenant: TenantId, blocks: Iterable[Block], rules: Rules, now: float) -> bool:
    """Whether so many workflows of the tenant were refused recently that it is paused. The default tenant is not
    paused, because without tenants it owns all jobs."""
    lately = sum(
        is_refusing(block) and block.tenant == tenant and now - block.made_at < rules.poison_window_s
        for block in blocks
    )
    return tenant != DEFAULT_TENANT and lately >= rules.poison_workflows
