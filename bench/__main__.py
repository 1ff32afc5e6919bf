"""`python -m bench`: measures, prints the scoreboard, writes it to bench/results.json and docs/benchmarks.md.

`--goal N` measures one goal and keeps the other entries of the file; `--quick` only shows that everything runs, and
writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import click
from rich.console import Console
from rich.table import Table

from bench._measure import Entry, Plan
from bench._report import write
from bench.filling import filling_an_empty_lane
from bench.leasing import behind_misfits, flat_leases
from bench.pooling import pool_throughput
from bench.waiting_memory import memory_of_waiting

GOALS: dict[str, Callable[[Plan], Awaitable[list[Entry]]]] = {
    "1": flat_leases,
    "2": behind_misfits,
    "6": pool_throughput,
    "10": memory_of_waiting,
    "11": filling_an_empty_lane,
}


@click.command()
@click.option(
    "--goal", "goals", multiple=True, type=click.Choice(list(GOALS)), help="Only this one; may be repeated."
)
@click.option("--quick", is_flag=True, help="Small sizes, rough figures, nothing written.")
def main(goals: tuple[str, ...], quick: bool) -> None:
    """Measures the product against its goals."""
    console = Console()
    measured: list[Entry] = []
    for goal in goals or tuple(GOALS):
        started = time.monotonic()
        with console.status(f"goal {goal}"):
            measured += asyncio.run(_measure(goal, Plan(quick)))
        console.print(f"goal {goal}: {time.monotonic() - started:.0f} s", style="dim")
    console.print(_table(measured))
    for each in measured:
        details = ", ".join(f"{name} {value}" for name, value in each.details.items())
        console.print(f"{each.goal}: {details}", style="dim", highlight=False, soft_wrap=True, markup=False)
    if not quick:
        write(measured)


async def _measure(goal: str, plan: Plan) -> list[Entry]:
    return await GOALS[goal](plan)


def _table(entries: list[Entry]) -> Table:
    table = Table("goal", "what", "value", "bound", "unit", "holds")
    for each in entries:
        holds = "yes" if each.holds else "[red]no[/red]"
        table.add_row(each.goal, each.name, f"{each.value:g}", each.bound, each.unit, holds)
    return table


if __name__ == "__main__":
    main()
