"""`comfyfleet usage`: what tenants' jobs took, added up by tenant, workflow, worker and day."""

from __future__ import annotations

from typing import Any

import click

from comfyfleet.cli.options import TO_REACH, as_json, settings


@click.command("usage")
@click.option("--tenant", metavar="ID", help="Of one tenant; of all unless given.")
@click.option(
    "--by",
    type=click.Choice(["tenant", "workflow", "worker", "day"]),
    multiple=True,
    help="For each of what it is added up; tenant unless given. Repeatable.",
)
@click.option(
    "--days", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="How far back."
)
@click.option(
    "--since",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]),
    help="From then on (UTC), instead of --days.",
)
@click.option("--until", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]), help="Up to then (UTC).")
@as_json
@settings(*TO_REACH)
def command(
    tenant: str | None, by: tuple[str, ...], days: float, since: Any, until: Any, as_json: bool, **flags: Any
) -> None:
    """What ended rounds took: GPU-seconds, credits, and what they cost by the workers' rates."""
    import time
    from datetime import UTC

    from comfyfleet.cli.reach import ask, print_json, print_table

    end = None if until is None else until.replace(tzinfo=UTC).timestamp()
    start = (end or time.time()) - days * 86400 if since is None else since.replace(tzinfo=UTC).timestamp()
    found = ask(
        flags,
        lambda client: client.usage(tenant=tenant, since=start, until=end, by=by or ("tenant",)),
    )
    if as_json:
        print_json(found)
        return
    chosen = dict.fromkeys(by or ("tenant",))
    names = {"tenant": "tenant", "workflow": "workflow_hash", "worker": "worker_id", "day": "day"}
    rows = [
        [
            *(str(getattr(each, names[name]) or "–") for name in chosen),
            str(each.rounds),
            str(each.completed),
            str(each.outputs),
            f"{each.gpu_s:.1f}",
            str(each.credits),
            "–" if each.cost is None else f"{each.cost:.4f}",
        ]
        for each in found.usage
    ]
    heads = [*chosen, "rounds", "completed", "outputs", "GPU s", "credits", "cost"]
    print_table(heads, rows, empty="nothing was used in that time")
