"""A worker with a Redis client and nothing else: plain functions, under a Redis user that may do little more."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import sha256
from math import inf
from pathlib import Path

import msgspec
import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError
from tests.servers.redis_fixtures import own_server
from tests.servers.redis_server import RedisServer
from tests.stores._redis_users import engine_rules, worker_rules

from comfyfleet.model.calls import Command, PendingRegistration
from comfyfleet.model.dispatch import AttemptOutcome, Change, Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import JobResult, Submission
from comfyfleet.model.tenant import DEFAULT_CHARGE_S, TenantTerms
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.ports import Clock
from comfyfleet.stores.redis.server import library_text
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import FAST, A, B, StoreBench

META = "{cf}:meta"
WORKER = WorkerRecord(A, Capabilities((Service("comfyui"),)), FAST, 1, 0.0, 0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with own_server(is_durable=False) as server:
        yield server


@pytest.fixture
async def bench(server: RedisServer) -> AsyncIterator[StoreBench]:
    with Redis(port=server.port) as admin:
        admin.flushall()
        admin.execute_command("ACL", "SETUSER", "gpu-a", "reset", "on", ">secret", *worker_rules("{cf}:"))
    bench = StoreBench(lambda clock: RedisStore(server.url))
    await bench.open()
    yield bench
    await bench.store.close()


class Worker:
    """What a program in another language would be: its own connection, strings in, strings out."""

    def __init__(self, server: RedisServer) -> None:
        self.redis = Redis(
            port=server.port, username="gpu-a", password="secret", decode_responses=True, protocol=2
        )
        self.send: Callable[..., object] = self.redis.execute_command
        self.lease: list[str] = []

    def call(self, name: str, *arguments: object) -> object:
        return self.send("FCALL", f"cf1_worker_{name}", 1, META, "", "", "", *arguments)

    def lease_next(self, poll: str) -> str | None:
        answer = self.call("lease_next", A, poll, f"token of {poll}", 10)
        if answer is None:
            return None
        assert isinstance(answer, list)
        *lease, self.left, self.payload, self.sha256 = answer
        self.lease = [str(part) for part in lease]
        return self.lease[0]


@pytest.fixture
def worker(server: RedisServer, bench: StoreBench) -> Iterator[Worker]:
    worker = Worker(server)
    yield worker
    worker.redis.close()


DECLARED = '{"services": [{"name": "comfyui"}]}'


async def admit(bench: StoreBench, record: WorkerRecord = WORKER) -> None:
    """What an engine does for a worker that waits."""
    assert isinstance(bench.store, RedisStore)
    await bench.store.put_worker(record)
    await bench.store.direct_workers.admitted(PendingRegistration(record.worker_id, DECLARED.encode()))


async def test_a_worker_is_admitted_once_an_engine_has_computed_its_profile(
    bench: StoreBench, worker: Worker
) -> None:
    assert worker.call("register", A, DECLARED) is None
    with pytest.raises(ResponseError, match="CFWORKER"):
        worker.lease_next("p1")
    await admit(bench)
    assert worker.call("register", A, DECLARED) == FAST
    assert worker.call("register", A, '{"services": []}') is None, "that is another offer"


async def test_a_worker_that_was_lost_registers_again_before_it_gets_anything(
    bench: StoreBench, worker: Worker
) -> None:
    await admit(bench, msgspec.structs.replace(WORKER, is_offline=True))
    await bench.enqueue()
    with pytest.raises(ResponseError, match="CFWORKER"):
        worker.lease_next("p1")
    assert worker.call("register", A, DECLARED) is None
    await admit(bench)
    assert worker.call("register", A, DECLARED) == FAST
    assert worker.lease_next("p1") is not None


@pytest.mark.parametrize("flags", [{"is_paused": True}, {"is_draining": True}, {"quarantined_until": 1e12}])
async def test_a_worker_that_is_kept_from_work_is_given_none(
    bench: StoreBench, worker: Worker, flags: dict[str, float]
) -> None:
    await bench.enqueue()
    await admit(bench, msgspec.structs.replace(WORKER, **flags))
    assert worker.lease_next("p1") is None
    await admit(bench)
    assert worker.lease_next("p1") is not None


async def test_two_workers_that_choose_the_same_poll_id_get_leases_of_their_own(
    bench: StoreBench, worker: Worker
) -> None:
    first, second = await bench.enqueue(), await bench.enqueue()
    await admit(bench)
    await admit(bench, msgspec.structs.replace(WORKER, worker_id=B))
    assert worker.lease_next("p1") == first.job_id
    answer = worker.call("lease_next", B, "p1", "another token", 10)
    assert isinstance(answer, list)
    assert answer[0] == second.job_id


async def test_a_name_that_is_too_long_to_be_kept_is_refused_and_takes_no_job(
    bench: StoreBench, worker: Worker
) -> None:
    job = await bench.enqueue()
    await admit(bench)
    with pytest.raises(ResponseError, match="CFCALL"):
        worker.call("lease_next", A, "p1", "t" * 70_000, 10)
    assert worker.lease_next("p2") == job.job_id


async def test_what_no_reader_could_read_is_refused_at_the_door_and_changes_nothing(
    bench: StoreBench, worker: Worker
) -> None:
    with pytest.raises(ResponseError, match="CFDECLARED"):
        worker.call("register", A, "comfyui")
    await admit(bench)
    job = await bench.enqueue()
    worker.lease_next("p1")
    for name in ("complete", "fail", "progress"):
        for text in ("done", "[]", '{"outputs"', '"{}"'):
            with pytest.raises(ResponseError, match="CFREPORT"):
                worker.call(name, *worker.lease, text)
    assert worker.call("complete", *worker.lease, " {}") == 1
    record = await bench.store.records.get(job.job_id)
    assert record is not None
    assert record.result == JobResult()


async def test_a_result_in_another_form_does_not_hide_the_job(bench: StoreBench, worker: Worker) -> None:
    await admit(bench)
    job = await bench.enqueue()
    worker.lease_next("p1")
    assert worker.call("complete", *worker.lease, '{"outputs": [1], "mine": 2}') == 1
    record = await bench.store.records.get(job.job_id)
    assert record is not None and record.result is not None
    assert record.phase is Phase.COMPLETED
    assert record.result.outputs == {"": {"outputs": [1], "mine": 2}}


async def test_a_command_is_read_from_the_workers_stream_under_its_own_user(
    bench: StoreBench, worker: Worker
) -> None:
    await admit(bench)
    reading = asyncio.create_task(
        asyncio.to_thread(worker.send, "XREAD", "BLOCK", "5000", "STREAMS", "{cf}:commands:" + A, "0")
    )
    command = Command("cancel", JobId("job-1"), 3, "by hand")
    await bench.store.send_command(A, command)
    found = await reading
    assert isinstance(found, list)
    ((_, ((_, told),)),) = found
    assert float(told.pop("timestamp")) == pytest.approx(await bench.store.now(), abs=60)
    assert told == {"action": "cancel", "job_id": "job-1", "lease": "3", "reason": "by hand"}
    for _ in range(500):
        await bench.store.send_command(A, command)
    kept = worker.send("XREAD", "COUNT", "1000", "STREAMS", "{cf}:commands:" + A, "0")
    assert isinstance(kept, list)
    assert len(kept[0][1]) <= 200


async def test_a_worker_leases_beats_reports_and_completes(bench: StoreBench, worker: Worker) -> None:
    await admit(bench)
    job = await bench.enqueue()
    assert worker.lease_next("p1") == job.job_id
    assert 9 < float(worker.left) <= 10
    assert json.loads(worker.payload)["job_id"] == job.job_id
    lease = worker.lease
    assert worker.lease_next("p1") == job.job_id, "a poll asked again finds its lease"
    assert worker.lease == lease
    assert worker.lease_next("p2") is None
    assert worker.call("heartbeat", *lease, 60) == 1
    assert worker.call("progress", *lease, '{"percentage": 50}') == 1
    kept = json.loads(worker.redis.get("{cf}:job:" + job.job_id + ":progress") or "")
    assert kept.pop("at") == pytest.approx(await bench.store.now(), abs=60)
    assert kept == {"percentage": 50, "worker_id": A, "lease": 1}
    assert worker.call("progress", *lease, " { } ") == 1, "nothing to say"
    assert json.loads(worker.redis.get("{cf}:job:" + job.job_id + ":progress") or "")["lease"] == 1
    assert worker.call("complete", *lease, msgspec.json.encode(JobResult(cached_nodes=("3",)))) == 1
    assert worker.call("complete", *lease, "{}") == 1, "the same report gets the same answer"
    assert worker.call("heartbeat", *lease, 60) == 0
    record = await bench.store.records.get(job.job_id)
    assert record is not None
    assert (record.phase, record.worker_id, record.result) == (
        Phase.COMPLETED,
        A,
        JobResult(cached_nodes=("3",)),
    )
    kinds = [fact.kind.value for fact in await bench.store.facts(job.job_id)]
    assert kinds == ["queued", "leased", "completed"]
    assert await bench.store.next_due() is None


async def test_the_hash_that_comes_with_a_lease_is_that_of_the_payload_also_after_a_change(
    bench: StoreBench, worker: Worker
) -> None:
    await admit(bench)
    dispatch = await bench.enqueue()
    payload = Submission({"1": {"class_type": "Späti", "inputs": {"seed": 2**63}}})
    changed = await bench.change(dispatch, Change(), job={"payload": payload})
    assert changed is not None
    await bench.enqueue()
    for number in range(2):
        assert worker.lease_next(f"p{number}") == json.loads(worker.payload)["job_id"]
        assert worker.sha256 == base64.b64encode(sha256(worker.payload.encode()).digest()).decode()


async def test_a_released_job_returns_to_its_place_and_a_cancelled_one_ends(
    bench: StoreBench, worker: Worker
) -> None:
    await admit(bench)
    job, later = await bench.enqueue(), await bench.enqueue()
    assert worker.lease_next("p1") == job.job_id
    old = worker.lease
    assert worker.call("release", *old, "draining") == 1
    assert worker.call("release", *old, "draining") == 1
    assert await bench.peek() == [job.job_id, later.job_id]
    assert worker.lease_next("p2") == job.job_id
    dispatch = await bench.store.load(job.job_id)
    assert dispatch is not None
    assert dispatch.releases == 1
    assert await bench.change(dispatch, Change(cancel_requested_at=1.0)) is not None
    assert worker.call("heartbeat", *worker.lease, 60) == 2, "to be stopped"
    assert worker.call("complete", *old, "{}") == 0, "an old lease changes nothing"
    assert worker.call("release", *worker.lease, "cancelled") == 1
    outcomes = [attempt.outcome for attempt in await bench.store.attempts(job.job_id)]
    assert outcomes == [AttemptOutcome.RELEASED, AttemptOutcome.CANCELLED]


async def test_what_such_a_worker_ends_of_a_tenant_apart_is_to_be_settled(
    bench: StoreBench, worker: Worker
) -> None:
    await admit(bench)
    plain, completed, cancelled = [await bench.enqueue(has_tenant_database=number > 0) for number in range(3)]
    for number in range(2):
        worker.lease_next(f"p{number}")
        assert worker.call("complete", *worker.lease, "{}") == 1
    assert worker.lease_next("p2") == cancelled.job_id
    dispatch = await bench.store.load(cancelled.job_id)
    assert dispatch is not None
    assert await bench.change(dispatch, Change(cancel_requested_at=1.0)) is not None
    assert worker.call("release", *worker.lease, "cancelled") == 1
    found = await bench.store.unsettled(10)
    assert [(each.job_id, each.phase) for each in found] == [
        (completed.job_id, Phase.COMPLETED),
        (cancelled.job_id, Phase.CANCELLED),
    ]
    for phase in (Phase.COMPLETED, Phase.CANCELLED):
        await bench.store.purge(phase, 1e12, 10)
    names = [plain.job_id, completed.job_id, cancelled.job_id]
    assert await bench.store.load_many(names) == [None, *found]


async def test_a_failure_is_kept_once_for_an_engine_to_judge(
    server: RedisServer, bench: StoreBench, worker: Worker
) -> None:
    await admit(bench)
    job = await bench.enqueue()
    worker.lease_next("p1")
    for _ in range(2):
        assert worker.call("fail", *worker.lease, '{"kind": "node_error", "message": "x"}') == 1
    with Redis(port=server.port) as admin:
        reports = admin.lrange("{cf}:reports", 0, -1)
    assert isinstance(reports, list)
    (report,) = (json.loads(text) for text in reports)
    assert (report["ref"]["job_id"], report["failure"]["kind"]) == (job.job_id, "node_error")
    assert (await bench.store.counts()).by_phase[Phase.LEASED] == 1, "the verdict is an engine's"


async def test_the_worker_user_calls_no_other_function_and_sees_no_other_key(
    bench: StoreBench, worker: Worker
) -> None:
    refused: list[tuple[object, ...]] = [
        ("FCALL", "cf1_purge", 1, META, "", "", "", "completed", "1e12", "10"),
        ("FCALL", "cf1_open", 1, META, "", "", "", "x", "0"),
        ("FCALL", "cf1_worker_heartbeat", 1, "{other}:meta", "", "", "", "j", 1, 1, 1, "t", 60),
        ("FUNCTION", "FLUSH"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("EVAL", "return 1", 0),
        ("GET", "{other}:meta"),
        ("SUBSCRIBE", "elsewhere"),
    ]
    for command in refused:
        with pytest.raises(NoPermissionError):
            worker.send(*[str(part) for part in command])


async def test_the_worker_user_neither_reads_nor_writes_the_cabinet(
    bench: StoreBench, worker: Worker
) -> None:
    documents = bench.store.documents
    assert await documents.put("keys", "k", b"an administrator's", version=0)
    assert not worker.redis.exists("{cf}:cabinet", "{cf}:cabinet:keys", "{cf}:cabinet:keys:names")
    for command in (
        ("HGET", "{cf}!cabinet:keys", "k"),
        ("HSET", "{cf}!cabinet:keys", "k", "2 mine"),
        ("SMEMBERS", "{cf}!cabinet"),
        ("SADD", "{cf}!cabinet", "keys"),
        ("ZADD", "{cf}!cabinet:keys:names", "0", "mine"),
        ("DEL", "{cf}!cabinet:keys"),
        ("FCALL", "cf1_cabinet_put", "1", META, "", "", "", "keys", "mine", "", "forged"),
        ("FCALL_RO", "cf1_cabinet_list", "1", META, "", "", "", "keys", "", "10"),
        # A key it may not name, even where a function it may call would use it.
        ("FCALL", "cf1_worker_leave", "1", "{cf}!meta", "", "", "", A),
    ):
        with pytest.raises(NoPermissionError):
            worker.send(*command)
    # What it writes where it may is no document.
    worker.redis.hset("{cf}:cabinet:keys", "forged", "1 {}")
    assert [each.name for each in await documents.listing("keys")] == ["k"]


async def test_an_engines_user_opens_works_and_listens_and_leaves_other_fleets_alone(
    server: RedisServer,
) -> None:
    with Redis(port=server.port) as admin:
        admin.flushall()
        admin.function_flush()
        send: Callable[..., object] = admin.execute_command
        send("ACL", "SETUSER", "hub", "reset", "on", ">word", *engine_rules("{cf}:"))
    woken = asyncio.Event()

    def make(clock: Clock) -> RedisStore:
        store = RedisStore(f"redis://hub:word@127.0.0.1:{server.port}/0")
        store.listen(woken.set)
        return store

    bench = StoreBench(make)
    await bench.open()
    assert isinstance(bench.store, RedisStore)
    await bench.enqueue()
    assert await bench.lease_next() is not None
    assert await bench.store.documents.put("keys", "k", b"1", version=0)
    assert await bench.store.documents.collections() == ["keys"]
    async with asyncio.timeout(60):
        await woken.wait()
    for command in (
        ("GET", "{other}:meta"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "SET", "maxmemory", "1"),
    ):
        with pytest.raises(Fault, match="NOPERM"):
            await bench.store.diagnose(*command)
    await bench.store.close()


def test_the_page_on_the_protocol_shows_the_rules_as_they_are_and_names_every_function() -> None:
    page = (Path(__file__).parents[2] / "docs" / "redis-protocol.md").read_text(encoding="utf-8")
    assert " ".join(worker_rules("{cf}:")) in " ".join(page.split())
    assert " ".join(engine_rules("{cf}:")) in " ".join(page.split())
    functions = re.findall(r"(?:define|define_reading)\('(\w+)'", library_text())
    assert len(functions) > 30
    for name in functions:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("seconds", ["NaN", "inf", "-1", "soon", ""])
async def test_a_time_that_is_none_is_refused_before_anything_changes(
    bench: StoreBench, worker: Worker, seconds: str
) -> None:
    """As a program writes that reads its settings badly."""
    job = await bench.enqueue()
    await admit(bench)
    with pytest.raises(ResponseError, match=r"CFCALL .*seconds"):
        worker.call("lease_next", A, "p1", "token", seconds)
    assert (await bench.store.counts()).waiting == 1
    assert worker.lease_next("p2") == job.job_id
    with pytest.raises(ResponseError, match=r"CFCALL .*seconds"):
        worker.call("heartbeat", *worker.lease, seconds)
    assert worker.call("heartbeat", *worker.lease, 60) == 1


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"\xe0\xa0\xc2\x80\x80", b"\xed\xa0\x80", b"\xf0\x80\x80\x80"])
@pytest.mark.parametrize("place", [1, 2])
async def test_names_that_are_no_text_are_refused_before_an_engine_stumbles_over_them(
    bench: StoreBench, worker: Worker, place: int, bad: bytes
) -> None:
    """A token of random bytes is no bad idea, but no engine could read the job again."""
    job = await bench.enqueue()
    await admit(bench)
    given: list[object] = [A, "p1", "token", 10]
    given[place] = bad
    with pytest.raises(ResponseError, match=r"CFCALL .*UTF-8"):
        worker.call("lease_next", *given)
    with pytest.raises(ResponseError, match=r"CFCALL .*UTF-8"):
        worker.call("register", bad, DECLARED)
    assert await bench.store.load(job.job_id) == job
    given[place] = "größer €uro 😀"
    assert worker.call("lease_next", *given) is not None


async def test_a_reason_that_is_no_text_leaves_the_facts_readable(bench: StoreBench, worker: Worker) -> None:
    job = await bench.enqueue()
    await admit(bench)
    worker.lease_next("p1")
    assert worker.call("release", *worker.lease, b"stopped by Andr\xe9") == 1
    released = (await bench.store.facts(job.job_id))[-1]
    assert released.data == {"reason": "stopped by Andr?", "attempt": 1}


async def test_nothing_is_kept_of_a_removed_worker_though_it_still_calls(
    bench: StoreBench, worker: Worker, server: RedisServer
) -> None:
    await admit(bench)
    await bench.enqueue()
    assert worker.lease_next("p1") is not None
    with Redis(port=server.port, decode_responses=True) as admin:
        assert admin.hkeys("{cf}:workers:seen") == [A]
        await bench.store.remove_worker(A)
        assert worker.call("heartbeat", *worker.lease, 60) == 1, "the job is still its own to end"
        assert worker.call("register", A, DECLARED) is None
        assert admin.exists("{cf}:workers:seen", f"{{cf}}:worker:{A}:heartbeat") == 0


async def test_a_tenant_at_its_cap_or_held_gives_such_a_worker_nothing(
    bench: StoreBench, server: RedisServer
) -> None:
    await bench.store.put_worker(WORKER)
    worker, ann, shares = Worker(server), TenantId("ann"), bench.store.fair_share
    await shares.put_terms(TenantTerms(ann, max_leased=1))
    for _ in range(3):
        await bench.enqueue(tenant=ann)
    assert worker.lease_next("one") is not None
    first = list(worker.lease)
    assert worker.lease_next("two") is None
    assert worker.call("complete", *first, "{}") == 1
    await shares.put_terms(TenantTerms(ann, held_until=inf))
    assert worker.lease_next("three") is None
    await shares.put_terms(TenantTerms(ann))
    assert worker.lease_next("four") is not None


async def test_such_a_worker_charges_the_tenant_as_an_engine_would(
    bench: StoreBench, server: RedisServer
) -> None:
    await bench.store.put_worker(WORKER)
    worker, ann, shares = Worker(server), TenantId("ann"), bench.store.fair_share
    await shares.put_terms(TenantTerms(ann, weight=2.0))
    for _ in range(2):
        await bench.enqueue(tenant=ann)
    assert worker.lease_next("one") is not None
    assert (await shares.get(ann)).virtual_time == DEFAULT_CHARGE_S / 2
    assert worker.call("heartbeat", *worker.lease, 60) == 1
    assert worker.call("complete", *worker.lease, "{}") == 1
    share = await shares.get(ann)
    assert 0 < share.virtual_time - share.credit < 1, "it took no time to speak of"
    # One that was never taken up took none at all.
    before = share.virtual_time - share.credit
    assert worker.lease_next("two") is not None
    assert worker.call("release", *worker.lease, "shutting down") == 1
    share = await shares.get(ann)
    assert share.virtual_time - share.credit == before
