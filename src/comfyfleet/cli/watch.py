"""Progress of jobs in a terminal: a bar there, plain lines elsewhere. Saves outputs when a job is done.

`watch_jobs` follows jobs of a hub, `RunProgress` shows the one job of `comfyfleet run`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from comfyfleet.cli.estimates import duration
from comfyfleet.cli.exit_codes import CommandFailed, end_of_failure
from comfyfleet.cli.output import echo, escaped, print_json
from comfyfleet.client.client import FleetClient
from comfyfleet.client.options import JobUpdate
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.pool.events import PoolEvent
from comfyfleet.pool.output_files import OutputNames, write_new
from comfyfleet.pool.records import offline_words
from comfyfleet.wire.answers import ResultBody

_PATIENCE_S = 60.0
_POLL_S = 2.0
_ENDLESS_S = 10 * 365 * 86_400.0
_NUMBERS = re.compile(r"\d+(\.\d+)?")
_WAITS = ("queued", "retrying", "released", "resumed")
_BATCH_SIZE = 50
"""Jobs that are watched at a time."""
_MAX_NAMED = 5


class ProgressBar:
    """A bar on standard error if that is a terminal. Use it as a context manager."""

    def __init__(self, title: str, *, is_quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=is_quiet)
        self._title = title
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
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
        self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: float, total: float, title: str | None = None) -> None:
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                completed=done,
                total=total,
                description=escaped(title or self._title, is_line=True),
            )

    def print_line(self, line: str) -> None:
        self._console.print(escaped(line), markup=False, soft_wrap=not self._console.is_terminal)


async def watch_jobs(
    client: FleetClient,
    job_ids: list[str],
    out: OutputNames | None,
    as_json: bool,
    previews: Path | None = None,
) -> None:
    """Follows all jobs to their end and saves outputs and previews in the folders, if given. Raises if a job did not
    complete."""
    ended: dict[str, ResultBody] = {}
    saved: list[Path] = []
    unsaved: list[Refusal | Fault] = []
    waiting: dict[str, None] = {}
    """Jobs that no worker runs, in order."""
    running: dict[str, float] = {}
    """By running job: its percentage."""
    away: Exception | None = None
    watch_slots = asyncio.Semaphore(_BATCH_SIZE)
    with _print_paths(saved, is_quiet=as_json), ProgressBar("waiting for a worker") as bar:

        def open_jobs() -> list[str]:
            return [job_id for job_id in job_ids if job_id not in ended]

        def note_away(error: Exception | None) -> None:
            nonlocal away
            away = error
            retry = f"trying again for up to {_PATIENCE_S:.0f} s"
            bar.print_line("the hub answers again" if error is None else f"{retry}: {error}")

        def show_progress(update: JobUpdate | None = None) -> None:
            if len(job_ids) > 1:
                title = f"{len(ended)} of {len(job_ids)} jobs done, {len(running)} running"
                bar.show(100.0 * len(ended) + sum(running.values()), 100.0 * len(job_ids), title)
            elif update is not None and update.percentage is not None:
                title = f"{update.worker_id or 'running'} {update.message or ''}".rstrip()
                bar.show(update.percentage, 100.0, title)

        async def follow(job_id: str) -> None:
            async with watch_slots:
                waiting[job_id] = None
                async for update in client.watch(job_id):
                    if previews is not None and update.kind == "preview":
                        await asyncio.to_thread(_save_preview, previews, job_id, update)
                    if update.kind in _WAITS:
                        waiting[job_id] = None
                        running.pop(job_id, None)
                    elif update.number is not None:
                        waiting.pop(job_id, None)
                    if update.kind == "leased" or update.percentage is not None:
                        running[job_id] = update.percentage or 0.0
                    _print_update(bar, job_id, update, len(job_ids) == 1)
                    show_progress(update)
                    if update.kind == "completed" and out is None:
                        # Otherwise the paths of its outputs show it.
                        bar.print_line("completed" if len(job_ids) == 1 else f"{job_id}: completed")
                ended[job_id] = await client.result(job_id)
                running.pop(job_id, None)
                show_progress()
                try:
                    await _save(client, ended[job_id], out, saved)
                except (Refusal, Fault) as error:
                    # Go on and save the outputs of the other jobs.
                    unsaved.append(error)
                    if len(job_ids) > 1:
                        bar.print_line(f"{job_id}: completed, but some outputs cannot be downloaded: {error}")

        # Jobs may take hours, so wait for a hub that restarts.
        client.patience_s = _PATIENCE_S
        client.on_away(note_away)
        try:
            async with asyncio.TaskGroup() as group:
                following = [group.create_task(follow(job_id)) for job_id in job_ids]
                explaining = group.create_task(_explain_waits(client, bar, waiting, len(job_ids) == 1))
                await asyncio.wait(following, return_when=asyncio.FIRST_EXCEPTION)
                explaining.cancel()
        except ExceptionGroup as failed:
            # The first error caused the others.
            error = failed.exceptions[0]
            if not isinstance(error, Fault):
                raise error from None
            raise type(error)(f"{error} But {_what_continues(open_jobs(), is_away=True)}") from None
        except asyncio.CancelledError:
            bar.print_line(f"Stopped watching; {_what_continues(open_jobs(), is_away=away is not None)}")
            raise
    results = [ended[job_id] for job_id in job_ids]
    if as_json:
        print_json(results)
    _raise_if_failed(results)
    if unsaved:
        raise unsaved[0]


def _what_continues(left: list[str], *, is_away: bool) -> str:
    what = left[0] if len(left) == 1 else f"{len(left)} jobs"
    state = f"has stored {what} and continues when it is back" if is_away else f"continues with {what}"
    which = " ".join(left) if len(left) <= _MAX_NAMED else "ID…"
    return f"the hub {state}. `comfyfleet job watch {which}` watches again, `comfyfleet job cancel {which}` cancels."


def _print_update(bar: ProgressBar, job_id: str, update: JobUpdate, is_alone: bool) -> None:
    where = "" if is_alone else f"{job_id}: "
    match update.kind:
        case "leased":
            bar.print_line(f"{where}runs on {update.worker_id}")
        case "retrying":
            bar.print_line(f"{where}{_failed(update)}")
        case "cancelled":
            bar.print_line(f"{where}was cancelled")
        case _:
            pass


def _failed(update: JobUpdate) -> str:
    failed = f"failed on {update.worker_id}" if update.worker_id else "failed"
    if update.blocked_s is None:
        return f"{failed}, will be retried: {update.message}"
    is_endless = update.blocked_s > _ENDLESS_S
    blocked = (
        "blocked there until it is lifted" if is_endless else f"blocked there for {update.blocked_s:.0f} s"
    )
    return f"{failed}, {blocked}, waiting for another server: {update.message}"


async def _explain_waits(
    client: FleetClient, bar: ProgressBar, waiting: dict[str, None], is_alone: bool
) -> None:
    """Says why no worker takes the first waiting job, or when it should start, once for each reason."""
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
        # A block that lasts shorter than before is the same reason.
        where = "" if is_alone else f"{job_id}: "
        line = f"{where}waits: {found.summary}" if is_stuck else ""
        if not is_stuck and found.phase is Phase.QUEUED and found.estimated_start_s:
            line = f"{where}is expected to start in about {duration(found.estimated_start_s)}"
        reason = _NUMBERS.sub("#", line)
        if reason and reason != before and job_id in waiting:
            bar.print_line(line)
        before = reason


def _save_preview(folder: Path, job_id: str, update: JobUpdate) -> None:
    """Saves the newest preview of a job, over the one before."""
    try:
        image = base64.b64decode(update.data["image"])
    except (KeyError, TypeError, ValueError):
        return
    suffix = ".png" if image.startswith(b"\x89PNG") else ".jpg"
    (folder / f"{job_id}{suffix}").write_bytes(image)


@contextlib.contextmanager
def _print_paths(saved: list[Path], *, is_quiet: bool) -> Iterator[None]:
    """Prints the saved paths when the bar is gone, even after an error."""
    try:
        yield
    finally:
        for path in () if is_quiet else saved:
            echo(path)


async def _save(client: FleetClient, ended: ResultBody, out: OutputNames | None, saved: list[Path]) -> None:
    if out is None or ended.result is None:
        return
    for index, file in enumerate(ended.result.files, start=1):
        # Create the file first, so that two jobs that save at once use different names.
        path = await write_new(out, file, b"", job=ended.id, index=index)
        try:
            await client.save(file, path)
        except BaseException:
            path.unlink()
            raise
        saved.append(path)


def _raise_if_failed(results: list[ResultBody]) -> None:
    bad = [result for result in results if result.status != "completed"]
    if not bad:
        return
    first = bad[0]
    why = first.status if first.error is None else f"{first.error.kind.value}: {first.error.message}"
    text = f"job {first.id} {first.status}" if first.error is None else f"job {first.id} failed ({why})"
    if len(results) > 1:
        text = f"{len(bad)} of {len(results)} jobs did not complete; {text}"
    code, text = end_of_failure(first.error, text)
    raise CommandFailed(text, code)


class RunProgress(ProgressBar):
    """Shows the events of the one job of `comfyfleet run`."""

    def __init__(self, is_quiet: bool, as_json: bool = False) -> None:
        super().__init__("waiting for a server", is_quiet=is_quiet)
        self._is_quiet = is_quiet
        self._as_json = as_json
        self.paths: list[Path] = []
        """The saved outputs. Each is printed at once; JSON lists them at the end."""

    def answer(self, line: str) -> None:
        """Answers a key that the user pressed, even with --quiet."""
        if self._is_quiet and self._console.is_terminal:
            echo(line, err=True)
        else:
            self.print_line(line)

    def warn(self, line: str) -> None:
        """Warns, even with --quiet."""
        self.stop()
        echo(f"Warning: {line}", err=True)

    def saved(self, path: Path) -> None:
        self.stop()
        self.paths.append(path)
        if not self._as_json:
            echo(path)

    def on_event(self, event: PoolEvent) -> None:
        match event.name:
            case "job:started":
                self.print_line(f"runs on {event.client_id}")
                self.show(0.0, 100.0, str(event.client_id))
            case "job:progress" if event.percentage is not None:
                self.show(event.percentage, 100.0, f"{event.client_id} {event.message}".rstrip())
            case "job:failed" if event.failure is not None and event.will_retry:
                self.print_line(f"failed on {event.client_id}: {event.failure.message.strip()}")
            case "job:retrying":
                self.show(0.0, 100.0, "waiting for the next attempt")
                self.print_line("retrying")
            case "client:state" if event.state == "offline":
                self.print_line(offline_words(str(event.client_id), event.message or ""))
            case "client:state" if event.state == "online":
                self.print_line(f"{event.client_id} is online again")
            case _:
                pass
