"""Chooses the requirement class of a job, new or retried, and the class after a server refused its workflow.

Policy says what statistics and refusals mean (`policy/workflow_stats.py`, `policy/acceptance.py`); this
module asks the fleet who could take the job. `failure_handler.py` handles the failure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.node_catalogs import NodeCatalogs
from comfyfleet.model.block import BlockReason, Pair
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import ClassKey, TenantId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.model.workflow import GraphNeeds, read_needs
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.policy.acceptance import applies_to_signature, signature_for, without_signatures
from comfyfleet.policy.failover import lifted_by_inventory
from comfyfleet.policy.feasibility import is_feasible, misses, nearest_miss
from comfyfleet.policy.tenants import name_for, reader_of
from comfyfleet.policy.workflow_stats import with_memory, without_slow


class Placement(NamedTuple):
    """The first class of a job, and the one it relaxes to after a wait."""

    cls: RequirementClass
    later: RequirementClass | None
    relax_at: float | None

    @property
    def classes(self) -> tuple[RequirementClass, ...]:
        return (self.cls,) if self.later is None else (self.cls, self.later)


def class_of(submission: Submission, graph: GraphNeeds, stats: WorkflowStats | None) -> RequirementClass:
    """The declared needs, those of the graph, and without workers that are too slow."""
    declared = submission.requirements
    models, node_classes = _named(submission, graph)
    needs = msgspec.structs.replace(
        declared,
        models=tuple(sorted(models)),
        node_classes=tuple(sorted(node_classes)),
        needs_files=declared.needs_files or bool(submission.inputs),
    )
    return RequirementClass(without_slow(needs, stats), submission.preferences, submission.tenant)


async def needed_class(
    context: EngineContext,
    catalogs: NodeCatalogs,
    placed: Submission,
    stats: WorkflowStats | None,
    needs: GraphNeeds | None = None,
) -> RequirementClass:
    """The class of a submission under the terms of its tenant. `needs`: of its payload; None: the graph is read."""
    if placed.requirements.service != COMFYUI:
        assert needs is not None, "only a graph can be read without a format"
        return class_of(placed, needs, stats)
    graph = placed.workflow
    refusing = await catalogs.refusing(graph, placed.variants)
    needs = await catalogs.needs_of(graph, read_needs(graph) if needs is None else needs)
    return exclude_refusing(context, class_of(placed, needs, stats), refusing)


def narrowed(cls: RequirementClass, submission: Submission, graph: GraphNeeds) -> RequirementClass:
    """Drops needs that the graph does not have. Adds none: the placement may have known more."""
    models, node_classes = _named(submission, graph)
    needs = msgspec.structs.replace(
        cls.requirements,
        models=tuple(each for each in cls.requirements.models if each in models),
        node_classes=tuple(each for each in cls.requirements.node_classes if each in node_classes),
    )
    return msgspec.structs.replace(cls, requirements=needs)


def _named(submission: Submission, graph: GraphNeeds) -> tuple[frozenset[str], frozenset[str]]:
    """The models and node classes of the graph and of the declaration."""
    declared = submission.requirements
    return graph.models.union(declared.models), graph.node_classes.union(declared.node_classes)


def exclude_refusing(
    context: EngineContext, cls: RequirementClass, refusing: frozenset[str]
) -> RequirementClass:
    """Excludes servers that refuse the graph, unless no other worker is left."""
    if not refusing:
        return cls
    fleet, others = context.fleet, without_signatures(cls, refusing)
    key = fleet.key_of(others)
    is_workable = fleet.selectivity(key) > 0 if key in fleet.classes else fleet.is_workable(others)
    return others if is_workable else cls


def initial_class(
    context: EngineContext, cls: RequirementClass, stats: WorkflowStats | None, start: float
) -> Placement:
    """Prefers the bigger cards that the workflow needs, then the preferred workers, then any worker."""
    fleet, rules = context.fleet, context.rules
    needs = with_memory(cls.requirements, stats, cls.tenant, fleet.capabilities())
    if needs is not cls.requirements:
        bigger = msgspec.structs.replace(cls, requirements=needs)
        if fleet.is_workable(bigger):
            return Placement(bigger, cls, start + rules.bigger_card_wait_s)
    wanted, allowed = cls.preferences.workers, cls.requirements.workers
    if wanted and rules.affinity_wait_s > 0:
        only = tuple(worker for worker in wanted if allowed is None or worker in allowed)
        needs = msgspec.structs.replace(cls.requirements, workers=only)
        held = msgspec.structs.replace(cls, requirements=needs)
        if fleet.is_workable(held):
            return Placement(held, cls, start + rules.affinity_wait_s)
    return Placement(cls, None, None)


def closest_worker(
    context: EngineContext, cls: RequirementClass, tenant: TenantId, workers: Iterable[WorkerRecord]
) -> tuple[str, tuple[str, ...]] | None:
    """The worker that lacks least, by the name that the tenant may know, and what it lacks."""
    lacking = {each.worker_id: misses(cls, each.worker_id, each.capabilities) for each in workers}
    nearest = nearest_miss(lacking, context.rules.weights)
    if nearest is None:
        return None
    access = context.fleet.workers[nearest].capabilities.tenant_access
    return name_for(nearest, access, reader_of(tenant)), tuple(miss.reason for miss in lacking[nearest])


class RefusalHandler:
    def __init__(self, context: EngineContext, catalogs: NodeCatalogs) -> None:
        self._context = context
        self._catalogs = catalogs

    async def refusing(
        self, dispatch: Dispatch, worker_id: WorkerId, failure: Failure, now: float
    ) -> frozenset[str]:
        """The signature of the refusing worker, if every worker with that signature would refuse."""
        cls = await self._context.fleet.find_class(dispatch.class_key)
        worker = self._context.fleet.workers.get(worker_id)
        signature = None if cls is None or worker is None else signature_for(cls, worker)
        if signature is None:
            return frozenset()
        catalog = await self._catalogs.get(signature)
        if not applies_to_signature(failure, None if catalog is None else catalog.signatures):
            assert cls is not None, "it has a signature"
            # The refusal may be about one disk, until several equal servers refuse.
            refusals = 1 + await self._equals_that_refused(dispatch, cls, worker_id, signature, now)
            if refusals < self._context.rules.give_up_workers:
                return frozenset()
        return frozenset({signature})

    async def may_accept(
        self, dispatch: Dispatch, worker_id: WorkerId, refusing: frozenset[str], now: float
    ) -> int:
        """Counts the live workers, also paused ones, that could run the job and have not refused it."""
        found = await self._context.fleet.find_class(dispatch.relaxed_class or dispatch.class_key)
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

    async def reroute(self, dispatch: Dispatch, refusing: frozenset[str]) -> Dispatch:
        """Moves the job to classes without the refusing signatures."""
        later = dispatch.relaxed_class
        return msgspec.structs.replace(
            dispatch,
            class_key=await self._without(dispatch.class_key, refusing),
            relaxed_class=None if later is None else await self._without(later, refusing),
        )

    async def _without(self, key: ClassKey, refusing: frozenset[str]) -> ClassKey:
        cls = await self._context.fleet.find_class(key)
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
        """Whether the worker lacks something or refuses the job. Other blocks just expire."""
        if worker_id not in self._context.fleet.with_blocks:
            return False
        for block_target in dispatch.block_targets:
            block = await self._context.store.get_block(Pair(worker_id, block_target))
            if block is not None and block.is_in_force(now) and lifted_by_inventory([block]):
                return True
        return False
