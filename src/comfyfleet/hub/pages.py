"""Pages for people: the status page, whose content depends on the caller's role, and the API at /docs. Also the
OpenAPI document.

Everything is in the page: no script, nothing from other hosts. `html.py` owns the style and the headers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

from starlette.responses import HTMLResponse

from comfyfleet.engine.engine import Engine
from comfyfleet.hub import html
from comfyfleet.hub.fleet import TenantQueueStats, workers_seen
from comfyfleet.hub.html import page
from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.model.calls import JobFilter
from comfyfleet.wire import answers
from comfyfleet.wire.openapi import document, with_payloads
from comfyfleet.wire.route import FLEET_VIEWERS, Route

_RECENT = 20


class PageHandlers:
    def __init__(
        self, engine: Engine, stats: TenantQueueStats, version: str, routes: tuple[Route, ...]
    ) -> None:
        self._engine = engine
        self._stats = stats
        self._version = version
        # Only the hub's process knows which connectors are installed.
        schemas = {name: each.json_schema() for name, each in engine.payloads.formats.items()}
        self._document = with_payloads(document(routes, version), schemas)

    async def status_page(self, call: HubRequest[None]) -> HTMLResponse:
        engine = self._engine
        stats = await self._stats.of(call.caller.scope)
        workers = await workers_seen(engine, call.caller) if call.caller.role in FLEET_VIEWERS else None
        page = await engine.listing(JobFilter(call.caller.scope), _RECENT, newest_first=True)
        jobs = list(map(answers.job_body, page.jobs))
        text = html.status_page(stats, workers, jobs, engine.now(), self._version)
        return HTMLResponse(text, headers=html.HEADERS)

    async def api_page(self, call: HubRequest[None]) -> HTMLResponse:
        return HTMLResponse(self._api_page, headers=html.HEADERS)

    async def openapi(self, call: HubRequest[None]) -> Reply:
        return Reply(200, self._document)

    @cached_property
    def _api_page(self) -> str:
        return api_page(self._document)


_BOUNDS = {
    "minimum": "≥ {}",
    "maximum": "≤ {}",
    "exclusiveMinimum": "> {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} entries",
    "maxProperties": "at most {} entries",
    "pattern": "pattern {}",
}


def api_page(document: Mapping[str, Any]) -> str:
    info, tags = document["info"], [tag["name"] for tag in document["tags"]]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]
    parts = [
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{_prose(info['description'])} The same as data: <a href=/openapi.json>/openapi.json</a>.</p>",
        "<p>Send the key with each request: <code>Authorization: Bearer cfk_…</code></p>",
        "<nav><ul>",
        *(f"<li><a href='#{_anchor(tag)}'>{escape(tag)}</a></li>" for tag in tags),
        "<li><a href='#schemas'>schemas</a></li></ul></nav>",
    ]
    for tag in tags:
        parts.append(f"<h2 id='{_anchor(tag)}'>{escape(tag.capitalize())}</h2>")
        parts += [_operation(*each) for each in operations if tag in each[2]["tags"]]
    parts.append("<h2 id=schemas>Schemas</h2>")
    parts += [_schema(name, schemas[name]) for name in sorted(schemas)]
    return page("".join(parts), title=f"{info['title']} API")


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    name = escape(operation["operationId"])
    parts = [
        f"<details><summary><b>{method}</b> <code>{escape(path)}</code> {_prose(operation['summary'])}</summary>"
        f"<p id='{name}'>{_prose(operation['description'])}</p>"
    ]
    if operation["parameters"]:
        rows = (
            (each["name"], each["in"], _required(each), *_about(each)) for each in operation["parameters"]
        )
        parts.append(
            "<h3>Parameters</h3>" + _table(("name", "in", "", "type", "description", "example"), rows)
        )
    if (body := operation.get("requestBody")) is not None:
        parts.append(f"<h3>Body</h3><p>{_prose(body.get('description', ''))}</p>{_content(body['content'])}")
    parts.append("<h3>Answers</h3>")
    for status, answer in operation["responses"].items():
        parts.append(f"<h4>{status}</h4><p>{_prose(answer['description'])}</p>")
        parts.append(_content(answer.get("content", {})))
    return "".join(parts) + "</details>"


def _content(content: Mapping[str, Any]) -> str:
    parts = []
    for kind, media in content.items():
        schema = media.get("schema", {})
        parts.append(f"<p><code>{escape(kind)}</code>: {_type(schema)}</p>")
        if "properties" in schema:
            parts.append(_properties(schema))
        if "example" in media:
            example = media["example"]
            text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
            parts.append(f"<pre>{escape(text)}</pre>")
    return "".join(parts)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    shown = _properties(schema) if "properties" in schema else f"<p>{_type(schema)}</p>"
    about = _prose(schema.get("description", ""))
    # Inside the details, so that a link to it opens them.
    inside = f"<div id='schema-{escape(name)}'><p>{about}</p>{shown}</div>"
    return f"<details><summary><code>{escape(name)}</code></summary>{inside}</details>"


def _properties(schema: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = (
        (name, _required({"required": name in needed}), *_about({"schema": each, **each})[:2])
        for name, each in schema["properties"].items()
    )
    return _table(("name", "", "type", "description"), rows)


def _about(described: Mapping[str, Any]) -> tuple[str, str, str]:
    """Cells: type, description, example."""
    example = described.get("example", "")
    return (
        _type(described["schema"]),
        _prose(described.get("description", "")),
        f"<code>{escape(str(example))}</code>",
    )


def _required(described: Mapping[str, Any]) -> str:
    return "required" if described.get("required") else ""


def _type(schema: Mapping[str, Any]) -> str:
    """The type as HTML, with links to schemas, its bounds and its default."""
    found = " or ".join(_kinds(schema)) or "any value"
    bounds = [
        text.format(f"<code>{escape(str(schema[name]))}</code>")
        for name, text in _BOUNDS.items()
        if name in schema
    ]
    if "default" in schema:
        bounds.append(f"default <code>{escape(json.dumps(schema['default'], ensure_ascii=False))}</code>")
    return f"{found}, {', '.join(bounds)}" if bounds else found


def _kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        yield f"<a href='#schema-{name}'>{name}</a>"
    elif "enum" in schema:
        yield from (f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    elif "anyOf" in schema:
        yield from map(_type, schema["anyOf"])
    elif schema.get("type") == "array":
        items = [*schema.get("prefixItems", ()), *filter(None, [schema.get("items")])]
        yield f"array of {', '.join(map(_type, items))}" if items else "array"
    elif isinstance(values := schema.get("additionalProperties"), Mapping):
        yield f"object of {_type(values)}"
    else:
        kinds = schema.get("type", ())
        yield from map(escape, (kinds,) if isinstance(kinds, str) else kinds)
        if "format" in schema:
            yield f"<code>{escape(schema['format'])}</code>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The cells are HTML, except the first."""
    head = "".join(f"<th scope=col>{heading}</th>" for heading in headings)
    body = "".join(
        f"<tr><td><code>{escape(first)}</code></td>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return (
        f"<div class=wide><table class=api><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _prose(text: str) -> str:
    """Escaped, with `code` between backticks."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _anchor(tag: str) -> str:
    return "tag-" + re.sub(r"[^a-z0-9]+", "-", tag.lower())
