"""Workers without an engine: whichever engine is there admits them, judges what they report, and learns from them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from tests.engine._rig import graph
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.direct_workers import DirectWorkers
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.worker_operations import WorkerOperations
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.calls import FailureReport, JobFilter, RegisterWorker, ReportReply
from comfyfleet.model.dispatch import AttemptOutcome, Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import JobInput, Submission
from comfyfleet.model.requirement import Requirements
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.redis.address import parse_address
from comfyfleet.stores.redis.store import RedisStore

NODE = WorkerId("node")
DECLARED = {
    "services": [{"name": "comfyui", "node_classes": ["KSampler", "SaveImage"]}],
    "hardware": {"gpu": {"count": 1, "memory_gb": 24, "model": "RTX"}},
}


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture
def url(server_url: str) -> str:
    return with_prefix(server_url)


@asynccontextmanager
async def engine_on(url: str, **rules: Any) -> AsyncIterator[Engine]:
    async with Engine(RedisStore(url), rules=Rules(**rules)) as engine:
        yield engine


async def until(condition: Callable[[], Awaitable[Any]], within_s: float = 60.0) -> Any:
    async with asyncio.timeout(within_s):
        while not (found := await condition()):
            await asyncio.sleep(0.01)
        return found


class Guest:
    """Speaks Redis and nothing else."""

    def __init__(self, url: str, name: str = NODE) -> None:
        address = parse_address(url)
        self.name = name
        self.prefix = address.prefix
        self.redis = Redis(host=address.host, port=address.port, decode_responses=True, protocol=2)
        self._polls = 0

    async def __aenter__(self) -> Guest:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.redis.aclose()

    async def call(self, name: str, *arguments: object) -> Any:
        function: Callable[..., Awaitable[Any]] = self.redis.execute_command
        return await function("FCALL", f"cf1_worker_{name}", 1, f"{self.prefix}meta", "", "", "", *arguments)

    async def register(self, declared: dict[str, Any] | None = None) -> str:
        text = json.dumps(declared or DECLARED)
        profile = await until(lambda: self.call("register", self.name, text))
        return str(profile)

    async def take(self) -> list[str]:
        """The lease, acknowledged."""
        self._polls += 1
        poll = f"poll-{self._polls}"
        answer = await until(lambda: self.call("lease_next", self.name, poll, f"token-{poll}", 10))
        lease = [str(part) for part in answer[:5]]
        assert await self.call("heartbeat", *lease, 60) == 1
        return lease

    async def fail(self, lease: list[str], kind: str = "node_error") -> None:
        assert await self.call("fail", *lease, json.dumps({"kind": kind, "message": "it broke"})) == 1


async def facts(engine: Engine, job_id: JobId) -> list[str]:
    return [fact.kind.value for fact in await engine.store.facts(job_id)]


async def reports(engine: Engine) -> int:
    assert engine.store.direct_workers is not None
    return len((await engine.store.direct_workers.backlog(1000)).reports)


async def test_a_worker_is_admitted_runs_a_job_and_the_engine_learns_from_it(url: str) -> None:
    async with engine_on(url) as engine, Guest(url) as guest:
        await guest.register()
        job_id = (await engine.submit(Submission(graph(), require_workable=True))).job_id
        lease = await guest.take()
        workflow_hash = (await engine.get(job_id)).dispatch.workflow_hash
        # A count towards a block, as an earlier failure would have left it.
        await engine.store.put_block(Block(NODE, workflow_hash, BlockReason.FAILURES, 1))
        assert await guest.call("complete", *lease, "{}") == 1
        view = await engine.get(job_id)
        assert (view.job.phase, view.job.worker_id) == (Phase.COMPLETED, NODE)
        assert [attempt.outcome for attempt in view.attempts] == [AttemptOutcome.COMPLETED]

        async def record() -> Any:
            found = await engine.store.get_worker(NODE)
            return found if found is not None and found.completed else None

        learned = await until(record)
        assert learned.live.last_workflow == workflow_hash
        assert await engine.store.get_workflow_stats(workflow_hash) is not None
        assert await engine.blocks() == []


async def test_a_worker_with_redis_alone_gets_no_job_that_brings_files_whatever_it_declares(url: str) -> None:
    async with engine_on(url) as engine, Guest(url) as guest:
        await guest.register({**DECLARED, "moves_files": True})
        brings = (JobInput("1", "seed", "f_1"),)
        passed_over = (await engine.submit(Submission(graph(seed=1), inputs=brings))).job_id
        taken = (await engine.submit(Submission(graph(seed=1)))).job_id
        lease = await guest.take()
        assert lease[0] == taken
        later = (
            await engine.submit(Submission(graph(seed=1), inputs=(JobInput("1", "seed", job=taken),)))
        ).job_id
        files = [{"node_id": "2", "kind": "images", "filename": "a.png"}]
        assert await guest.call("complete", *lease, json.dumps({"files": files})) == 1

        async def failure() -> Any:
            return (await engine.get(later)).job.failure

        assert "only on its server" in (await until(failure)).message
        assert (await engine.get(passed_over)).job.phase is Phase.QUEUED


async def test_a_worker_with_redis_alone_gets_no_job_that_is_for_workers_of_a_hub_whatever_it_declares(
    url: str,
) -> None:
    async with engine_on(url) as engine, Guest(url) as guest:
        await guest.register({**DECLARED, "has_hub": True})
        needs = Requirements(needs_hub=True)
        passed_over = (await engine.submit(Submission(graph(), priority=5, requirements=needs))).job_id
        taken = (await engine.submit(Submission(graph()))).job_id
        assert (await guest.take())[0] == taken
        explained = await engine.explain(passed_over)
        assert "reads jobs directly from the store" in explained.workers[0].reasons[0]
        assert (await engine.get(passed_over)).job.phase is Phase.QUEUED


async def test_a_failure_is_judged_by_an_engine_and_put_away(url: str) -> None:
    async with engine_on(url, retry_base_s=0.01, retry_cap_s=0.02) as engine, Guest(url) as guest:
        await guest.register()
        hopeless = (await engine.submit(Submission(graph(), priority=1))).job_id
        await guest.fail(await guest.take(), "invalid_workflow")

        async def has_failed() -> bool:
            return (await engine.get(hopeless)).job.phase is Phase.FAILED

        await until(has_failed)
        strange = (await engine.submit(Submission(graph("SaveImage")))).job_id
        await guest.fail(await guest.take(), "no such kind")

        async def is_tried_again() -> bool:
            return "retrying" in await facts(engine, strange)

        await until(is_tried_again)
        failure = (await engine.get(strange)).job.failure
        assert failure is not None
        assert failure.kind is FailureKind.UNKNOWN
        assert "it broke" in failure.message, "what could not be read is shown"
        assert await reports(engine) == 0


async def test_a_repeated_failure_of_a_run_that_was_to_be_stopped_gets_the_first_answer(url: str) -> None:
    async with engine_on(url) as engine, Guest(url) as node:
        await node.register()
        job_id = (await engine.submit(Submission(graph()))).job_id
        lease = await node.take()
        await engine.cancel(job_id)
        await node.fail(lease)

        async def is_cancelled() -> bool:
            return (await engine.get(job_id)).job.phase is Phase.CANCELLED

        await until(is_cancelled)
        await node.fail(lease)
        (attempt,) = await engine.store.attempts(job_id)
        assert attempt.outcome is AttemptOutcome.CANCELLED
        other = [lease[0], lease[1], str(int(lease[2]) + 1), *lease[3:]]
        assert await node.call("fail", *other, '{"kind": "node_error"}') == 0, "a lease that never was"


async def test_two_engines_at_once_judge_each_failure_once_and_admit_each_worker(url: str) -> None:
    async with engine_on(url, max_attempts=9) as first, engine_on(url) as second, Guest(url) as guest:
        await guest.register()
        others = [Guest(url, f"other-{number}") for number in range(5)]
        jobs = [(await first.submit(Submission(graph(seed=number)))).job_id for number in range(20)]
        leases = [await guest.take() for _ in jobs]
        await asyncio.gather(
            *(guest.fail(lease) for lease in leases), *(other.register() for other in others)
        )
        await asyncio.gather(first._direct_workers.process_inbox(), second._direct_workers.process_inbox())

        async def are_judged() -> bool:
            return not await reports(first)

        await until(are_judged)
        for job_id in jobs:
            told = await facts(second, job_id)
            assert told.count("retrying") + told.count("failed") == 1, told
        profiles = {worker.profile for worker in await second.store.workers()}
        assert len(await second.store.workers()) == 6
        assert len(profiles) == 1
        for other in others:
            await other.redis.aclose()


async def test_an_engine_that_dies_after_its_verdict_leaves_nothing_to_be_judged_twice(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Guest(url) as guest:
        async with engine_on(url, retry_base_s=3600, retry_cap_s=3600) as dying:
            assert isinstance(dying.store, RedisStore)
            died = asyncio.Event()

            async def die(_: object) -> None:
                died.set()
                await asyncio.Event().wait()

            monkeypatch.setattr(dying.store.direct_workers, "handled", die)
            await guest.register()
            job_id = (await dying.submit(Submission(graph()))).job_id
            await guest.fail(await guest.take())
            await died.wait()
            assert await reports(dying) == 1
        async with engine_on(url) as heir:

            async def is_put_away() -> bool:
                return not await reports(heir)

            await until(is_put_away)
            assert (await facts(heir, job_id)).count("retrying") == 1


async def test_a_failure_told_while_no_engine_was_there_is_judged_by_the_next(url: str) -> None:
    async with Guest(url) as guest:
        async with engine_on(url) as engine:
            await guest.register()
            job_id = (await engine.submit(Submission(graph()))).job_id
            lease = await guest.take()
        await guest.fail(lease, "invalid_workflow")
        async with engine_on(url) as heir:

            async def has_failed() -> bool:
                return (await heir.get(job_id)).job.phase is Phase.FAILED

            await until(has_failed)


async def test_a_worker_that_calls_stays_one_that_is_silent_is_lost_and_comes_back(url: str) -> None:
    async with engine_on(url, worker_lost_s=1.0, sweep_s=0.1) as engine, Guest(url) as guest:
        await guest.register()

        async def is_offline() -> bool:
            record = await engine.store.get_worker(NODE)
            return record is not None and record.is_offline

        for poll in range(15):
            assert await guest.call("lease_next", NODE, f"idle-{poll}", "token", 10) is None
            await asyncio.sleep(0.1)
        assert not await is_offline(), "a poll is a sign of life"
        await until(is_offline)
        with pytest.raises(ResponseError, match="CFWORKER"):
            await guest.take()
        await guest.register()
        await engine.submit(Submission(graph()))
        await guest.take()


async def test_an_engine_that_starts_does_not_take_a_worker_for_lost_that_has_just_called(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Guest(url) as guest:
        async with engine_on(url) as engine:
            await guest.register()
            record = await engine.store.get_worker(NODE)
            assert record is not None
            # It was admitted long ago, and what it has called since then is not in its record.
            await engine.store.put_worker(msgspec.structs.replace(record, last_seen_at=1.0))
        assert await guest.call("lease_next", NODE, "poll", "token", 10) is None
        # Its first sweep comes before its first look at what such workers have left.
        monkeypatch.setattr(DirectWorkers, "wake", lambda _: None)
        async with engine_on(url) as heir:
            await heir.sweep()
            record = await heir.store.get_worker(NODE)
            assert record is not None
            assert not record.is_offline


async def test_a_worker_that_leaves_is_offline_and_forgotten_when_it_is_removed(url: str) -> None:
    async with engine_on(url) as engine, Guest(url) as guest:
        await guest.register()
        assert await guest.call("leave", NODE) == 1

        async def is_offline() -> bool:
            record = await engine.store.get_worker(NODE)
            return record is not None and record.is_offline

        await until(is_offline)
        await guest.register()
        assert not await is_offline()
        await engine.drain_worker(NODE)
        await engine.remove_worker(NODE)
        left = await guest.redis.keys(f"{guest.prefix}*")
        assert not [key for key in left if "node" in key or "declared" in key or "seen" in key]


async def test_a_declaration_that_cannot_be_read_is_refused_with_the_place(url: str) -> None:
    async with engine_on(url), Guest(url) as guest:
        with pytest.raises(ResponseError, match=r"CFDECLARED .*services"):
            await guest.register({"services": "comfyui"})
        await guest.register()


# What the server's own reader of JSON lets pass and others do not: some languages write such things.
UNREADABLE = [b"NaN", b'"\xff"', b"1e999"]


@pytest.mark.parametrize("value", UNREADABLE)
async def test_a_failure_that_nobody_can_read_is_judged_and_holds_up_nobody(url: str, value: bytes) -> None:
    async with engine_on(url) as engine, Guest(url) as guest:
        await guest.register()
        job_id = (await engine.submit(Submission(graph(), max_attempts=1))).job_id
        lease = await guest.take()
    # Told while no engine is there: the next one must be able to start.
    async with Guest(url) as guest:
        assert await guest.call("fail", *lease, b'{"kind": "node_error", "message": %b}' % value) == 1
    async with engine_on(url) as engine, Guest(url, "another") as guest:
        await guest.register()

        async def ended() -> bool:
            return (await engine.get(job_id)).job.phase is Phase.FAILED

        await until(ended)
        failure = (await engine.get(job_id)).job.failure
        assert failure is not None
        assert failure.kind is FailureKind.UNKNOWN
        assert await reports(engine) == 0


@pytest.mark.parametrize("value", UNREADABLE)
async def test_a_result_that_nobody_can_read_is_shown_as_it_came_and_hides_no_other_job(
    url: str, value: bytes
) -> None:
    async with engine_on(url) as engine, Guest(url) as guest:
        await guest.register()
        job_id = (await engine.submit(Submission(graph()))).job_id
        text = b'{"outputs": {"9": {"text": [%b]}}}' % value
        assert await guest.call("complete", *await guest.take(), text) == 1
        job = (await engine.get(job_id)).job
        assert job.phase is Phase.COMPLETED
        assert job.result is not None
        assert '"9"' in str(job.result.outputs[""]["text"])
        assert [each.job_id for each in (await engine.listing(JobFilter())).jobs] == [job_id]


async def test_one_that_cannot_be_admitted_or_judged_holds_up_nobody(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_register, real_fail = WorkerOperations.register, WorkerOperations.fail

    async def register(desk: WorkerOperations, call: RegisterWorker) -> WorkerRecord:
        if call.worker_id == "a-bad-one":
            raise Refusal(RefusalCode.INVALID_REQUEST, "not this one")
        return await real_register(desk, call)

    async def fail(desk: WorkerOperations, call: FailureReport) -> ReportReply:
        if call.failure.message == "bad":
            raise Refusal(RefusalCode.INVALID_REQUEST, "not this one")
        return await real_fail(desk, call)

    monkeypatch.setattr(WorkerOperations, "register", register)
    monkeypatch.setattr(WorkerOperations, "fail", fail)
    async with engine_on(url) as engine, Guest(url) as guest, Guest(url, "a-bad-one") as bad:
        with pytest.raises(ResponseError, match="CFDECLARED not this one"):
            await bad.register()
        await guest.register()
        for number in range(2):
            await engine.submit(Submission(graph(seed=number), max_attempts=1))
        first, second = await guest.take(), await guest.take()
        assert await guest.call("fail", *first, json.dumps({"kind": "node_error", "message": "bad"})) == 1
        await guest.fail(second)

        async def is_judged() -> bool:
            return (await engine.get(JobId(second[0]))).job.phase is Phase.FAILED

        await until(is_judged)

        async def is_put_away() -> bool:
            return await reports(engine) == 1

        await until(is_put_away)


async def test_what_an_engine_decides_is_written_to_the_workers_stream(url: str) -> None:
    async with engine_on(url) as engine, Guest(url) as guest:
        await guest.register()
        job_id = (await engine.submit(Submission(graph()))).job_id
        lease = await guest.take()
        await engine.cancel(job_id)
        await engine.pause_worker(NODE)
        await engine.pause_worker(NODE, False)
        await engine.drain_worker(NODE)
        read: Callable[..., Awaitable[Any]] = guest.redis.xrange
        entries = [fields for _, fields in await read(f"{guest.prefix}commands:{NODE}")]
        assert [fields["action"] for fields in entries] == ["cancel", "pause", "resume", "drain"]
        assert (entries[0]["job_id"], entries[0]["lease"]) == (job_id, lease[2])
        assert await guest.call("heartbeat", *lease, 60) == 2
        assert await guest.call("release", *lease, "cancelled") == 1
        assert (await engine.get(job_id)).job.phase is Phase.CANCELLED
