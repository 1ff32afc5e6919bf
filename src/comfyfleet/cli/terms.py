"""The terms of a tenant as options of `comfyfleet tenant`: what each is called there, and what was said with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from comfyfleet.cli.prices import NO_PRICE, PriceType

F = TypeVar("F", bound=Callable[..., Any])

_CAPS = {
    "max_waiting": "Jobs that are open at a time, running ones too.",
    "max_running": "Jobs that run at a time.",
    "submits_per_minute": "Jobs that it may submit in a minute.",
    "max_priority": "The most that priority and tier come to.",
    "max_nodes": "Nodes of a workflow.",
    "max_steps": "Steps of a sampler.",
    "max_pixels": "Width × height of a picture.",
    "max_batch": "Pictures at once.",
}
_LISTS = ("node_classes", "denied_node_classes", "models", "denied_models")
# What `--clear` makes of each option: the term, the part of it if it has parts, and the value for "nothing was said".
CLEARED: dict[str, tuple[str, str | None, Any]] = {
    "name": ("name", None, ""),
    "price": ("price", None, None),
    "weight": ("weight", None, 1.0),
    "tier": ("tier", None, 0),
    "isolation": ("isolation", None, "none"),
    "allow-direct": ("allows_direct", None, False),
    "unrunnable-after": ("unrunnable_after", None, None),
    "node-class": ("node_classes", None, None),
    "deny-node-class": ("denied_node_classes", None, []),
    "model": ("models", None, None),
    "deny-model": ("denied_models", None, []),
    "region": ("location", "region", None),
    "compliance": ("location", "compliance", []),
} | {cap.replace("_", "-"): ("caps", cap, None) for cap in _CAPS}


def term_options(command: F) -> F:
    """The options that say on what terms; each that is not given is None or empty."""
    options: list[Callable[[Any], Any]] = [
        click.option("--name", "label", default=None, metavar="TEXT", help="What it is called."),
        click.option(
            "--price",
            type=PriceType(),
            metavar="PRICE",
            help="flat:5, output:EACH:MOST, gpu_second:EACH:MOST, none, or JSON.",
        ),
        click.option(
            "--weight",
            type=click.FloatRange(0, 1_000_000, min_open=True),
            help="Its share beside others'; 1 unless given.",
        ),
        click.option(
            "--tier", type=click.IntRange(-1000, 1000), help="Added to the priority of each of its jobs."
        ),
        click.option(
            "--isolation",
            type=click.Choice(["strict", "loose", "none"]),
            help="The least that its jobs ask for.",
        ),
        click.option("--region", metavar="NAME", help="Where its jobs must run."),
        click.option(
            "--compliance", multiple=True, metavar="NAME", help="What its workers must keep to. Repeatable."
        ),
        click.option(
            "--allow-direct/--no-allow-direct",
            "allows_direct",
            default=None,
            help="Whether workers directly on the store may read its payloads.",
        ),
        click.option(
            "--unrunnable-after",
            type=click.FloatRange(0, min_open=True),
            metavar="SECONDS",
            help="Fail its waiting jobs that no known worker can run for so long; as the hub says unless given.",
        ),
        click.option(
            "--node-class",
            "node_classes",
            multiple=True,
            metavar="PATTERN",
            help="The only ones it may use. Repeatable.",
        ),
        click.option(
            "--deny-node-class",
            "denied_node_classes",
            multiple=True,
            metavar="PATTERN",
            help="What it may not use, though it is allowed. Repeatable.",
        ),
        click.option(
            "--model",
            "models",
            multiple=True,
            metavar="PATTERN",
            help="The only ones it may use. Repeatable.",
        ),
        click.option(
            "--deny-model",
            "denied_models",
            multiple=True,
            metavar="PATTERN",
            help="What it may not use, though it is allowed. Repeatable.",
        ),
        *(
            click.option(
                f"--{cap.replace('_', '-')}",
                cap,
                type=int if cap == "max_priority" else click.IntRange(0),
                metavar="N",
                help=f"Bound: {text}",
            )
            for cap, text in _CAPS.items()
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """What was said of it, taken out of the flags."""
    label, price, region = flags.pop("label"), flags.pop("price"), flags.pop("region")
    compliance = flags.pop("compliance")
    terms: dict[str, Any] = {"name": label}
    terms |= {
        name: flags.pop(name) for name in ("weight", "tier", "isolation", "allows_direct", "unrunnable_after")
    }
    terms |= {name: flags.pop(name) or None for name in _LISTS}
    caps = {name: value for name in _CAPS if (value := flags.pop(name)) is not None}
    found = {name: value for name, value in terms.items() if value is not None}
    if price is not None:
        found["price"] = None if price == NO_PRICE else price
    if region is not None or compliance:
        found["location"] = {"region": region} if region is not None else {}
        found["location"] |= {"compliance": compliance} if compliance else {}
    if caps:
        found["caps"] = caps
    return found
