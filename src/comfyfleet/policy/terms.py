"""The terms of a tenant: its state, its lists of nodes and models, its caps, and requirements for its jobs.

A graph is checked by its literal values. If a cap is set, a value that the graph does not show is refused. Others count
waiting jobs and submits.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from comfyfleet.model.dispatch import Change, Dispatch, Phase
from comfyfleet.model.editor_conversion import with_nodes
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.payload import COMFYUI, PayloadReading
from comfyfleet.model.requirement import Isolation, LocationNeed, RequirementClass, Requirements
from comfyfleet.model.tenant import Tenant, TenantCaps, TenantState
from comfyfleet.model.workflow import files_of
from comfyfleet.model.workflow_graph import Node, Workflow, check_workflow
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.timers import effective_priority, wake_at

_STRICTNESS: tuple[Isolation, ...] = ("none", "loose", "strict")
_MEGAPIXEL = 1024 * 1024
"""As ComfyUI counts."""
_AMOUNTS = {"steps": "steps", "pixels": "pixels", "batch": "pictures at once"}
_REPEATS = frozenset({"RepeatLatentBatch", "RepeatImageBatch"})
_CONSTANTS = frozenset({"INTConstant", "FloatConstant"})
"""Nodes that only hold a number. ComfyUI's own have names that start with Primitive."""


def under_terms(submission: Submission, tenant: Tenant, reading: PayloadReading | None = None) -> Submission:
    """The checked submission with the terms applied. The job record holds the original, so that repeats are recognised
    and a retry uses the terms of its own time."""
    check_state(tenant)
    check_within_terms(submission, tenant, reading)
    return with_terms(submission, tenant)


def check_within_terms(submission: Submission, tenant: Tenant, reading: PayloadReading | None = None) -> None:
    """Refuse a new or waiting job that violates the terms, whatever the state of the tenant. `reading`: of a payload of
    another service than ComfyUI."""
    if submission.requirements.service == COMFYUI:
        check_graph(tenant, submission.workflow)
        for variant in submission.variants:
            check_graph(tenant, with_nodes(submission.workflow, variant))
    else:
        assert reading is not None, "only a graph can be checked without a format"
        check_payload(tenant, submission.requirements.service, reading)
    check_region(tenant, submission.requirements)


def is_within_terms(submission: Submission, tenant: Tenant, reading: PayloadReading | None = None) -> bool:
    try:
        check_within_terms(submission, tenant, reading)
    except Refusal:
        return False
    return True


def class_under_terms(cls: RequirementClass, submission: Submission, tenant: Tenant) -> RequirementClass:
    """The class of a waiting job under the current terms. Direct workers can be excluded later but not admitted,
    because the payload's location is fixed."""
    needs = with_terms(submission, tenant).requirements
    changed = msgspec.structs.replace(
        cls.requirements,
        isolation=needs.isolation,
        location=needs.location,
        needs_hub=needs.needs_hub or cls.requirements.needs_hub,
    )
    return msgspec.structs.replace(cls, requirements=changed)


def under_new_terms(dispatch: Dispatch, job: Job, tenant: Tenant, now: float, rules: Rules) -> Change:
    """The job's priority under the current tier and ceiling."""
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
    """Refuse submits of a tenant that is not active."""
    match tenant.state:
        case TenantState.ACTIVE:
            return
        case TenantState.MOVING:
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"the tenant {tenant.tenant_id!r} is being moved to another database; try again in a moment",
                retry_after_s=5,
            )
        case TenantState.SUSPENDED:
            raise _not_allowed(
                f"the tenant {tenant.tenant_id!r} is suspended: it cannot submit jobs until an operator resumes it"
            )
        case TenantState.LEAVING:
            raise _not_allowed(f"the tenant {tenant.tenant_id!r} is being deleted and cannot submit jobs")


def check_graph(tenant: Tenant, graph: dict[str, Any]) -> None:
    """Refuse a graph whose nodes, models or amounts the tenant may not use."""
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


def check_payload(tenant: Tenant, service: str, reading: PayloadReading) -> None:
    """Refuse a payload of another service by what its format reads: names and amounts."""
    caps = tenant.caps
    for kind in sorted(reading.node_classes):
        if _is_denied_class(tenant, kind):
            raise _not_allowed(
                f"the payload uses {kind!r}, which the tenant {tenant.tenant_id!r} may not use",
                class_type=kind,
            )
    for model in sorted(reading.models):
        _check_model(tenant, model, "the payload")
    if reading.unread and (tenant.models is not None or tenant.denied_models):
        raise _not_allowed(
            f"the tenant {tenant.tenant_id!r} has a list of models, and the field {reading.unread[0]!r} of the payload "
            "may name others: leave it out, or ask an operator to change the list",
            field=reading.unread[0],
        )
    limits = {"steps": caps.max_steps, "pixels": caps.max_pixels, "batch": caps.max_batch}
    for name, most in limits.items():
        if most is None:
            continue
        if reading.amounts is None:
            raise _not_allowed(
                f"the tenant {tenant.tenant_id!r} has a limit on {_AMOUNTS[name]}, and payloads of the service "
                f"{service!r} do not show how many they ask for: ask an operator to change the limit",
            )
        amount = getattr(reading.amounts, name)
        if not amount <= most:
            raise _too_large(f"the payload asks for {amount:g} {_AMOUNTS[name]}", most)


def check_region(tenant: Tenant, needs: Requirements) -> None:
    own, its = needs.location.region, tenant.location.region
    if own is not None and its is not None and own.casefold() != its.casefold():
        raise _not_allowed(
            f"jobs of the tenant {tenant.tenant_id!r} run in the region {its!r} only, and this one asks for {own!r}",
            field="requirements.location.region",
        )


def check_waiting(tenant: Tenant, waiting: int) -> None:
    """`waiting` is the number of its open jobs without the new one."""
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
    """The submission with the tenant's minimum requirements."""
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
        # Submitted before the terms changed. No worker is in both regions, so none gets the job.
        region = f"{own.region} and {its.region}"
    # One spelling each, because workers are compared without regard to case.
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


def _is_denied_class(tenant: Tenant, kind: str) -> bool:
    return _is_like(kind, tenant.denied_node_classes) or not (
        tenant.node_classes is None or _is_like(kind, tenant.node_classes)
    )


def _check_listed(tenant: Tenant, node_id: str, node: Node, named: str) -> None:
    kind = node.class_type
    if _is_denied_class(tenant, kind):
        raise _not_allowed(
            f"{named} is of a class that the tenant {tenant.tenant_id!r} may not use",
            node=node_id,
            class_type=kind,
        )
    for model in sorted(files_of(node)[0]):
        _check_model(tenant, model, named, node=node_id)


def _check_model(tenant: Tenant, model: str, named: str, **details: Any) -> None:
    # A denied name is denied in any folder. An allowed name must match with its folder.
    is_denied = _is_like(model, tenant.denied_models) or _is_like(
        model.rpartition("/")[2], tenant.denied_models
    )
    if is_denied or not (tenant.models is None or _is_like(model, tenant.models)):
        raise _not_allowed(
            f"{named} names the model {model!r}, which the tenant {tenant.tenant_id!r} may not use",
            model=model,
            **details,
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
        for size, pixels in _pictures(workflow, node, named):
            if not pixels <= caps.max_pixels:
                raise _too_large(f"{named} asks for {size} pixels", caps.max_pixels)
    if caps.max_batch is not None:
        for name in _batches(node):
            batch = _number(workflow, node, name, named)
            if not batch <= caps.max_batch:
                raise _too_large(f"{named} asks for {batch:g} pictures at once", caps.max_batch)


def _pictures(workflow: Workflow, node: Node, named: str) -> Iterator[tuple[str, float]]:
    if "width" in node.inputs and "height" in node.inputs:
        width, height = (_number(workflow, node, name, named) for name in ("width", "height"))
        # If one side is open (0), the other one counts for both.
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
    """The number of an input, literal or from a node that only holds a number."""
    value: Any = node.inputs[name]
    if (link := node.links.get(name)) is not None:
        value = _held_by(workflow.nodes[link.node])
    number = _parsed(value)
    if number is None:
        raise _not_allowed(
            f"the input {name!r} of {named} has a limit for this tenant, and the workflow does not show its value: "
            "set it to a number",
            input=name,
        )
    return number


def _held_by(node: Node) -> Any:
    if not (node.class_type.startswith("Primitive") or node.class_type in _CONSTANTS):
        # The output of any other node is not known here.
        return None
    numbers = [value for value in node.inputs.values() if _parsed(value) is not None]
    return numbers[0] if len(numbers) == 1 and not node.links else None


def _parsed(value: Any) -> float | None:
    """Like a server, accept text that is a number."""
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
