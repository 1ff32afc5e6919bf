"""The flows of one server: their names, and the components that tweaks and files are for.

LangFlow ignores tweaks of components that it does not find, so they are checked here before the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.worker.connectors.langflow import failures
from comfyfleet.worker.connectors.langflow.api import LangFlowApi
from comfyfleet.worker.connectors.langflow.failures import fail

MAX_FLOWS = 20_000

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


class Flow(msgspec.Struct, frozen=True):
    flow_id: str
    name: str
    endpoint_name: str | None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(filter(None, (self.flow_id, self.name, self.endpoint_name)))


class Component(msgspec.Struct, frozen=True):
    component_id: str
    type: str
    display_name: str
    fields: Mapping[str, Any]


def read_flows(body: Any) -> tuple[Flow, ...]:
    """The flows of a listing. Saved components are none."""
    return tuple(_flows(body))


def _flows(body: Any) -> Iterator[Flow]:
    for each in body[:MAX_FLOWS] if isinstance(body, list) else ():
        if not isinstance(each, Mapping) or each.get("is_component") is True:
            continue
        flow_id, name, endpoint = each.get("id"), each.get("name"), each.get("endpoint_name")
        if isinstance(flow_id, str) and isinstance(name, str):
            yield Flow(flow_id, name, endpoint if isinstance(endpoint, str) else None)


async def find_flow(api: LangFlowApi, wanted: str) -> str:
    """The id of the flow. Raises `ServiceFailed` and `Unreachable`.

    Names are looked up each time: an endpoint name can move to another flow."""
    if _UUID.fullmatch(wanted):
        return wanted.lower()
    answer = await api.flows()
    if not answer.is_ok or not isinstance(answer.body, list):
        raise failures.refused_request(answer.status, answer.body, "the list of flows")
    flows = read_flows(answer.body)
    found = [flow for flow in flows if flow.endpoint_name == wanted] or [
        flow for flow in flows if flow.name == wanted
    ]
    if not found:
        raise failures.missing_flow(wanted)
    if len(found) > 1:
        raise fail(
            FailureKind.INVALID_WORKFLOW,
            f"LangFlow has {len(found)} flows with the name {wanted!r}. Submit the id of one of them.",
        )
    return found[0].flow_id


async def read_components(api: LangFlowApi, flow_id: str, wanted: str) -> tuple[Component, ...]:
    """Raises `ServiceFailed` and `Unreachable`."""
    answer = await api.flow(flow_id)
    if answer.status == 404:
        raise failures.missing_flow(wanted)
    if not answer.is_ok or not isinstance(answer.body, Mapping):
        raise failures.refused_request(answer.status, answer.body, f"the flow {wanted!r}")
    graph = answer.body.get("data")
    nodes = graph.get("nodes") if isinstance(graph, Mapping) else None
    return tuple(_components(nodes))


def _components(nodes: Any) -> Iterator[Component]:
    for node in nodes if isinstance(nodes, list) else ():
        data = node.get("data") if isinstance(node, Mapping) else None
        if not isinstance(data, Mapping) or not isinstance(node.get("id"), str):
            continue
        content = data.get("node")
        content = content if isinstance(content, Mapping) else {}
        template = content.get("template")
        yield Component(
            node["id"],
            str(data.get("type") or ""),
            str(content.get("display_name") or ""),
            template if isinstance(template, Mapping) else {},
        )


def checked_tweaks(
    tweaks: Mapping[str, Mapping[str, Any]], components: tuple[Component, ...]
) -> dict[str, dict[str, Any]]:
    """The tweaks by component id. Raises `ServiceFailed` for what the flow does not have."""
    checked: dict[str, dict[str, Any]] = {}
    for name, fields in tweaks.items():
        component = find_component(name, components)
        for field in fields:
            if component.fields and field not in component.fields:
                known = ", ".join(sorted(each for each in component.fields if not each.startswith("_"))[:20])
                raise _invalid(
                    f"The component {name!r} has no field {field!r}, so LangFlow would ignore the tweak. "
                    f"It has: {known}.",
                    component.component_id,
                )
        checked.setdefault(component.component_id, {}).update(fields)
    return checked


def find_component(name: str, components: tuple[Component, ...]) -> Component:
    """By id, else by display name. Raises `ServiceFailed`."""
    for component in components:
        if component.component_id == name:
            return component
    named = [component for component in components if component.display_name == name]
    if len(named) == 1:
        return named[0]
    if named:
        ids = ", ".join(component.component_id for component in named[:20])
        raise _invalid(
            f"The flow has {len(named)} components named {name!r}. Name one by its id: {ids}.", None
        )
    known = ", ".join(component.component_id for component in components[:20])
    raise _invalid(
        f"The flow has no component {name!r}, so LangFlow would ignore it. It has: {known or 'none'}.", None
    )


def only_chat_input(components: tuple[Component, ...]) -> Component:
    """Raises `ServiceFailed`."""
    found = [component for component in components if component.type == "ChatInput"]
    if len(found) != 1:
        raise _invalid(
            f"The flow has {len(found)} chat inputs, so the input `files` has no clear place on this older server. "
            "Name the component and its field instead.",
            None,
        )
    return found[0]


def _invalid(message: str, node_id: str | None) -> ServiceFailed:
    return ServiceFailed(Failure(FailureKind.INVALID_WORKFLOW, message, node_id=node_id))
