"""What was acknowledged is there again: after a clean end, after SIGKILL, and after the power went at any moment."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.stores._sqlite import make_bench, reopened

from comfyfleet.model.block import Block, BlockReason, Pair
from comfyfleet.model.dispatch import Change, Phase, Readiness, WriteResult
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import JobId
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.model.workflow_stats import MeanDuration, WorkflowStats
from comfyfleet.stores.sqlite import codec
from comfyfleet.stores.sqlite.maintenance import check
from comfyfleet.stores.sqlite.reader import DatabaseReader
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.contract.store_bench import (
    FAST,
    HASH,
    A,
    StoreBench,
    completion,
    failure,
    release,
    tenant,
)
from comfyfleet.testing.leases import lease_next


async def a_day(bench: StoreBench) -> None:
    """A bit of everything that is kept."""
    store = bench.store
    await store.put_worker(WorkerRecord(A, Capabilities((Service("comfyui"),)), FAST, 2, 1.0, 2.0))
    await bench.enqueue(standing=Readiness.PAUSED)
    await bench.enqueue(standing=Readiness.DELAYED, wake_at=bench.clock.now() + 60, not_before=5.0)
    first = await bench.enqueue(priority=2, tenant=tenant("ann"), reference="mine")
    await bench.enqueue(tenant=tenant("bob"))
    await store.fair_share.charge(tenant("ann"), 12.5)
    await store.fair_share.put_terms(TenantTerms(tenant("ann"), 2.0, 1))
    await store.fair_share.put_terms(TenantTerms(tenant("bob"), held_until=inf))
    await bench.leased(tenant=tenant("ann"))
    _, done = await bench.leased(reference="done")
    await store.heartbeat([done], 60)
    assert await store.write(completion(done)) is not None
    _, broken = await bench.leased()
    block = Block(A, "other", BlockReason.FAILURES, 1, 1e12)
    assert await store.write(failure(broken, blocks=(block,))) is not None
    _, back = await bench.leased()
    assert await store.write(release(back)) is not None
    await store.mark_late(back)
    assert await bench.cancel(await bench.enqueue()) is not None
    _, held = await bench.leased()
    await store.heartbeat([held], 45)
    assert await bench.change(first, Change(priority=3), facts=(FactDraft(FactKind.PRIORITY_CHANGED),))
    retried = await store.load(broken.job_id)
    assert retried is not None
    assert await bench.change(retried, Change(phase=Phase.QUEUED, round=2), job={"phase": Phase.QUEUED})
    await store.put_block(Block(A, HASH, BlockReason.OUT_OF_MEMORY, 2))
    await store.put_workflow_stats(WorkflowStats(HASH, {"card": MeanDuration(3.0, 1)}, 24.0))
    await store.pause_queue(True)
    await store.pause_queue(False)


async def test_a_lease_is_put_right_by_what_it_was_charged_with_before(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    ann = tenant("ann")
    await bench.store.fair_share.put_terms(TenantTerms(ann, max_leased=1))
    job = await bench.enqueue(tenant=ann)
    written = await bench.store.lease(job.job_id, msgspec.structs.replace(bench.offer(), charge_s=30.0))
    assert written is not None
    await bench.enqueue(tenant=ann)
    await bench.store.close()
    async with reopened(tmp_path / "fleet.db", bench.clock) as store:
        assert await lease_next(store, bench.offer()) is None, "it is still at its cap"
        await store.write(completion(written.dispatch.lease_ref(), used_s=2.0))
        share = await store.fair_share.get(ann)
        assert (share.virtual_time, share.credit, share.leased) == (30.0, 28.0, 0)
        assert await lease_next(store, bench.offer()) is not None


async def test_everything_is_there_after_a_clean_end(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    await a_day(bench)
    before = await bench.state()
    await bench.store.close()
    await bench.store.close()
    async with reopened(path, bench.clock) as store:
        bench.store = store
        assert await bench.state() == before
        stats = await store.get_workflow_stats(HASH)
        assert stats is not None
        assert stats.memory_above_gb == 24.0
        known = await store.records.by_reference(tenant("default"), "done")
        assert known is not None
        assert known.phase is Phase.COMPLETED
        assert known.result is not None
        after = await bench.enqueue()
        assert after.sequence == len(bench.jobs), "places go on where they were"
    assert check(path) == []


async def test_a_reference_of_an_ended_job_is_still_answered_with_it_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    _, ref = await bench.leased(reference="mine")
    assert await bench.store.write(completion(ref)) is not None
    await bench.store.close()
    async with reopened(path, bench.clock) as store:
        bench.store = store
        again = await bench.enqueue(reference="mine")
        assert again.job_id == ref.job_id
        assert (await store.counts()).by_phase[Phase.COMPLETED] == 1


_CHILD = """
import asyncio, sys
from pathlib import Path
from comfyfleet.testing.contract.store_bench import FAST, HASH, A, completion, failure
from tests.stores._sqlite import make_bench
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord

async def main():
    bench = make_bench(Path(sys.argv[1]))
    await bench.open()
    store = bench.store
    await store.put_worker(WorkerRecord(A, Capabilities((Service("comfyui"),)), FAST, 2, 1.0, 2.0))
    await store.put_block(Block(A, "other", BlockReason.FAILURES, 1, 1e12))
    print("ready", flush=True)

    async def caller():
        while True:
            job = await bench.enqueue()
            print("enqueued", job.job_id, flush=True)
            taken = await bench.lease_next()
            if taken is None:
                continue
            print("leased", taken.job_id, taken.lease.token, flush=True)
            if taken.sequence % 3:
                written = await store.write(completion(taken.lease_ref()))
                print("completed", taken.job_id, written.facts[-1].number, flush=True)

    await asyncio.gather(*(caller() for _ in range(8)))

asyncio.run(main())
"""


def last_words(path: Path, lines: int) -> list[list[str]]:
    """What a process acknowledged until it was killed in the middle of its work."""
    command = [sys.executable, "-c", _CHILD, str(path)]
    said: list[list[str]] = []
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.endswith("\n"):
                said.append(line.split())
            if len(said) == lines:
                child.kill()
    assert child.returncode == -signal.SIGKILL
    return said


async def test_a_killed_process_has_lost_nothing_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    said = last_words(path, 400)
    assert check(path) == []
    done = {words[1]: int(words[2]) for words in said if words[0] == "completed"}
    held = {words[1]: words[2] for words in said if words[0] == "leased"}
    enqueued = {words[1] for words in said if words[0] == "enqueued"}
    assert done
    assert held.keys() - done.keys()
    async with reopened(path) as store:
        assert await store.get_worker(A) is not None
        assert await store.get_block(Pair(A, "other")) is not None
        for name in enqueued:
            job_id = JobId(name)
            dispatch = await store.load(job_id)
            assert dispatch is not None
            assert await store.records.get(job_id) is not None
            numbers = [fact.number for fact in await store.facts(job_id)]
            assert numbers == list(range(1, len(numbers) + 1))
            if name in done:
                assert dispatch.phase is Phase.COMPLETED
                assert numbers[-1] == done[name]
            elif name in held and dispatch.phase is Phase.LEASED:
                assert dispatch.lease is not None
                assert dispatch.lease.token == held[name]
            else:
                # What happened in the last moment was written and not yet told.
                assert name not in held or dispatch.phase is Phase.COMPLETED


def frames_of(log: bytes) -> list[int]:
    """Where the frames of a write-ahead log end."""
    page = int.from_bytes(log[8:12], "big")
    return list(range(32, len(log) + 1, 24 + page))


async def test_power_that_goes_at_any_moment_after_an_answer_takes_nothing_with_it(tmp_path: Path) -> None:
    path, log_path = tmp_path / "fleet.db", tmp_path / "fleet.db-wal"
    bench = make_bench(path)
    await bench.open()
    waiting = [await bench.enqueue(reference=f"r{number}") for number in range(3)]
    held, _ = await bench.leased()
    _, ref = await bench.leased()
    assert await bench.store.write(completion(ref)) is not None
    acknowledged = log_path.stat().st_size
    jobs = list(bench.jobs)
    before = (await bench.state())["jobs"]
    # Not acknowledged, as far as those know whose power goes.
    for _ in range(3):
        _, later = await bench.leased()
        await bench.store.write(completion(later))
    await asyncio.gather(*(bench.enqueue() for _ in range(20)))
    database, log = path.read_bytes(), log_path.read_bytes()
    await bench.store.close()
    ends = [end for end in frames_of(log) if end >= acknowledged]
    assert len(ends) > 5, "there is something to cut"
    for number, end in enumerate([*ends, *(end - 1000 for end in ends[1:])]):
        copy = tmp_path / f"copy-{number}.db"
        copy.write_bytes(database)
        copy.with_name(copy.name + "-wal").write_bytes(log[:end])
        other = make_bench(copy)
        await other.store.open()
        try:
            other.jobs, other.clock = jobs, bench.clock
            found: list[Any] = [
                (
                    await other.store.load(job_id),
                    await other.store.records.get(job_id),
                    await other.store.facts(job_id),
                    await other.store.attempts(job_id),
                )
                for job_id in jobs
            ]
            assert found == [each[:4] for each in before]
            assert held in await other.store.leases_of(A)
            assert (await other.peek())[:3] == [each.job_id for each in waiting]
        finally:
            await other.store.close()
        assert check(copy) == []


async def test_a_cut_into_what_was_acknowledged_is_seen_by_this_very_test(tmp_path: Path) -> None:
    """The test above can fail: with one frame less, something is gone."""
    path, log_path = tmp_path / "fleet.db", tmp_path / "fleet.db-wal"
    bench = make_bench(path)
    await bench.open()
    job = await bench.enqueue()
    log = log_path.read_bytes()
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    copy.with_name(copy.name + "-wal").write_bytes(log[: frames_of(log)[-2]])
    await bench.store.close()
    async with reopened(copy) as store:
        assert await store.load(job.job_id) is None


async def test_nothing_of_the_payload_stays_in_memory_while_a_job_waits(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    job = await bench.enqueue()
    assert isinstance(bench.store, SqliteStore)
    entry = bench.store._state.entries[job.job_id]
    kept = {"dispatch", "attempts", "fact_count", "ending", "reference", "changes", "facts"}
    assert set(entry.__struct_fields__) == kept
    assert len(msgspec.msgpack.encode(entry.dispatch)) + len(entry.facts) < 1024
    _, ref = await bench.leased()
    assert await bench.store.write(completion(ref)) is not None
    assert ref.job_id not in bench.store._state.entries, "what has ended is the file's"
    await bench.store.close()


async def test_a_restart_reads_each_open_job_once_and_none_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    for _ in range(20):
        _, ref = await bench.leased()
        assert await bench.store.write(completion(ref)) is not None
    waiting = [await bench.enqueue() for _ in range(30)]
    await bench.store.close()
    decoded: list[bytes] = []
    asked: list[str] = []
    decode, ask = codec.decode_state, DatabaseReader._all

    def count_decoded(blob: bytes) -> codec.RowState:
        decoded.append(blob)
        return decode(blob)

    def count_asked(disk: DatabaseReader, sql: str, *values: Any) -> list[Any]:
        asked.append(sql)
        return ask(disk, sql, *values)

    monkeypatch.setattr(codec, "decode_state", count_decoded)
    monkeypatch.setattr(DatabaseReader, "_all", count_asked)
    async with reopened(path, bench.clock) as store:
        bench.store = store
        assert len(decoded) == len(waiting)
        assert len([sql for sql in asked if "open_jobs" in sql]) == 2, "a page, and the end"
        assert len(asked) < 20, "what is asked does not grow with the jobs"
        assert not any("FROM jobs" in sql and "max(" not in sql for sql in asked), "no payload is touched"
        first = await bench.lease_next()
        assert first is not None
        assert first.job_id == waiting[0].job_id


async def test_a_place_is_not_given_again_though_its_job_was_purged(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    for _ in range(3):
        _, ref = await bench.leased()
        assert await bench.store.write(completion(ref)) is not None
    assert await bench.store.purge(Phase.COMPLETED, 1e12, 10) == 3
    await bench.store.close()
    async with reopened(path, bench.clock) as store:
        bench.store = store
        assert (await bench.enqueue()).sequence == 4


async def test_what_is_to_be_settled_is_found_after_a_restart_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    ended = []
    for has_tenant_database in (True, False, True):
        _, ref = await bench.leased(has_tenant_database=has_tenant_database)
        written = await bench.store.write(completion(ref))
        assert written is not None
        ended.append(written.dispatch)
    settled = await bench.change(ended[0], Change(settled_at=bench.clock.now()))
    assert settled is not None
    await bench.store.close()
    await bench.clock.advance(30)
    async with reopened(path, bench.clock) as store:
        assert await store.unsettled(10) == [ended[2]]
        assert await store.load_many([each.job_id for each in ended]) == [settled.dispatch, *ended[1:]]
        assert await store.purge(Phase.COMPLETED, bench.clock.now(), 10) == 1
        assert await store.load(ended[1].job_id) is None
        first = msgspec.structs.replace(ended[2], phase=Phase.QUEUED)
        assert await store.enqueue(first, bench.job(first), ()) == WriteResult(ended[2], ())


@pytest.mark.parametrize("mode", ["wal", "full"])
async def test_the_file_is_opened_for_durability(tmp_path: Path, mode: str) -> None:
    bench = make_bench(tmp_path / "fleet.db")
    await bench.open()
    assert isinstance(bench.store, SqliteStore)
    database: sqlite3.Connection = bench.store._writer._database
    if mode == "wal":
        assert database.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
    else:
        assert database.execute("PRAGMA synchronous").fetchall() == [(2,)]
    await bench.store.close()
