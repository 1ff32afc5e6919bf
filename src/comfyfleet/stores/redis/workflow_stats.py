"""Lessons of a Redis store: written over what was read, or read again. What is learned of a workflow while another
lesson of it is being written goes with the next, so only other processes ever come between."""

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
        """`write` puts what several have learned of one workflow into the store at once."""
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
