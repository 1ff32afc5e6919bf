"""`comfyfleet workers`, `queue`, `blocks` and `top`: the workers of a hub, its queue, its blocks, and a live view.

(`comfyfleet worker` runs a worker; it is in `worker.py`.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.command import (
    complete_worker_ids,
    group,
    hub_options,
    report,
    runs_subcommand,
    short_ids,
)
from comfyfleet.cli.estimates import print_capacity
from comfyfleet.cli.output import ago, echo, escaped, plain, print_json, print_pairs, print_table

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from rich.console import RenderableType

    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.answers import BlockBody, JobBody, StatsBody, WorkerBody, WorkerDetails

_WORKER_HEADINGS = ("worker", "status", "runs", "done", "failed", "per h", "seen")
_RATE_MINIMUM = 5
"""Completed jobs before a rate is shown: one job of two seconds is not 1,800 an hour."""

worker_argument = click.argument("worker_id", shell_complete=complete_worker_ids)


@group("workers", invoke_without_command=True)
@hub_options
@click.pass_context
def workers_command(context: click.Context, /, **flags: Any) -> None:
    """List the workers of a hub, or control one.

    `comfyfleet worker` runs a worker.
    """
    if not runs_subcommand(context):
        _list_workers(flags)


@workers_command.command("list")
@hub_options
def list_workers(**flags: Any) -> None:
    """List the workers, as `comfyfleet workers` does."""
    _list_workers(flags)


def _list_workers(flags: dict[str, Any]) -> None:
    async def look(client: FleetClient) -> tuple[Sequence[WorkerBody], str]:
        return await client.workers(), client.url

    def show(found: tuple[Sequence[WorkerBody], str]) -> None:
        workers, url = found
        now = time.time()
        start = f"comfyfleet worker --hub {url} --server http://127.0.0.1:8188"
        print_table(
            _WORKER_HEADINGS,
            [_worker_row(worker, now) for worker in workers],
            empty=f"The hub has no workers. Start one with `{start}`.",
        )
        for note in notes_on(workers, now):
            echo(note)

    report(flags, look, show, json=lambda found: found[0])


def _worker_row(worker: WorkerBody, now: float) -> list[str]:
    return [
        worker.id,
        _worker_state(worker),
        f"{len(worker.current_jobs)} of {worker.slots}",
        str(worker.completed),
        str(worker.failed),
        rate(worker),
        f"{ago(worker.last_seen_at, now)} ago",
    ]


def rate(worker: WorkerBody) -> str:
    """Jobs an hour, once enough jobs were completed to measure it."""
    if worker.completed < _RATE_MINIMUM:
        return "–"
    return f"{worker.per_hour:.0f}" if worker.per_hour >= 10 else f"{worker.per_hour:.2g}"


def _worker_state(worker: WorkerBody) -> str:
    return f"{worker.status.value} (fake)" if worker.is_fake else worker.status.value


def note_on(worker: WorkerBody, now: float) -> str:
    """Why the worker takes no jobs, or not all. Empty: nothing stops it."""
    if worker.offline_reason:
        return f"offline: {worker.offline_reason}"
    notes = []
    if worker.quarantined_until is not None and now < worker.quarantined_until:
        left_s = worker.quarantined_until - now
        notes.append(f"quarantined for another {left_s:.0f} s: too many different workflows failed on it")
    if worker.blocked_workflows:
        count = worker.blocked_workflows
        what = "1 workflow" if count == 1 else f"{count} workflows"
        until = "until lifted"
        if worker.blocked_until is not None:
            first = "" if count == 1 else "the first one "
            until = f"{first}for another {max(0.0, worker.blocked_until - now):.0f} s"
        notes.append(f"blocked for {what}, {until} (comfyfleet blocks)")
    return "; ".join(notes)


def notes_on(workers: Sequence[WorkerBody], now: float) -> list[str]:
    """One line for each worker that something stops."""
    return [f"{worker.id}: {note}" for worker in workers if (note := note_on(worker, now))]


@workers_command.command("show")
@worker_argument
@hub_options
def show_worker(worker_id: str, **flags: Any) -> None:
    """Show one worker and what it offers."""
    report(flags, lambda client: client.worker(worker_id), _print_worker)


def _print_worker(worker: WorkerDetails) -> None:
    echo(f"{worker.id}  {_worker_state(worker)}")
    names = ("environment", "slots", "current_jobs", "completed", "failed", "per_hour", "disconnects")
    note = note_on(worker, time.time())
    details = {"why": note} if note else {}
    print_pairs(details | {name: plain(getattr(worker, name)) for name in names}, indent="  ")
    for service in worker.capabilities.services if worker.capabilities else ():
        models = "any" if service.models is None else len(service.models)
        classes = "any" if service.node_classes is None else len(service.node_classes)
        echo(f"  {service.name}: {models} models, {classes} node classes")


def _add_command(name: str, text: str, method: str, to_all: str | None = None) -> None:
    @workers_command.command(name, help=text)
    @click.argument("worker_id", required=to_all is None, shell_complete=complete_worker_ids)
    @hub_options
    def command(worker_id: str | None, is_all: bool = False, **flags: Any) -> None:
        if is_all is (worker_id is not None):
            raise click.UsageError("Name one worker, or add --all.")

        async def send(client: FleetClient) -> list[WorkerBody]:
            if is_all:
                assert to_all is not None
                return list(await getattr(client, to_all)())
            return [await getattr(client, method)(worker_id)]

        def show(found: list[WorkerBody]) -> None:
            for worker in found:
                echo(f"{worker.id} {worker.status.value}")
            if not found:
                echo("No worker needs that.")

        report(flags, send, show, json=lambda found: found if is_all else found[0])

    if to_all is not None:
        click.option("--all", "is_all", is_flag=True, help="Every worker of the hub.")(command)


_add_command(
    "drain",
    "Let a worker finish its jobs and stop, until it is resumed.",
    "drain_worker",
    "drain_workers",
)
_add_command("pause", "Give a worker no new jobs.", "pause_worker", "pause_workers")
_add_command("refresh", "Let a worker read again what its servers have.", "refresh_worker")
_add_command(
    "resume",
    "Give jobs again to a worker that was paused, drained or removed.",
    "resume_worker",
    "resume_workers",
)


@workers_command.command("remove")
@worker_argument
@hub_options
def remove(worker_id: str, **flags: Any) -> None:
    """Forget a worker and its blocks. If it is online, it gets no jobs until it is resumed."""
    report(
        flags,
        lambda client: client.remove_worker(worker_id),
        lambda _: echo(f"{worker_id} removed"),
        json=lambda _: {"id": worker_id, "removed": True},
    )


@group("queue")
def queue_command() -> None:
    """Show, pause or resume the queue, or tell which workers are missing."""


@queue_command.command("show")
@hub_options
def show_queue(**flags: Any) -> None:
    """Count the jobs that wait, run and have ended."""

    def show(stats: StatsBody) -> None:
        # Some counts exist for a tenant's key only.
        counts = {name: getattr(stats, name) for name in stats.__struct_fields__}
        print_pairs({name.replace("_", " "): count for name, count in counts.items() if count is not None})

    report(flags, lambda client: client.stats(), show)


@queue_command.command("capacity")
@click.option(
    "--within",
    type=click.FloatRange(1, 86_400),
    default=300.0,
    metavar="SECONDS",
    help="The time in which the waiting work should be done. Default: 300.",
)
@hub_options
def capacity(within: float, **flags: Any) -> None:
    """Tell how much work waits, and how many more workers would do it in time."""
    report(flags, lambda client: client.capacity(within), print_capacity)


@queue_command.command("pause")
@hub_options
def pause(**flags: Any) -> None:
    """Start no more jobs until resumed. Running jobs continue, and the hub still accepts jobs."""
    report(flags, lambda client: client.pause_queue(), lambda _: echo("The queue is paused."))


@queue_command.command("resume")
@hub_options
def resume(**flags: Any) -> None:
    """Start jobs again."""
    report(flags, lambda client: client.resume_queue(), lambda _: echo("The queue runs."))


@group("blocks", invoke_without_command=True)
@hub_options
@click.pass_context
def blocks_command(context: click.Context, /, **flags: Any) -> None:
    """List which workers are blocked for which workflows, or lift a block.

    The worker `*` means every worker: servers crashed while they ran that workflow, and the hub refuses it to its
    tenant until you lift the block. All other blocks end by themselves.
    """
    if not runs_subcommand(context):
        _list_blocks(flags)


@blocks_command.command("list")
@hub_options
def list_blocks(**flags: Any) -> None:
    """List the blocks, as `comfyfleet blocks` does."""
    _list_blocks(flags)


def _list_blocks(flags: dict[str, Any]) -> None:
    def show(blocks: Sequence[BlockBody]) -> None:
        now = time.time()
        rows = [
            [
                block.worker_id,
                block.target,
                "one job" if block.workflow_hash is None else block.tenant or "everybody",
                f"{block.reason}: lacks {', '.join(block.missing)}" if block.missing else block.reason,
                "until lifted"
                if block.blocked_until is None
                else f"{max(0.0, block.blocked_until - now):.0f} s",
            ]
            for block in blocks
        ]
        print_table(["worker", "target", "counts for", "reason", "left"], rows, empty="Nothing is blocked.")

    report(flags, lambda client: client.blocks(), show)


@blocks_command.command("lift")
@click.argument("worker_id", metavar="WORKER")
@click.argument("target")
@hub_options
def lift(worker_id: str, target: str, **flags: Any) -> None:
    """Lift a block. WORKER and TARGET are as `comfyfleet blocks` lists them.

    A workflow hash alone lifts the block for every tenant. Quote the worker that means all:
    comfyfleet blocks lift '*' TARGET
    """
    report(
        flags,
        lambda client: client.lift_block(worker_id, target),
        lambda _: echo(f"lifted {target} for {'every worker' if worker_id == '*' else worker_id}"),
        json=lambda _: {"worker_id": worker_id, "target": target, "lifted": True},
    )


_WIDE = 80
"""Columns from which whole job ids are shown."""
_NOTES = 5
"""At most this many notes on workers that something stops."""
_FRAME = 8
"""Rows that are neither a worker nor a job: three lines of counts, two headings, and blank lines."""
_STYLES = {
    "idle": "green",
    "busy": "bold green",
    "offline": "bold red",
    "draining": "yellow",
    "paused": "yellow",
}


@click.command("top")
@click.option(
    "--interval",
    type=click.FloatRange(0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
@click.option("--once", is_flag=True, help="Print once and exit. A pipe implies it.")
@hub_options
def top_command(interval: float, once: bool, as_json: bool, **flags: Any) -> None:
    """Watch queue, workers and running jobs live, until `q` or Ctrl-C.

    It shows the whole fleet, so it needs a key of a viewer, an operator or an administrator. With a tenant's key use
    `comfyfleet jobs`.
    """
    from comfyfleet.cli.hub_connection import ask

    if as_json:
        stats, workers, jobs = ask(flags, _look)
        print_json({"stats": stats, "workers": workers, "running": jobs})
        return
    ask(flags, lambda client: _show_top(client, interval, once))


async def _look(client: FleetClient) -> tuple[StatsBody, list[WorkerBody], list[JobBody]]:
    import asyncio

    from comfyfleet.model.errors import Refusal, RefusalCode

    try:
        stats, workers, page = await asyncio.gather(
            client.stats(), client.workers(), client.jobs(status="leased", order="oldest", limit=20)
        )
    except Refusal as error:
        if error.code is RefusalCode.NOT_ALLOWED:
            message = (
                f"top shows the whole fleet: {error.message}. With a tenant's key use `comfyfleet jobs`."
            )
            raise Refusal(error.code, message, **error.details) from error
        raise
    return stats, list(workers), list(page.jobs)


async def _show_top(client: FleetClient, interval: float, once: bool) -> None:
    import asyncio
    import contextlib

    from rich.console import Console
    from rich.live import Live

    from comfyfleet.model.errors import Fault

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(_draw(client.url, *await _look(client)))
        return
    # The first call may fail, as in any command. Later the view waits for a hub that does not answer.
    found, trouble = await _look(client), ""
    with _quit_on_q() as is_over, Live(console=console, auto_refresh=False, screen=True) as live:
        while not is_over.is_set():
            size = console.size
            frame = _draw(client.url, *found, rows=size.height, columns=size.width, trouble=trouble)
            live.update(frame, refresh=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await is_over.wait()
            try:
                found, trouble = await _look(client), ""
            except Fault as error:
                trouble = f"not updated: {error}"


@contextmanager
def _quit_on_q() -> Iterator[asyncio.Event]:
    """An event that `q` sets. Meanwhile the terminal delivers single keys."""
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
        # No bytes: the terminal is gone. Function keys send an escape with more bytes after it.
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


def _style(text: str) -> str:
    return _STYLES.get(text.removesuffix(" (fake)"), "")


def _draw(
    url: str,
    stats: StatsBody,
    workers: list[WorkerBody],
    jobs: list[JobBody],
    *,
    rows: int | None = None,
    columns: int | None = None,
    trouble: str = "",
) -> RenderableType:
    """The view in at most `rows` rows. Workers that do not fit are counted."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
        # The live view needs styles and rows that never wrap, so it does not use `print_table`.
        made = Table(*headings, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in made.columns:
            column.no_wrap = True
        for row in body:
            made.add_row(*(Text(escaped(text, is_line=True), style=_style(text)) for text in row))
        return made

    def line(text: str, style: str = "") -> Text:
        return Text(escaped(text, is_line=True), style=style, no_wrap=True, overflow="ellipsis")

    now = time.time()
    notes = notes_on(workers, now)[:_NOTES]
    room = len(workers) + len(jobs) if rows is None else max(2, rows - _FRAME - len(notes))
    shown_jobs = jobs[: max(room // 2, room - len(workers))]
    shown_workers = workers[: max(1, room - len(shown_jobs))]
    short = short_ids(job.id for job in jobs) if columns is not None and columns < _WIDE else {}
    running = [
        [
            short.get(job.id, job.id),
            job.worker_id or "–",
            str(job.priority),
            ago(job.started_at or job.submitted_at, now),
        ]
        for job in shown_jobs
    ]
    waiting = (
        f"{stats.waiting} waiting, {stats.delayed} delayed, {stats.paused} paused, {stats.leased} running"
    )
    left_out = len(workers) - len(shown_workers)
    state = trouble or ("the queue is paused" if stats.is_paused else "")
    return Group(
        line(f"{url}  {state}", "bold red" if trouble else "bold"),
        line(f"{waiting} · {stats.idle_slots} idle slots"),
        line(f"{stats.completed} completed, {stats.failed} failed, {stats.cancelled} cancelled"),
        Text(),
        table(_WORKER_HEADINGS, [_worker_row(worker, now) for worker in shown_workers]),
        Text(f"… and {left_out} more workers" if left_out else ""),
        *map(line, notes),
        table(("running job", "worker", "prio", "since"), running),
    )
