"""A full disk leaves everything as it was and answers a fault; what waits on it hears of it too."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import msgspec
import pytest
from tests.stores._sqlite import FullDisk, SlowDisk, make_bench, reopened

from comfyfleet.model.dispatch import Dispatch, Phase, WriteResult
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Job, Submission
from comfyfleet.ports import RecordQuery
from comfyfleet.stores.sqlite.maintenance import check
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.contract.full_disk import WORKER, steps_of
from comfyfleet.testing.contract.job_transfer import moving, renamed, whole
from comfyfleet.testing.contract.store_bench import HASH, A, completion, tenant
from comfyfleet.testing.leases import lease_next


async def test_a_full_disk_leaves_everything_as_it_was_whatever_was_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    steps = await steps_of(bench)
    before = await bench.state()
    disk = FullDisk(monkeypatch)
    for name, step in steps.items():
        with pytest.raises(Fault, match="disk is full"):
            await step()
        bench.polls = [poll for poll in bench.polls if await bench.store.leased_by_poll(poll) is not None]
        after = await bench.state()
        del after["polls"]
        assert after == {key: value for key, value in before.items() if key != "polls"}, name
        assert await bench.store.get_workflow_stats(HASH) is None
    # And with room again, everything works.
    disk.make_room()
    await bench.store.fair_share.charge(tenant("ann"), 1.0)
    first = await bench.lease_next()
    assert first is not None
    job = await bench.enqueue()
    assert job.sequence == 5, "a place that could not be written is given to the next"
    assert await bench.store.purge(Phase.COMPLETED, 1e12, 10) == 1
    state = await bench.state()
    await bench.store.close()
    assert check(path) == []
    async with reopened(path, bench.clock) as store:
        bench.store = store
        assert await bench.state() == state


async def test_a_database_that_may_not_grow_answers_a_fault_and_goes_on_when_it_may(tmp_path: Path) -> None:
    """The same with SQLite's own means."""
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    job = await bench.enqueue()
    assert isinstance(bench.store, SqliteStore)
    database = bench.store._writer._database
    ((pages,),) = database.execute("PRAGMA page_count").fetchall()
    database.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    large = Job(JobId("large"), job.tenant, HASH, 0.0, Submission({"text": "x" * 100_000}))
    template = await bench.store.load(job.job_id)
    assert template is not None
    counts = await bench.store.counts()
    with pytest.raises(Fault, match="full"):
        await bench.store.enqueue(_named(template, "large"), large, ())
    assert await bench.store.load(JobId("large")) is None
    assert await bench.store.counts() == counts
    assert await bench.peek() == [job.job_id]
    database.execute("PRAGMA max_page_count = 1000000").fetchall()
    assert await bench.store.enqueue(_named(template, "large"), large, ()) is not None
    assert await bench.peek() == [job.job_id, "large"]
    await bench.store.close()


def _named(template: Dispatch, name: str) -> Dispatch:
    return msgspec.structs.replace(template, job_id=JobId(name))


async def test_what_was_decided_on_a_change_that_could_not_be_written_falls_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    wakes: list[None] = []
    bench.store.listen(lambda: wakes.append(None))
    disk = FullDisk(monkeypatch)
    # All of them are asked before the first is answered: the lease is of the job that is never written.
    enqueued, leased, read = await asyncio.gather(
        bench.enqueue(), bench.lease_next(), bench.store.load(JobId("job-0001")), return_exceptions=True
    )
    assert isinstance(enqueued, Fault)
    assert isinstance(leased, Fault)
    assert read is None, "nobody was shown what was not written"
    assert wakes, "whoever found nothing may look again"
    assert (await bench.store.counts()).by_phase[Phase.QUEUED] == 0
    disk.make_room()
    assert await bench.lease_next() is None
    await bench.store.close()


async def test_a_refusal_that_rests_on_an_unwritten_change_is_reconsidered_when_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    dispatch, ref = await bench.leased()
    FullDisk(monkeypatch, times=1)
    cancelled, completed = await asyncio.gather(
        bench.cancel(dispatch), bench.store.write(completion(ref)), return_exceptions=True
    )
    assert isinstance(cancelled, Fault)
    assert isinstance(completed, WriteResult)
    found = await bench.store.load(ref.job_id)
    assert found is not None
    assert found.phase is Phase.COMPLETED
    await bench.store.close()


async def test_a_heartbeat_calls_no_lease_lost_whose_end_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    ended, ending = await bench.leased()
    _, done = await bench.leased()
    FullDisk(monkeypatch, times=1, after=1)
    first = asyncio.ensure_future(bench.store.write(completion(done)))
    await asyncio.sleep(0)
    # It waits for what is being written of one job; meanwhile the other one's end joins the next group, which fails.
    beat = asyncio.ensure_future(bench.store.heartbeat([ending, done], 60.0))
    await asyncio.sleep(0)
    cancelled = asyncio.ensure_future(bench.cancel(ended))
    assert await first is not None
    with pytest.raises(Fault):
        await cancelled
    assert [state.is_alive for state in await beat] == [True, False]
    await bench.store.close()


async def test_a_job_is_shown_to_others_only_when_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    first, second = await asyncio.gather(bench.enqueue(reference="r"), bench.enqueue(reference="r"))
    assert first.job_id == second.job_id
    offer = bench.offer(poll="mine")
    leased, by_poll, of_worker = await asyncio.gather(
        lease_next(bench.store, offer), bench.store.leased_by_poll(offer.poll_id), bench.store.leases_of(A)
    )
    assert leased is not None
    assert by_poll == leased.dispatch
    assert of_worker == [leased.dispatch]
    FullDisk(monkeypatch)
    lost, late = await asyncio.gather(
        bench.store.write(completion(leased.dispatch.lease_ref())),
        bench.store.facts(first.job_id),
        return_exceptions=True,
    )
    assert isinstance(lost, Fault)
    assert isinstance(late, list)
    assert [fact.kind.value for fact in late] == ["queued", "leased"]
    await bench.store.close()


async def test_what_cannot_be_written_is_refused_before_anything_changes(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    template = await bench.enqueue()
    before = await bench.state()
    for workflow in ({"text": "\ud800"}, {"seed": 2**70}, {"what": object()}):
        job = Job(JobId("odd"), template.tenant, HASH, 0.0, Submission(workflow))
        with pytest.raises(Refusal, match="cannot be stored"):
            await bench.store.enqueue(_named(template, "odd"), job, ())
    assert await bench.state() == before
    await bench.store.close()


async def test_a_closed_store_answers_a_fault(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    job = await bench.enqueue()
    await bench.store.close()
    with pytest.raises(Fault, match="closed"):
        await bench.enqueue()
    with pytest.raises(Fault, match="closed"):
        await bench.store.load(job.job_id)


async def test_a_caller_that_goes_away_leaves_its_change_and_disturbs_nobody(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    gone = asyncio.ensure_future(bench.enqueue())
    await asyncio.sleep(0)
    gone.cancel()
    other = await bench.enqueue()
    assert [each.job_id for each in await bench.store.records.listing(RecordQuery(limit=9))] == [
        "job-0001",
        other.job_id,
    ]
    await bench.store.close()


async def test_a_list_is_answered_though_something_always_changes(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    is_over = False

    async def keep_busy() -> None:
        while not is_over:
            await bench.enqueue()
            await bench.lease_next()
            await bench.store.put_worker(WORKER)

    busy = [asyncio.ensure_future(keep_busy()) for _ in range(4)]
    store = bench.store
    async with asyncio.timeout(60):
        for _ in range(20):
            await asyncio.sleep(0)
            await store.records.listing(RecordQuery(limit=5))
            await store.dead_letter(5)
            await store.workers()
            await store.leases_of(A)
            await store.due(5)
    is_over = True
    await asyncio.gather(*busy)
    await store.close()


async def test_a_document_whose_writer_was_cancelled_is_what_the_next_compares_with(tmp_path: Path) -> None:
    async with reopened(tmp_path / "fleet.db") as store:
        first = asyncio.ensure_future(store.documents.put("keys", "a", b"1", version=0))
        await asyncio.sleep(0)
        first.cancel()
        assert not await store.documents.put("keys", "a", b"2", version=0)
        assert await store.documents.put("keys", "a", b"3", version=1)
    async with reopened(tmp_path / "fleet.db") as store:
        kept = await store.documents.get("keys", "a")
        assert kept is not None and (kept.body, kept.version) == (b"3", 2)


async def test_a_no_that_rested_on_a_document_that_could_not_be_written_is_thought_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reopened(tmp_path / "fleet.db") as store:
        FullDisk(monkeypatch, times=1)
        first = asyncio.ensure_future(store.documents.put("keys", "a", b"1", version=0))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(store.documents.put("keys", "a", b"2", version=0))
        with pytest.raises(Fault):
            await first
        assert await second, "the first was never written"
        kept = await store.documents.get("keys", "a")
        assert kept is not None and (kept.body, kept.version) == (b"2", 1)


async def test_a_known_job_that_is_purged_while_others_are_taken_in_is_answered_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    _, ref = await bench.leased()
    assert await bench.store.write(completion(ref)) is not None
    ended, waiting = await whole(bench, ref.job_id), await whole(bench, (await bench.enqueue()).job_id)
    await bench.clock.advance(60)
    disk = SlowDisk(monkeypatch)
    # Something is being written; the purge waits for it, so it comes into the group behind that of the jobs taken in.
    written = asyncio.ensure_future(bench.enqueue())
    while not isinstance(bench.store, SqliteStore) or bench.store._writer._in_flight is None:
        await asyncio.sleep(0)
    purging = asyncio.ensure_future(bench.store.purge(Phase.COMPLETED, bench.clock.now(), 10))
    await asyncio.sleep(0)
    adopting = asyncio.ensure_future(moving(bench).import_jobs([ended, renamed(waiting, "new")]))
    await asyncio.sleep(0)
    disk.let_through(9)
    await written
    assert await purging == 1
    imported = await adopting
    assert imported is not None
    assert [imported[0], imported[1].job_id] == [ended.dispatch, "new"]
    await bench.store.close()


async def test_a_disk_without_room_for_the_first_byte_is_told_with_the_path_and_nothing_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = make_bench(tmp_path / "fleet.db").store
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(Fault, match="No space left") as told:
            await store.open()
    assert str(tmp_path / "fleet.db") in str(told.value) and "Free space" in str(told.value)
    await store.open()
    await store.close()
