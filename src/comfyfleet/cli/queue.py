"""`comfyfleet queue`: how much waits, and whether anything is leased."""

from __future__ import annotations

from typing import Any

from comfyfleet.cli.helping import group
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo


@group("queue")
def command() -> None:
    """Look at the queue, pause it, resume it."""


@command.command("show")
@as_json
@settings(*TO_REACH)
def show(as_json: bool, **flags: Any) -> None:
    """How many jobs wait, run and ended."""
    from comfyfleet.cli.reach import ask, print_json, print_pairs

    stats = ask(flags, lambda client: client.stats())
    if as_json:
        print_json(stats)
        return
    told = {name: getattr(stats, name) for name in stats.__struct_fields__}
    # Of how many jobs the figures are is known, and said, for a tenant's key alone.
    print_pairs([(name.replace("_", " "), value) for name, value in told.items() if value is not None])


@command.command("pause")
@as_json
@settings(*TO_REACH)
def pause(as_json: bool, **flags: Any) -> None:
    """Lease nothing until resumed. What runs goes on, and jobs are still taken."""
    _set(flags, as_json, "pause_queue")


@command.command("resume")
@as_json
@settings(*TO_REACH)
def resume(as_json: bool, **flags: Any) -> None:
    """Lease again."""
    _set(flags, as_json, "resume_queue")


def _set(flags: dict[str, Any], as_json: bool, method: str) -> None:
    from comfyfleet.cli.reach import ask, print_json

    queue = ask(flags, lambda client: getattr(client, method)())
    if as_json:
        print_json(queue)
    else:
        echo("the queue is paused" if queue.is_paused else "the queue runs")
