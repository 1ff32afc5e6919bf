"""`python -m bench`: measures, prints the scoreboard, writes it to bench/results.json, docs/benchmarks.md and pictures.

`--goal N` and `--store NAME` measure a part and keep the other entries of the file; `--all-peers` sets more queues
beside ours; `--quick` only shows that everything runs, and writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import click
from rich.console import Console
from rich.table import Table
from tests._home import own_home

from bench._measure import STORES, Entry, Plan
from bench._report import draw, write
from bench.answering import submit_and_poll
from bench.auditing import audit_of_several_hubs
from bench.beside_redis import idle_to_start, redis_throughput
from bench.client_calls import share_of_the_server
from bench.deciding import cost_of_decisions
from bench.embedded import durable_cycles
from bench.filling import filling_an_empty_lane
from bench.leasing import behind_misfits, flat_leases
from bench.model_loads import batch_with_many_checkpoints
from bench.pooling import pool_throughput
from bench.random_worlds import random_worlds
from bench.restarting import restart_with_a_backlog
from bench.simulated_fleets import (
    arrivals,
    batch,
    estimates,
    promises,
    slow_loads,
    unequal_cards,
)
from bench.streaming import watching
from bench.terms import leases_with_terms
from bench.waiting_memory import memory_of_waiting

# Each goal, on which stores, by what.
GOALS: dict[str, tuple[tuple[str, ...], Callable[[Plan, str], Awaitable[list[Entry]]]]] = {
    "A1": (("memory",), batch),
    "A2": (("memory",), arrivals),
    "A3": (("memory",), slow_loads),
    "A4": (("memory",), promises),
    "A5": (("memory",), unequal_cards),
    "A6": (("memory",), estimates),
    "A7": (("memory",), cost_of_decisions),
    "A8": (("memory",), random_worlds),
    "1": (STORES, flat_leases),
    "2": (STORES, behind_misfits),
    "3": (("redis",), redis_throughput),
    "4": (("redis",), share_of_the_server),
    "5": (("sqlite",), durable_cycles),
    "6": (("memory",), pool_throughput),
    "7": (("redis",), idle_to_start),
    "8": (("sqlite",), submit_and_poll),
    "9": (("sqlite",), watching),
    "10": (STORES, memory_of_waiting),
    "11": (STORES, filling_an_empty_lane),
    "12": (("sqlite",), restart_with_a_backlog),
    "13": (("postgres",), leases_with_terms),
    "14": (("redis",), audit_of_several_hubs),
    "15": (("memory",), batch_with_many_checkpoints),
}


@click.command()
@click.option(
    "--goal", "goals", multiple=True, type=click.Choice(list(GOALS)), help="Only this one; may be repeated."
)
@click.option(
    "--store", "stores", multiple=True, type=click.Choice(STORES), help="Only on this one; may be repeated."
)
@click.option(
    "--all-peers", is_flag=True, help="Goals 3 and 7 beside arq, SAQ, dramatiq, Celery and RQ as well."
)
@click.option("--quick", is_flag=True, help="Small sizes, rough figures, nothing written.")
def main(goals: tuple[str, ...], stores: tuple[str, ...], all_peers: bool, quick: bool) -> None:
    """Measures the product against its goals."""
    console = Console()
    measured: list[Entry] = []
    for goal in goals or tuple(GOALS):
        for store in GOALS[goal][0]:
            if stores and store not in stores:
                continue
            started = time.monotonic()
            with console.status(f"goal {goal}, {store}"):
                found = asyncio.run(_measure(goal, store, Plan(quick, all_peers)))
            console.print(f"goal {goal}, {store}: {time.monotonic() - started:.0f} s", style="dim")
            measured += found
            if not quick:
                # At once: a later goal that breaks takes nothing of this one along.
                write(found)
    console.print(_table(measured))
    for each in measured:
        details = ", ".join(f"{name} {value}" for name, value in each.details.items())
        console.print(
            f"{each.goal} {each.store}: {details}", style="dim", highlight=False, soft_wrap=True, markup=False
        )
    if not quick:
        draw()


async def _measure(goal: str, store: str, plan: Plan) -> list[Entry]:
    return await GOALS[goal][1](plan, store)


def _table(entries: list[Entry]) -> Table:
    table = Table("goal", "store", "what", "value", "bound", "unit", "holds")
    for each in entries:
        holds = {True: "yes", False: "[red]no[/red]", None: ""}[each.holds]
        table.add_row(
            each.goal, each.store, each.name, f"{each.value:g}", each.bound or "reported", each.unit, holds
        )
    return table


if __name__ == "__main__":
    # A hub that its user runs here is neither met nor changed.
    with own_home(is_guarded=False):
        main()
