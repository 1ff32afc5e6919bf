"""Everything a store keeps of one job: what another store needs to go on with it as if nothing had happened."""

from __future__ import annotations

import msgspec

from comfyfleet.model.dispatch import Attempt, Dispatch
from comfyfleet.model.fact import Fact
from comfyfleet.model.job import Job


class WholeJob(msgspec.Struct, frozen=True):
    dispatch: Dispatch
    job: Job
    facts: tuple[Fact, ...]
    attempts: tuple[Attempt, ...]
