"""`python -m chaos`: plays every part that has no result yet, writes chaos/results.json, and prints what was found.

A part that ends writes its entry at once, so an interrupted run goes on where it was. `--part NAME` plays one,
`--fresh` plays again what was played, `--quick` shows in a minute or two that everything runs, and writes nothing.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from tests._home import own_home

from chaos.plan import PARTS, QUICK, SEED, Entry, plan_of, play

RESULTS = Path(__file__).with_name("results.json")


@click.command()
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(list(PARTS)), help="Only this one; may be repeated."
)
@click.option("--fresh", is_flag=True, help="Play again what has a result.")
@click.option("--quick", is_flag=True, help="Tiny sizes, nothing written.")
@click.option("--seed", default=SEED, show_default=True, help="What the random moments are drawn from.")
def main(parts: tuple[str, ...], fresh: bool, quick: bool, seed: int) -> None:
    """Kills what there is, throws rubbish at a hub, and checks that nothing was lost, doubled, stale or missed."""
    console = Console()
    if not console.is_terminal:
        console.width = 140
    known = {} if quick else read_results()
    sizes = QUICK if quick else PARTS
    found: list[Entry] = []
    for part in parts or tuple(PARTS):
        entry = known.get(part)
        if entry is not None and entry.plan == plan_of(sizes[part], seed) and entry.is_clean and not fresh:
            console.print(f"{part}: has its result; --fresh plays it again", style="dim")
        else:
            entry = _play(console, part, seed, quick)
            if not quick:
                # Read anew: another part may have been played beside this one.
                write_results(read_results() | {part: entry})
        found.append(entry)
    console.print(_table(found))
    for entry in found:
        causes = [f"{count} by {cause}" for cause, count in entry.explained.items()]
        if entry.unexplained:
            causes.append(f"{entry.unexplained} by nothing")
        if causes:
            console.print(f"{entry.part}: executed again {', '.join(causes)}", style="dim", highlight=False)
        if entry.node_executions:
            console.print(f"{entry.part}: {entry.node_executions} executions in Node.js", style="dim")
        if entry.memory_mb[1]:
            early, late = entry.memory_mb
            told = ", ".join(f"{count} × {status}" for status, count in entry.statuses.items())
            console.print(
                f"{entry.part}: {told}; {early:.0f} MB, then {late:.0f} MB", style="dim", highlight=False
            )
        if entry.grown_mb:
            told = ", ".join(f"the {name} grew by {more:.0f} MB" for name, more in entry.grown_mb.items())
            console.print(f"{entry.part}: {told}", style="dim", highlight=False)
        for cell in entry.cells:
            console.print(f"{entry.part}: {cell}", style="dim", highlight=False)
        if entry.without_node:
            console.print(f"{entry.part}: without Node.js: {entry.without_node}", style="yellow")
        for line in entry.wrong:
            console.print(f"{entry.part}: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(0 if all(entry.is_clean for entry in found) else 1)


def _play(console: Console, part: str, seed: int, quick: bool) -> Entry:
    size = (QUICK if quick else PARTS)[part]
    began = time.monotonic()
    with console.status(part) as status:
        entry = play(part, size, seed, lambda words: status.update(f"{part}: {words}"))
    entry = msgspec.structs.replace(entry, seconds=round(time.monotonic() - began, 1))
    verdict = "clean" if entry.is_clean else "NOT clean"
    console.print(f"{part}: {verdict}, {entry.seconds:.0f} s", style="dim" if entry.is_clean else "red")
    return entry


def read_results() -> dict[str, Entry]:
    if not RESULTS.exists():
        return {}
    return {entry.part: entry for entry in msgspec.json.decode(RESULTS.read_bytes(), type=list[Entry])}


def write_results(entries: dict[str, Entry]) -> None:
    ordered = [entries[part] for part in PARTS if part in entries]
    text = msgspec.json.format(msgspec.json.encode(ordered), indent=2)
    RESULTS.write_bytes(text + b"\n")


def _table(entries: list[Entry]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("part")
    for name in (
        "jobs",
        "engine",
        "hub",
        "worker",
        "server",
        "zombies",
        "cuts",
        "streams",
        "thrown",
        "lost",
        "mixed",
        "twice",
        "stale",
        "doubled",
        "missed",
    ):
        table.add_column(name, justify="right")
    table.add_column("seconds", justify="right")
    for entry in entries:
        kills = [str(entry.kills.get(role, 0) or "") for role in ("engine", "hub", "worker", "server")]
        thrown = entry.requests + entry.frames
        sizes = [str(each or "") for each in (entry.zombies, entry.cuts, entry.streams, thrown)]
        zeros = [str(entry.lost), str(entry.mixed), str(entry.completed_twice), str(entry.stale_accepted)]
        zeros += [str(entry.duplicate_executions), str(entry.missed)]
        table.add_row(entry.part, str(entry.jobs), *kills, *sizes, *zeros, f"{entry.seconds:.0f}")
    return table


if __name__ == "__main__":
    # A hub that its user runs here is neither met nor changed.
    with own_home():
        main()
