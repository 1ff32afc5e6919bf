"""Jobs watched from a terminal: a bar where there is one, lines elsewhere; outputs saved when a job is done.

`comfyfleet top`: the fleet at a glance, again and again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.hub_connection import print_json
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.output import echo, escaped
from comfyfleet.client.client import FleetClient
from comfyfleet.client.options import JobUpdate
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.failure import FailureKind
from comfyfleet.pool.output_files import OutputNames, write_new
from comfyfleet.wire.answers import ResultBody

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from rich.console import RenderableType

    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.answers import JobBody, StatsBody, WorkerBody


_CALLERS_FAULT = (FailureKind.INVALID_WORKFLOW, FailureKind.MISSING_INPUT)
_PATIENCE_S = 60.0
_POLL_S = 2.0
_ENDLESS_S = 10 * 365 * 86_400.0
_NUMBERS = re.compile(r"\d+(\.\d+)?")
_WAITS = ("queued", "retrying", "released", "resumed")
_BATCH_SIZE = 50
"""Jobs that are watched together; the others' turn comes when one ends."""


class ProgressBar:
    """A bar on standard error, or nothing where that is no terminal."""

    def __init__(self, title: str) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._title = title
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task(self._title, total=None)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def show(self, done: float, total: float, title: str | None = None) -> None:
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                completed=done,
                total=total,
                description=escaped(title or self._title, is_line=True),
            )

    def say(self, line: str) -> None:
        self._console.print(escaped(line), markup=False, soft_wrap=True)


async def watch_jobs(
    client: FleetClient,
    job_ids: list[str],
    out: OutputNames | None,
    as_json: bool,
    previews: Path | None = None,
) -> None:
    """To the end of all of them. Outputs, and the newest preview of each, go to folders, where there are; raises when a
    job did not complete."""
    ended: dict[str, ResultBody] = {}
    saved: list[Path] = []
    unsaved: list[Refusal | Fault] = []
    waiting: dict[str, None] = {}
    """Jobs that no worker has; in their order."""
    admission_control = asyncio.Semaphore(_BATCH_SIZE)
    with _told_at_the_end(saved, is_quiet=as_json), ProgressBar("waiting for a worker") as bar:

        async def follow(job_id: str) -> None:
            async with admission_control:
                waiting[job_id] = None
                async for update in client.watch(job_id):
                    if previews is not None and update.kind == "preview":
                        await asyncio.to_thread(_keep_preview, previews, job_id, update)
                    if update.kind in _WAITS:
                        waiting[job_id] = None
                    elif update.number is not None:
                        waiting.pop(job_id, None)
                    _tell(bar, job_id, update, len(job_ids) == 1)
                    if update.kind == "completed" and out is None:
                        # Else the paths of its outputs say so.
                        bar.say("completed" if len(job_ids) == 1 else f"{job_id}: completed")
                ended[job_id] = await client.result(job_id)
                if len(job_ids) > 1:
                    bar.show(len(ended), len(job_ids), "jobs done")
                try:
                    await _save(client, ended[job_id], out, saved)
                except (Refusal, Fault) as error:
                    # A file that cannot be had is no reason to leave the other jobs' where they are.
                    unsaved.append(error)
                    if len(job_ids) > 1:
                        bar.say(f"{job_id}: completed, but not all of its outputs can be fetched: {error}")

        # A hub that is started anew is waited for: what is watched may take hours.
        client.patience_s = _PATIENCE_S
        try:
            async with asyncio.TaskGroup() as group:
                following = [group.create_task(follow(job_id)) for job_id in job_ids]
                telling = group.create_task(_tell_waits(client, bar, waiting, len(job_ids) == 1))
                await asyncio.wait(following, return_when=asyncio.FIRST_EXCEPTION)
                telling.cancel()
        except ExceptionGroup as failed:
            # The first reason is the whole story.
            raise failed.exceptions[0] from None
        except asyncio.CancelledError:
            left = [job_id for job_id in job_ids if job_id not in ended]
            what = left[0] if len(left) == 1 else f"{len(left)} jobs"
            which = left[0] if len(left) == 1 else "ID"
            bar.say(
                f"not watched any more; the hub goes on with {what}. `comfyfleet job watch {which}` watches again, "
                f"`comfyfleet job cancel {which}` ends it"
            )
            raise
    results = [ended[job_id] for job_id in job_ids]
    if as_json:
        print_json(results)
    _verdict(results)
    if unsaved:
        raise unsaved[0]


def _tell(bar: ProgressBar, job_id: str, update: JobUpdate, is_alone: bool) -> None:
    where = "" if is_alone else f"{job_id}: "
    match update.kind:
        case "leased":
            bar.say(f"{where}runs on {update.worker_id}")
        case "retrying":
            bar.say(f"{where}{_failed(update)}")
        case "cancelled":
            bar.say(f"{where}was cancelled")
        case _:
            pass
    if is_alone and update.percentage is not None:
        bar.show(update.percentage, 100.0, f"{update.worker_id or 'running'} {update.message or ''}".rstrip())


def _failed(update: JobUpdate) -> str:
    told = f"failed on {update.worker_id}" if update.worker_id else "failed"
    if update.blocked_s is None:
        return f"{told} and is tried again: {update.message}"
    is_endless = update.blocked_s > _ENDLESS_S
    blocked = (
        "blocked there until it is lifted" if is_endless else f"blocked there for {update.blocked_s:.0f} s"
    )
    return f"{told}, {blocked}, waiting for another server: {update.message}"


async def _tell_waits(
    client: FleetClient, bar: ProgressBar, waiting: dict[str, None], is_alone: bool
) -> None:
    """Says why the first job that waits is given to no worker, once for each reason."""
    before = ""
    while True:
        await asyncio.sleep(_POLL_S)
        job_id = next(iter(waiting), None)
        if job_id is None:
            continue
        try:
            found = await client.explain(job_id)
        except (Refusal, Fault):
            continue
        is_stuck = found.phase is Phase.QUEUED and not found.able and not found.able_others
        # How long a block still lasts is no other reason.
        told = _NUMBERS.sub("#", found.summary) if is_stuck else ""
        if told and told != before and job_id in waiting:
            bar.say(f"{'' if is_alone else f'{job_id}: '}waits: {found.summary}")
        before = told


def _keep_preview(folder: Path, job_id: str, update: JobUpdate) -> None:
    """The newest of a job, in place of the one before."""
    try:
        image = base64.b64decode(update.data["image"])
    except (KeyError, TypeError, ValueError):
        return
    suffix = ".png" if image.startswith(b"\x89PNG") else ".jpg"
    (folder / f"{job_id}{suffix}").write_bytes(image)


@contextlib.contextmanager
def _told_at_the_end(saved: list[Path], *, is_quiet: bool) -> Iterator[None]:
    """Paths go to standard output once the bar is gone; those that were saved, whatever else went wrong."""
    try:
        yield
    finally:
        for path in () if is_quiet else saved:
            echo(path)


async def _save(client: FleetClient, ended: ResultBody, out: OutputNames | None, saved: list[Path]) -> None:
    if out is None or ended.result is None:
        return
    for index, file in enumerate(ended.result.files, start=1):
        # The name is taken first: of two who save at once each has one of its own.
        path = await write_new(out, file, b"", job=ended.id, index=index)
        try:
            await client.save(file, path)
        except BaseException:
            path.unlink()
            raise
        saved.append(path)


def _verdict(results: list[ResultBody]) -> None:
    bad = [result for result in results if result.status != "completed"]
    if not bad:
        return
    first = bad[0]
    why = first.status if first.error is None else f"{first.error.kind.value}: {first.error.message}"
    is_callers = first.error is not None and first.error.kind in _CALLERS_FAULT
    text = f"job {first.id} {first.status}" if first.error is None else f"job {first.id} failed ({why})"
    if len(results) > 1:
        text = f"{len(bad)} of {len(results)} jobs did not complete; {text}"
    raise CommandFailed(text, ExitCode.REFUSED if is_callers else ExitCode.FAILED)


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

    from comfyfleet.cli.fleet import notes_on
    from comfyfleet.cli.hub_connection import ago, rate, short_ids

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
