"""The OpenAPI document explains itself: everything in it is described, and its examples are valid."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from comfyfleet.wire.bodies import BatchBody, RawSubmitBody
from comfyfleet.wire.openapi import document
from comfyfleet.wire.route import Route
from comfyfleet.wire.routes import ROUTES

DOCUMENT = document(ROUTES, "1")
SCHEMAS: dict[str, dict[str, Any]] = DOCUMENT["components"]["schemas"]
BYTES_OR_PROBLEM = {"*/*", "application/problem+json"}


def operation_of(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][route.path][route.method.lower()]
    return found


def contents(route: Route) -> list[tuple[str, dict[str, Any]]]:
    """The media of the request and of the answers that are no problems."""
    operation = operation_of(route)
    parts = [operation.get("requestBody", {}), *operation["responses"].values()]
    return [
        each for part in parts for each in part.get("content", {}).items() if each[0] not in BYTES_OR_PROBLEM
    ]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_property_is_described(name: str) -> None:
    properties = SCHEMAS[name].get("properties", {})
    assert [field for field, schema in properties.items() if not schema.get("description")] == []


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_operation_and_its_parameters_are_described(route: Route) -> None:
    operation = operation_of(route)
    assert operation["summary"] and operation["description"].startswith(operation["summary"])
    assert [each["name"] for each in operation["parameters"] if not each.get("description")] == []
    assert [status for status, each in operation["responses"].items() if not each["description"]] == []


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_operation_has_an_example(route: Route) -> None:
    assert [
        kind for kind, each in contents(route) if kind != "multipart/form-data" and "example" not in each
    ] == []
    in_path = [each for each in operation_of(route)["parameters"] if each["in"] == "path"]
    assert [each["name"] for each in in_path if "example" not in each] == []
    assert contents(route) or in_path


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_example_of_a_body_or_an_answer_is_valid(route: Route) -> None:
    operation = operation_of(route)
    if route.body is not None:
        sent = msgspec.json.encode(operation["requestBody"]["content"]["application/json"]["example"])
        decoded = msgspec.json.decode(sent, type=route.body)
        if isinstance(decoded, BatchBody):
            assert [msgspec.json.decode(job, type=RawSubmitBody) for job in decoded.jobs]
    for status, kind in route.answers.items():
        if kind not in (None, bytes, str):
            example = operation["responses"][str(status)]["content"]["application/json"]["example"]
            msgspec.json.decode(msgspec.json.encode(example), type=kind)


def test_no_operation_or_schema_is_there_twice() -> None:
    names = [operation_of(route)["operationId"] for route in ROUTES] + list(SCHEMAS)
    assert len(set(names)) == len(names)
    assert [name for name in names if "_alias_" in name or "." in name] == []


def test_an_old_name_is_marked_as_deprecated() -> None:
    for name in ("TenantBody", "MoveBody", "TenantView"):
        properties = SCHEMAS[name]["properties"]
        assert properties["pool"]["deprecated"] and "`database`" in properties["pool"]["description"]
        assert "deprecated" not in properties["database"]
