"""The table of routes as an OpenAPI 3.1 document."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from comfyfleet.wire.files import FORM_FILE
from comfyfleet.wire.problems import CONTENT_TYPE, INCIDENT, KINDS, Problem
from comfyfleet.wire.route import SMALL_BYTES, Route

_REF = "#/components/schemas/{name}"

_SSE = {
    "type": "object",
    "description": "One Server-Sent Event",
    "properties": {
        "id": {"type": "string"},
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}

_HEADER_PATTERNS = {"Idempotency-Key": "^[!-~]{1,200}$", "Last-Event-ID": "^[0-9]{0,15}$"}

_BYTES = {"*/*": {"schema": {"type": "string", "format": "binary"}}}

_STATUS_TEXT = {
    200: "Done",
    201: "Made",
    202: "Not yet",
    204: "Done; nothing to say",
    206: "A part",
    304: "As it was",
    416: "No such part",
    503: "Not now",
}


def document(routes: tuple[Route, ...], version: str) -> dict[str, Any]:
    types = _types(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for number, path in enumerate(route.paths):
            operation = _operation(route, by_type, components)
            if number:
                operation["operationId"] += f"_alias_{number}"
                operation["summary"] += f" (another name of {route.path})"
                operation["deprecated"] = True
            paths.setdefault(path, {})[route.method.lower()] = operation
    for query in {route.query for route in routes if route.query is not None}:
        # Told parameter by parameter, where it is asked for.
        del components[query.__name__]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ComfyFleet hub",
            "version": version,
            "description": "One address for a fleet of ComfyUI servers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": noun} for noun in dict.fromkeys(route.noun for route in routes)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key, beginning with cfk_"}
            },
        },
    }


def _types(routes: tuple[Route, ...]) -> list[Any]:
    found: dict[int, Any] = {id(Problem): Problem}
    for route in routes:
        for kind in (route.body, route.query, *route.answers.values()):
            if kind not in (None, bytes, str):
                found[id(kind)] = kind
    return list(found.values())


def _operation(route: Route, by_type: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.noun],
        "parameters": [*_in_path(route), *_in_query(route, components), *_in_headers(route)],
        "responses": _responses(route, by_type),
        "security": [{"key": []}] if route.roles else [],
        "x-roles": sorted(role.value for role in route.roles),
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.is_body_optional,
            "content": {"application/json": {"schema": by_type[id(route.body)]}},
            "description": f"At most {said_bytes(route.max_bytes)}, packed or unpacked",
            "x-max-bytes": route.max_bytes,
        }
    if route.takes_form and route.body is not None:
        operation["requestBody"]["content"]["multipart/form-data"] = {
            "schema": _form(components[route.body.__name__])
        }
    if route.takes_bytes:
        operation["requestBody"] = {"required": True, "content": _BYTES}
    return operation


def _form(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of the body, then the file."""
    fields = {name: _without_null(schema) for name, schema in body["properties"].items()}
    return {
        "type": "object",
        "properties": {**fields, FORM_FILE: {"type": "string", "format": "binary"}},
        "required": [FORM_FILE],
        "additionalProperties": False,
        "description": "What is said of the file stands before it",
    }


def _in_path(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in route.parameters
    ]


def _in_query(route: Route, components: dict[str, Any]) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    found = []
    for name, schema in components[route.query.__name__]["properties"].items():
        parameter: dict[str, Any] = {"name": name, "in": "query", "schema": _without_null(schema)}
        if schema.get("type") == "object":
            parameter |= {"style": "deepObject", "explode": True}
        found.append(parameter)
    return found


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query has no null: what may be left out is left out."""
    schema = {name: value for name, value in schema.items() if name != "default"}
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind != {"type": "null"}]
        schema = kinds[0] if len(kinds) == 1 else {**schema, "anyOf": kinds}
    return schema


def _in_headers(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "schema": {"type": "string", "pattern": _HEADER_PATTERNS[name]}}
        for name in route.headers
    ]


def _responses(route: Route, by_type: dict[int, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, kind in route.answers.items():
        found[str(status)] = {"description": _STATUS_TEXT[status]}
        if kind is bytes:
            found[str(status)]["content"] = _BYTES
        elif kind is str:
            found[str(status)]["content"] = {"text/plain": {"schema": {"type": "string"}}}
        elif kind is not None:
            found[str(status)]["content"] = {"application/json": {"schema": by_type[id(kind)]}}
    if route.streams:
        found["200"].setdefault("content", {})["text/event-stream"] = {"schema": _SSE}
    if route.is_page:
        found["200"]["content"] = {"text/html": {"schema": {"type": "string"}}}
    by_status: dict[int, list[str]] = {500: [INCIDENT]}
    for code in route.all_refusals:
        by_status.setdefault(KINDS[code].status, []).append(code.value)
    for status, codes in by_status.items():
        answer = found.setdefault(str(status), {"description": ""})
        said = "; ".join(f"`{code}`" for code in codes)
        answer["description"] = f"{answer['description']} {said}".strip()
        answer.setdefault("content", {})[CONTENT_TYPE] = {"schema": by_type[id(Problem)]}
        if status in (429, 503):
            answer["headers"] = {"Retry-After": {"schema": {"type": "string", "pattern": "^[0-9]+$"}}}
    return dict(sorted(found.items()))


def page(routes: tuple[Route, ...]) -> str:
    """The table as Markdown, for docs/protocol.md."""
    lines = []
    for noun in dict.fromkeys(route.noun for route in routes):
        lines += [
            f"### {noun[:1].upper()}{noun[1:]}",
            "",
            "| call | what | who | refuses |",
            "|---|---|---|---|",
        ]
        for route in routes:
            if route.noun == noun:
                lines.append(_row(route))
        lines.append("")
    return "\n".join(lines).rstrip()


def _row(route: Route) -> str:
    calls = "<br>".join(f"`{route.method} {re.sub(' ', '', path)}`" for path in route.paths)
    who = ", ".join(sorted(role.value for role in route.roles)) or "anybody"
    codes = ", ".join(f"`{code.value}`" for code in route.refuses) or "–"
    return f"| {calls} | {route.summary} | {who} | {codes} |"


def body_table(routes: tuple[Route, ...]) -> str:
    """How large bodies may be, as Markdown, for docs/protocol.md."""
    lines = ["| at most | the body of |", "|---|---|"]
    for most in sorted({route.max_bytes for route in routes if route.body is not None}):
        named = ", ".join(
            f"`{route.method} {route.path}`" for route in routes if route.body and route.max_bytes == most
        )
        lines.append(f"| {said_bytes(most)} | {'every other route' if most == SMALL_BYTES else named} |")
    return "\n".join(lines)


def said_bytes(size: int) -> str:
    return f"{size // 1024} KiB" if size < 1024 * 1024 else f"{size // (1024 * 1024)} MiB"


def problem_table() -> str:
    """The closed list as Markdown, for docs/protocol.md."""
    lines = ["| code | status | |", "|---|---|---|"]
    lines += [f"| `{code.value}` | {kind.status} | {kind.title} |" for code, kind in KINDS.items()]
    lines.append(f"| `{INCIDENT}` | 500 | A defect of the hub; `incident` finds it in the log |")
    return "\n".join(lines)
