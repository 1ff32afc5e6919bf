"""Workflow statistics of a Redis store, updated by compare and set.

Updates of one workflow that arrive during a write go together with the next, so only other processes
conflict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta

Swap = Callable[[list[WorkflowStatsDelta]], Awaitable[WorkflowStats]]


class _Update:
    def __init__(self, delta: WorkflowStatsDelta) -> None:
        self.delta = delta
        self.stats: WorkflowStats | None = None


class _Workflow:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting: list[_Update] = []
        self.users = 0


class RedisWorkflowStats:
    def __init__(self, write: Swap) -> None:
        """`write` stores several updates of one workflow at once."""
        self._write = write
        self._workflows: dict[WorkflowHash, _Workflow] = {}

    async def add_workflow_stats(self, delta: WorkflowStatsDelta) -> WorkflowStats:
        workflow = self._workflows.setdefault(delta.workflow_hash, _Workflow())
        mine = _Update(delta)
        workflow.waiting.append(mine)
        workflow.users += 1
        try:
            async with workflow.lock:
                return mine.stats or await self._write_together(workflow, mine)
        finally:
            workflow.users -= 1
            if not workflow.users:
                del self._workflows[delta.workflow_hash]

    async def _write_together(self, workflow: _Workflow, mine: _Update) -> WorkflowStats:
        together = [mine, *(each for each in workflow.waiting if each is not mine)]
        workflow.waiting = []
        stats = await self._write([each.delta for each in together])
        for each in together:
            each.stats = stats
        return stats
