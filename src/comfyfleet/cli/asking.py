"""The flags of `comfyfleet submit` that say for whom a job is, what it needs, what it would like, and when it runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from comfyfleet.cli import values
from comfyfleet.cli.helping import GroupedOption

F = TypeVar("F", bound=Callable[..., Any])

WHEN = "When it runs"
NEEDS = "What it needs (a worker that lacks one of these never gets it)"
WISHES = "What it would like (of the workers that may run it, the best gets it)"

_TIERS = click.Choice(["economy", "standard", "premium"])
_SIZE = click.FloatRange(0, min_open=True)
_NUMBER = click.IntRange(1)


class _Time(click.ParamType[datetime]):
    name = "time"

    def convert(self, value: Any, _: click.Parameter | None, __: click.Context | None) -> datetime:
        try:
            at = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is no time: write it like 2026-11-16T21:30 or 2026-11-16T21:30+01:00")
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _option(group: str, *names: str, **more: Any) -> Callable[[F], F]:
    return click.option(*names, cls=GroupedOption, group=group, **more)


def _many(group: str, flag: str, name: str, metavar: str, help_: str, **more: Any) -> Callable[[F], F]:
    return _option(group, flag, name, multiple=True, metavar=metavar, help=f"{help_} Repeatable.", **more)


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    _option(
        WHEN,
        "--priority",
        type=click.IntRange(-1000, 1000),
        default=0,
        show_default=True,
        help="Higher runs first.",
    ),
    _option(
        WHEN,
        "--urgency",
        type=click.Choice(["low", "normal", "high", "critical"]),
        help="Added to the priority; normal unless given.",
    ),
    _option(
        WHEN,
        "--not-before",
        type=_Time(),
        metavar="TIME",
        help="Wait until then: 2026-11-16T21:30, in UTC unless it has a zone.",
    ),
    _option(
        WHEN,
        "--deadline",
        type=_Time(),
        metavar="TIME",
        help="It is to have ended by then, and comes forward as the time draws near.",
    ),
    _option(
        WHEN,
        "--on-deadline",
        type=click.Choice(["fail", "flag"]),
        help="What happens at the deadline: it fails, or goes on and is marked as late; fail unless given.",
    ),
    _many(
        WHEN,
        "--after",
        "after",
        "JOB",
        "Wait until this job has completed, by its id or reference.",
        shell_complete=values.job_ids,
    ),
    _option(
        WHEN,
        "--max-attempts",
        type=click.IntRange(1, 1000),
        metavar="N",
        help="Give up after so many; 3 unless given.",
    ),
    _option(
        WHEN,
        "--retry-delay",
        type=click.FloatRange(0),
        metavar="SECONDS",
        help="Wait so long before the second attempt.",
    ),
    _option(
        WHEN, "--timeout", type=_SIZE, metavar="SECONDS", help="Give up after so long, waiting included."
    ),
    _option(
        WHEN,
        "--start-timeout",
        type=_SIZE,
        metavar="SECONDS",
        help="Try elsewhere if a server has not begun after so long.",
    ),
    _option(
        WHEN,
        "--stall-timeout",
        type=_SIZE,
        metavar="SECONDS",
        help="Try elsewhere if a node has told nothing for so long.",
    ),
    _option(NEEDS, "--vram", type=_SIZE, metavar="GB", help="Memory of the graphics card."),
    _option(NEEDS, "--gpus", type=_NUMBER, metavar="N", help="Graphics cards."),
    _option(NEEDS, "--gpu-model", metavar="TEXT", help="Part of the card's name, such as 4090."),
    _option(NEEDS, "--ram", type=_SIZE, metavar="GB", help="Memory of the machine."),
    _option(NEEDS, "--cores", type=_NUMBER, metavar="N", help="Cores of its processor."),
    _option(NEEDS, "--threads", type=_NUMBER, metavar="N", help="Threads of its processor."),
    _many(NEEDS, "--model", "models", "FILE", "A model file, beside those that the workflow names."),
    _many(NEEDS, "--node-class", "node_classes", "CLASS", "A node class, beside those of the workflow."),
    _option(NEEDS, "--quality", metavar="LEVEL", help="A quality level that the worker offers."),
    _option(NEEDS, "--service", metavar="NAME", help="The service; comfyui unless given."),
    _option(NEEDS, "--provider", metavar="NAME", help="Who provides it."),
    _option(
        NEEDS, "--environment", type=click.Choice(["cloud", "self_hosted"]), help="Where the worker runs."
    ),
    _option(NEEDS, "--region", metavar="NAME", help="Where the worker is."),
    _many(NEEDS, "--compliance", "compliance", "NAME", "What the worker complies with, such as gdpr."),
    _option(
        NEEDS,
        "--isolation",
        type=click.Choice(["strict", "loose", "none"]),
        help="How the worker keeps tenants apart, at least.",
    ),
    _option(NEEDS, "--max-cost-tier", type=_TIERS, help="The dearest worker that will do."),
    _option(
        NEEDS,
        "--max-processing",
        type=_SIZE,
        metavar="SECONDS",
        help="No worker on which it was seen to take longer.",
    ),
    _many(
        NEEDS,
        "--worker",
        "workers",
        "WORKER",
        "This worker alone, or another one named so.",
        shell_complete=values.worker_ids,
    ),
    _many(
        NEEDS,
        "--exclude-worker",
        "exclude_workers",
        "WORKER",
        "Not this worker.",
        shell_complete=values.worker_ids,
    ),
    _many(
        WISHES,
        "--prefer-worker",
        "prefer_workers",
        "WORKER",
        "This worker.",
        shell_complete=values.worker_ids,
    ),
    _many(WISHES, "--prefer-model", "prefer_models", "FILE", "A worker that has this model loaded."),
    _option(WISHES, "--prefer-quality", metavar="LEVEL", help="A worker that offers this quality level."),
    _option(WISHES, "--prefer-region", metavar="NAME", help="A worker there."),
    _option(WISHES, "--prefer-cost-tier", type=_TIERS, help="A worker of this price."),
)


def asking(command: F) -> F:
    """Adds the flags; what they say is read by `asked_for`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def asked_for(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes these flags out of `flags`; what is left are the settings. The options of a client's `submit`."""
    from comfyfleet.wire.bodies import (
        HardwareBody,
        LocationBody,
        PreferencesBody,
        RequirementsBody,
        TimeoutsBody,
    )

    def taken(**names: str) -> dict[str, Any]:
        """Those that were given, under the names of the body."""
        found = {name: flags.pop(flag) for name, flag in names.items()}
        return {name: value for name, value in found.items() if value not in (None, ())}

    hardware = taken(
        gpu_memory_gb="vram",
        gpu_count="gpus",
        gpu_model="gpu_model",
        ram_gb="ram",
        cpu_cores="cores",
        cpu_threads="threads",
    )
    location = taken(region="region", compliance="compliance")
    needs = taken(
        models="models",
        node_classes="node_classes",
        quality="quality",
        environment="environment",
        isolation="isolation",
        max_cost_tier="max_cost_tier",
        max_processing_s="max_processing",
        workers="workers",
        exclude_workers="exclude_workers",
    )
    if hardware:
        needs["hardware"] = HardwareBody(**hardware)
    if location:
        needs["location"] = LocationBody(**location)
    wishes = taken(
        workers="prefer_workers",
        models="prefer_models",
        quality="prefer_quality",
        region="prefer_region",
        cost_tier="prefer_cost_tier",
    )
    times = taken(total_s="timeout", start_s="start_timeout", stall_s="stall_timeout")
    asked = taken(
        tenant="tenant",
        service="service",
        provider="provider",
        priority="priority",
        urgency="urgency",
        not_before="not_before",
        deadline="deadline",
        on_deadline="on_deadline",
        after="after",
        max_attempts="max_attempts",
        retry_delay_s="retry_delay",
        include_outputs="include_outputs",
    )
    if needs:
        asked["requirements"] = RequirementsBody(**needs)
    if wishes:
        asked["preferences"] = PreferencesBody(**wishes)
    if times:
        asked["timeouts"] = TimeoutsBody(**times)
    return asked
