"""Quotes: what is expected of a job before it is submitted. Nothing is written.

The submitter says where the job would wait, and the forecast when it would start; policy says how sure the learned
duration is, and what the tenant's price makes of it."""

from __future__ import annotations

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.forecasts import Expected, Forecasts
from comfyfleet.engine.submitter import Preview, Submitter
from comfyfleet.model.estimate import CreditRange, JobEstimate, Quote, Range
from comfyfleet.model.job import Submission
from comfyfleet.policy.forecast import ExpectedRun
from comfyfleet.policy.quotes import KnownRun, expected_credits, known_run


class Quotes:
    def __init__(self, context: EngineContext, submitter: Submitter, forecasts: Forecasts) -> None:
        self._context = context
        self._submitter = submitter
        self._forecasts = forecasts

    async def quote(self, submission: Submission, *, is_own: bool = False, is_large: bool = False) -> Quote:
        """`is_own` and `is_large` as for `submit`. Refuses what `submit` refuses in the submission itself."""
        preview = await self._submitter.preview(submission, is_own=is_own, is_large=is_large)
        lane = preview.dispatch.lane
        run = await self._forecasts.run_of(Expected(preview.cls, lane))
        worker_class = "" if run is None else run.worker_class
        stats = await self._context.stats(lane.workflow_hash)
        known = known_run(
            stats, worker_class, self._context.estimates.run_s(lane.workflow_hash, worker_class)
        )
        load_s = 0.0 if run is None else run.load_s
        return Quote(
            lane.workflow_hash,
            known.seconds,
            load_s,
            known.runs,
            None if run is None else self._estimate(preview, run),
            _credits(preview, known, load_s),
            preview.unworkable,
        )

    def _estimate(self, preview: Preview, run: ExpectedRun) -> JobEstimate:
        estimate, dispatch = self._forecasts.estimate(preview.dispatch.lane, run), preview.dispatch
        later_s = max(0.0, (dispatch.not_before or 0.0) - estimate.starts_at)
        if not later_s:
            return estimate
        # Who will wait by then is not known.
        return JobEstimate(estimate.starts_at + later_s, estimate.ends_at + later_s, True)


def _credits(preview: Preview, known: KnownRun, load_s: float) -> CreditRange | None:
    tenant = preview.tenant
    if tenant is None or tenant.price is None:
        return None
    seconds = known.seconds
    # A load counts as use of the worker; whether there is one depends on the worker that runs the job.
    used = Range(seconds.expected + load_s, seconds.low, seconds.high + load_s)
    return expected_credits(tenant.price, preview.cls.requirements.service, used)
