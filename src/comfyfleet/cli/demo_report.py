"""What became of the demo: who ran what, what was blocked, what was tried again, and whether anything was lost.

Everything is computed from what the hub answers about jobs and workers and from the counts of the fake servers; of the
events only the times of blocks are kept.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from comfyfleet.cli.demo_fleet import CARDS, KINDS
from comfyfleet.cli.demo_show import count_jobs, kinds_by_hash, shortened
from comfyfleet.client.client import FleetClient
from comfyfleet.pool.events import PoolEvent
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeStats
from comfyfleet.wire.answers import JobDetails, WorkerBody


class Blocked(msgspec.Struct):
    """One block, from its beginning to its end."""

    client_id: str
    workflow_hash: str
    began_at: float
    failures: int
    ended_at: float | None = None


class DemoReport:
    """Collects while the demo runs; prints when it is over."""

    def __init__(self, began_at: float) -> None:
        self.submitted: list[str] = []
        self.pictures: dict[str, bytes] = {}
        self.is_short = False
        """Time was up, or a job that should have followed another was never submitted."""
        self.is_told = False
        """Everything is over and printed; what follows is the hub alone."""
        self.blocks: list[Blocked] = []
        self.records: list[JobDetails] = []
        self._workers: dict[str, WorkerBody] = {}
        self._fakes: dict[str, FakeStats] = {}
        self._began_at = began_at
        self._ended_at = self._began_at
        self._folder = Path()
        self._shown: Path | None = None

    def hear(self, event: PoolEvent) -> None:
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
        self._workers = {worker.id: worker for worker in await client.workers()}
        self._fakes = {name: fake.stats for name, fake in fakes.items()}

    @property
    def completed(self) -> int:
        return sum(record.status == "completed" for record in self.records)

    @property
    def is_complete(self) -> bool:
        """Every job that was to be run was submitted, completed, and its picture is here."""
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
        console.print(self._who_ran_what())
        console.print(self._what_was_blocked())
        console.print(self._what_was_retried(console.width))
        console.print()
        if self._shown is not None:
            console.print(f"{len(self.pictures)} pictures in {self._folder}, one of them:", soft_wrap=True)
            console.print(f"  {self._shown}", soft_wrap=True)
        console.print(f"Took {self._ended_at - self._began_at:.1f} s.")
        self.print_verdict(console)

    def print_verdict(self, console: Console) -> None:
        """The last line: all of them, or how many."""
        for record in self.records:
            if record.status != "completed":
                why = "" if record.error is None else f": {record.error.message}"
                console.print(f"{_label(record, 'title')} {record.status}{why}", style="red", markup=False)
        counted = f"{self.completed} of {count_jobs()} jobs completed"
        if self.is_complete:
            console.print(f"{counted}, nothing lost", style="bold green")
        else:
            console.print(counted, style="bold red")

    def _who_ran_what(self) -> Table:
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
        table.add_column("server", style="bold")
        for heading in (*KINDS, "jobs", "failed", "used", "loads", "swaps", "crashes"):
            table.add_column(heading, justify="right")
        for card in CARDS:
            fake = self._fakes[card.id]
            counts = [ran[card.id, kind] for kind in KINDS]
            numbers = [*counts, sum(counts), failed[card.id]]
            loads = [fake.model_loads, fake.model_swaps, fake.crashes]
            used = f"{self._used(card.id):.0%}"
            table.add_row(card.id, *map(_count, numbers), used, *map(_count, loads))
        return table

    def _used(self, worker_id: str) -> float:
        """Which share of the time it worked."""
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
            return Text("\nNo job had to be tried again.")
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
