"""`comfyfleet top`: the fleet at a glance, again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.options import TO_REACH, as_json, settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from comfyfleet.client.fleet import FleetClient
    from comfyfleet.wire.answers import JobBody, StatsBody, WorkerBody


@click.command("top")
@click.option("--interval", type=click.FloatRange(0.2), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--once", is_flag=True, help="Look once and end; so it is where the output is no terminal.")
@as_json
@settings(*TO_REACH)
def command(interval: float, once: bool, as_json: bool, **flags: Any) -> None:
    """Watch queue, workers and running jobs live, until Ctrl-C."""
    from comfyfleet.cli.reach import ask, print_json

    if as_json:
        stats, workers, jobs = ask(flags, _look)
        print_json({"stats": stats, "workers": workers, "running": jobs})
        return
    ask(flags, lambda client: _show(client, interval, once))


async def _look(client: FleetClient) -> tuple[StatsBody, list[WorkerBody], list[JobBody]]:
    import asyncio

    stats, workers, page = await asyncio.gather(
        client.stats(), client.workers(), client.jobs(status="leased", order="oldest", limit=20)
    )
    return stats, list(workers), list(page.jobs)


async def _show(client: FleetClient, interval: float, once: bool) -> None:
    import asyncio

    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(_drawn(client.url, *await _look(client)))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(_drawn(client.url, *await _look(client)), refresh=True)
            await asyncio.sleep(interval)


def _drawn(url: str, stats: StatsBody, workers: list[WorkerBody], jobs: list[JobBody]) -> RenderableType:
    import time

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from comfyfleet.cli.reach import ago

    now = time.time()
    styles = {
        "idle": "green",
        "busy": "bold green",
        "offline": "bold red",
        "draining": "yellow",
        "paused": "yellow",
    }
    fleet = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("worker", "status", "runs", "completed", "failed", "per hour", "seen"):
        fleet.add_column(heading)
    for worker in workers:
        fleet.add_row(
            Text(worker.id),
            Text(worker.status.value, style=styles.get(worker.status.value, "")),
            f"{len(worker.current_jobs)} of {worker.slots}",
            str(worker.completed),
            str(worker.failed),
            f"{worker.per_hour:g}",
            f"{ago(worker.last_seen_at, now)} ago",
        )
    running = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("running job", "worker", "priority", "since"):
        running.add_column(heading)
    for job in jobs:
        since = ago(job.started_at or job.submitted_at, now)
        running.add_row(Text(job.id), Text(job.worker_id or "–"), str(job.priority), since)
    waiting = (
        f"{stats.waiting} waiting, {stats.delayed} delayed, {stats.paused} paused, {stats.leased} running"
    )
    ended = f"{stats.completed} completed, {stats.failed} failed, {stats.cancelled} cancelled"
    return Group(
        Text(f"{url}  {'the queue is paused' if stats.is_paused else ''}", style="bold"),
        Text(f"{waiting} · {ended} · {stats.idle_slots} idle slots"),
        Text(),
        fleet,
        Text(),
        running,
    )
