"""Goal 11: a job that comes into an empty lane is told to every profile that may take it; three hundred of them.

The goal is on the store's `enqueue`, the part every such job pays and that grows with the workers. Reported beside it
are a whole `Engine.submit`, which also checks and hashes the workflow, and the first submit of a new class, for which
the engine asks of every worker whether it may take it.
"""

from __future__ import annotations

from typing import Any

from bench._measure import (
    Case,
    Entry,
    Plan,
    clear_memory,
    cpu_s,
    entry,
    in_microseconds,
    in_turn,
    ratio,
    ratio_range,
    settle_memory,
)
from bench._places import Place
from bench._releases import GROUPS, WORKERS, fleet_of, workflow_of
from bench._store import lane
from bench.pooling import twelve_nodes
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.dispatch import LeaseOffer
from comfyfleet.model.ids import LeaseToken, PollId, ProfileKey, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.requirement import Requirements
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.model.workflow import read_needs
from comfyfleet.stores.memory import MemoryStore

_WORKERS = 300


_BOUNDS = {"memory": "<= 0.2", "sqlite": "<= 0.2", "redis": "<= 0.5", "postgres": None}


async def filling_an_empty_lane(plan: Plan, kind: str) -> list[Entry]:
    repeats = plan.repeats(200)
    async with Place(kind) as place:
        cases = {str(count): await _store_case(place, count, repeats) for count in (1, _WORKERS)}
        engines = {}
        if kind == "memory":
            engines = {count: await _engine(count) for count in (1, _WORKERS)}
            cases |= {f"submit {count}": _submit_case(engine, repeats) for count, engine in engines.items()}
        settle_memory()
        await in_turn(cases, 1)
        times = await in_turn(cases, plan.rounds)
        clear_memory()
    more = await releases_in_a_fleet(plan) if kind == "memory" else []
    value = in_microseconds(times[str(_WORKERS)])
    details: dict[str, Any] = {"enqueue_us": {"1 worker": in_microseconds(times["1"]), "300 workers": value}}
    if engines:
        details["submit_us"] = {
            "1 worker": in_microseconds(times["submit 1"]),
            "300 workers": in_microseconds(times[f"submit {_WORKERS}"]),
        }
        details["first_submit_of_a_class_ms"] = {
            "nothing new is named": await _first_submit_ms(engines[_WORKERS], "KSampler", "SaveImage"),
            "a node class is new": await _first_submit_ms(engines[_WORKERS], "Spare"),
        }
    return [
        entry(
            "11",
            kind,
            "enqueue into an empty lane, 300 unequal workers",
            value / 1000,
            _BOUNDS[kind],
            "ms",
            time=place.time,
            **details,
        ),
        *more,
    ]


async def releases_in_a_fleet(plan: Plan) -> list[Entry]:
    """A whole submit, since it is there that a graph is compared with what servers of twenty releases accept."""
    repeats = plan.repeats(200)
    engines = {groups: await fleet_of(MemoryStore(SystemClock()), groups) for groups in (1, GROUPS)}
    cases = {
        f"{what} {groups}": _submit_case(engine, repeats, workflow_of(release))
        for groups, engine in engines.items()
        for what, release in (("any", None), ("own", 0))
    }
    settle_memory()
    await in_turn(cases, 1)
    times = await in_turn(cases, plan.rounds)
    clear_memory()
    us = {name: in_microseconds(found) for name, found in times.items()}
    return [
        entry(
            "11b",
            "memory",
            f"submit into an empty lane, {WORKERS} workers in {GROUPS} signature groups / in one",
            ratio(times[f"own {GROUPS}"], times["own 1"]),
            "<= 1.5",
            "ratio",
            time="CPU time of the process",
            range=ratio_range(times[f"own {GROUPS}"], times["own 1"]),
            submit_us={
                "one group": us["own 1"],
                "20 groups, one accepts it": us[f"own {GROUPS}"],
                "20 groups, all accept it": us[f"any {GROUPS}"],
            },
        ),
        entry(
            "11c",
            "memory",
            f"what {GROUPS} signature groups add to a submit",
            (us[f"own {GROUPS}"] - us["own 1"]) / 1000,
            "<= 0.2",
            "ms",
            time="CPU time of the process",
        ),
    ]


async def _store_case(place: Place, profiles: int, repeats: int) -> Case:
    """Jobs come one at a time; each is leased by another profile and ends before the next comes."""
    rig = await place.rig()
    names = [ProfileKey(f"profile {number}") for number in range(profiles)]
    await rig.add_profiles(*names)
    only = lane(await rig.add_class("class", names))

    async def measure() -> float:
        spent = 0.0
        for number in range(repeats):
            dispatch, job = rig.job(only)
            started = rig.spent_s()
            await rig.store.enqueue(dispatch, job, ())
            spent += rig.spent_s() - started
            offer = LeaseOffer(
                WorkerId("worker"), names[number % profiles], PollId("poll"), LeaseToken("token"), 60, 10
            )
            leased = await rig.lease_next(offer)
            assert leased is not None, "the job that came is there"
            await rig.finish(leased)
        return spent / repeats

    return measure


async def _engine(workers: int) -> Engine:
    """Every worker has all the workflow needs and one model of its own that some waiting class mentions, so that no
    two of them share a profile."""
    engine = Engine(MemoryStore(SystemClock()))
    needs = read_needs(twelve_nodes(1))
    node_classes = needs.node_classes | {"Spare"}
    for number in range(workers):
        own = f"own-{number}.safetensors"
        service = Service("comfyui", models=needs.models | {own}, node_classes=node_classes)
        await engine.register(RegisterWorker(WorkerId(f"worker-{number}"), Capabilities((service,))))
        await engine.submit(Submission(twelve_nodes(1), requirements=Requirements(models=(own,))))
    profiles = {worker.profile for worker in await engine.workers()}
    assert len(profiles) == workers, "the workers are unequal"
    return engine


def _submit_case(engine: Engine, repeats: int, workflow: dict[str, Any] | None = None) -> Case:
    workflow = workflow or twelve_nodes(1)

    async def measure() -> float:
        spent = 0.0
        for _ in range(repeats):
            submission = Submission(workflow)
            started = cpu_s()
            submitted = await engine.submit(submission)
            spent += cpu_s() - started
            await engine.cancel(submitted.job_id)
        return spent / repeats

    return measure


async def _first_submit_ms(engine: Engine, *node_classes: str) -> float:
    workflow = {name: {"class_type": name, "inputs": {"filename_prefix": "picture"}} for name in node_classes}
    started = cpu_s()
    await engine.submit(Submission(workflow))
    return float(f"{(cpu_s() - started) * 1000:.3g}")
