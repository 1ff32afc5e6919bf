"""A block: this worker does not get this target until then.

The target is a workflow hash, or one job ("not on this worker again"). A record below the threshold only counts:
it blocks nobody, and reading it changes nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from comfyfleet.model.ids import WorkerId


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

    @property
    def pair(self) -> Pair:
        return Pair(self.worker_id, self.target)

    def is_in_force(self, now: float) -> bool:
        """A worker is available again at exactly `blocked_until`."""
        return self.blocked_until is not None and now < self.blocked_until
