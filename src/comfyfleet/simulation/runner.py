"""Runs one scenario under several policies and measures each.

A variant is a policy of `policies.py`, or the engine with some rules. Every variant gets the same jobs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from comfyfleet.policy.rules import Rules
from comfyfleet.simulation.engine_run import run_engine
from comfyfleet.simulation.metrics import SimulationRun
from comfyfleet.simulation.policies import ENGINE, POLICIES
from comfyfleet.simulation.queue_simulation import QueueSimulation
from comfyfleet.simulation.scenario import Scenario, ScenarioMistake


class Variant(msgspec.Struct, frozen=True):
    label: str
    policy: str = ENGINE
    rules: Rules = Rules()
    """For the engine."""


def variants_of(policies: Sequence[str], patience: Sequence[float] = ()) -> list[Variant]:
    """`patience`: the engine once for each value, in loads, instead of once with its default."""
    found = []
    for policy in dict.fromkeys(policies):
        if policy == ENGINE and patience:
            found += [
                Variant(f"{ENGINE}, patience {value:g}", rules=_rules(value))
                for value in dict.fromkeys(patience)
            ]
        else:
            found.append(Variant(policy, policy))
    return found


def _rules(patience: float) -> Rules:
    try:
        return msgspec.convert({"patience": patience}, Rules)
    except msgspec.ValidationError as error:
        raise ScenarioMistake(f"patience {patience:g}: {error}") from error


def run_variant(scenario: Scenario, variant: Variant, seed: int = 0) -> SimulationRun:
    began, jobs = time.perf_counter(), scenario.fresh_jobs()
    if variant.policy == ENGINE:
        run_engine(scenario.servers, jobs, rules=variant.rules, weights=scenario.weights, seed=seed)
    else:
        QueueSimulation(scenario.servers, jobs, POLICIES[variant.policy](), scenario.weights).run()
    return SimulationRun(
        label=variant.label,
        servers=scenario.servers,
        jobs=tuple(jobs),
        unfinished=sum(not job.has_ended for job in jobs),
        took_s=time.perf_counter() - began,
    )
