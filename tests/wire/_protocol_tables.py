"""The tables of docs/protocol.md, made from the table of routes."""

from __future__ import annotations

import re

from comfyfleet.wire.openapi import format_bytes
from comfyfleet.wire.problems import INCIDENT, KINDS
from comfyfleet.wire.route import SMALL_BYTES, Route


def page(routes: tuple[Route, ...]) -> str:
    """The routes as Markdown, for docs/protocol.md."""
    lines = []
    for tag in dict.fromkeys(route.tag for route in routes):
        lines += [
            f"### {tag[:1].upper()}{tag[1:]}",
            "",
            "| call | what it does | roles | problems |",
            "|---|---|---|---|",
        ]
        for route in routes:
            if route.tag == tag:
                lines.append(_row(route))
        lines.append("")
    return "\n".join(lines).rstrip()


def _row(route: Route) -> str:
    calls = "<br>".join(f"`{route.method} {re.sub(' ', '', path)}`" for path in route.paths)
    who = ", ".join(sorted(role.value for role in route.roles)) or "no key"
    codes = ", ".join(f"`{code.value}`" for code in route.refuses) or "–"
    return f"| {calls} | {route.summary} | {who} | {codes} |"


def body_table(routes: tuple[Route, ...]) -> str:
    """The size limits of bodies as Markdown, for docs/protocol.md."""
    lines = ["| at most | the body of |", "|---|---|"]
    for most in sorted({route.max_bytes for route in routes if route.body is not None}):
        named = ", ".join(
            f"`{route.method} {route.path}`" for route in routes if route.body and route.max_bytes == most
        )
        lines.append(f"| {format_bytes(most)} | {'every other route' if most == SMALL_BYTES else named} |")
    return "\n".join(lines)


def problem_table() -> str:
    """All problem codes as Markdown, for docs/protocol.md."""
    lines = ["| code | status | |", "|---|---|---|"]
    lines += [f"| `{code.value}` | {kind.status} | {kind.title} |" for code, kind in KINDS.items()]
    lines.append(f"| `{INCIDENT}` | 500 | A defect of the hub; search its log for `incident` |")
    return "\n".join(lines)
