"""One form for ids, times, pages and deletions across all routes, read from the OpenAPI document."""

from __future__ import annotations

from typing import Any

from comfyfleet.wire.openapi import document
from comfyfleet.wire.routes import ROUTES

DOCUMENT = document(ROUTES, "1")
SCHEMAS: dict[str, dict[str, Any]] = DOCUMENT["components"]["schemas"]

# What is answered when something is left to be seen: a revoked key stays in the list, a tenant goes step by step.
LEAVES_SOMETHING = {"/api/keys/{key_id}": "200", "/api/tenants/{tenant_id}": "202"}
# A day is no moment.
NO_MOMENTS = {"day"}


def schema_of(answer: dict[str, Any]) -> dict[str, Any]:
    found = answer["content"]["application/json"]["schema"]
    return SCHEMAS[found["$ref"].rpartition("/")[2]] if "$ref" in found else found


def answers(method: str) -> dict[str, dict[str, Any]]:
    return {
        path: operation["responses"]
        for path, methods in DOCUMENT["paths"].items()
        for name, operation in methods.items()
        if name == method and not operation.get("deprecated")
    }


def test_whatever_is_looked_at_by_its_id_is_answered_with_it_as_id() -> None:
    """`GET /api/things/{thing_id}` and what lies below it about the same thing."""
    lacking = []
    for path, responses in answers("get").items():
        content = responses.get("200", {}).get("content", {})
        if (
            "_id}" not in path
            or "application/json" not in content
            or path.startswith("/api/tenants/{tenant_id}/")
        ):
            continue
        properties = schema_of(responses["200"]).get("properties", {})
        is_list = any(each.get("type") == "array" for each in properties.values()) and "cursor" in properties
        if not is_list and "id" not in properties:
            lacking.append(path)
    assert lacking == []


def test_what_belongs_to_another_thing_names_it_by_its_kind_and_id() -> None:
    assert {"webhook_id", "job_id"} <= SCHEMAS["DeliveryView"]["properties"].keys()
    assert {"id", "job_id"} <= SCHEMAS["Explanation"]["properties"].keys()
    assert {"id", "worker_id"} <= SCHEMAS["RegisteredBody"]["properties"].keys()
    events = {each["name"] for each in DOCUMENT["paths"]["/api/events"]["get"]["parameters"]}
    assert {"job_id", "worker_id", "tenant"} <= events


def test_every_moment_that_is_answered_is_seconds_since_1970() -> None:
    """And is called by what happened then; a list of things says when each was made."""
    answered = {
        each["schema"]["$ref"].rpartition("/")[2]
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        for status, response in operation["responses"].items()
        if status < "300"
        for each in response.get("content", {}).values()
        if "$ref" in each["schema"]
    }
    wrong = []
    for name in sorted(answered - {"PayloadBody"}):
        for field, schema in SCHEMAS[name].get("properties", {}).items():
            if (field == "at" or field.endswith(("_at", "_until"))) and field not in NO_MOMENTS:
                kinds = [each.get("type") for each in schema.get("anyOf", [schema])]
                if set(kinds) - {"number", "null"}:
                    wrong.append(f"{name}.{field}")
    assert wrong == []
    for name in (
        "FileView",
        "WebhookView",
        "DeliveryView",
        "TenantView",
        "KeyView",
        "EnrolmentView",
    ):
        assert "created_at" in SCHEMAS[name]["properties"], name
    assert "created_at" in SCHEMAS["CreatedEnrolment"]["properties"]


def test_every_list_is_paged_by_cursor_and_limit() -> None:
    lists = {"list_workers", "list_blocks", "job_deliveries", "statement"}
    for methods in DOCUMENT["paths"].values():
        operation = methods.get("get", {})
        name = operation.get("operationId", "")
        if not (name.startswith("list_") or name in lists):
            continue
        parameters = {each["name"] for each in operation["parameters"]}
        assert {"cursor", "limit"} <= parameters, name
        assert "cursor" in schema_of(operation["responses"]["200"])["properties"], name


def test_a_deletion_is_answered_with_204_unless_something_is_left_to_be_seen() -> None:
    found = {
        path: next(status for status in responses if status < "300")
        for path, responses in answers("delete").items()
    }
    assert {path: status for path, status in found.items() if status != "204"} == LEAVES_SOMETHING
