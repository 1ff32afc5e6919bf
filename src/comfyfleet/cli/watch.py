"""Jobs watched from a terminal: a bar where there is one, lines elsewhere; outputs saved when a job is done.

What `comfyfleet run` shows on standard error: a progress bar in a terminal, plain lines elsewhere.
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

from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.hub_connection import print_json
from comfyfleet.cli.output import echo, escaped
from comfyfleet.client.client import FleetClient
from comfyfleet.client.options import JobUpdate
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.failure import FailureKind
from comfyfleet.pool.events import PoolEvent
from comfyfleet.pool.output_files import OutputNames, write_new
from comfyfleet.pool.records import offline_words
from comfyfleet.wire.answers import ResultBody

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


class RunProgress:
    """Hears the events of one job. Use it as a context manager: it leaves the terminal as it was."""

    def __init__(self, is_quiet: bool, as_json: bool = False) -> None:
        self._is_quiet = is_quiet
        self._as_json = as_json
        self.paths: list[Path] = []
        """What was saved; told one by one, unless JSON tells them at the end."""
        self._console = Console(stderr=True, highlight=False, quiet=is_quiet)
        self._bar: Progress | None = None
        if self._console.is_terminal and not is_quiet:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("waiting for a server", total=100.0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        self._console.print(escaped(line), markup=False, soft_wrap=True)

    def answer(self, line: str) -> None:
        """What follows from a key that was pressed: whoever sits at the terminal sees it, quiet or not."""
        if self._is_quiet and self._console.is_terminal:
            echo(line, err=True)
        else:
            self.say(line)

    def warn(self, line: str) -> None:
        """What a quiet run must not keep to itself either."""
        if self._bar is not None:
            self._bar.stop()
        echo(f"Warning: {line}", err=True)

    def saved(self, path: Path) -> None:
        if self._bar is not None:
            self._bar.stop()
        self.paths.append(path)
        if not self._as_json:
            echo(path)

    def hear(self, event: PoolEvent) -> None:
        match event.name:
            case "job:started":
                self.say(f"runs on {event.client_id}")
                self._show(str(event.client_id), 0.0)
            case "job:progress" if event.percentage is not None:
                self._show(f"{event.client_id} {event.message}".rstrip(), event.percentage)
            case "job:failed" if event.failure is not None and event.will_retry:
                self.say(f"failed on {event.client_id}: {event.failure.message.strip()}")
            case "job:retrying":
                self._show("waiting for another try", 0.0)
                self.say("tries again")
            case "client:state" if event.state == "offline":
                self.say(offline_words(str(event.client_id), event.message or ""))
            case "client:state" if event.state == "online":
                self.say(f"{event.client_id} is online again")
            case _:
                pass

    def _show(self, description: str, percentage: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=escaped(description, is_line=True), completed=percentage)
