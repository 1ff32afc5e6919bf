"""`comfyfleet top`: the fleet at a glance, again and again."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.output import escaped

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from rich.console import RenderableType

    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.answers import JobBody, StatsBody, WorkerBody


_WIDE = 80
"""Columns from which ids of jobs are shown whole."""
_NOTES = 5
"""Workers that something keeps from work, of which the reason is shown."""
_FRAME = 8
"""Rows that are not a worker or a job: three lines of figures, two headings, what lies between, and the last."""


@click.command("top")
@click.option("--interval", type=click.FloatRange(0.2), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--once", is_flag=True, help="Look once and end; so it is where the output is no terminal.")
@as_json
@settings(*TO_REACH)
def top_command(interval: float, once: bool, as_json: bool, **flags: Any) -> None:
    """Watch queue, workers and running jobs live, until `q` or Ctrl-C.

    It shows the whole fleet, so it takes a key of a viewer, an operator or an administrator; a tenant has `jobs`.
    """
    from comfyfleet.cli.hub_connection import ask, print_json

    if as_json:
        stats, workers, jobs = ask(flags, _look)
        print_json({"stats": stats, "workers": workers, "running": jobs})
        return
    ask(flags, lambda client: _show(client, interval, once))


async def _look(client: FleetClient) -> tuple[StatsBody, list[WorkerBody], list[JobBody]]:
    import asyncio

    from comfyfleet.model.errors import Refusal, RefusalCode

    try:
        stats, workers, page = await asyncio.gather(
            client.stats(), client.workers(), client.jobs(status="leased", order="oldest", limit=20)
        )
    except Refusal as error:
        if error.code is RefusalCode.NOT_ALLOWED:
            told = f"top shows the whole fleet: {error.message}. `comfyfleet jobs` lists the jobs of a tenant's key"
            raise Refusal(error.code, told, **error.details) from error
        raise
    return stats, list(workers), list(page.jobs)


async def _show(client: FleetClient, interval: float, once: bool) -> None:
    import asyncio
    import contextlib

    from rich.console import Console
    from rich.live import Live

    from comfyfleet.model.errors import Fault

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(_drawn(client.url, *await _look(client)))
        return
    # The first look may fail as any command does; from then on a hub that is away is waited for.
    found, trouble = await _look(client), ""
    with _keys() as is_over, Live(console=console, auto_refresh=False, screen=True) as live:
        while not is_over.is_set():
            live.update(
                _drawn(
                    client.url, *found, rows=console.size.height, columns=console.size.width, trouble=trouble
                ),
                refresh=True,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await is_over.wait()
            try:
                found, trouble = await _look(client), ""
            except Fault as error:
                trouble = f"as it was: {error}"


@contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Set by `q`. The terminal gives single keys meanwhile, where it is one."""
    import asyncio
    import sys

    is_over = asyncio.Event()
    try:
        import termios
        import tty
    except ImportError:
        yield is_over
        return
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, OSError, ValueError):
        yield is_over
        return

    def read() -> None:
        pressed = os.read(sys.stdin.fileno(), 64)
        # Nothing at all: the terminal is gone. Other keys send an escape with more behind it.
        if pressed in (b"", b"\x1b") or (not pressed.startswith(b"\x1b") and b"q" in pressed.lower()):
            is_over.set()

    loop = asyncio.get_running_loop()
    tty.setcbreak(sys.stdin)
    loop.add_reader(sys.stdin, read)
    try:
        yield is_over
    finally:
        loop.remove_reader(sys.stdin)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _drawn(
    url: str,
    stats: StatsBody,
    workers: list[WorkerBody],
    jobs: list[JobBody],
    *,
    rows: int | None = None,
    columns: int | None = None,
    trouble: str = "",
) -> RenderableType:
    """In at most so many rows: what does not fit is counted."""
    import time

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from comfyfleet.cli.completion import short_ids
    from comfyfleet.cli.hub_connection import ago, notes_on, rate

    now = time.time()
    styles = {
        "idle": "green",
        "busy": "bold green",
        "offline": "bold red",
        "draining": "yellow",
        "paused": "yellow",
    }
    fleet = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("worker", "status", "runs", "done", "failed", "per h", "seen"):
        fleet.add_column(heading, no_wrap=True)
    notes = notes_on(workers, now)[:_NOTES]
    room = len(workers) + len(jobs) if rows is None else max(2, rows - _FRAME - len(notes))
    shown_jobs = jobs[: max(room // 2, room - len(workers))]
    shown_workers = workers[: max(1, room - len(shown_jobs))]
    for worker in shown_workers:
        fleet.add_row(
            Text(escaped(worker.id, is_line=True)),
            Text(worker.status.value, style=styles.get(worker.status.value, "")),
            f"{len(worker.current_jobs)} of {worker.slots}",
            str(worker.completed),
            str(worker.failed),
            rate(worker),
            f"{ago(worker.last_seen_at, now)} ago",
        )
    running = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("running job", "worker", "prio", "since"):
        running.add_column(heading, no_wrap=True)
    short = short_ids(job.id for job in jobs) if columns is not None and columns < _WIDE else {}
    for job in shown_jobs:
        since = ago(job.started_at or job.submitted_at, now)
        running.add_row(
            Text(escaped(short.get(job.id, job.id))),
            Text(escaped(job.worker_id or "–", is_line=True)),
            str(job.priority),
            since,
        )
    waiting = (
        f"{stats.waiting} waiting, {stats.delayed} delayed, {stats.paused} paused, {stats.leased} running"
    )
    ended = f"{stats.completed} completed, {stats.failed} failed, {stats.cancelled} cancelled"
    left_out = len(workers) - len(shown_workers)
    state = trouble or ("the queue is paused" if stats.is_paused else "")
    return Group(
        Text(f"{url}  {state}", style="bold red" if trouble else "bold", no_wrap=True, overflow="ellipsis"),
        Text(f"{waiting} · {stats.idle_slots} idle slots", no_wrap=True, overflow="ellipsis"),
        Text(ended, no_wrap=True, overflow="ellipsis"),
        Text(),
        fleet,
        Text(f"… and {left_out} more workers" if left_out else ""),
        *(Text(escaped(note, is_line=True), no_wrap=True, overflow="ellipsis") for note in notes),
        running,
    )
