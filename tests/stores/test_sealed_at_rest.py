"""What lies in the files, the tables and the keys is ciphertext; whoever swaps or changes it is found out."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from tests.engine._rig import graph, offers
from tests.servers.postgres_database import empty_database
from tests.servers.redis_fixtures import own_server
from tests.stores._at_rest import in_files, in_postgres, in_redis
from tests.tenancy._databases import tenant_schema

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, PollId, TenantId, WorkerId
from comfyfleet.model.job import Attachment, JobResult, Submission
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import RecordQuery, Store
from comfyfleet.stores.crypto.keyring import Keyring, MasterKeys
from comfyfleet.stores.crypto.store import encrypted_store
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.stores.factory import open_store
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.encrypted import encrypted_database
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.testing.contract.ledger_driver import LedgerDriver

GPU = WorkerId("gpu")
MASTERS = MasterKeys({"k1": b"1" * 32}, "k1")
TOLD = ("fox-in-the-snow", "for-the-cover", "drawn-by-hand", "left-on-the-server", "fell-over-a-fox")
"""A prompt, metadata, an attachment, a result, and what a server said of a failure."""
PROMPT, METADATA, ATTACHED, RESULT, FAILURE = TOLD
DIGEST = bytes(range(32))
STAGED, LATER = "left-before-it-was-told", "found-while-it-waited"

Look = Callable[[], Awaitable[bytes]]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with own_server(is_durable=False) as server:
        yield server.url


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Look]:
    """The URL of an empty store, and what shows everything in it."""
    match request.param:
        case "sqlite":

            async def files() -> bytes:
                return in_files(tmp_path)

            return f"sqlite:///{tmp_path}/fleet.db", files
        case "redis":
            url: str = request.getfixturevalue("redis_url")
            return f"{url}?prefix=at-rest-{request.node.name[-8:]}", lambda: in_redis(url)
    url = empty_database(request.config)
    parts = psycopg.conninfo.conninfo_to_dict(url)

    async def tables() -> bytes:
        return in_postgres(url)

    return f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}", tables


def opened(url: str) -> Store:
    store = open_store(url, SystemClock())
    return encrypted_store(store, Keyring(store.documents, SystemClock(), lambda: MASTERS))


async def take(engine: Engine, poll: str) -> LeasedJob:
    leased = await engine.poll(Poll(GPU, PollId(poll), 5.0))
    assert leased is not None
    return leased


async def nothing() -> bytes:
    return b""


async def live(store: Store, look: Look = nothing) -> tuple[JobId, Engine, bytes]:
    """A job that fails once, is tried again, and completes; and what lay there while it ran."""
    engine = Engine(store, rules=Rules(retry_base_s=0.0, max_failures_before_block=9))
    await engine.__aenter__()
    await engine.register(RegisterWorker(GPU, offers("KSampler")))
    asked = Submission(
        graph(text=PROMPT),
        reference="ours",
        metadata={"why": METADATA},
        attachments=(Attachment("a.png", ATTACHED.encode(), "1", "image"),),
    )
    job_id = (await engine.submit(asked)).job_id
    leased = await take(engine, "first")
    assert leased.workflow["1"]["inputs"]["text"] == PROMPT
    assert leased.attachments[0].data == ATTACHED.encode()
    failure = Failure(FailureKind.NODE_ERROR, FAILURE, traceback=(FAILURE,), node_errors={"1": FAILURE})
    await engine.fail(FailureReport(leased.ref, failure))
    leased = await take(engine, "second")
    lay_there = await look()
    await engine.complete(Completion(leased.ref, JobResult({"2": {"images": [RESULT]}})))
    return job_id, engine, lay_there


def lies_in(text: str, content: bytes) -> bool:
    # Bytes in JSON are base64.
    return text.encode() in content or base64.b64encode(text.encode()) in content


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_what_lies_there_is_ciphertext_and_what_is_read_is_whole(
    place: tuple[str, Look], is_sealed: bool
) -> None:
    url, look = place
    store = opened(url) if is_sealed else open_store(url, SystemClock())
    job_id, engine, lies_there = await live(store, look)
    view = await engine.get(job_id)
    assert view.job.payload.workflow["1"]["inputs"]["text"] == PROMPT
    assert view.job.payload.metadata == {"why": METADATA}
    assert view.job.result == JobResult({"2": {"images": [RESULT]}})
    assert view.attempts[0].failure is not None and view.attempts[0].failure.traceback == (FAILURE,)
    told = [fact.data for fact in await engine.store.facts(job_id) if fact.kind.value == "retrying"]
    assert told[0] is not None and told[0]["message"] == FAILURE
    dispatch = await engine.store.load(job_id)
    assert dispatch is not None and (dispatch.payload_sha256 is None) == is_sealed, "it would confirm a guess"
    lies_there += await look()
    await engine.close()
    lies_there += await look()
    found = [text for text in TOLD if lies_in(text, lies_there)]
    # Without a key the same search finds them all: it looks in the right places.
    assert found == ([] if is_sealed else list(TOLD))
    assert b"ours" in lies_there, "a reference is not sealed: stores go by it"


async def test_a_job_from_before_there_was_a_key_lives_beside_sealed_ones(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    job_id, engine, _ = await live(open_store(url, SystemClock()))
    await engine.close()
    async with Engine(opened(url)) as engine:
        assert (await engine.get(job_id)).job.payload.metadata == {"why": METADATA}
        second = (await engine.submit(Submission(graph(text="x"), metadata={"n": 2}))).job_id
        listed = await engine.store.records.listing(RecordQuery(limit=9))
        assert [job.payload.metadata for job in listed] == [{"why": METADATA}, {"n": 2}]
        repeat = await engine.submit(
            Submission(graph(text=PROMPT), reference="ours", metadata={"why": METADATA})
        )
        assert repeat.is_repeat and repeat.job_id == job_id and second != job_id


async def two_jobs(url: str) -> list[JobId]:
    async with Engine(opened(url)) as engine:
        return [
            (await engine.submit(Submission(graph(text=each), metadata={"m": each}))).job_id for each in "ab"
        ]


async def said_of(url: str, job_id: JobId) -> str | None:
    async with Engine(opened(url)) as engine:
        return (await engine.get(job_id)).job.unreadable


async def test_rows_that_were_swapped_do_not_open_and_the_others_do(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    one, two = await two_jobs(url)
    third = (await two_jobs(url))[0]
    with sqlite3.connect(tmp_path / "fleet.db") as file:
        table, column = payload_column(file)
        rows = dict(file.execute(f"SELECT job_id, {column} FROM {table}").fetchall())
        file.execute(
            f"UPDATE {table} SET {column} = ? WHERE job_id = ?", (swapped(rows[one], rows[two]), one)
        )
    file.close()
    assert "so it cannot be decrypted" in str(await said_of(url, one))
    assert await said_of(url, two) is None and await said_of(url, third) is None
    async with Engine(opened(url)) as engine:
        listed = await engine.store.records.listing(RecordQuery(limit=9))
        assert [job.unreadable is None for job in listed].count(False) == 1
        with pytest.raises(Refusal, match="can no longer be read"):
            await engine.retry(one)
        await engine.register(RegisterWorker(GPU, offers("KSampler"), 9))
        # It is next in line. Nobody gets it: it ends, and says of what.
        leased = [await engine.poll(Poll(GPU, PollId(str(number)), 0)) for number in range(5)]
        assert {each.job_id for each in leased if each is not None}.isdisjoint({one})
        view = await engine.get(one)
        assert view.dispatch.phase is Phase.FAILED and view.job.failure is not None
        assert view.job.failure.kind is FailureKind.UNREADABLE


def payload_column(file: sqlite3.Connection) -> tuple[str, str]:
    """Wherever the sealed bytes lie."""
    for (table,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        columns = [row[1] for row in file.execute(f"PRAGMA table_info({table})")]
        for column in columns:
            if "job_id" in columns and any(
                isinstance(value, bytes) and b"comfyfleet:sealed" in value
                for (value,) in file.execute(f"SELECT {column} FROM {table}")
            ):
                return table, column
    raise AssertionError("nothing is sealed in this file")


def swapped(mine: bytes, theirs: bytes) -> bytes:
    """My row with the other's sealed bytes in it."""
    content, other = msgspec.msgpack.decode(mine), msgspec.msgpack.decode(theirs)
    content_sealed, other_sealed = sealed_part(content), sealed_part(other)
    content_sealed["value"] = other_sealed["value"]
    return msgspec.msgpack.encode(content)


def sealed_part(content: Any) -> Any:
    if isinstance(content, dict):
        if "comfyfleet:sealed" in content:
            return content["comfyfleet:sealed"]
        content = list(content.values())
    if isinstance(content, list):
        for each in content:
            if (found := sealed_part(each)) is not None:
                return found
    return None


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("is_sealed", [True, False])
async def test_a_tenants_database_holds_ciphertext_too(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, is_sealed: bool
) -> None:
    url = f"sqlite:///{tmp_path}/tenants.db" if kind == "sqlite" else tenant_schema(request.config)
    database: TenantDatabase = open_tenant_database(url)
    if is_sealed:
        keyring = Keyring(MemoryDocumentStore(), SystemClock(), lambda: MASTERS)
        database = encrypted_database(database, keyring)
    await database.open()
    teller = LedgerDriver(database)
    opening = teller.opening(0)
    payload = Submission({"1": {"text": PROMPT}}, metadata={"why": METADATA})
    opening = msgspec.structs.replace(
        opening,
        job=msgspec.structs.replace(opening.job, payload=payload),
        dispatch=msgspec.structs.replace(opening.dispatch, payload_sha256=DIGEST),
    )
    await database.open_round(opening)
    hold_id, staged = opening.hold.hold_id, JobResult({"9": {"n": STAGED}})
    payload = msgspec.structs.replace(payload, include_outputs=(LATER,))
    assert await database.put_payload(hold_id, payload)
    await database.stage(hold_id, "attempt", staged, 2.5)
    leased, found = await database.leasable(hold_id), await database.open_round_of(hold_id, "attempt")
    assert leased is not None and leased.payload == payload
    assert found is not None and found.job == leased and found.result == staged
    lay_there = in_files(tmp_path) if kind == "sqlite" else in_postgres(url)
    (waiting,) = await database.outbox(is_sent=False, after=None, limit=9)
    assert waiting.dispatch.payload_sha256 == (None if is_sealed else DIGEST), "it would confirm a guess"
    ending = teller.ending(opening.hold, Phase.COMPLETED)
    changes = {"result": JobResult({"9": {"n": RESULT}}), "failure": Failure(FailureKind.UNKNOWN, FAILURE)}
    await database.end_round(msgspec.structs.replace(ending, changes=changes))
    job = await database.get(opening.job.job_id)
    assert await database.get_many([opening.job.job_id]) == {opening.job.job_id: job}
    assert job is not None and job.payload == payload and job.result == changes["result"]
    assert job.failure == changes["failure"]
    lies_there = lay_there + (in_files(tmp_path) if kind == "sqlite" else in_postgres(url))
    await database.close()
    told = [PROMPT, METADATA, RESULT, FAILURE, STAGED, LATER]
    assert [text for text in told if text.encode() in lies_there] == ([] if is_sealed else told)


async def test_after_shredding_a_job_says_why_it_cannot_be_read(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    job_id, engine, _ = await live(opened(url))
    await Keyring(engine.store.documents, SystemClock(), lambda: MASTERS).crypto_shred(TenantId("default"))
    await engine.close()
    async with Engine(opened(url)) as engine:
        view = await engine.get(job_id)
        assert view.job.unreadable is not None and "was destroyed" in view.job.unreadable
        assert view.job.phase is Phase.COMPLETED and view.job.reference == "ours"
        assert view.job.payload.workflow == {} and view.job.result is None
        facts = await engine.store.facts(job_id)
        assert [fact.kind.value for fact in facts][-1] == "completed"
        assert view.attempts[0].failure is not None
        assert "was destroyed" in view.attempts[0].failure.message
        again = (await engine.submit(Submission(graph(text="new")))).job_id
        assert (await engine.get(again)).job.unreadable is None
