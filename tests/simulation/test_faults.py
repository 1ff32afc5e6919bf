"""Whatever fails, what was promised holds; and where it does not hold, the checker notices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from comfyfleet.model.dispatch import AtRevision, Dispatch, HeldBy, Write, WriteResult
from comfyfleet.model.fact import FactDraft
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Job, JobResult
from comfyfleet.ports import Peek
from comfyfleet.simulation.event_loop import SimulatedClock
from comfyfleet.simulation.faults import WorldResult, run_world
from comfyfleet.stores.memory import MemoryStore

SEEDS = range(20)
STEPS = 500
BROKEN_STEPS = 400


@pytest.mark.parametrize("seed", SEEDS)
def test_promises_hold_whatever_fails(seed: int) -> None:
    found = run_world(seed, STEPS)
    assert found.violations == (), f"comfyfleet simulate --faults 1 --steps {STEPS} --seed {seed}"
    assert found.steps == STEPS and found.jobs > 25 and found.crashes > 0


def test_a_seed_plays_the_same_world_again() -> None:
    assert run_world(3, 300) == run_world(3, 300)
    assert run_world(3, 300) != run_world(4, 300)


class BrokenStore(MemoryStore):
    """A store with a defect. `is_shared` is as the world wants it."""

    shared = False

    @property
    def is_shared(self) -> bool:
        return self.shared


class LosesJobs(BrokenStore):
    """Says that a job is in the queue, and forgets some."""

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        written = await super().enqueue(dispatch, job, facts)
        if written is not None and written.facts and written.dispatch.sequence % 20 == 0:
            self._forget(self._state.entries[dispatch.job_id])
        return written


class ForgetsLanes(BrokenStore):
    """Keeps every job, and never shows some of them to a worker."""

    async def peek(self, query: Peek) -> list[Any]:
        return [each for each in await super().peek(query) if each.sequence % 20]


class MixesResults(BrokenStore):
    """Writes the result of the previous job."""

    last: JobResult | None = None

    async def write(self, write: Write) -> WriteResult | None:
        if write.job is not None and (result := write.job.get("result")) is not None:
            write = msgspec.structs.replace(write, job={**write.job, "result": self.last or result})
            self.last = result
        return await super().write(write)


class MixesPayloads(BrokenStore):
    """Stores a job with the graph of the previous one."""

    last: Job | None = None

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        stored = job
        if self.last is not None and dispatch.revision == 0 and int(job.job_id[-2:], 16) % 16 == 0:
            payload = msgspec.structs.replace(job.payload, workflow=self.last.payload.workflow)
            stored = msgspec.structs.replace(job, payload=payload)
            dispatch = msgspec.structs.replace(dispatch, payload_sha256=None)
        self.last = job
        return await super().enqueue(dispatch, stored, facts)


class AcceptsOldLeases(BrokenStore):
    """Does not compare the lease of a write with the one in force. Slow reads give old leases their chance."""

    loads = 0

    async def load(self, job_id: JobId) -> Dispatch | None:
        found = await super().load(job_id)
        self.loads += 1
        if self.loads % 25 == 0:
            await asyncio.sleep(30)
        return found

    async def write(self, write: Write) -> WriteResult | None:
        written = await super().write(write)
        if written is None and isinstance(write.guard, HeldBy):
            current = await super().load(write.job_id)
            if current is not None and not current.phase.is_final:
                guard = AtRevision(current.revision)
                return await super().write(msgspec.structs.replace(write, guard=guard))
        return written


def broken_worlds(kind: type[BrokenStore], seeds: range) -> list[WorldResult]:
    def make(clock: SimulatedClock, is_shared: bool) -> BrokenStore:
        store = kind(clock)
        store.shared = is_shared
        return store

    return [run_world(seed, BROKEN_STEPS, make) for seed in seeds]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (LosesJobs, "lost: it was accepted and the store has it no more"),
        (ForgetsLanes, "lost: it is queued at the end"),
        (MixesResults, "its result was not made from its payload (mixed)"),
        (MixesPayloads, "the payload of another job (mixed)"),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_the_checker_notices_a_broken_store(kind: type[BrokenStore], words: str) -> None:
    found = [text for world in broken_worlds(kind, range(2)) for text in world.violations]
    assert any(words in text for text in found), found[:5]


def test_the_checker_notices_a_write_of_a_lease_that_is_over() -> None:
    worlds = broken_worlds(AcceptsOldLeases, range(3))
    found = [text for world in worlds for text in world.violations]
    assert any("was accepted; in force is" in text for text in found), found[:5]
