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


class _Learner:
    def __init__(self, delta: WorkflowStatsDelta) -> None:
        self.delta = delta
        self.stats: WorkflowStats | None = None


class _Workflow:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting: list[_Learner] = []
        self.users = 0


class RedisWorkflowStats:
    def __init__(self, write: Swap) -> None:
        """`write` stores several updates of one workflow at once."""
        self._write = write
        self._workflows: dict[WorkflowHash, _Workflow] = {}

    async def learn(self, delta: WorkflowStatsDelta) -> WorkflowStats:
        workflow = self._workflows.setdefault(delta.workflow_hash, _Workflow())
        me = _Learner(delta)
        workflow.waiting.append(me)
        workflow.users += 1
        try:
            async with workflow.lock:
                return me.stats or await self._lead(workflow, me)
        finally:
            workflow.users -= 1
            if not workflow.users:
                del self._workflows[delta.workflow_hash]

    async def _lead(self, workflow: _Workflow, me: _Learner) -> WorkflowStats:
        together = [me, *(each for each in workflow.waiting if each is not me)]
        workflow.waiting = []
        stats = await self._write([each.delta for each in together])
        for each in together:
            each.stats = stats
        return stats
