"""What the demo shows: a live view in a terminal or plain lines while it runs, and tables at the end.

`Narrator` turns an event into a line for both. `DemoReport` computes the tables from the hub's answers about jobs and
workers and from the counts of the fake servers; from the events it keeps only the times of blocks.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections import Counter, deque
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from comfyfleet.cli.demo_fleet import CARDS, KINDS, load_seconds_of, loaders_of, stories, workflow_of
from comfyfleet.cli.demo_loads import PlayedJob, PlayedServer, count_first_come_first_served
from comfyfleet.cli.output import discard
from comfyfleet.client.client import FleetClient
from comfyfleet.model.job import JobResult
from comfyfleet.model.workflow_hash import hash_workflow
from comfyfleet.pool.events import PoolEvent
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeStats
from comfyfleet.wire.answers import JobDetails, WorkerBody

_FRAME_S = 0.1
_EVENT_LINES = 9
_WIDE, _NARROW = 110, 80
"""Columns from which cards are described in full, and below which they are left out."""
_STATE_STYLES = {"online": "green", "offline": "bold red", "reconnecting": "yellow"}


class DemoConsole(Console):
    """A console that ends the demo, as SIGTERM does, when nobody reads its output any more."""

    def on_broken_pipe(self) -> None:
        # Rich would raise SystemExit here: inside a listener or a task of the hub, whichever has printed.
        self.quiet = True
        discard(sys.stdout)
        signal.raise_signal(signal.SIGTERM)


class Show(Protocol):
    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def on_event(self, event: PoolEvent) -> None: ...
    async def keep_drawing(self) -> None: ...


def make_show(console: Console, is_plain: bool, began_at: float) -> Show:
    narrator = Narrator(began_at)
    if console.is_terminal and not is_plain:
        return LiveShow(console, narrator)
    return PlainShow(console, narrator)


def kinds_by_hash() -> dict[str, str]:
    return {hash_workflow(workflow_of(kind, "")): kind for kind in KINDS}


def count_jobs() -> int:
    return sum(1 if story.then is None else 2 for story in stories())


class Narrator:
    """Lines for people, with the time since the demo began."""

    def __init__(self, began_at: float) -> None:
        self._began_at = began_at
        self._kinds = kinds_by_hash()

    def elapsed_s(self, at: float | None = None) -> float:
        return max(0.0, (time.time() if at is None else at) - self._began_at)

    def line(self, event: PoolEvent) -> tuple[str, str] | None:
        """The line and its style."""
        found = self._describe(event)
        return None if found is None else (f"{self.elapsed_s(event.at):5.1f} s  {found[0]}", found[1])

    def _describe(self, event: PoolEvent) -> tuple[str, str] | None:
        title = event.metadata.get("title", "")
        server = event.client_id
        match event.name:
            case "job:completed":
                return f"{server}  completed {title}", "green"
            case "job:failed" if event.failure is not None:
                return f"{server}  {title} failed: {shortened(event.failure.message)}", "red"
            case "job:retrying":
                return f"       {title} will be retried", "yellow"
            case "client:blocked_workflow":
                for_s = (event.blocked_until or event.at) - event.at
                kind = self._kinds.get(event.workflow_hash or "", "?")
                return f"{server}  blocked for {kind} for {for_s:.1f} s", "bold magenta"
            case "client:unblocked_workflow":
                kind = self._kinds.get(event.workflow_hash or "", "?")
                return f"{server}  unblocked for {kind}: {event.reason}", "bold cyan"
            case "client:state" if event.state in ("offline", "reconnecting", "online"):
                return f"{server}  is {event.state}", _STATE_STYLES[event.state]
            case _:
                return None


def shortened(text: str, longest: int = 60) -> str:
    """One line of at most `longest` characters."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


class PlainShow:
    """A line for each event, for logs, pipes and tests."""

    def __init__(self, console: Console, narrator: Narrator) -> None:
        self._console = console
        self._narrator = narrator

    def __enter__(self) -> Self:
        for card in CARDS:
            self._print(f"{card.id}: {card.description}, speed {card.speed:g}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def on_event(self, event: PoolEvent) -> None:
        line = self._narrator.line(event)
        if line is not None:
            self._print(*line)

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(line, style=style, markup=False, soft_wrap=True)

    async def keep_drawing(self) -> None:
        """Nothing to draw between two lines."""


class _Row:
    """The current state of a server."""

    __slots__ = ("blocked", "done", "job_id", "percentage", "state", "title")

    def __init__(self) -> None:
        self.state = "online"
        self.job_id: str | None = None
        self.title = ""
        self.percentage = 0.0
        self.done = 0
        self.blocked: set[str] = set()


class LiveShow:
    """The fleet as a live table, with the last events below it."""

    def __init__(self, console: Console, narrator: Narrator) -> None:
        self._narrator = narrator
        self._is_wide, self._is_narrow = console.width >= _WIDE, console.width < _NARROW
        self._kinds = kinds_by_hash()
        self._rows = {card.id: _Row() for card in CARDS}
        self._events: deque[Text] = deque(maxlen=_EVENT_LINES)
        self._queued = self._completed = self._retries = 0
        self._total = count_jobs()
        # A task of the same loop draws it, so no other thread reads what the events change.
        self._live = Live(console=console, auto_refresh=False, transient=True, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    async def keep_drawing(self) -> None:
        while True:
            self._live.refresh()
            await asyncio.sleep(_FRAME_S)

    def on_event(self, event: PoolEvent) -> None:
        line = self._narrator.line(event)
        if line is not None:
            self._events.append(Text(line[0], style=line[1], no_wrap=True, overflow="ellipsis"))
        self._queued += event.name == "job:queued"
        self._completed += event.name == "job:completed"
        self._retries += event.name == "job:retrying"
        row = self._rows.get(event.client_id or "")
        if event.name in ("job:retrying", "job:failed", "job:completed"):
            for each in self._rows.values():
                if each.job_id == event.job_id:
                    each.job_id, each.title, each.percentage = None, "", 0.0
        if row is None:
            return
        match event.name:
            case "job:accepted":
                row.job_id, row.title, row.percentage = event.job_id, event.metadata.get("title", ""), 0.0
            case "job:progress" if event.job_id == row.job_id:
                row.percentage = max(row.percentage, event.percentage or 0.0)
            case "job:completed":
                row.done += 1
            case "client:state":
                row.state = event.state or row.state
            case "client:blocked_workflow":
                row.blocked.add(self._kinds.get(event.workflow_hash or "", "?"))
            case "client:unblocked_workflow":
                row.blocked.discard(self._kinds.get(event.workflow_hash or "", "?"))
            case _:
                pass

    def _draw(self) -> RenderableType:
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        bar_width = 8 if self._is_narrow else 22
        columns: list[dict[str, Any]] = [
            {"header": "server", "style": "bold", "min_width": 6},
            {"header": "card", "style": "dim"},
            {"header": "state", "min_width": 7},
            {"header": "runs", "min_width": 10, "no_wrap": True},
            {"header": "", "width": bar_width},
            {"header": "done", "justify": "right"},
            {"header": "blocked for", "style": "magenta", "no_wrap": True},
        ]
        if self._is_narrow:
            del columns[1]
        for column in columns:
            table.add_column(**column)
        for card in CARDS:
            row = self._rows[card.id]
            bar = (
                ProgressBar(total=100, completed=row.percentage, width=bar_width) if row.job_id else Text("")
            )
            size = card.description if self._is_wide else f"{card.vram_gb:g} GB"
            table.add_row(
                card.id,
                *(() if self._is_narrow else (size,)),
                Text(row.state, style=_STATE_STYLES.get(row.state, "")),
                row.title or Text("–", style="dim"),
                bar,
                str(row.done),
                ", ".join(sorted(row.blocked)),
            )
        running = sum(row.job_id is not None for row in self._rows.values())
        total = Table.grid(padding=(0, 1))
        total.add_row(
            f"{self._narrator.elapsed_s():5.1f} s",
            ProgressBar(total=self._total, completed=self._completed, width=bar_width + 2),
            f"{self._completed} of {self._total} done, {running} running, "
            f"{max(0, self._queued - self._completed - running)} waiting, {self._total - self._queued} to come, "
            f"{self._retries} retried",
        )
        return Group(
            Text("A fleet of four fake ComfyUI servers", style="bold"),
            table,
            Text(),
            total,
            Text(),
            *self._events,
        )


class Blocked(msgspec.Struct):
    """One block, from its start to its end."""

    client_id: str
    workflow_hash: str
    began_at: float
    failures: int
    ended_at: float | None = None


class DemoReport:
    """Collects data while the demo runs and prints tables at the end."""

    def __init__(self, began_at: float, time_scale: float = 1.0) -> None:
        self.submitted: dict[str, str | None] = {}
        """The jobs in the order of their submission. Of a follower, the job that it waited for."""
        self.pictures: dict[str, bytes] = {}
        self.is_short = False
        """The time was up, or a job was never submitted because the one before it failed."""
        self.is_printed = False
        """The report is printed; from now on only the hub runs."""
        self.blocks: list[Blocked] = []
        self.records: list[JobDetails] = []
        self._results: dict[str, JobResult] = {}
        self._time_scale = time_scale
        self._workers: dict[str, WorkerBody] = {}
        self._fakes: dict[str, FakeStats] = {}
        self._began_at = began_at
        self._ended_at = self._began_at
        self._folder = Path()
        self._shown: Path | None = None

    def on_event(self, event: PoolEvent) -> None:
        client_id, workflow_hash = event.client_id or "", event.workflow_hash or ""
        if event.name == "client:blocked_workflow":
            self.blocks.append(Blocked(client_id, workflow_hash, event.at, event.failures or 0))
        elif event.name == "client:unblocked_workflow":
            for block in self.blocks:
                is_its = (block.client_id, block.workflow_hash) == (client_id, workflow_hash)
                if is_its and block.ended_at is None:
                    block.ended_at = event.at

    async def collect(self, client: FleetClient, fakes: dict[str, FakeComfyUI]) -> None:
        self._ended_at = time.time()
        self.records = [await client.get(job_id) for job_id in self.submitted]
        for job_id in self.submitted:
            ended = (await client.result(job_id)).result
            if ended is not None:
                self._results[job_id] = ended
        self._workers = {worker.id: worker for worker in await client.workers()}
        self._fakes = {name: fake.stats for name, fake in fakes.items()}

    @property
    def completed(self) -> int:
        return sum(record.status == "completed" for record in self.records)

    @property
    def is_complete(self) -> bool:
        """Every job was submitted and completed, and its picture is here."""
        return not self.is_short and self.completed == len(self.pictures) == count_jobs()

    def save_pictures(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for title, content in self.pictures.items():
            name = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")
            path = folder / f"{name}.png"
            path.write_bytes(content)
            if self._shown is None or title.startswith("edit"):
                self._shown = path

    def print(self, console: Console) -> None:
        console.print(self._who_ran_what(console.width))
        console.print(self._what_was_blocked())
        console.print(self._what_was_retried(console.width))
        console.print()
        if self._shown is not None:
            console.print(f"{len(self.pictures)} pictures in {self._folder}, one of them:", soft_wrap=True)
            console.print(f"  {self._shown}", soft_wrap=True)
        if self.is_complete:
            console.print(self.loads_line(), highlight=False)
        console.print(f"Took {self._ended_at - self._began_at:.1f} s.")
        self.print_summary(console)

    def loads_line(self) -> str:
        """The loads of this run, and those of first come, first served for the same jobs on the same servers."""
        made = sum(fake.model_loads for fake in self._fakes.values())
        servers = [
            PlayedServer(card.id, card.speed, load_seconds_of(card, self._time_scale)) for card in CARDS
        ]
        else_made = count_first_come_first_served([self._played(each) for each in self.records], servers)
        return f"{made} model loads; first come, first served would have made {else_made}"

    def _played(self, record: JobDetails) -> PlayedJob:
        kind = next(kind for kind in KINDS if kind == _label(record, "kind"))
        loaders = loaders_of(kind)
        speed = next(card.speed for card in CARDS if card.id == record.worker_id)
        worked_s = sum(
            timing.seconds for timing in self._results[record.id].timings if timing.node_id not in loaders
        )
        return PlayedJob(
            record.id,
            record.priority,
            frozenset(loaders.values()),
            worked_s * speed,
            record.submitted_at - self._began_at,
            self.submitted[record.id],
        )

    def print_summary(self, console: Console) -> None:
        """Prints the jobs that did not complete, and how many did."""
        for record in self.records:
            if record.status != "completed":
                why = "" if record.error is None else f": {record.error.message}"
                console.print(f"{_label(record, 'title')} {record.status}{why}", style="red", markup=False)
        counted = f"{self.completed} of {count_jobs()} jobs completed"
        if self.is_complete:
            console.print(f"{counted}, nothing lost", style="bold green")
        else:
            console.print(counted, style="bold red")

    def _who_ran_what(self, width: int) -> Table:
        ran = Counter(
            (record.worker_id, _label(record, "kind"))
            for record in self.records
            if record.status == "completed"
        )
        failed = Counter[str](
            attempt.worker_id
            for record in self.records
            for attempt in record.history
            if attempt.error is not None
        )
        table = Table(
            title="Who ran what", title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        # All columns need 79; what happened to the servers is also in the lines and tables around this one.
        about_loads = () if width < _NARROW else ("loads", "swaps", "crashes")
        table.add_column("server", style="bold", no_wrap=True)
        for heading in (*KINDS, "jobs", "failed", "used", *about_loads):
            table.add_column(heading, justify="right")
        for card in CARDS:
            fake = self._fakes[card.id]
            counts = [ran[card.id, kind] for kind in KINDS]
            numbers = [*counts, sum(counts), failed[card.id]]
            loads = [fake.model_loads, fake.model_swaps, fake.crashes][: len(about_loads)]
            used = f"{self._used(card.id):.0%}"
            table.add_row(card.id, *map(_count, numbers), used, *map(_count, loads))
        return table

    def _used(self, worker_id: str) -> float:
        """The share of the time that it was busy."""
        worker = self._workers[worker_id]
        busy_s = worker.completed / worker.per_hour * 3600 if worker.per_hour else 0.0
        return min(1.0, busy_s / max(1e-9, self._ended_at - self._began_at))

    def _what_was_blocked(self) -> Table:
        table = Table(title="\nBlocks", title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("server", style="bold")
        for heading in ("workflow", "blocked at", "unblocked at", "jobs of it there since"):
            table.add_column(heading)
        kinds = kinds_by_hash()
        for block in self.blocks:
            ended = block.ended_at
            since = sum(
                record.worker_id == block.client_id
                and record.workflow_hash == block.workflow_hash
                and record.status == "completed"
                and ended is not None
                and (record.started_at or 0) >= ended
                for record in self.records
            )
            table.add_row(
                block.client_id,
                kinds.get(block.workflow_hash, "?"),
                f"{block.began_at - self._began_at:.1f} s",
                "still blocked" if ended is None else f"{ended - self._began_at:.1f} s",
                _count(since),
            )
        return table

    def _what_was_retried(self, width: int) -> Table | Text:
        retried = [record for record in self.records if len(record.history) > 1]
        if not retried:
            return Text("\nNo job was retried.")
        table = Table(title="\nRetries", title_justify="left", title_style="bold", box=None, pad_edge=False)
        for heading in ("job", "tried on", "because"):
            table.add_column(heading)
        trails = {
            _label(record, "title"): " → ".join(attempt.worker_id for attempt in record.history)
            for record in retried
        }
        left = max(20, width - max(map(len, trails)) - max(map(len, trails.values())) - 4)
        for record in retried:
            title = _label(record, "title")
            why = [attempt.error for attempt in record.history if attempt.error is not None]
            lines = [shortened(f"{each.kind.value}: {each.message}", left) for each in why]
            table.add_row(title, trails[title], "\n".join(lines))
        return table


def _label(record: JobDetails, name: str) -> str:
    return str((record.metadata or {}).get(name, ""))


def _count(number: int) -> str:
    return str(number) if number else "–"
