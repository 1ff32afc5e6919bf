"""Goal A7: what it costs to decide who runs what.

A pool with stubs that finish at once (`pooling`) measures a whole job from enqueue to completed, in CPU time. A pass
compares no more than its window, so many kinds of jobs cost no more than a window of them. The same pool on the last
source tree before load times decided anything shows what the policy costs; that tree is taken from the history.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import msgspec

from bench._measure import Case, Entry, Plan, entry, in_turn, rate, ratio, ratio_range
from bench._report import ROOT

_FORMER = "cce68b0f68"
_ROUNDS = 3
_WINDOW, _MANY = 32, 1_000
"""Kinds of jobs in the queue. A pass ranks the first jobs of as many lanes as the window has."""


async def cost_of_decisions(plan: Plan, kind: str) -> list[Entry]:
    waiting, slices = plan.size(2_000), plan.repeats(15)
    with tempfile.TemporaryDirectory() as folder:
        former = _former_tree(Path(folder))
        trees = {"now": ROOT} | ({"former": former} if former else {})
        kinds = {"one": (1, 100), "window": (_WINDOW, waiting), "many": (_MANY, waiting)}
        found: dict[str, dict[str, float]] = {}

        def case(name: str, tree: Path, of: tuple[int, int]) -> Case:
            async def measure() -> float:
                found[name] = await _in_process(tree, *of, slices)
                return found[name]["run"]

            return measure

        cases = {
            f"{tree} {name}": case(f"{tree} {name}", path, of)
            for tree, path in trees.items()
            for name, of in kinds.items()
        }
        rates = await in_turn(cases, min(_ROUNDS, plan.rounds))
    per_second = {name: rate(each) for name, each in rates.items()}
    entries = [
        entry(
            "A7a",
            kind,
            f"pool, jobs/s of {_MANY:,} kinds / of {_WINDOW}",
            ratio(rates["now many"], rates["now window"]),
            ">= 0.7",
            "ratio",
            range=ratio_range(rates["now many"], rates["now window"]),
            per_cpu_second=per_second,
            waiting=waiting,
        )
    ]
    if not former:
        return entries
    for part, name, text in (
        ("b", "one", "one kind"),
        ("c", "window", f"{_WINDOW} kinds"),
        ("d", "many", f"{_MANY:,} kinds"),
    ):
        now, before = rates[f"now {name}"], rates[f"former {name}"]
        entries.append(
            entry(
                f"A7{part}",
                kind,
                f"pool, jobs/s of {text} / with the policy before",
                ratio(now, before),
                ">= 0.9",
                "ratio",
                range=ratio_range(now, before),
            )
        )
    return entries


def _former_tree(folder: Path) -> Path | None:
    """The source tree before this policy. None: this clone has no history that goes back so far."""
    archive = subprocess.run(["git", "archive", _FORMER, "src"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        click.echo(
            f"A7b to A7d are left out: commit {_FORMER} is not in this clone. Fetch its whole history.",
            err=True,
        )
        return None
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


async def _in_process(tree: Path, *arguments: int) -> dict[str, float]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.pool_process", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONHASHSEED": "0"},
    )
    answer, errors = await child.communicate()
    if child.returncode:
        raise SystemExit(f"the pool of {tree} ended with exit code {child.returncode}:\n{errors.decode()}")
    return msgspec.json.decode(answer, type=dict[str, float])
