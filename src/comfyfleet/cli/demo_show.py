"""What the demo shows while it runs: live bars in a terminal, plain lines elsewhere.

Both tell the same news; `Narrator` turns an event into a line, or into nothing where it is not news.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from comfyfleet.cli.demo_fleet import CARDS, KINDS, stories, workflow_of
from comfyfleet.model.workflow import hash_workflow
from comfyfleet.pool.events import PoolEvent

_FRAME_S = 0.1
_NEWS_LINES = 9
_WIDE = 100
_STATE_STYLES = {"online": "green", "offline": "bold red", "reconnecting": "yellow"}


class Show(Protocol):
    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def hear(self, event: PoolEvent) -> None: ...
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
        told = self._told(event)
        return None if told is None else (f"{self.elapsed_s(event.at):5.1f} s  {told[0]}", told[1])

    def _told(self, event: PoolEvent) -> tuple[str, str] | None:
        title = event.metadata.get("title", "")
        server = event.client_id
        match event.name:
            case "job:completed":
                return f"{server}  completed {title}", "green"
            case "job:failed" if event.failure is not None:
                return f"{server}  {title} failed: {shortened(event.failure.message)}", "red"
            case "job:retrying":
                return f"       {title} will be tried again", "yellow"
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
    """One line of at most so many characters."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


class PlainShow:
    """A line for each piece of news: for logs, pipes and tests."""

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

    def hear(self, event: PoolEvent) -> None:
        told = self._narrator.line(event)
        if told is not None:
            self._print(told[0], told[1])

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(line, style=style, markup=False, soft_wrap=True)

    async def keep_drawing(self) -> None:
        """There is nothing to draw between two lines."""


class _Row:
    """What is known of a server right now."""

    __slots__ = ("blocked", "done", "job_id", "percentage", "state", "title")

    def __init__(self) -> None:
        self.state = "online"
        self.job_id: str | None = None
        self.title = ""
        self.percentage = 0.0
        self.done = 0
        self.blocked: set[str] = set()


class LiveShow:
    """The fleet as a table that moves, and the last pieces of news below it."""

    def __init__(self, console: Console, narrator: Narrator) -> None:
        self._narrator = narrator
        self._is_wide = console.width >= _WIDE
        self._kinds = kinds_by_hash()
        self._rows = {card.id: _Row() for card in CARDS}
        self._progress: deque[Text] = deque(maxlen=_NEWS_LINES)
        self._queued = self._completed = self._retries = 0
        self._total = count_jobs()
        # Drawn by a task of the same loop: no other thread reads what the events change.
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

    def hear(self, event: PoolEvent) -> None:
        told = self._narrator.line(event)
        if told is not None:
            self._progress.append(Text(told[0], style=told[1], no_wrap=True, overflow="ellipsis"))
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
        columns: list[dict[str, Any]] = [
            {"header": "server", "style": "bold"},
            {"header": "card", "style": "dim"},
            {"header": "state"},
            {"header": "runs", "min_width": 10, "no_wrap": True},
            {"header": "", "width": 22},
            {"header": "done", "justify": "right"},
            {"header": "blocked for", "style": "magenta", "no_wrap": True},
        ]
        for column in columns:
            table.add_column(**column)
        for card in CARDS:
            row = self._rows[card.id]
            bar = ProgressBar(total=100, completed=row.percentage, width=22) if row.job_id else Text("")
            table.add_row(
                card.id,
                card.description if self._is_wide else f"{card.vram_gb:g} GB",
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
            ProgressBar(total=self._total, completed=self._completed, width=24),
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
            *self._progress,
        )
