"""`comfyfleet simulate`: a fleet on simulated time, to compare policies and to ask what would happen if.

This module reads the flags and prints; `simulation/` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.types import StringParamType

from comfyfleet.cli.command import GroupedOption, command
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.options import HUB_SETTINGS, as_json, settings
from comfyfleet.cli.output import echo, print_json, print_table

if TYPE_CHECKING:
    from comfyfleet.client.client import FleetClient
    from comfyfleet.simulation.history import PastJob, PastWorker
    from comfyfleet.simulation.metrics import SimulationRun
    from comfyfleet.simulation.scenario import Scenario, WorkerGroup

F = TypeVar("F", bound=Callable[..., Any])

_POLICY_NAMES = ("first-come", "shortest-queue", "least-loaded", "selectivity", "overtaking", "comfyfleet")
_MAX_HISTORY = 200_000


class _Load(StringParamType):
    """A share of what the fleet can do, or `batch`."""

    name = "load"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "batch":
            return value
        try:
            load = float(value)
        except ValueError:
            load = 0.0
        if not 0 < load < 1000:
            self.fail(f"{value!r} is neither batch nor a number above 0, such as 0.8", param, ctx)
        return load


def _option(group: str, *names: str, **more: Any) -> Callable[[F], F]:
    return click.option(*names, cls=GroupedOption, group=group, **more)


_FLEET, _JOBS, _WHAT_IF, _FAULTS = "Servers", "Jobs", "A hub's own jobs", "Faults"


@command("simulate")
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(_POLICY_NAMES),
    metavar="NAME",
    help="Simulate this policy: first-come, shortest-queue, least-loaded, selectivity, overtaking, or comfyfleet, "
    "which is the real engine. Repeatable. Default: all.",
)
@click.option(
    "--patience",
    multiple=True,
    type=click.FloatRange(0),
    metavar="LOADS",
    help="The engine's patience, in model loads. Repeatable, to compare; 0 is first come, first served.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random draws."
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Also write a page with charts. It is one file and loads nothing.",
)
@as_json
@_option(
    _FLEET, "--workers", type=click.IntRange(1, 10_000), metavar="N", help="Equal servers.  [default: 4]"
)
@_option(
    _FLEET,
    "--add-worker",
    "more",
    multiple=True,
    metavar="TEXT",
    help="Compare with a fleet that has this server too: 24GB, or '2x24GB speed=2 disk=0.5 cache=lru'. Repeatable.",
)
@_option(_JOBS, "--jobs", type=click.IntRange(1, 2_000_000), metavar="N", help="Jobs.  [default: 64]")
@_option(_JOBS, "--models", type=click.IntRange(1, 1_000), metavar="N", help="Checkpoints.  [default: 7]")
@_option(
    _JOBS,
    "--load",
    type=_Load(),
    metavar="SHARE",
    help="How fast jobs arrive: 0.8 is 80 % of what the servers could do with all models loaded; batch is all at "
    "once.  [default: batch]",
)
@_option(
    _JOBS, "--hours", type=click.FloatRange(0, min_open=True), help="Spread the jobs over so many hours."
)
@_option(_JOBS, "--burst", type=click.IntRange(1), metavar="N", help="So many jobs of one model together.")
@_option(
    _JOBS,
    "--cold-ratio",
    type=click.FloatRange(1),
    metavar="TIMES",
    help="How many times as long as a warm run a cold one takes.",
)
@_option(
    _JOBS, "--skew", type=click.FloatRange(0), help="Popularity of the models by Zipf's law: 0 is equal."
)
@_option(_WHAT_IF, "--from-hub", is_flag=True, help="Take servers and jobs from what a hub has run.")
@_option(
    _WHAT_IF,
    "--since",
    type=click.FloatRange(0, min_open=True),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Completed jobs that were submitted in so many hours.",
)
@_option(
    _FAULTS,
    "--faults",
    type=click.IntRange(1),
    metavar="SEEDS",
    help="Instead: play so many random worlds with lost messages, crashes and deaths, and check every promise.",
)
@_option(
    _FAULTS,
    "--steps",
    type=click.IntRange(10),
    default=2_000,
    show_default=True,
    metavar="N",
    help="Messages of each such world.",
)
@settings(*HUB_SETTINGS)
def simulate_command(
    file: Path | None,
    policies: tuple[str, ...],
    patience: tuple[float, ...],
    seed: int,
    html: Path | None,
    as_json: bool,
    more: tuple[str, ...],
    from_hub: bool,
    since: float,
    faults: int | None,
    steps: int,
    **flags: Any,
) -> None:
    """Simulate a fleet: the real engine on simulated time, beside other ways to share out jobs.

    A day of thousands of servers takes minutes, and a seed repeats it exactly. FILE (TOML or JSON) describes servers,
    models, jobs and tenants; docs/simulate.md has an example.
    """
    generated = {name: flags.pop(name) for name in ("workers", "jobs", "models", "load", "hours", "burst")}
    generated |= {name: flags.pop(name) for name in ("cold_ratio", "skew")}
    given = [f"--{name.replace('_', '-')}" for name, value in generated.items() if value is not None]
    if faults is not None:
        _refuse("--faults", given, file, from_hub, html)
        _simulate_faults(faults, steps, seed, as_json)
        return
    if from_hub:
        _refuse("--from-hub", given, file)
    from comfyfleet.simulation.runner import variants_of
    from comfyfleet.simulation.scenario import ScenarioMistake, read_worker

    try:
        groups = [read_worker(text) for text in more]
        variants = variants_of(policies or _POLICY_NAMES, patience)
        recorded: list[SimulationRun] = []
        if from_hub:
            scenario, recorded, title = _read_hub(flags, since)
        else:
            scenario, title = _generated(file, generated, seed)
        outcomes = recorded + _run_all(scenario, variants, groups, seed)
    except ScenarioMistake as mistake:
        raise CommandFailed(str(mistake), ExitCode.USAGE) from mistake
    _print(outcomes, title, html, as_json=as_json)


def _refuse(flag: str, given: Sequence[str], *others: object) -> None:
    named = [*given, *("FILE" if isinstance(other, Path) else "--from-hub" for other in others if other)]
    if named:
        raise click.UsageError(f"{flag} does not go together with {named[0]}: leave one of them out.")


def _generated(file: Path | None, generated: dict[str, Any], seed: int) -> tuple[Scenario, str]:
    import msgspec

    from comfyfleet.simulation.scenario import ScenarioFile, WorkerGroup, build_scenario, read_scenario

    description = ScenarioFile() if file is None else read_scenario(file)
    jobs = {"count": generated["jobs"], "load": generated["load"], "burst": generated["burst"]}
    if generated["hours"] is not None:
        jobs["duration_s"] = generated["hours"] * 3600
    if generated["load"] is not None or generated["hours"] is not None:
        # The flag replaces what the file says about the same thing.
        jobs |= {name: jobs.get(name) for name in ("load", "duration_s")} | {"rate": None}
        changed = msgspec.structs.replace(description.jobs, load=None, rate=None, duration_s=None)
        description = msgspec.structs.replace(description, jobs=changed)
    values: dict[str, Any] = {
        "model_count": generated["models"],
        "skew": generated["skew"],
        "cold_ratio": generated["cold_ratio"],
        "workers": None if generated["workers"] is None else (WorkerGroup(generated["workers"]),),
        "seed": seed or None,
        "jobs": msgspec.structs.replace(
            description.jobs, **{name: value for name, value in jobs.items() if value is not None}
        ),
    }
    changes = {name: value for name, value in values.items() if value is not None}
    scenario = build_scenario(msgspec.structs.replace(description, **changes))
    return scenario, f"{len(scenario.jobs):,} jobs on {len(scenario.servers):,} servers, seed {seed}"


def _run_all(
    scenario: Scenario, variants: Sequence[Any], groups: Sequence[WorkerGroup], seed: int
) -> list[SimulationRun]:
    import msgspec

    from comfyfleet.simulation.runner import run_variant
    from comfyfleet.simulation.scenario import with_workers

    outcomes = [run_variant(scenario, variant, seed) for variant in variants]
    if groups:
        larger = with_workers(scenario, groups)
        count = len(larger.servers) - len(scenario.servers)
        outcomes += [
            msgspec.structs.replace(
                run_variant(larger, variant, seed), label=f"{variant.label}, {count} more"
            )
            for variant in variants
        ]
    return outcomes


def _print(outcomes: list[SimulationRun], title: str, html: Path | None, *, as_json: bool) -> None:
    from comfyfleet.simulation.metrics import measure
    from comfyfleet.simulation.report import HEADINGS, html_page, notes_on, table_rows

    if html is not None:
        try:
            html.write_text(html_page(outcomes, "Simulated fleet", title), encoding="utf-8")
        except OSError as error:
            raise CommandFailed(f"cannot write {html}: {error.strerror}. Choose another --html.") from error
    if as_json:
        print_json([{"policy": outcome.label, "measured": measure(outcome)} for outcome in outcomes])
        return
    echo(title)
    print_table(HEADINGS, table_rows(outcomes), empty="")
    for note in notes_on(outcomes):
        echo(note, wraps=True)
    if html is not None:
        echo(f"The charts are in {html}.", wraps=True)


# a hub's own jobs


def _read_hub(flags: dict[str, Any], since: float) -> tuple[Scenario, list[SimulationRun], str]:
    import time

    from comfyfleet.cli.hub_connection import ask
    from comfyfleet.simulation.history import read_history

    after = time.time() - since * 3600

    async def read(client: FleetClient) -> tuple[list[PastJob], list[PastWorker]]:
        return await _past_jobs(client, after), await _past_workers(client)

    past, workers = ask(flags, read)
    history = read_history(past, workers)
    scenario = history.scenario
    title = f"{len(past):,} jobs of the last {since:g} hours on {len(scenario.servers):,} servers of the hub"
    return scenario, [history.recorded], title


async def _past_jobs(client: FleetClient, after: float) -> list[PastJob]:
    from comfyfleet.simulation.history import PastJob

    found = []
    async for job in client.every_job(status="completed", submitted_after=after, limit=1_000):
        if job.worker_id is not None and job.started_at is not None and job.completed_at is not None:
            found.append(
                PastJob(
                    job.workflow_hash,
                    job.worker_id,
                    job.submitted_at,
                    job.started_at,
                    job.completed_at,
                    job.tenant,
                    job.priority,
                )
            )
        if len(found) >= _MAX_HISTORY:
            echo(f"Only the newest {_MAX_HISTORY:,} jobs are simulated. Give a shorter --since.", err=True)
            break
    return found


async def _past_workers(client: FleetClient) -> list[PastWorker]:
    from comfyfleet.simulation.history import PastWorker

    found = []
    for worker in await client.workers():
        if worker.status.value == "offline":
            continue
        capabilities = (await client.worker(worker.id)).capabilities
        memory_gb = 0.0 if capabilities is None else capabilities.hardware.gpu.memory_gb
        found.append(PastWorker(worker.id, memory_gb, worker.slots) if memory_gb else PastWorker(worker.id))
    return found


# faults


def _simulate_faults(seeds: int, steps: int, first: int, as_json: bool) -> None:
    from comfyfleet.simulation.faults import run_world

    violations: list[dict[str, Any]] = []
    messages = jobs = 0
    for seed in range(first, first + seeds):
        found = run_world(seed, steps)
        messages, jobs = messages + found.steps, jobs + found.jobs
        for text in found.violations:
            violations.append({"seed": seed, "violation": text})
            echo(f"seed {seed}: {text}", err=True)
    if as_json:
        print_json({"seeds": seeds, "steps": messages, "jobs": jobs, "violations": violations})
    else:
        echo(f"{seeds:,} seeds, {messages:,} steps, {jobs:,} jobs: {len(violations)} violations")
        if violations:
            echo(
                f"To replay one: comfyfleet simulate --faults 1 --steps {steps} --seed {violations[0]['seed']}",
                err=True,
            )
    if violations:
        raise SystemExit(ExitCode.FAILED)
