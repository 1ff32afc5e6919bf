"""A block: this worker does not get this target until then.

The target is a workflow hash (for every tenant), the workflow hash of one tenant (`tenant_target`), or one job ("not on
this worker again"). A record below the threshold only counts: it blocks nobody, and reading it changes nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash

EVERY_WORKER = WorkerId("*")
"""Stands for all of them: no worker gets what is blocked here."""

UNTIL_LIFTED = 253_402_300_799.0
"""The end of a block that has none: the last second of the year 9999, as every store can keep it."""

# Stores in other languages compose the same text: neither a hash nor a job id contains the sign.
_OF = "@"


def tenant_target(workflow_hash: WorkflowHash, tenant: TenantId) -> str:
    """A workflow as one tenant submits it: a hash ignores values, so one tenant's say nothing about another's."""
    return f"{workflow_hash}{_OF}{tenant}"


def whose_target(target: str) -> tuple[WorkflowHash, TenantId]:
    """Of a target that `tenant_target` made."""
    workflow_hash, _, tenant = target.partition(_OF)
    return WorkflowHash(workflow_hash), TenantId(tenant)


class BlockReason(StrEnum):
    FAILURES = "failures"
    OUT_OF_MEMORY = "out_of_memory"
    INVENTORY = "inventory"
    """Something is not installed; lifted when the worker's inventory changes."""
    REFUSED = "refused"
    """The server's versions of the nodes do not accept the workflow; lifted when the worker's inventory changes."""
    JOB = "job"
    """One job is kept off one worker while another can run it."""
    OPERATOR = "operator"
    SERVER_DIED = "server_died"
    """Servers died while they ran it; until an operator lifts it."""


class Pair(NamedTuple):
    worker_id: WorkerId
    target: str


class Block(msgspec.Struct, frozen=True, omit_defaults=True):
    worker_id: WorkerId
    target: str
    reason: BlockReason
    failures: int = 0
    blocked_until: float | None = None
    """None: only counting so far."""
    missing: tuple[str, ...] = ()
    made_at: float = 0.0
    """Of a block that is lifted by hand. 0: not known."""

    @property
    def pair(self) -> Pair:
        return Pair(self.worker_id, self.target)

    @property
    def names_job(self) -> bool:
        """Whether its target is one job. The ids of jobs have dashes, and hashes have none."""
        return self.reason is BlockReason.JOB or (self.reason is BlockReason.REFUSED and "-" in self.target)

    @property
    def workflow_hash(self) -> WorkflowHash:
        """Of a block whose target is no job."""
        return WorkflowHash(self.target.partition(_OF)[0])

    @property
    def tenant(self) -> TenantId | None:
        """None: it counts for everybody, or for one job."""
        return TenantId(self.target.partition(_OF)[2]) or None

    def is_in_force(self, now: float) -> bool:
        """A worker is available again at exactly `blocked_until`."""
        return self.blocked_until is not None and now < self.blocked_until
