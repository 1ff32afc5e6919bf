"""`comfyfleet services`: the services that a hub takes jobs for, and the payloads of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.command import command, hub_options, report
from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.output import print_json, print_table

if TYPE_CHECKING:
    from comfyfleet.wire.answers import ServiceBody

_MOST_CHARACTERS = 44
"""The list fits into 80 columns; NAME shows the rest."""


@command("services")
@click.argument("name", required=False)
@hub_options
def services_command(name: str | None, **flags: Any) -> None:
    """List the services that the hub takes jobs for, how many workers offer each, and the fields of its payload.

    With NAME, print the JSON Schema of the payload of this service.
    """

    def show(services: Sequence[ServiceBody]) -> None:
        if name is not None:
            print_json(_named(services, name).payload_schema or {"type": "object"})
            return
        print_table(
            ["service", "workers", "payload"],
            [[each.name, str(each.workers), fields_of(each.payload_schema)] for each in services],
            empty="The hub knows no services.",
        )

    report(
        flags,
        lambda client: client.services(),
        show,
        json=lambda found: found if name is None else _named(found, name),
    )


def _named(services: Sequence[ServiceBody], name: str) -> ServiceBody:
    for each in services:
        if each.name == name:
            return each
    known = ", ".join(each.name for each in services) or "none"
    raise CommandFailed(f"the hub knows no service {name!r}; it knows: {known}")


def fields_of(schema: dict[str, Any] | None) -> str:
    """The fields of a payload in one line, required ones first."""
    if schema is None:
        return "any JSON object"
    # So `msgspec.json.schema` and others write the schema of a class.
    if isinstance(target := schema.get("$ref"), str):
        found = schema.get("$defs", {}).get(target.removeprefix("#/$defs/"))
        schema = found if isinstance(found, dict) else schema
    fields, title = schema.get("properties"), schema.get("title")
    if isinstance(title, str) and title and not fields:
        return title
    if not isinstance(fields, dict) or not fields:
        return "a JSON object"
    required = [each for each in schema.get("required", ()) if each in fields]
    words = [f"{each} (required)" for each in required]
    words += [each for each in fields if each not in required]
    shown = words[:1]
    while len(shown) < len(words) and len(", ".join(words[: len(shown) + 1])) <= _MOST_CHARACTERS:
        shown = words[: len(shown) + 1]
    left = len(words) - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left else "")
