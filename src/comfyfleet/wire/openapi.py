"""The OpenAPI 3.1 document, generated from the table of routes."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from comfyfleet.wire.descriptions import description_of
from comfyfleet.wire.examples import example_of, hints_of, value_of
from comfyfleet.wire.files import FORM_FILE
from comfyfleet.wire.problems import CONTENT_TYPE, INCIDENT, KINDS, Problem
from comfyfleet.wire.route import Route

_REF = "#/components/schemas/{name}"
_KNOWN_NAMES = {"LeaseRef": "LeaseBody", "ProgressReport": "ReportBody", "Release": "ReleaseBody"}
"""Schemas of model structs that keep the name which generated clients know."""

_SSE = {
    "schema": {
        "type": "object",
        "description": "One Server-Sent Event",
        "properties": {
            "id": {"type": "string", "description": "The number of the event, for `Last-Event-ID`."},
            "event": {"type": "string", "description": "The kind of the event."},
            "data": {
                "type": "string",
                "contentMediaType": "application/json",
                "description": "The event as JSON.",
            },
        },
    },
    "example": {"id": "3", "event": "completed", "data": '{"kind": "completed", "status": "completed"}'},
}

_HEADERS = {
    "Idempotency-Key": (
        "^[!-~]{1,200}$",
        "Your own id of the request: a repeat returns the first answer.",
        "order-17",
    ),
    "Last-Event-ID": ("^[0-9]{0,15}$", "Continue after this event.", "3"),
}

_UNNAMED = re.compile(r"[^A-Za-z0-9._-]")
"""What the name of a component cannot have."""

_BYTES = {"*/*": {"schema": {"type": "string", "format": "binary", "description": "The bytes of the file."}}}

_STATUS_TEXT = {
    200: "Success",
    201: "Created",
    202: "Accepted; not finished yet",
    204: "Success without content",
    206: "A part of the content",
    304: "Not modified",
    416: "Range not satisfiable",
    503: "Not ready",
}


@cache
def document(routes: tuple[Route, ...], version: str) -> dict[str, Any]:
    """Cached: it takes longer than the rest of a hub's start. Do not change what it returns."""
    types = _types(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    _describe(components, types)
    by_type = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type, components)
    for query in {route.query for route in routes if route.query is not None}:
        # The document lists query fields as parameters of each operation.
        del components[query.__name__]
    found = {
        "openapi": "3.1.0",
        "info": {
            "title": "ComfyFleet hub",
            "version": version,
            "description": "One address for a fleet of ComfyUI servers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key, beginning with cfk_"}
            },
        },
    }
    text = msgspec.json.encode(found).decode()
    for name, known in _KNOWN_NAMES.items():
        text = text.replace(f'/{name}"', f'/{known}"').replace(f'"{name}"', f'"{known}"')
    return msgspec.json.decode(text, type=dict[str, Any])


def with_payloads(found: dict[str, Any], schemas: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A copy of the document with the schema of the payloads of each service beside the others."""
    if not schemas:
        return found
    copy = msgspec.json.decode(msgspec.json.encode(found), type=dict[str, Any])
    components = copy["components"]["schemas"]
    names = {}
    for service, schema in sorted(schemas.items()):
        names[service] = name = f"Payload_{_UNNAMED.sub('_', service)}"
        # Its parts become schemas of the document, because a reference starts at the document.
        text = msgspec.json.encode(schema).decode().replace('"#/$defs/', f'"{_REF.format(name=name)}.')
        own = msgspec.json.decode(text, type=dict[str, Any])
        components |= {f"{name}.{part}": each for part, each in own.pop("$defs", {}).items()}
        components[name] = {**own, "title": f"Payload of {service}"}
    for body in ("SubmitBody", "PayloadBody"):
        payload = components[body]["properties"]["payload"]
        words = ", ".join(f"`{service}`: {name}" for service, name in names.items())
        payload["description"] += f" Its schema depends on the service: {words}."
    return copy


def _types(routes: tuple[Route, ...]) -> list[Any]:
    found: dict[int, Any] = {id(Problem): Problem}
    for route in routes:
        for kind in (route.body, route.query, *route.answers.values()):
            if kind not in (None, bytes, str):
                found[id(kind)] = kind
    return list(found.values())


def _describe(components: dict[str, Any], types: list[Any]) -> None:
    found: set[type[msgspec.Struct]] = set()
    left = list(types)
    while left:
        kind = left.pop()
        if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
            left += typing.get_args(kind)
        elif kind not in found:
            found.add(kind)
            left += hints_of(kind).values()
            # Structs that are encoded as arrays have no properties.
            for field, schema in components[kind.__name__].get("properties", {}).items():
                if schema.setdefault("description", description_of(kind, field)).startswith("Deprecated"):
                    schema["deprecated"] = True
                for each in (schema, *schema.get("anyOf", ())):
                    # Sets: the decoder merges duplicates and does not refuse them.
                    each.pop("uniqueItems", None)


def _operation(route: Route, by_type: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": _description(route),
        "tags": [route.tag],
        "parameters": [*_in_path(route), *_in_query(route, components), *_in_headers(route)],
        "responses": _responses(route, by_type),
        "security": [{"key": []}] if route.roles else [],
        "x-roles": sorted(role.value for role in route.roles),
    }
    if route.aliases:
        operation["x-aliases"] = list(route.aliases)
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.is_body_optional,
            "content": {
                "application/json": {"schema": by_type[id(route.body)], "example": example_of(route.body)}
            },
            "description": f"At most {format_bytes(route.max_bytes)}, compressed or not",
            "x-max-bytes": route.max_bytes,
        }
    if route.takes_form and route.body is not None:
        operation["requestBody"]["content"]["multipart/form-data"] = {
            "schema": _form(components[route.body.__name__])
        }
    if route.takes_bytes:
        operation["requestBody"] = {"required": True, "content": _BYTES}
    return operation


def _description(route: Route) -> str:
    roles = ", ".join(sorted(role.value for role in route.roles))
    found = f"{route.summary}. " + (f"Roles: {roles}." if roles else "No key is needed.")
    if route.aliases:
        found += f" Older paths: {', '.join(f'`{path}`' for path in route.aliases)}."
    return found


def _form(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of the body, then the file."""
    fields = {name: _without_null(schema) for name, schema in body["properties"].items()}
    file = {"type": "string", "format": "binary", "description": "The file. It is the last field."}
    return {
        "type": "object",
        "properties": {**fields, FORM_FILE: file},
        "required": [FORM_FILE],
        "additionalProperties": False,
        "description": "Fields that describe the file come before the file",
    }


def _in_path(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
            "description": f"The {name.replace('_', ' ')}.",
            "example": value_of(route.name, name, str),
        }
        for name in route.parameters
    ]


def _in_query(route: Route, components: dict[str, Any]) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    found = []
    for name, schema in components[route.query.__name__]["properties"].items():
        parameter: dict[str, Any] = {
            "name": name,
            "in": "query",
            "schema": _without_null(schema),
            "description": schema["description"],
        }
        if schema.get("type") == "object":
            parameter |= {"style": "deepObject", "explode": True}
        found.append(parameter)
    return found


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Queries and forms have no null: callers leave the field out."""
    schema = {name: value for name, value in schema.items() if name != "default"}
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind != {"type": "null"}]
        if len(kinds) > 1:
            return {**schema, "anyOf": kinds}
        schema = {**kinds[0], "description": schema["description"]}
    return schema


def _in_headers(route: Route) -> list[dict[str, Any]]:
    found = []
    for name in route.headers:
        pattern, description, example = _HEADERS[name]
        found.append(
            {
                "name": name,
                "in": "header",
                "schema": {"type": "string", "pattern": pattern},
                "description": description,
                "example": example,
            }
        )
    return found


def _responses(route: Route, by_type: dict[int, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, kind in route.answers.items():
        found[str(status)] = {"description": _STATUS_TEXT[status]}
        if kind is bytes:
            found[str(status)]["content"] = _BYTES
        elif kind is str:
            found[str(status)]["content"] = {
                "text/plain": {"schema": {"type": "string"}, "example": "comfyfleet_jobs_waiting 3\n"}
            }
        elif kind is not None:
            found[str(status)]["content"] = {
                "application/json": {"schema": by_type[id(kind)], "example": example_of(kind)}
            }
    if route.streams:
        found["200"].setdefault("content", {})["text/event-stream"] = _SSE
    if route.is_page:
        found["200"]["content"] = {
            "text/html": {"schema": {"type": "string"}, "example": "<!doctype html><title>ComfyFleet</title>"}
        }
    by_status: dict[int, list[str]] = {500: [INCIDENT]}
    for code in route.all_refusals:
        by_status.setdefault(KINDS[code].status, []).append(code.value)
    for status, codes in by_status.items():
        answer = found.setdefault(str(status), {"description": ""})
        named = "; ".join(f"`{code}`" for code in codes)
        answer["description"] = f"{answer['description']} {named}".strip()
        answer.setdefault("content", {})[CONTENT_TYPE] = {"schema": by_type[id(Problem)]}
        if status in (429, 503):
            answer["headers"] = {
                "Retry-After": {
                    "schema": {"type": "string", "pattern": "^[0-9]+$"},
                    "description": "Seconds to wait before the next try.",
                }
            }
    return dict(sorted(found.items()))


def format_bytes(size: int) -> str:
    return f"{size // 1024} KiB" if size < 1024 * 1024 else f"{size // (1024 * 1024)} MiB"
