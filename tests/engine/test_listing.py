"""Lists of jobs: filters that a store does not know are looked for in its pages, within a bound."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.job_list import MAX_RECORDS_READ, list_jobs
from comfyfleet.model.calls import JobFilter
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId, TenantId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.ports import RecordQuery
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.time import ManualClock

ACME = TenantId("acme")


class LongRecords:
    """Ten thousand jobs, every thousandth with a mark; counts what is read."""

    def __init__(self) -> None:
        self.read = 0
        self.largest = 0
        self.jobs = [
            Job(
                JobId(f"{number:08d}"),
                ACME,
                WorkflowHash("hash"),
                float(number),
                Submission({}, metadata={"mark": "yes"} if number % 1000 == 999 else None),
            )
            for number in range(10_000)
        ]

    async def get(self, job_id: JobId) -> Job | None:
        raise AssertionError("a list reads pages")

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        raise AssertionError("a list reads pages")

    async def listing(self, query: RecordQuery) -> list[Job]:
        limit, after = query.limit, query.after
        if query.newest_first:
            end = len(self.jobs) if after is None else int(after)
            page = self.jobs[max(0, end - limit) : end][::-1]
        else:
            start = 0 if after is None else int(after) + 1
            page = self.jobs[start : start + limit]
        self.largest = max(self.largest, limit)
        self.read += len(page)
        return page


@pytest.mark.parametrize("newest_first", [False, True])
async def test_a_rare_mark_is_found_page_by_page_and_no_call_reads_more_than_its_bound(
    newest_first: bool,
) -> None:
    records, after, found, calls = LongRecords(), None, [], 0
    while True:
        before = records.read
        page = await list_jobs(
            records, JobFilter(metadata={"mark": "yes"}), 100, after, newest_first=newest_first
        )
        assert records.read - before <= MAX_RECORDS_READ
        assert records.largest <= 50, "whole payloads, so only a few at a time"
        found += [job.submitted_at for job in page.jobs]
        calls, after = calls + 1, page.after
        if after is None:
            break
    marked = [number * 1000.0 + 999 for number in range(10)]
    assert found == (marked[::-1] if newest_first else marked)
    assert calls == 10_000 // MAX_RECORDS_READ + 1


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
async def test_without_such_filters_a_page_reads_what_it_shows_and_one_more(limit: int) -> None:
    records = LongRecords()
    page = await list_jobs(records, JobFilter(), limit, None)
    assert len(page.jobs) == limit and records.read == limit + 1
    assert page.after == page.jobs[-1].job_id


async def test_the_last_page_says_so_even_when_it_is_full() -> None:
    async with Rig() as rig:
        made = [await rig.submit() for _ in range(3)]
        page = await rig.engine.listing(JobFilter(), 3)
        assert [job.job_id for job in page.jobs] == made
        assert page.after is None


async def test_a_list_begins_and_ends_at_a_time() -> None:
    async with Rig() as rig:
        made = []
        for _ in range(5):
            made.append(await rig.submit())
            await rig.clock.advance(10)
        start = (await rig.engine.get(made[1])).job.submitted_at
        wanted = JobFilter(submitted_after=start, submitted_before=start + 20)
        page = await rig.engine.listing(wanted, 100)
        assert [job.job_id for job in page.jobs] == made[1:3]
        assert page.after is None
        # A cursor from before the time does not reach back.
        again = await rig.engine.listing(wanted, 100, made[0])
        assert again.jobs == page.jobs


async def test_a_list_from_the_newest_begins_and_ends_at_a_time_too() -> None:
    async with Rig() as rig:
        made = []
        for _ in range(5):
            made.append(await rig.submit())
            await rig.clock.advance(10)
        start = (await rig.engine.get(made[1])).job.submitted_at
        wanted = JobFilter(submitted_after=start, submitted_before=start + 20)
        page = await rig.engine.listing(wanted, 100, newest_first=True)
        assert [job.job_id for job in page.jobs] == made[1:3][::-1]
        assert page.after is None
        one = await rig.engine.listing(wanted, 1, made[4], newest_first=True)
        assert ([job.job_id for job in one.jobs], one.after) == ([made[2]], made[2])
        # Half a millisecond after a job was submitted, it was submitted before.
        moment = JobFilter(submitted_before=start + 0.0005)
        page = await rig.engine.listing(moment, 100, newest_first=True)
        assert [job.job_id for job in page.jobs] == [made[1], made[0]]


@pytest.mark.parametrize("newest_first", [False, True])
async def test_a_job_that_was_held_up_on_its_way_ends_no_list(newest_first: bool) -> None:
    """It is written behind one that was submitted after it."""
    records = LongRecords()
    records.jobs = [records.jobs[number] for number in (0, 1, 2, 4, 3, 5, 6)]
    wanted = JobFilter(submitted_after=4.0) if newest_first else JobFilter(submitted_before=4.0)
    page = await list_jobs(records, wanted, 100, None, newest_first=newest_first)
    assert [job.submitted_at for job in page.jobs] == ([6, 5, 4] if newest_first else [0, 1, 2, 3])


async def test_filters_hold_together() -> None:
    async with Rig() as rig:
        await rig.submit(graph("A"), metadata={"user": "1", "deep": {"a": [1]}})
        wanted = await rig.submit(graph("A"), metadata={"user": "1", "deep": {"a": [1]}}, tenant=ACME)
        await rig.submit(graph("B"), metadata={"user": "1"}, tenant=ACME)
        gone = await rig.submit(graph("A"), metadata={"user": "1"}, tenant=ACME)
        await rig.engine.cancel(gone)
        known = (await rig.engine.get(wanted)).job.workflow_hash
        page = await rig.engine.listing(
            JobFilter(ACME, Phase.QUEUED, known, {"user": "1", "deep": '{"a":[1]}'}), 100
        )
        assert [job.job_id for job in page.jobs] == [wanted]


async def test_dead_jobs_are_purged_up_to_a_time_and_a_number() -> None:
    async with Rig(max_attempts=1) as rig:
        for _ in range(3):
            await rig.worker("a")
            await rig.submit()
            await rig.fail(await rig.take("a"))
            await rig.clock.advance(100)
        now = rig.clock.now()
        assert await rig.engine.purge_dead_letter(now - 150) == 2
        assert await rig.engine.purge_dead_letter(limit=0) == 0
        assert await rig.engine.purge_dead_letter() == 1
        assert await rig.engine.dead_letter() == []


async def test_others_are_served_while_a_list_looks_into_payloads(tmp_path: Path) -> None:
    clock = ManualClock()
    served = 0

    async def serve() -> None:
        nonlocal served
        while True:
            served += 1
            await asyncio.sleep(0)

    async with Engine(SqliteStore(tmp_path / "fleet.db", clock), clock=clock) as engine:
        for number in range(60):
            await engine.submit(Submission(graph(text="x" * 100_000), metadata={"number": number}))
        other = asyncio.create_task(serve())
        await asyncio.sleep(0)
        before = served
        page = await engine.listing(JobFilter(metadata={"number": "59"}))
        assert len(page.jobs) == 1
        assert served - before > 20, "the store reads elsewhere"
        other.cancel()
