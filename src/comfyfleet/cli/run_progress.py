"""What `comfyfleet run` shows on standard error: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from comfyfleet.cli.printing import echo, escaped
from comfyfleet.pool.events import PoolEvent
from comfyfleet.pool.records import offline_words


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
