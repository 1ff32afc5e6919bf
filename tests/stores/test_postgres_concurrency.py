"""Several engines on one PostgreSQL: no job is leased twice, none is overlooked, and no number is given twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import psycopg
import pytest
from tests.servers.postgres_database import empty_database
from tests.stores._postgres import Jobs, fill_table

from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import AtRevision, Change, Lease, Phase, Write, WriteResult
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import ClassKey, JobId, LeaseToken, PollId, ProfileKey, TenantId, WorkerId
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.ports import Peek
from comfyfleet.stores.postgres import PostgresStore, codec, lanes
from comfyfleet.stores.postgres.connections import Row, SqlStep, Values
from comfyfleet.stores.postgres.job_import import _KNOWN
from comfyfleet.testing.contract.store_bench import FAST, A, B, completion, release
from comfyfleet.testing.leases import lease_next

Stores = tuple[PostgresStore, PostgresStore]


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request.config)


@pytest.fixture
async def stores(url: str) -> AsyncIterator[Stores]:
    pair = PostgresStore(url, connections=6), PostgresStore(url, connections=6)
    for store in pair:
        await store.open()
    await fill_table(pair[0])
    yield pair
    for store in pair:
        await store.close()


async def test_as_many_leases_as_jobs_at_once_all_succeed_and_take_each_job_once(stores: Stores) -> None:
    jobs = Jobs()
    ids = {(await jobs.enqueue(stores[0], f"hash-{number % 3}")).job_id for number in range(48)}
    answers = await asyncio.gather(*(lease_next(stores[n % 2], jobs.offer()) for n in range(48)))
    assert None not in answers, "a slot was sent away while a job waited"
    assert {answer.dispatch.job_id for answer in answers if answer} == ids
    assert await lease_next(stores[1], jobs.offer()) is None


async def test_a_lease_does_not_wait_for_jobs_that_others_hold(stores: Stores, url: str) -> None:
    """Two who each hold what the other looks for would wait for ever."""
    jobs = Jobs()
    job_id = (await jobs.enqueue(stores[0], "hash-0")).job_id
    async with await psycopg.AsyncConnection.connect(url) as other:
        await other.execute("SELECT 1 FROM comfyfleet.dispatches FOR UPDATE")
        async with asyncio.timeout(60):
            assert await lease_next(stores[0], jobs.offer()) is None
        await other.rollback()
    leased = await lease_next(stores[0], jobs.offer())
    assert leased is not None and leased.dispatch.job_id == job_id


async def test_engines_that_submit_lease_return_and_finish_at_once_lose_no_job_and_finish_each_once(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tidying at every turn: bounds rise and lanes go while others put jobs into them.
    monkeypatch.setattr(lanes, "MAX_LAG", 0)
    monkeypatch.setattr(lanes, "MAX_EMPTY", 0)
    jobs, finished, returned = Jobs(), Counter[JobId](), set[JobId]()
    total = 150

    async def submit(store: PostgresStore, count: int) -> None:
        for number in range(count):
            await jobs.enqueue(store, f"hash-{number % 4}", priority=number % 2)

    async def work(store: PostgresStore) -> None:
        while finished.total() < total:
            written = await lease_next(store, jobs.offer())
            if written is None:
                await asyncio.sleep(0.005)
                continue
            ref = written.dispatch.lease_ref()
            if ref.job_id not in returned and len(returned) < 40:
                returned.add(ref.job_id)
                assert await store.write(release(ref)) is not None
            else:
                assert await store.write(completion(ref)) is not None
                finished[ref.job_id] += 1

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for store in stores:
            group.create_task(submit(store, total // 2))
            for _ in range(4):
                group.create_task(work(store))
    assert set(finished.values()) == {1}
    counts = await stores[0].counts()
    assert (counts.waiting, counts.by_phase[Phase.QUEUED], counts.by_phase[Phase.LEASED]) == (0, 0, 0)
    assert counts.by_phase[Phase.COMPLETED] == total
    for job_id in finished:
        numbers = [fact.number for fact in await stores[1].facts(job_id)]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_one_of_many_writers_of_the_same_revision_wins_and_one_of_many_leases_of_the_same_job(
    stores: Stores,
) -> None:
    jobs = Jobs()
    job = await jobs.enqueue(stores[0])
    draft = (FactDraft(FactKind.PRIORITY_CHANGED),)
    writes = [
        Write(job.job_id, AtRevision(job.revision), Change(priority=number), facts=draft)
        for number in range(8)
    ]
    answers = await asyncio.gather(*(stores[n % 2].write(write) for n, write in enumerate(writes)))
    (winner,) = [answer for answer in answers if answer is not None]
    assert await stores[1].load(job.job_id) == winner.dispatch
    assert [fact.number for fact in await stores[1].facts(job.job_id)] == [1, 2]
    leases = await asyncio.gather(*(stores[n % 2].lease(job.job_id, jobs.offer()) for n in range(8)))
    assert len([lease for lease in leases if lease is not None]) == 1
    assert len(await stores[0].attempts(job.job_id)) == 1


async def test_the_same_reference_submitted_many_times_at_once_makes_one_job(stores: Stores) -> None:
    jobs = Jobs()
    made = [jobs.make() for _ in range(8)]

    async def submit(store: PostgresStore, number: int) -> JobId:
        dispatch, job = made[number]
        named = type(job)(
            job.job_id, job.tenant, job.workflow_hash, job.submitted_at, job.payload, reference="mine"
        )
        written = await store.enqueue(dispatch, named, ())
        assert written is not None
        return written.dispatch.job_id

    answers = await asyncio.gather(*(submit(stores[n % 2], n) for n in range(8)))
    assert len(set(answers)) == 1
    assert (await stores[0].counts()).waiting == 1


async def test_an_enqueue_repeated_after_its_answer_was_lost_is_answered_and_not_done_twice(
    stores: Stores,
) -> None:
    dispatch, job = Jobs().make()
    draft = (FactDraft(FactKind.QUEUED),)
    answers = await asyncio.gather(*(stores[n % 2].enqueue(dispatch, job, draft) for n in range(8)))
    written = [answer for answer in answers if answer is not None]
    assert len(written) == 8 and len({answer.dispatch.sequence for answer in written}) == 1
    assert sorted(len(answer.facts) for answer in written) == [*[0] * 7, 1], "told by the one who wrote it"
    assert (await stores[0].counts()).waiting == 1


async def test_additions_to_the_table_at_once_are_refused_all_but_one_and_succeed_when_repeated(
    stores: Stores,
) -> None:
    version = (await stores[0].table()).version
    classes = [RequirementClass(Requirements(models=(f"model-{n}",))) for n in range(6)]
    answers = await asyncio.gather(
        *(stores[n % 2].put_class(cls, [FAST], version=version) for n, cls in enumerate(classes))
    )
    assert sorted(answers) == [False] * 5 + [True]

    async def repeat(store: PostgresStore, name: str) -> None:
        while True:
            table = await store.table()
            fits: list[ClassKey] = list(table.classes)
            if await store.put_profile(ProfileKey(name), fits, version=table.version):
                return

    await asyncio.gather(*(repeat(stores[n % 2], f"profile-{n}") for n in range(6)))
    assert (await stores[0].table()).version == version + 7


async def test_heartbeats_over_the_same_leases_in_any_order_all_get_through(stores: Stores) -> None:
    jobs = Jobs()
    refs = []
    for _ in range(6):
        await jobs.enqueue(stores[0])
        written = await lease_next(stores[0], jobs.offer())
        assert written is not None
        refs.append(written.dispatch.lease_ref())
    beats = await asyncio.gather(
        *(stores[n % 2].heartbeat(refs[::-1] if n % 2 else refs, 60.0) for n in range(20))
    )
    assert all(state.is_alive for states in beats for state in states)
    dispatch = await stores[0].load(refs[0].job_id)
    assert dispatch is not None
    assert dispatch.revision == 21, "one for the lease, one for each heartbeat"


async def test_a_job_another_engine_is_changing_is_stepped_over_and_not_waited_for(
    url: str, stores: Stores
) -> None:
    jobs = Jobs()
    first, second = await jobs.enqueue(stores[0]), await jobs.enqueue(stores[0])
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM comfyfleet.dispatches WHERE job_id = %s FOR UPDATE", (first.job_id,))
        async with asyncio.timeout(60):
            taken = await lease_next(stores[0], jobs.offer())
            assert taken is not None
            assert taken.dispatch.job_id == second.job_id
            assert await stores[1].lease(first.job_id, jobs.offer()) is None
    assert await stores[1].lease(first.job_id, jobs.offer(B)) is not None


# A real one comes about only if both wait within a second of each other, which no busy machine promises.
DEADLOCK_ONCE = """
CREATE SEQUENCE comfyfleet.tries;
CREATE FUNCTION comfyfleet.fail_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- What a sequence has counted stays counted when the transaction is taken back.
    IF nextval('comfyfleet.tries') = 1 THEN
        RAISE EXCEPTION 'deadlock detected' USING ERRCODE = 'deadlock_detected';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER fail_once AFTER UPDATE ON comfyfleet.tallies EXECUTE FUNCTION comfyfleet.fail_once();
"""


async def test_a_deadlock_is_repeated_and_not_felt(url: str, stores: Stores) -> None:
    jobs = Jobs()
    job = await jobs.enqueue(stores[0])
    cancel = Write(job.job_id, AtRevision(job.revision), Change(phase=Phase.CANCELLED))
    with psycopg.connect(url, autocommit=True) as other:
        other.execute(DEADLOCK_ONCE)
        written = await stores[0].write(cancel)
        assert other.execute("SELECT last_value FROM comfyfleet.tries").fetchone() == (2,)
    assert written is not None
    assert written.dispatch.phase is Phase.CANCELLED
    assert (await stores[0].counts()).by_phase[Phase.CANCELLED] == 1


async def test_peeking_sees_what_the_other_engine_left(stores: Stores) -> None:
    jobs = Jobs()
    waiting = [await jobs.enqueue(stores[n % 2]) for n in range(4)]
    assert await stores[0].lease(waiting[0].job_id, jobs.offer()) is not None
    seen = await stores[1].peek(Peek(FAST, A, 10, 32, 30.0))
    assert [each.job_id for each in seen] == [each.job_id for each in waiting[1:]]


def test_a_dispatch_stays_within_a_kilobyte() -> None:
    dispatch, _ = Jobs().make("h" * 64)
    lease = Lease(WorkerId("w" * 64), 1, 1, LeaseToken("t" * 64), PollId("p" * 64), 1e9, 1e9 + 0.123456)
    assert len(codec.encode(msgspec.structs.replace(dispatch, lease=lease, wake_at=1e9 + 0.5))) < 1024


async def test_a_job_that_is_purged_while_it_is_found_known_is_taken_in(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs()
    dispatch, job = jobs.make(phase=Phase.COMPLETED)
    job = msgspec.structs.replace(job, phase=Phase.COMPLETED)
    assert await stores[0].enqueue(dispatch, job, ()) is not None
    real = SqlStep.row

    async def purged_before(step: SqlStep, query: str, values: Values = ()) -> Row | None:
        if query == _KNOWN:
            await stores[1].purge(Phase.COMPLETED, 1e12, 10)
        return await real(step, query, values)

    monkeypatch.setattr(SqlStep, "row", purged_before)
    imported = await stores[0].job_transfer.import_jobs([JobSnapshot(dispatch, job, (), ())])
    assert imported is not None
    assert [each.job_id for each in imported] == [dispatch.job_id]
    assert await stores[1].load(dispatch.job_id) == imported[0]


async def test_a_reference_whose_job_is_purged_while_it_is_looked_up_is_free_again(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs()
    dispatch, job = jobs.make(phase=Phase.COMPLETED)
    job = msgspec.structs.replace(job, reference="mine", phase=Phase.COMPLETED)
    assert await stores[0].enqueue(dispatch, job, ()) is not None
    real = PostgresStore._known

    async def purged_before(store: PostgresStore, step: SqlStep, known: JobId) -> WriteResult | None:
        await stores[1].purge(Phase.COMPLETED, 1e12, 10)
        return await real(store, step, known)

    monkeypatch.setattr(PostgresStore, "_known", purged_before)
    again, job = jobs.make()
    written = await stores[0].enqueue(again, msgspec.structs.replace(job, reference="mine"), ())
    assert written is not None
    assert written.dispatch.job_id == again.job_id


async def test_two_stores_at_once_never_pass_a_cap_and_use_all_of_it(stores: Stores) -> None:
    jobs, ann = Jobs(), TenantId("ann")
    await stores[0].fair_share.put_terms(TenantTerms(ann, max_leased=3))
    for number in range(60):
        await jobs.enqueue(stores[0], f"hash-{number % 3}", tenant=ann)
    first = [await lease_next(stores[number % 2], jobs.offer()) for number in range(4)]
    assert [each is not None for each in first] == [True, True, True, False]
    for each in first[:3]:
        assert each is not None
        assert await stores[0].write(completion(each.dispatch.lease_ref(), used_s=1.0)) is not None
    running, most, done = 0, 0, 3

    async def work(store: PostgresStore) -> None:
        nonlocal running, most, done
        while done < 60:
            taken = await lease_next(store, jobs.offer())
            if taken is None:
                await asyncio.sleep(0.01)
                continue
            running += 1
            most = max(most, running)
            await store.heartbeat([taken.dispatch.lease_ref()], 60)
            # Counted down before the store is told: it may lease the next at once.
            running -= 1
            assert await store.write(completion(taken.dispatch.lease_ref(), used_s=1.0)) is not None
            done += 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(work(stores[number % 2]) for number in range(8)))
    share = await stores[1].fair_share.get(ann)
    assert (share.leased, share.virtual_time - share.credit) == (0, 60.0)
    assert most <= 3


async def test_leases_that_are_given_while_the_first_terms_come_are_counted(stores: Stores) -> None:
    jobs, ann = Jobs(), TenantId("ann")
    for number in range(40):
        await jobs.enqueue(stores[0], f"hash-{number % 3}", tenant=ann)
    asked = [lease_next(stores[number % 2], jobs.offer()) for number in range(30)]
    terms = stores[1].fair_share.put_terms(TenantTerms(ann, max_leased=1000))
    *taken, _ = await asyncio.gather(*asked[:15], *asked[15:], terms)
    refs = [each.dispatch.lease_ref() for each in taken if each is not None]
    assert (await stores[0].fair_share.get(ann)).leased == len(refs) == 30
    await asyncio.gather(*(stores[n % 2].write(completion(ref, used_s=1.0)) for n, ref in enumerate(refs)))
    assert (await stores[1].fair_share.get(ann)).leased == 0
