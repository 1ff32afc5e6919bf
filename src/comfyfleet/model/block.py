"""A block keeps a target from a worker until a time.

The target is a workflow hash (for all tenants), a workflow hash of one tenant (`tenant_target`), or one job.
A record below the failure threshold only counts failures and blocks nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash

EVERY_WORKER = WorkerId("*")
"""This id stands for all workers."""

UNTIL_LIFTED = 253_402_300_799.0
"""The end of a block without an end: the last second of the year 9999, which every store can represent."""

_TENANT_SEPARATOR = "@"


def tenant_target(workflow_hash: WorkflowHash, tenant: TenantId) -> str:
    """A workflow of one tenant. The hash ignores input values, so failures of one tenant say nothing about others."""
    return f"{workflow_hash}{_TENANT_SEPARATOR}{tenant}"


def whose_target(target: str) -> tuple[WorkflowHash, TenantId]:
    """The inverse of `tenant_target`."""
    workflow_hash, _, tenant = target.partition(_TENANT_SEPARATOR)
    return WorkflowHash(workflow_hash), TenantId(tenant)


class BlockReason(StrEnum):
    FAILURES = "failures"
    OUT_OF_MEMORY = "out_of_memory"
    INVENTORY = "inventory"
    """A node or model is missing. A change of the worker's inventory lifts the block."""
    REFUSED = "refused"
    """The server's node versions do not accept the workflow. A change of the inventory lifts the block."""
    JOB = "job"
    """One job avoids one worker while another worker can run it."""
    OPERATOR = "operator"
    SERVER_DIED = "server_died"
    """Servers died while they ran the workflow. Only an operator lifts the block."""


class Pair(NamedTuple):
    worker_id: WorkerId
    target: str


class Block(msgspec.Struct, frozen=True, omit_defaults=True):
    worker_id: WorkerId
    target: str
    reason: BlockReason
    failures: int = 0
    blocked_until: float | None = None
    """None: this record only counts failures."""
    missing: tuple[str, ...] = ()
    made_at: float = 0.0
    """Set for blocks that an operator lifts. 0: not known."""

    @property
    def pair(self) -> Pair:
        return Pair(self.worker_id, self.target)

    @property
    def names_job(self) -> bool:
        """Whether the target is one job. Job ids contain dashes and hashes do not."""
        return self.reason is BlockReason.JOB or (self.reason is BlockReason.REFUSED and "-" in self.target)

    @property
    def workflow_hash(self) -> WorkflowHash:
        """Valid only if the target is not a job."""
        return whose_target(self.target)[0]

    @property
    def tenant(self) -> TenantId | None:
        """None: the block applies to all tenants, or to one job."""
        return whose_target(self.target)[1] or None

    def is_in_force(self, now: float) -> bool:
        """The block ends exactly at `blocked_until`."""
        return self.blocked_until is not None and now < self.blocked_until
