"""Which class a job stands in, a new one or one that is tried again: what it needs, and where it waits first.

What a lesson teaches is policy's (`policy/learning.py`); this asks the fleet whether anybody could take the job there.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from comfyfleet.engine.context import Context
from comfyfleet.model.job import Submission
from comfyfleet.model.lesson import Lesson
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.workflow import GraphNeeds
from comfyfleet.policy.learning import with_memory, without_slow
from comfyfleet.policy.refusals import without_signatures


class Place(NamedTuple):
    """The class a job stands in, and the one it moves to when it has waited long enough."""

    cls: RequirementClass
    later: RequirementClass | None
    relax_at: float | None

    @property
    def classes(self) -> tuple[RequirementClass, ...]:
        return (self.cls,) if self.later is None else (self.cls, self.later)


def class_of(submission: Submission, graph: GraphNeeds, lesson: Lesson | None) -> RequirementClass:
    """What the caller declares, plus what the graph shows, plus which workers are known to be too slow."""
    declared = submission.requirements
    models, node_classes = _named(submission, graph)
    needs = msgspec.structs.replace(
        declared,
        models=tuple(sorted(models)),
        node_classes=tuple(sorted(node_classes)),
        needs_files=declared.needs_files or bool(submission.inputs),
    )
    return RequirementClass(without_slow(needs, lesson), submission.preferences, submission.tenant)


def narrowed(cls: RequirementClass, submission: Submission, graph: GraphNeeds) -> RequirementClass:
    """The class of a job that waits, without what its graph is known not to need. Nothing is added to it: whoever
    placed the job may have known more."""
    models, node_classes = _named(submission, graph)
    needs = msgspec.structs.replace(
        cls.requirements,
        models=tuple(each for each in cls.requirements.models if each in models),
        node_classes=tuple(each for each in cls.requirements.node_classes if each in node_classes),
    )
    return msgspec.structs.replace(cls, requirements=needs)


def _named(submission: Submission, graph: GraphNeeds) -> tuple[frozenset[str], frozenset[str]]:
    """Models and node classes, of the graph and as declared."""
    declared = submission.requirements
    return graph.models.union(declared.models), graph.node_classes.union(declared.node_classes)


def where_accepted(context: Context, cls: RequirementClass, refusing: frozenset[str]) -> RequirementClass:
    """The class past servers that are known to refuse the graph. If nobody else is there, they say so themselves."""
    if not refusing:
        return cls
    fleet, others = context.fleet, without_signatures(cls, refusing)
    key = fleet.key_of(others)
    is_workable = fleet.selectivity(key) > 0 if key in fleet.classes else fleet.is_workable(others)
    return others if is_workable else cls


def first_place(context: Context, cls: RequirementClass, lesson: Lesson | None, start: float) -> Place:
    """Where a job stands first: with the bigger cards it is known to need, with those it prefers, or anywhere."""
    fleet, rules = context.fleet, context.rules
    needs = with_memory(cls.requirements, lesson, cls.tenant, fleet.capabilities())
    if needs is not cls.requirements:
        bigger = msgspec.structs.replace(cls, requirements=needs)
        if fleet.is_workable(bigger):
            return Place(bigger, cls, start + rules.bigger_card_wait_s)
    wanted, allowed = cls.preferences.workers, cls.requirements.workers
    if wanted and rules.affinity_wait_s > 0:
        only = tuple(worker for worker in wanted if allowed is None or worker in allowed)
        needs = msgspec.structs.replace(cls.requirements, workers=only)
        held = msgspec.structs.replace(cls, requirements=needs)
        if fleet.is_workable(held):
            return Place(held, cls, start + rules.affinity_wait_s)
    return Place(cls, None, None)
