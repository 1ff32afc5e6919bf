"""How good predicted starts are: asks for each job right after its submit, and compares with what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.engine._model_fleet import Model, ModelFleet

from comfyfleet.model.ids import JobId
from comfyfleet.policy.quotes import KNOWN_AFTER_RUNS

NEAR_S, NEAR_SHARE = 2.0, 0.25


@dataclass
class PredictingFleet(ModelFleet):
    asks_at_submit: bool = True
    predicted: dict[JobId, tuple[float, float]] = field(default_factory=dict)
    """By job: when it was expected to start, and when that was asked."""

    async def __aenter__(self) -> PredictingFleet:
        await super().__aenter__()
        return self

    async def submit(self, model: Model | None, **options: Any) -> JobId:
        job_id = await super().submit(model, **options)
        if self.asks_at_submit:
            await self.ask([job_id])
        return job_id

    async def ask(self, job_ids: Iterable[JobId]) -> None:
        """Of workflows that have run often enough."""
        dispatches = [each for each in await self.store.load_many(list(job_ids)) if each is not None]
        found = await self.engine.estimates(dispatches)
        for each in dispatches:
            stats = await self.store.get_workflow_stats(each.workflow_hash)
            runs = 0 if stats is None else sum(its.runs for its in stats.durations.values())
            if each.job_id in found and runs >= KNOWN_AFTER_RUNS:
                self.predicted[each.job_id] = (found[each.job_id].starts_at, self.clock.now())

    async def play_batch(self, jobs: list[tuple[float, Model]]) -> None:
        """After what was played before: all at once, and asked for a moment later."""
        batch = [await self.submit(model) for _, model in jobs]
        await self.settle()
        await self.advance(0.2)
        await self.ask(job_id for job_id in batch if not self.runs[job_id].server)
        await self.finish()

    @property
    def misses(self) -> list[float]:
        """By how much each prediction was wrong beyond what is allowed; 0: it was good."""
        found = []
        for job_id, (expected, asked_at) in self.predicted.items():
            began_at = self.runs[job_id].at
            allowed = max(NEAR_S, NEAR_SHARE * (began_at - asked_at))
            found.append(max(0.0, abs(expected - began_at) - allowed))
        return found

    @property
    def good_share(self) -> float:
        misses = self.misses
        return sum(not each for each in misses) / len(misses)
