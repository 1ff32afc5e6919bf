"""What an attempt left on its service, once the hub has taken its end: removed by connectors that are set up to.

Only here is it known that a completion was taken and that every output is kept elsewhere. What a service removes, and
how, is its connector's. Nothing depends on it: what could not be removed is told and left.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, runtime_checkable

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.job import JobResult
from comfyfleet.ports import Connector

_log = logging.getLogger(__name__)

_WITHIN_S = 10.0


@runtime_checkable
class TidiesUp(Protocol):
    async def tidy_up(self, job: LeasedJob, *, are_outputs_kept: bool) -> None:
        """Removes what this attempt left, and nothing of others; its outputs only if they are kept elsewhere."""


async def tidy_up(connector: Connector, job: LeasedJob, result: JobResult) -> None:
    """After a completion was taken."""
    if not isinstance(connector, TidiesUp):
        return
    are_kept = all(file.file_id is not None for file in result.files)
    try:
        async with asyncio.timeout(_WITHIN_S):
            await connector.tidy_up(job, are_outputs_kept=are_kept)
    except Exception as error:
        _log.warning("what %s left on its server stays there: %r", job.attempt_id, error)
