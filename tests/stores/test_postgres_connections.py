"""What a PostgreSQL store makes of its connections: a server that dies, a pooler in between, values it cannot keep."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from importlib import resources

import msgspec
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from tests.servers.postgres_database import empty_database
from tests.servers.postgres_pooler import TransactionPooler
from tests.servers.postgres_server import CannotStart, PostgresServer
from tests.stores._postgres import Jobs, fill_table

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import JobResult, OutputFile, Submission
from comfyfleet.ports import Peek, RecordQuery
from comfyfleet.stores.factory import open_store
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.postgres import connections as postgres_connections
from comfyfleet.stores.postgres.connections import Connection, ConnectionPool, SqlStep
from comfyfleet.testing.contract.store_bench import FAST, A, completion
from comfyfleet.testing.leases import lease_next
from comfyfleet.testing.time import ManualClock


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request.config)


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url)
    await store.open()
    await fill_table(store)
    yield store
    await store.close()


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """One of its own, to be killed."""
    try:
        server = PostgresServer()
        server.start()
    except CannotStart as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    yield server
    server.stop()


async def test_a_server_that_hangs_up_while_the_store_is_being_opened_is_a_fault(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang_up(connection: Connection, _migrations: object) -> None:
        with suppress(psycopg.Error):
            await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr("comfyfleet.stores.postgres.store.migrate", hang_up)
    with pytest.raises(Fault, match="closed the connection while the store was opened"):
        await PostgresStore(url).open()


async def test_a_killed_server_loses_nothing_acknowledged_and_the_store_finds_it_again(
    server: PostgresServer,
) -> None:
    store, jobs = PostgresStore(server.url, connections=4), Jobs()
    await store.open()
    await fill_table(store)
    acknowledged: list[JobId] = []
    finished: list[JobId] = []
    unknown: list[tuple[Dispatch, object]] = []

    async def submit() -> None:
        while True:
            dispatch, job = jobs.make()
            try:
                written = await store.enqueue(dispatch, job, ())
            except Fault:
                unknown.append((dispatch, job))
                return
            assert written is not None
            acknowledged.append(dispatch.job_id)

    async def work() -> None:
        while True:
            try:
                leased = await lease_next(store, jobs.offer())
                if leased is not None and await store.write(completion(leased.dispatch.lease_ref())):
                    finished.append(leased.dispatch.job_id)
            except Fault:
                return

    async with asyncio.timeout(60):
        tasks = [asyncio.create_task(each) for each in (submit(), submit(), work())]
        while len(acknowledged) < 60 or len(finished) < 10:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.kill)
        await asyncio.gather(*tasks)
        with pytest.raises(Fault, match="cannot reach PostgreSQL"):
            await store.counts()
        await asyncio.to_thread(server.start)
    for job_id in acknowledged:
        dispatch = await store.load(job_id)
        assert dispatch is not None, f"{job_id} was acknowledged and is gone"
        assert job_id not in finished or dispatch.phase is Phase.COMPLETED
    # What was in flight is there as a whole or not at all; submitting it again is safe.
    there = {job.job_id for job in await store.records.listing(RecordQuery(limit=9999))}
    counts = await store.counts()
    assert sum(counts.by_phase.values()) == len(there)
    assert set(acknowledged) <= there <= set(acknowledged) | {dispatch.job_id for dispatch, _ in unknown}
    assert await lease_next(store, jobs.offer()) is not None
    await store.close()


async def test_connections_that_were_cut_while_idle_are_replaced_unnoticed(
    url: str, store: PostgresStore
) -> None:
    jobs = Jobs()
    await asyncio.gather(*(jobs.enqueue(store) for _ in range(8)))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'comfyfleet' AND datname = current_database()"
        )
    leases = await asyncio.gather(*(lease_next(store, jobs.offer()) for _ in range(8)))
    assert len({lease.dispatch.job_id for lease in leases if lease is not None}) == 8


async def test_a_caller_that_gives_up_leaves_nothing_behind(url: str, store: PostgresStore) -> None:
    jobs = Jobs()
    job = await jobs.enqueue(store)
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE comfyfleet.facts IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await store.lease(job.job_id, jobs.offer())
    assert await store.load(job.job_id) == job
    assert await store.lease(job.job_id, jobs.offer()) is not None


async def test_a_process_that_stands_still_in_a_transaction_loses_its_locks_and_does_it_again(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = postgres_connections._BEGIN
    monkeypatch.setattr(postgres_connections, "_BEGIN", patient.replace("10s", "100ms"))
    is_standing, is_continued, tries = asyncio.Event(), asyncio.Event(), 0

    async def stand_still(step: SqlStep) -> None:
        nonlocal tries
        tries += 1
        await step.row("SELECT FROM comfyfleet.state FOR UPDATE")
        if tries == 1:
            is_standing.set()
            await is_continued.wait()
        await step.row("UPDATE comfyfleet.state SET is_paused = true RETURNING is_paused")

    connections = ConnectionPool(url)
    stopped = asyncio.create_task(connections.transact(stand_still))
    await asyncio.wait_for(is_standing.wait(), 60)
    # Only the first try is to lose its patience: on a busy machine any other might stand still as long.
    monkeypatch.setattr(postgres_connections, "_BEGIN", patient)
    async with asyncio.timeout(60):
        await store.pause_queue(False)
        is_continued.set()
        await stopped
    await connections.close()
    assert tries == 2
    assert await store.is_queue_paused()


async def test_a_refused_transaction_is_a_fault_and_changes_nothing(url: str, store: PostgresStore) -> None:
    jobs = Jobs()
    job = await jobs.enqueue(store)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER TABLE comfyfleet.facts ADD CONSTRAINT full_disk CHECK (number < 2)")
        with pytest.raises(Fault, match=r"and changed nothing.*full_disk"):
            await lease_next(store, jobs.offer())
        assert await store.load(job.job_id) == job
        assert await store.attempts(job.job_id) == []
        assert [each.job_id for each in await store.peek(Peek(FAST, A, 5, 32, 30.0))] == [job.job_id]
        connection.execute("ALTER TABLE comfyfleet.facts DROP CONSTRAINT full_disk")
    assert await lease_next(store, jobs.offer()) is not None


@pytest.mark.parametrize("text", ["nul \x00 inside", "half a pair \ud800"], ids=["nul", "surrogate"])
async def test_text_that_postgresql_cannot_keep_is_refused_and_not_retried(
    store: PostgresStore, text: str
) -> None:
    with pytest.raises(Refusal, match="cannot store this value"):
        await Jobs().enqueue(store, text)
    assert (await store.counts()).waiting == 0


async def test_payloads_and_results_come_back_exactly(store: PostgresStore) -> None:
    odd = {"seed": 2**64 + 1, "one": 1.0, "tiny": 5e-324, "text": "nul \x00 'quote' %s \\ ☃", "none": None}
    dispatch, plain = Jobs().make()
    job = msgspec.structs.replace(plain, payload=Submission({"1": odd}, metadata={"deep": [odd]}))
    assert await store.enqueue(dispatch, job, ()) is not None
    assert await store.records.get(job.job_id) == job
    leased = await lease_next(store, Jobs().offer())
    assert leased is not None
    result = JobResult({"9": {"images": [odd]}}, (OutputFile("9", "images", "a\x00.png"),))
    write = msgspec.structs.replace(
        completion(leased.dispatch.lease_ref()), job={"phase": Phase.COMPLETED, "result": result}
    )
    assert await store.write(write) is not None
    found = await store.records.get(job.job_id)
    assert found == msgspec.structs.replace(job, phase=Phase.COMPLETED, result=result)
    assert found.payload.workflow["1"]["one"].hex() == (1.0).hex()


async def test_time_is_the_servers(url: str, store: PostgresStore) -> None:
    with psycopg.connect(url) as connection:
        query = "SELECT extract(epoch FROM clock_timestamp())::float8"
        before = connection.execute(query).fetchone()
        now = await store.now()
        connection.rollback()
        after = connection.execute(query).fetchone()
    assert before is not None
    assert after is not None
    assert before[0] <= now <= after[0]
    job = await Jobs().enqueue(store)
    written = await store.lease(job.job_id, Jobs().offer())
    assert written is not None
    assert written.dispatch.lease is not None
    assert now <= written.dispatch.lease.leased_at <= await store.now()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_url_opens_it_without_connecting(scheme: str) -> None:
    store = open_store(f"{scheme}://somebody@127.0.0.1:1/fleet", ManualClock())
    assert isinstance(store, PostgresStore)
    assert store.is_shared


async def test_a_closed_store_says_so(store: PostgresStore) -> None:
    await store.close()
    with pytest.raises(Fault, match="closed"):
        await store.counts()


async def test_everything_works_behind_a_transaction_pooler(url: str) -> None:
    parts = conninfo_to_dict(url)
    async with TransactionPooler(
        str(parts.get("host", "127.0.0.1")), int(parts.get("port") or 5432)
    ) as pooler:
        through = make_conninfo(url, host="127.0.0.1", port=pooler.port, sslmode="disable")
        store, jobs = PostgresStore(through, connections=4), Jobs()
        store.listen(lambda: None)
        await store.open()
        await fill_table(store)
        made = await asyncio.gather(*(jobs.enqueue(store) for _ in range(20)))

        async def work() -> set[JobId]:
            mine = set()
            while (leased := await lease_next(store, jobs.offer())) is not None:
                ref = leased.dispatch.lease_ref()
                (state,) = await store.heartbeat([ref], 60.0)
                assert state.is_alive
                assert await store.write(completion(ref)) is not None
                mine.add(ref.job_id)
            return mine

        finished = await asyncio.gather(*(work() for _ in range(4)))
        assert set().union(*finished) == {job.job_id for job in made}
        assert sum(map(len, finished)) == 20
        await store.close()
        assert pooler.transactions > 60
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (
            0,
        )


def test_no_statement_keeps_a_state_in_its_connection() -> None:
    """Beside LISTEN, which has a connection of its own."""
    words = re.compile(r"\b(PREPARE|DECLARE|TEMPORARY|SET SESSION|pg_advisory_lock|SET search_path)\b")
    package = resources.files("comfyfleet.stores.postgres")
    for file in package.iterdir():
        if file.name.endswith(".py"):
            assert not words.search(file.read_text()), file.name


async def test_a_call_that_is_given_up_twice_leaves_no_connection_open(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time while what it had begun is being taken back."""
    connections, begun = ConnectionPool(url), asyncio.Event()
    opened: list[Connection] = []
    connect = connections.connect

    async def remembered() -> Connection:
        opened.append(await connect())
        return opened[-1]

    async def never(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def work(step: SqlStep) -> None:
        await step.rows("SELECT 1")
        monkeypatch.setattr(opened[0], "rollback", never)
        await never()

    monkeypatch.setattr(connections, "connect", remembered)
    call = asyncio.ensure_future(connections.transact(work))
    for _ in range(2):
        await begun.wait()
        begun.clear()
        call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    assert [connection.closed for connection in opened] == [True]
    await connections.close()
