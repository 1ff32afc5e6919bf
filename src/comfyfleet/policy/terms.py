"""What a tenant may ask for: its state, its lists of nodes and models, its caps; and what its jobs need beside that.

A graph is judged by what it says. Where a cap is set, a value that cannot be told from the graph is refused: unknown
means no. How many jobs wait and how often somebody submits is counted by others, and judged here.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from comfyfleet.model.dispatch import Change, Dispatch, Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.requirement import Isolation, LocationNeed, RequirementClass, Requirements
from comfyfleet.model.tenant import Tenant, TenantCaps, TenantState
from comfyfleet.model.workflow import Node, Workflow, check_workflow, files_of
from comfyfleet.model.workflow_variants import with_nodes
from comfyfleet.policy.priority import effective_priority
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.timers import wake_at

_STRICTNESS: tuple[Isolation, ...] = ("none", "loose", "strict")
_MEGAPIXEL = 1024 * 1024
"""As ComfyUI counts them."""
_REPEATS = frozenset({"RepeatLatentBatch", "RepeatImageBatch"})
_CONSTANTS = frozenset({"INTConstant", "FloatConstant"})
"""Nodes that hold a number, beside ComfyUI's own, whose names begin with Primitive."""


def under_terms(submission: Submission, tenant: Tenant) -> Submission:
    """Judged, and as it is placed. What is kept of it is what was asked for: so a repeat is known again, and a retry is
    judged by the terms of its own time."""
    check_state(tenant)
    check_kept(submission, tenant)
    return with_terms(submission, tenant)


def check_kept(submission: Submission, tenant: Tenant) -> None:
    """Whether a job keeps to the terms, new or waiting; whether anything new is taken now is not asked."""
    check_graph(tenant, submission.workflow)
    for variant in submission.variants:
        check_graph(tenant, with_nodes(submission.workflow, variant))
    check_region(tenant, submission.requirements)


def keeps_to(submission: Submission, tenant: Tenant) -> bool:
    try:
        check_kept(submission, tenant)
    except Refusal:
        return False
    return True


def judged_again(cls: RequirementClass, submission: Submission, tenant: Tenant) -> RequirementClass:
    """The class of a job that waits, as its tenant's terms are now. Whether direct workers may take it was decided with
    where its payload lies: that can be withdrawn, and not be given later."""
    needs = with_terms(submission, tenant).requirements
    changed = msgspec.structs.replace(
        cls.requirements,
        isolation=needs.isolation,
        location=needs.location,
        needs_hub=needs.needs_hub or cls.requirements.needs_hub,
    )
    return msgspec.structs.replace(cls, requirements=changed)


def under_new_terms(dispatch: Dispatch, job: Job, tenant: Tenant, now: float, rules: Rules) -> Change:
    """Its priority, as tier and ceiling are now."""
    asked, ceiling = job.payload, tenant.caps.max_priority
    own = asked.priority if job.priority is None else job.priority
    base = effective_priority(own, asked.tier + tenant.tier, asked.urgency, None, now, rules, ceiling)
    placed = msgspec.structs.replace(dispatch, base_priority=base, priority_ceiling=ceiling)
    change = Change(base_priority=base, priority_ceiling=ceiling)
    if dispatch.phase is not Phase.QUEUED:
        return change
    priority = effective_priority(base, 0, "normal", dispatch.deadline_at, now, rules, ceiling)
    return msgspec.structs.replace(change, priority=priority, wake_at=wake_at(placed, now, rules))


def check_state(tenant: Tenant) -> None:
    """Whether anything new of this tenant is taken now."""
    match tenant.state:
        case TenantState.ACTIVE:
            return
        case TenantState.MOVING:
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"the tenant {tenant.tenant_id!r} is being moved to another pool; try again in a moment",
                retry_after_s=5,
            )
        case TenantState.SUSPENDED:
            raise _not_allowed(
                f"the tenant {tenant.tenant_id!r} is suspended: nothing new is taken until an operator resumes it"
            )
        case TenantState.LEAVING:
            raise _not_allowed(f"the tenant {tenant.tenant_id!r} is being deleted: nothing new is taken")


def check_graph(tenant: Tenant, graph: dict[str, Any]) -> None:
    """Whether it may run such a graph: the nodes it has, the models they name, and how much they ask for."""
    caps = tenant.caps
    if caps.max_nodes is not None and len(graph) > caps.max_nodes:
        raise _too_large(f"the workflow has {len(graph)} nodes", caps.max_nodes)
    if not _looks_inside(tenant):
        return
    workflow = check_workflow(graph, max_nodes=len(graph), max_chain=len(graph))
    for node_id, node in workflow.nodes.items():
        named = f"node {node_id} ({node.class_type})"
        _check_listed(tenant, node_id, node, named)
        _check_amounts(caps, workflow, node, named)


def check_region(tenant: Tenant, needs: Requirements) -> None:
    own, its = needs.location.region, tenant.location.region
    if own is not None and its is not None and own.casefold() != its.casefold():
        raise _not_allowed(
            f"jobs of the tenant {tenant.tenant_id!r} run in the region {its!r} only, and this one asks for {own!r}",
            field="requirements.location.region",
        )


def check_waiting(tenant: Tenant, waiting: int) -> None:
    """`waiting`: how many of its jobs are open before the one that wants to come in."""
    most = tenant.caps.max_waiting
    if most is not None and waiting >= most:
        raise Refusal(
            RefusalCode.QUEUE_FULL,
            f"{waiting} jobs of the tenant {tenant.tenant_id!r} wait or run, and it may have {most}; "
            "try again when some have ended",
            waiting=waiting,
            limit=most,
        )


def with_terms(submission: Submission, tenant: Tenant) -> Submission:
    """As it is placed: a job may ask for more than its tenant's terms, never for less."""
    needs = submission.requirements
    return msgspec.structs.replace(
        submission,
        tier=submission.tier + tenant.tier,
        requirements=msgspec.structs.replace(
            needs,
            isolation=max(needs.isolation, tenant.isolation, key=_STRICTNESS.index),
            location=_location(needs.location, tenant.location),
            needs_hub=needs.needs_hub or not tenant.allows_direct,
        ),
    )


def _location(own: LocationNeed, its: LocationNeed) -> LocationNeed:
    region = own.region or its.region
    if own.region is not None and its.region is not None and own.region.casefold() != its.region.casefold():
        # Taken before the terms were changed. No worker is in both, and so none gets it.
        region = f"{own.region} and {its.region}"
    # Under one spelling each: workers are compared without regard to case.
    compliance = {entry.casefold(): entry for entry in (*own.compliance, *its.compliance)}
    return LocationNeed(region, tuple(compliance[entry] for entry in sorted(compliance)))


def _looks_inside(tenant: Tenant) -> bool:
    caps = tenant.caps
    return (
        tenant.node_classes is not None
        or tenant.models is not None
        or bool(tenant.denied_node_classes or tenant.denied_models)
        or any(most is not None for most in (caps.max_steps, caps.max_pixels, caps.max_batch))
    )


# --- lists -------------------------------------------------------------------------------------------------------


def _check_listed(tenant: Tenant, node_id: str, node: Node, named: str) -> None:
    kind = node.class_type
    if _is_like(kind, tenant.denied_node_classes) or not (
        tenant.node_classes is None or _is_like(kind, tenant.node_classes)
    ):
        raise _not_allowed(
            f"{named} is of a class that the tenant {tenant.tenant_id!r} may not use",
            node=node_id,
            class_type=kind,
        )
    for model in sorted(files_of(node)[0]):
        # What is denied is denied in any folder; what is allowed is allowed where the list says.
        is_denied = _is_like(model, tenant.denied_models) or _is_like(
            model.rpartition("/")[2], tenant.denied_models
        )
        if is_denied or not (tenant.models is None or _is_like(model, tenant.models)):
            raise _not_allowed(
                f"{named} names the model {model!r}, which the tenant {tenant.tenant_id!r} may not use",
                node=node_id,
                model=model,
            )


def _is_like(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern.replace("\\", "/")) for pattern in patterns)


# --- amounts -----------------------------------------------------------------------------------------------------


def _check_amounts(caps: TenantCaps, workflow: Workflow, node: Node, named: str) -> None:
    if caps.max_steps is not None and "steps" in node.inputs:
        steps = _number(workflow, node, "steps", named)
        if not steps <= caps.max_steps:
            raise _too_large(f"{named} asks for {steps:g} steps", caps.max_steps)
    if caps.max_pixels is not None:
        for said, pixels in _pictures(workflow, node, named):
            if not pixels <= caps.max_pixels:
                raise _too_large(f"{named} asks for {said} pixels", caps.max_pixels)
    if caps.max_batch is not None:
        for name in _batches(node):
            batch = _number(workflow, node, name, named)
            if not batch <= caps.max_batch:
                raise _too_large(f"{named} asks for {batch:g} pictures at once", caps.max_batch)


def _pictures(workflow: Workflow, node: Node, named: str) -> Iterator[tuple[str, float]]:
    if "width" in node.inputs and "height" in node.inputs:
        width, height = (_number(workflow, node, name, named) for name in ("width", "height"))
        # Beside a side that is left open (0), the other one is taken for both.
        yield f"{width:g} × {height:g}", (abs(width) or abs(height)) * (abs(height) or abs(width))
    if "megapixels" in node.inputs:
        pixels = _number(workflow, node, "megapixels", named) * _MEGAPIXEL
        yield f"{pixels:.0f}", pixels


def _batches(node: Node) -> Iterator[str]:
    if "batch_size" in node.inputs:
        yield "batch_size"
    if node.class_type in _REPEATS and "amount" in node.inputs:
        yield "amount"


def _number(workflow: Workflow, node: Node, name: str, named: str) -> float:
    """The number that the input has, or gets from a node that does nothing but hold one."""
    value: Any = node.inputs[name]
    if (link := node.links.get(name)) is not None:
        value = _held_by(workflow.nodes[link.node])
    number = _parsed(value)
    if number is None:
        raise _not_allowed(
            f"the input {name!r} of {named} is bounded for this tenant and cannot be told from the workflow: "
            "give it as a number",
            input=name,
        )
    return number


def _held_by(node: Node) -> Any:
    if not (node.class_type.startswith("Primitive") or node.class_type in _CONSTANTS):
        # What other nodes make of their inputs nobody here can tell.
        return None
    numbers = [value for value in node.inputs.values() if _parsed(value) is not None]
    return numbers[0] if len(numbers) == 1 and not node.links else None


def _parsed(value: Any) -> float | None:
    """As a server reads it: text that is a number is one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _not_allowed(message: str, **details: Any) -> Refusal:
    return Refusal(RefusalCode.NOT_ALLOWED, message, **details)


def _too_large(what: str, most: int) -> Refusal:
    return Refusal(RefusalCode.TOO_LARGE, f"{what}; this tenant may ask for at most {most}", limit=most)
