"""What a worker with a Redis client alone does with a job that is to be stopped."""

from __future__ import annotations

import pytest
from tests.stores.test_redis_workers import Worker, admit, bench, server, worker

from comfyfleet.contract.bench import Bench
from comfyfleet.model.dispatch import AttemptOutcome, Change, Phase, Standing

__all__ = ["bench", "server", "worker"]


async def test_a_cancelled_job_ends_with_the_reason_of_its_cancel(bench: Bench, worker: Worker) -> None:
    await admit(bench)
    job = await bench.enqueue()
    assert worker.lease_next("p1") == job.job_id
    dispatch = await bench.store.load(job.job_id)
    assert dispatch is not None
    stop = Change(cancel_requested_at=1.0, cancel_reason='the "customer" left')
    assert await bench.change(dispatch, stop) is not None
    assert worker.call("release", *worker.lease, "cancelled") == 1
    fact = (await bench.store.facts(job.job_id))[-1]
    assert (fact.kind.value, fact.data) == ("cancelled", {"reason": 'the "customer" left'})
    ended = await bench.store.load(job.job_id)
    assert ended is not None and ended.cancel_reason == 'the "customer" left'


@pytest.mark.parametrize(("asked", "standing"), [("pause", Standing.PAUSED), ("retry", Standing.IN_LANE)])
async def test_a_job_that_is_to_be_stopped_is_paused_or_back_in_line_when_it_is_released(
    bench: Bench, worker: Worker, asked: str, standing: Standing
) -> None:
    await admit(bench)
    job, later = await bench.enqueue(), await bench.enqueue()
    assert worker.lease_next("p1") == job.job_id
    dispatch = await bench.store.load(job.job_id)
    assert dispatch is not None
    stop = Change(pause_requested_at=1.0) if asked == "pause" else Change(retry_requested_at=1.0)
    assert await bench.change(dispatch, stop) is not None
    assert worker.call("heartbeat", *worker.lease, 60) == 2, "to be stopped"
    assert worker.call("progress", *worker.lease, "{}") == 2
    for _ in range(2):
        assert worker.call("release", *worker.lease, "cancelled") == 1
    after = await bench.store.load(job.job_id)
    assert after is not None
    assert (after.phase, after.standing, after.stop, after.releases) == (Phase.QUEUED, standing, None, 0)
    assert await bench.peek() == ([] if asked == "pause" else [job.job_id]) + [later.job_id]
    (attempt,) = await bench.store.attempts(job.job_id)
    assert attempt.outcome is AttemptOutcome.CANCELLED
    assert [fact.kind.value for fact in await bench.store.facts(job.job_id)][-1] == (
        "paused" if asked == "pause" else "released"
    )
