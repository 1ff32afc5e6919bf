"""Records that are at hand say what the file says, in every phase; and they take no more room than they may."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.stores._sqlite import FullDisk, make_bench

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId
from comfyfleet.stores.sqlite.reader import RecentRecords
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.contract.store_bench import completion, release


async def is_as_the_file_says(store: SqliteStore, dispatch: Dispatch) -> bool:
    """Whether it was at hand; what was, is the same."""
    told = await store.records.get(dispatch.job_id)
    assert told is not None and told == store._disk.job(dispatch.job_id)
    return store._at_hand(dispatch.job_id) is not None


async def test_an_open_job_is_at_hand_as_the_file_has_it_and_an_ended_one_is_read(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    store = bench.store
    assert isinstance(store, SqliteStore)
    job, ref = await bench.leased(reference="r")
    assert await is_as_the_file_says(store, job)
    await store.write(msgspec.structs.replace(release(ref), job={"phase": Phase.QUEUED, "priority": 3}))
    assert await is_as_the_file_says(store, job)
    assert (await bench.lease_next()) is not None
    assert await is_as_the_file_says(store, job)
    dispatch = await store.load(job.job_id)
    assert dispatch is not None
    await store.write(completion(dispatch.lease_ref()))
    assert not await is_as_the_file_says(store, job)
    found = await store.records.get(job.job_id)
    assert found is not None and found.result is not None and found.priority == 3
    await store.close()


async def test_a_job_that_could_not_be_written_is_not_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    FullDisk(monkeypatch, times=1)
    with pytest.raises(Fault):
        await bench.enqueue()
    store = bench.store
    assert isinstance(store, SqliteStore)
    (job_id,) = store._recent._records
    assert await store.records.get(job_id) is None
    await store.close()


def test_the_oldest_make_room_for_the_newest() -> None:
    recent = RecentRecords(max_bytes=100)
    for number in range(1_000):
        recent.put(JobId(f"job-{number}"), bytes(number % 60))
        recent.put(JobId(f"large-{number}"), bytes(101))
        assert sum(map(len, recent._records.values())) == recent._bytes <= 100
        assert recent.get(JobId(f"job-{number}")) == bytes(number % 60)
        assert recent.get(JobId(f"large-{number}")) is None
    assert recent.get(JobId("job-0")) is None
