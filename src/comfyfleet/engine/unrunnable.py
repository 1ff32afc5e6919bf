"""Jobs that wait though no worker which is here may take them: asked for in a list, counted for whoever looks on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from comfyfleet.engine.context import Context
from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Job

MAX_COUNTED = 2_000
"""Waiting jobs that are looked at, the oldest first: each is read whole."""
_PAGE = 100
_REMEMBER_S = 30.0


class Unrunnable:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._counted: tuple[int, float] | None = None
        """How many, and since when that is known."""

    def is_unrunnable(self, dispatch: Dispatch) -> bool:
        """Nobody of the kind it needs is here. Blocks end by themselves and do not count."""
        if dispatch.phase is not Phase.QUEUED or dispatch.is_held:
            return False
        fleet = self._context.fleet
        keys = [key for key in (dispatch.class_key, dispatch.relaxed_class) if key is not None]
        # Of a class that is new to this engine nothing is known yet.
        return all(key in fleet.classes and not fleet.selectivity(key) for key in keys)

    async def among(self, jobs: Sequence[Job]) -> set[JobId]:
        context = self._context
        if context.store.is_shared:
            await context.fleet.freshen(context.rules.round_s)
        found = await context.store.load_many([job.job_id for job in jobs])
        return {each.job_id for each in found if each is not None and self.is_unrunnable(each)}

    async def count(self) -> int:
        """Of the oldest jobs that wait, at most `MAX_COUNTED`; what was counted is good for a while."""
        now = self._context.clock.monotonic()
        if self._counted is None or now >= self._counted[1] + _REMEMBER_S:
            self._counted = (await self._count(), now)
        return self._counted[0]

    async def _count(self) -> int:
        return len([job_id async for job_id in self.oldest()])

    async def oldest(self) -> AsyncIterator[JobId]:
        """Those among the oldest jobs that wait, at most `MAX_COUNTED`."""
        fleet = self._context.fleet
        if all(fleet.selectivity(key) for key in fleet.classes):
            return
        after = None
        for _ in range(MAX_COUNTED // _PAGE):
            page = await self._context.store.records.listing(
                tenant=None, phase=Phase.QUEUED, limit=_PAGE, after=after
            )
            for job_id in await self.among(page):
                yield job_id
            if len(page) < _PAGE:
                return
            after = page[-1].job_id
