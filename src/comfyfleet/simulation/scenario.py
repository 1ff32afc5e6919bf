"""A scenario: servers, jobs and tenants. It is described by a file, by options, or by the history of a hub.

A file is TOML or JSON with the fields of `ScenarioFile`. What a file does not say has the defaults below.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from comfyfleet.simulation.workload import Stream, checkpoints, draw_jobs, full_rate
from comfyfleet.simulation.world import (
    Cache,
    ServerSpec,
    SimulatedJob,
    SimulatedModel,
    SimulatedWorkflow,
)

MAX_WORKERS = 10_000
MAX_JOBS = 2_000_000
_WORKER_PARTS = re.compile(r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*GB((?:\s+[a-z-]+=[^\s]+)*)", re.IGNORECASE)


class ScenarioMistake(ValueError):
    """The description of a scenario is wrong. The message names the mistake and what would be right."""


class WorkerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` equal servers. With `dies_every_s` each of them dies at random, that often on average, and returns
    `away_s` later with nothing loaded."""

    count: int = 1
    vram_gb: float = 12.0
    speed: float = 1.0
    disk_speed: float = 1.0
    cache: Cache = "last"
    name: str = ""
    dies_every_s: float | None = None
    away_s: float = 120.0


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    load_s: float
    size_gb: float = 6.9


class WorkflowEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    models: tuple[str, ...]
    run_s: float
    weight: float = 1.0


class TenantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`share` is the share of the jobs, `weight` the fair share of the fleet."""

    name: str
    share: float = 1.0
    weight: float = 1.0


class PriorityEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    priority: int
    share: float


class JobStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `load`, `rate` (jobs per second) and `duration_s` says how fast jobs arrive; without them all arrive at
    once."""

    count: int = 64
    load: float | Literal["batch"] | None = None
    rate: float | None = None
    duration_s: float | None = None
    burst: int = 1
    noise: float = 0.08


class ScenarioFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: tuple[WorkerGroup, ...] = (WorkerGroup(4),)
    jobs: JobStream = JobStream()
    workflows: tuple[WorkflowEntry, ...] = ()
    models: tuple[ModelFile, ...] = ()
    model_count: int = 7
    """How many checkpoints are generated, if the file lists no workflows. Seven are those that were measured."""
    skew: float | None = None
    """The exponent of Zipf's law for their popularity."""
    cold_ratio: float | None = None
    tenants: tuple[TenantEntry, ...] = ()
    priorities: tuple[PriorityEntry, ...] = ()
    seed: int = 0


class Scenario(msgspec.Struct, frozen=True):
    servers: tuple[ServerSpec, ...]
    jobs: tuple[SimulatedJob, ...]
    weights: dict[str, float] = {}
    """The fair share of each tenant. Empty: tenants do not matter."""

    def fresh_jobs(self) -> list[SimulatedJob]:
        """A copy for one run, which fills in what became of each job."""
        return [msgspec.structs.replace(job) for job in self.jobs]


def read_scenario(path: Path) -> ScenarioFile:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ScenarioMistake(f"cannot read {path}: {error.strerror}") from error
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(text, type=ScenarioFile)
        return msgspec.convert(tomllib.loads(text.decode()), ScenarioFile)
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # A validation error is a decode error that names the field.
        raise ScenarioMistake(f"{path}: {error}. docs/simulate.md has an example.") from error


def read_worker(text: str) -> WorkerGroup:
    """A group from text such as `24GB`, `2x24GB speed=2 disk=0.5 cache=lru`."""
    found = _WORKER_PARTS.fullmatch(text.strip())
    if found is None:
        raise ScenarioMistake(f"{text!r} is not a worker: write 24GB, or 2x24GB speed=2 disk=0.5 cache=lru")
    values: dict[str, object] = {"count": int(found[1] or 1), "vram_gb": float(found[2])}
    names = {"speed": "speed", "disk": "disk_speed", "cache": "cache", "name": "name"}
    for part in found[3].split():
        name, _, value = part.partition("=")
        if name not in names:
            raise ScenarioMistake(f"{text!r}: {name!r} is not known; known are {', '.join(names)}")
        values[names[name]] = value
    try:
        return msgspec.convert(values, WorkerGroup, strict=False)
    except msgspec.ValidationError as error:
        raise ScenarioMistake(f"{text!r}: {error}") from error


def build_scenario(file: ScenarioFile) -> Scenario:
    workflows = _workflows(file)
    jobs = file.jobs
    _check_count("jobs", jobs.count, MAX_JOBS)
    tenants, priorities = file.tenants, file.priorities
    _check_positive(
        ("burst", jobs.burst),
        ("load", jobs.load if isinstance(jobs.load, float | int) else None),
        ("rate", jobs.rate),
        ("duration_s", jobs.duration_s),
        *(("share of a tenant", each.share) for each in tenants),
        *(("weight of a tenant", each.weight) for each in tenants),
        *(("share of a priority", each.share) for each in priorities),
    )
    if jobs.noise < 0:
        raise ScenarioMistake(f"noise is {jobs.noise:g}: it must not be negative")
    plain = _servers(file.workers)
    rate = _rate(jobs, workflows, plain)
    stream = Stream(
        jobs.count,
        rate,
        jobs.burst,
        tuple((each.name, each.share) for each in tenants),
        tuple((each.priority, each.share) for each in priorities),
        jobs.noise,
    )
    drawn = tuple(draw_jobs(workflows, stream, file.seed))
    last_s = drawn[-1].arrives_s + sum(job.workflow.run_s + job.workflow.load_s for job in drawn) / len(plain)
    servers = _with_absences(plain, file.workers, last_s, file.seed)
    weights = {each.name: each.weight for each in tenants} if len(tenants) > 1 else {}
    return checked(Scenario(servers, drawn, weights))


def with_workers(scenario: Scenario, groups: Sequence[WorkerGroup]) -> Scenario:
    """The scenario with more servers."""
    more = _servers(groups, [server.name for server in scenario.servers])
    return msgspec.structs.replace(scenario, servers=scenario.servers + more)


def checked(scenario: Scenario) -> Scenario:
    """Refuses a scenario in which a job could never run."""
    if not scenario.servers:
        raise ScenarioMistake("there are no workers: add one, such as --add-worker 24GB")
    for workflow in {job.workflow.name: job.workflow for job in scenario.jobs}.values():
        if not any(server.fits(workflow) for server in scenario.servers):
            largest = max(server.vram_gb for server in scenario.servers)
            raise ScenarioMistake(
                f"workflow {workflow.name!r} needs {workflow.largest_gb:g} GB, "
                f"and the largest worker has {largest:g} GB: add one, such as --add-worker {workflow.largest_gb:g}GB"
            )
    return scenario


def _rate(
    jobs: JobStream, workflows: Sequence[SimulatedWorkflow], servers: Sequence[ServerSpec]
) -> float | None:
    given = [name for name in ("load", "rate", "duration_s") if getattr(jobs, name) not in (None, "batch")]
    if len(given) > 1:
        raise ScenarioMistake(f"{' and '.join(given)} both say how fast jobs arrive: give one of them")
    if isinstance(jobs.load, float | int):
        return jobs.load * full_rate(workflows, servers)
    return jobs.count / jobs.duration_s if jobs.duration_s else jobs.rate


def _workflows(file: ScenarioFile) -> tuple[SimulatedWorkflow, ...]:
    if not file.workflows:
        if file.models:
            raise ScenarioMistake("models without workflows: add a [[workflows]] that names them")
        _check_count("models", file.model_count, 1_000)
        return checkpoints(file.model_count, skew=file.skew, cold_ratio=file.cold_ratio)
    models = {each.name: SimulatedModel(each.name, each.size_gb, each.load_s) for each in file.models}
    found = []
    for entry in file.workflows:
        unknown = [name for name in entry.models if name not in models]
        if unknown:
            raise ScenarioMistake(
                f"workflow {entry.name!r} names the model {unknown[0]!r}, which no [[models]] describes; "
                f"known: {', '.join(models) or 'none'}"
            )
        _check_positive(
            (f"run_s of {entry.name!r}", entry.run_s), (f"weight of {entry.name!r}", entry.weight)
        )
        found.append(
            SimulatedWorkflow(
                entry.name, tuple(models[name] for name in entry.models), entry.run_s, entry.weight
            )
        )
    return tuple(found)


def _servers(groups: Sequence[WorkerGroup], taken: Sequence[str] = ()) -> tuple[ServerSpec, ...]:
    names, servers = set(taken), list[ServerSpec]()
    for group in groups:
        _check_count("workers", group.count, MAX_WORKERS)
        _check_positive(
            ("vram_gb", group.vram_gb),
            ("speed", group.speed),
            ("disk_speed", group.disk_speed),
            ("dies_every_s", group.dies_every_s),
            ("away_s", group.away_s),
        )
        for number in range(group.count):
            name = group.name or "gpu"
            if not group.name or group.count > 1 or name in names:
                place = number + 1
                while f"{name}-{place}" in names:
                    place += 1
                name = f"{name}-{place}"
            names.add(name)
            servers.append(ServerSpec(name, group.vram_gb, group.speed, group.disk_speed, group.cache))
    _check_count("workers", len(servers), MAX_WORKERS)
    return tuple(servers)


def _with_absences(
    servers: Sequence[ServerSpec], groups: Sequence[WorkerGroup], until_s: float, seed: int
) -> tuple[ServerSpec, ...]:
    rng, found = random.Random(seed + 1), list[ServerSpec]()
    each_group = [group for group in groups for _ in range(group.count)]
    for server, group in zip(servers, each_group, strict=True):
        absences, at_s = list[tuple[float, float]](), 0.0
        while group.dies_every_s is not None:
            at_s += rng.expovariate(1 / group.dies_every_s)
            if at_s > until_s:
                break
            absences.append((at_s, at_s + group.away_s))
            at_s += group.away_s
        found.append(msgspec.structs.replace(server, absences=tuple(absences)))
    return tuple(found)


def _check_positive(*values: tuple[str, float | None]) -> None:
    for name, value in values:
        if value is not None and not 0 < value < float("inf"):
            raise ScenarioMistake(f"{name} is {value:g}: it must be more than 0")


def _check_count(what: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise ScenarioMistake(f"{count} {what}: between 1 and {most:,} can be simulated")
