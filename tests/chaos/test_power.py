"""Power that goes takes nothing with it that was acknowledged; and a cut that does take something is noticed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chaos.callers import result_of, submission
from chaos.made import made_from
from chaos.plan import QUICK, play

from chaos import power
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import Completion, Poll, RegisterWorker
from comfyfleet.model.dispatch import AtRevision, Change, Write
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.stores.memory import MemoryStore

SEED = 7

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.parametrize("part", ["power-sqlite", "power-redis"])
def test_every_cut_after_the_last_acknowledged_commit_reopens_with_every_job(part: str) -> None:
    entry = play(part, QUICK[part], SEED, lambda _: None)
    assert entry.wrong == ()
    assert entry.is_clean
    assert entry.cuts > 5
    assert entry.jobs >= 30


async def test_a_payload_or_result_that_is_another_jobs_is_noticed() -> None:
    """Nothing is missing then, and each job is completed."""
    async with Engine(store := MemoryStore(SystemClock())) as engine:
        await engine.register(RegisterWorker(WorkerId("gpu"), Capabilities((Service("comfyui"),))))
        asked = submission(random.Random(SEED), "r", 0.1)
        job = (await engine.submit(asked)).job_id
        leased = await engine.poll(Poll(WorkerId("gpu"), PollId("p"), 0))
        assert leased is not None
        made, another = made_from(leased.workflow), made_from({"1": {"inputs": {"nonce": "another"}}})
        await engine.complete(Completion(leased.ref, result_of("e1", leased.workflow)))
        assert await power._problem(store, "r", job, "e1", made) == ""
        assert "another payload" in await power._problem(store, "r", job, None, another)
        swapped = result_of("e1", {"1": {"inputs": {"nonce": "another"}}})
        record = await store.records.get(job)
        assert record is not None
        dispatch = await store.load(job)
        assert dispatch is not None
        write = Write(job, AtRevision(dispatch.revision), Change(), job={"result": swapped})
        assert await store.write(write) is not None
        assert "made from another payload" in await power._problem(store, "r", job, "e1", made)


# Where commits are small, all jobs may stand in the first third of SQLite's log; the first of Redis' is its library.
@pytest.mark.parametrize(("kind", "part"), [("sqlite", 20), ("redis", 3)])
def test_a_cut_into_what_was_acknowledged_is_noticed(
    kind: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: cut early in the log instead of behind it, jobs are gone."""

    def too_early(log: Path, _start: int, _kind: str, _most: int) -> list[int]:
        return [log.stat().st_size // part]

    monkeypatch.setattr(power, "_points", too_early)
    entry = play(f"power-{kind}", QUICK[f"power-{kind}"], SEED, lambda _: None)
    assert entry.lost > 0
    assert not entry.is_clean
