"""After a server refused a workflow: for which others its word counts, who may still accept it, where it stands next.

What a refusal is, and how far it reaches, is policy's (`policy/refusals.py`); the failure itself is handled in
`verdicts.py` like any other.
"""

from __future__ import annotations

import msgspec

from comfyfleet.engine.catalogs import NodeCatalogs
from comfyfleet.engine.context import Context
from comfyfleet.model.block import BlockReason, Pair
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import ClassKey, WorkerId
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.failover import lifted_by_inventory
from comfyfleet.policy.feasibility import is_feasible
from comfyfleet.policy.refusals import signature_for, speaks_for_equals, without_signatures


class Refusals:
    def __init__(self, context: Context, catalogs: NodeCatalogs) -> None:
        self._context = context
        self._catalogs = catalogs

    async def refusing(
        self, dispatch: Dispatch, worker_id: WorkerId, failure: Failure, now: float
    ) -> frozenset[str]:
        """The signature of the worker that refused, where all that have it would refuse too."""
        cls = await self._class(dispatch.class_key)
        worker = self._context.fleet.workers.get(worker_id)
        signature = None if cls is None or worker is None else signature_for(cls, worker)
        if signature is None:
            return frozenset()
        catalog = await self._catalogs.get(signature)
        if not speaks_for_equals(failure, None if catalog is None else catalog.signatures):
            assert cls is not None, "it has a signature"
            # It may be about its own disk. When several equal servers say so, it is the workflow.
            said = 1 + await self._equals_that_refused(dispatch, cls, worker_id, signature, now)
            if said < self._context.rules.give_up_workers:
                return frozenset()
        return frozenset({signature})

    async def may_accept(
        self, dispatch: Dispatch, worker_id: WorkerId, refusing: frozenset[str], now: float
    ) -> int:
        """Live workers that could run it, other than those that have refused it or are equal to one that has. One that
        drains, or is paused, may be let back."""
        found = await self._class(dispatch.relaxed_class or dispatch.class_key)
        if found is None:
            return 0
        cls, count = without_signatures(found, refusing), 0
        for worker in list(self._context.fleet.workers.values()):
            if worker.worker_id == worker_id or worker.is_offline:
                continue
            if self._context.fleet.is_held_back(worker):
                continue
            if is_feasible(cls, worker.worker_id, worker.capabilities):
                count += not await self._cannot(dispatch, worker.worker_id, now)
        return count

    async def elsewhere(self, dispatch: Dispatch, refusing: frozenset[str]) -> Dispatch:
        """In a class without the servers that refuse it."""
        later = dispatch.relaxed_class
        return msgspec.structs.replace(
            dispatch,
            class_key=await self._without(dispatch.class_key, refusing),
            relaxed_class=None if later is None else await self._without(later, refusing),
        )

    async def _without(self, key: ClassKey, refusing: frozenset[str]) -> ClassKey:
        cls = await self._class(key)
        others = None if cls is None else without_signatures(cls, refusing)
        return key if others is None or others is cls else await self._context.fleet.ensure_class(others)

    async def _equals_that_refused(
        self, dispatch: Dispatch, cls: RequirementClass, worker_id: WorkerId, signature: str, now: float
    ) -> int:
        fleet, count = self._context.fleet, 0
        for worker in list(fleet.workers.values()):
            if worker.worker_id == worker_id or worker.worker_id not in fleet.with_blocks:
                continue
            if signature_for(cls, worker) == signature:
                count += await self._has_refused(dispatch, worker, now)
        return count

    async def _has_refused(self, dispatch: Dispatch, worker: WorkerRecord, now: float) -> bool:
        block = await self._context.store.get_block(Pair(worker.worker_id, dispatch.job_id))
        return block is not None and block.is_in_force(now) and block.reason is BlockReason.REFUSED

    async def _cannot(self, dispatch: Dispatch, worker_id: WorkerId, now: float) -> bool:
        """Whether the worker is known to lack something, or to refuse it. Other blocks are only a matter of time."""
        if worker_id not in self._context.fleet.with_blocks:
            return False
        for block_target in dispatch.block_targets:
            block = await self._context.store.get_block(Pair(worker_id, block_target))
            if block is not None and block.is_in_force(now) and lifted_by_inventory([block]):
                return True
        return False

    async def _class(self, key: ClassKey) -> RequirementClass | None:
        """Submitted at another engine, it may be new to this one."""
        fleet = self._context.fleet
        if key not in fleet.classes and self._context.store.is_shared:
            await fleet.sync()
        return fleet.classes.get(key)
