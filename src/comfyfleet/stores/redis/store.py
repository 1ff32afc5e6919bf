"""The port's methods as calls of the function library on Redis or Valkey. Each call is atomic."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.calls import Command
from comfyfleet.model.dispatch import (
    Attempt,
    Candidate,
    Dispatch,
    LeaseOffer,
    LeaseRef,
    Phase,
    Write,
    WriteResult,
)
from comfyfleet.model.fact import Fact, FactDraft
from comfyfleet.model.ids import ClassKey, JobId, PollId, ProfileKey, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerDelta, WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta
from comfyfleet.ports import (
    Clock,
    Counts,
    EligibilityMatrix,
    LaneBacklog,
    LeaseState,
    Peek,
    QueuePlace,
    RecordQuery,
)
from comfyfleet.stores.inprocess.blocks import MAX_WORKFLOW_STATS
from comfyfleet.stores.inprocess.lane_index import MAX_IDLE_CLASSES
from comfyfleet.stores.redis import codec
from comfyfleet.stores.redis.address import parse_address
from comfyfleet.stores.redis.client import Argument, RedisClient, Send
from comfyfleet.stores.redis.codec import as_list
from comfyfleet.stores.redis.direct_workers import RedisDirectWorkerInbox
from comfyfleet.stores.redis.dispatches import as_bytes, decode_dispatch
from comfyfleet.stores.redis.documents import RedisDocumentStore
from comfyfleet.stores.redis.fair_share import RedisFairShare
from comfyfleet.stores.redis.job_import import RedisJobTransfer
from comfyfleet.stores.redis.pubsub import PubSubListener, RedisPeerChannel
from comfyfleet.stores.redis.server import Durability, check_server, ensure_library
from comfyfleet.stores.redis.workflow_stats import RedisWorkflowStats

_workers = msgspec.json.Decoder(WorkerRecord)
_classes = msgspec.json.Decoder(RequirementClass)
_workflow_stats = msgspec.json.Decoder(WorkflowStats)


class RedisStore:
    """`winding` is for tests: a clock that replaces the server's."""

    is_shared = True

    def __init__(
        self, url: str, *, winding: Clock | None = None, may_load: bool = True, patience_s: float = 30.0
    ) -> None:
        self._address = parse_address(url)
        self.prefix = self._address.prefix
        self._winding = winding
        self._may_load = may_load
        self._client = RedisClient(self._address, secrets.token_hex(8), self._greet, patience_s=patience_s)
        self._listener: PubSubListener | None = None
        self._learning = RedisWorkflowStats(self._learn)
        self._epoch = 0
        self.durability: Durability = "none"
        self.can_lose = ""
        self.records = RedisRecords(self)
        self.job_transfer = RedisJobTransfer(self)
        self.documents = RedisDocumentStore(self)
        self.fair_share = RedisFairShare(self._do, self._client.call, self.prefix, self.now)
        self.direct_workers = RedisDirectWorkerInbox(self._do, self._ask)
        self.peer_channel = RedisPeerChannel(self._client.call, self.prefix, self._client.client_id)

    @property
    def epoch(self) -> int:
        return self._epoch

    async def open(self) -> None:
        await self._client.connect()
        if self._listener is not None:
            self._listener.start()

    async def _greet(self, send: Send) -> None:
        """Runs on each connection, because another server may answer at the address now."""
        server = await check_server(send, self._address.name)
        self.durability = server.durability
        self.can_lose = server.can_lose
        await ensure_library(send, may_load=self._may_load)
        winds = "0" if self._winding is None else "1"
        answer = await send("FCALL", "cf1_open", 1, f"{self.prefix}meta", "", "", "", server.run, winds)
        epoch = as_list(answer)[0]
        assert isinstance(epoch, int)
        self._epoch = epoch

    def listen(
        self,
        wake: Callable[[], None],
        on_command: Callable[[WorkerId, Command], None] | None = None,
        on_new_class: Callable[[], None] | None = None,
    ) -> None:
        assert self._listener is None, "one engine listens to one store"
        self._listener = PubSubListener(
            self._address,
            self._client.client_id,
            wake,
            self.direct_workers.wake_up,
            on_command,
            on_new_class,
            self.peer_channel.handle_message,
            self.peer_channel.handle_run_message,
        )
        if self._epoch:
            self._listener.start()

    async def send_command(self, worker_id: WorkerId, command: Command) -> None:
        what = (command.action, command.job_id or "", command.lease_number, command.reason)
        await self._do("tell", worker_id, *what, self._client.client_id)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.stop()
        await self._client.close()

    async def now(self) -> float:
        return float(as_bytes(await self._ask("now")))

    async def diagnose(self, *command: Argument) -> object:
        """A command for diagnosis. It may be sent twice."""
        return await self._client.call(*command)

    # calls

    async def _do(self, name: str, *arguments: Argument) -> object:
        return await self._client.function(name, *arguments, time=self._time())

    def _join(self, name: str, *arguments: Argument) -> Awaitable[object]:
        return self._client.joined(name, *arguments, time=self._time())

    async def _ask(self, name: str, *arguments: Argument) -> object:
        return await self._client.function(name, *arguments, time=self._time(), is_reading=True)

    async def _get(self, key: str) -> object:
        return await self._client.call("GET", self.prefix + key)

    def _time(self) -> str:
        return "" if self._winding is None else repr(self._winding.now())

    async def _dispatches(self, name: str, *arguments: Argument) -> list[Dispatch]:
        return [decode_dispatch(each) for each in as_list(await self._ask(name, *arguments))]

    async def _head(self) -> codec.FleetHead:
        return codec.decode_head(await self._get("meta"))

    # eligibility matrix

    async def table(self) -> EligibilityMatrix:
        version, classes, profiles = as_list(await self._ask("table"))
        assert isinstance(version, int)
        pairs = as_list(classes)
        known = {
            ClassKey(as_bytes(key).decode()): _classes.decode(as_bytes(text))
            for key, text in zip(pairs[::2], pairs[1::2], strict=True)
        }
        return EligibilityMatrix(
            version, known, frozenset(ProfileKey(as_bytes(each).decode()) for each in as_list(profiles))
        )

    async def put_class(self, cls: RequirementClass, fits: Collection[ProfileKey], *, version: int) -> bool:
        text = msgspec.json.encode(cls)
        return await self._do("put_class", version, cls.key, text, MAX_IDLE_CLASSES, *fits) is not None

    async def put_profile(self, profile: ProfileKey, fits: Collection[ClassKey], *, version: int) -> bool:
        return await self._do("put_profile", version, profile, *fits) is not None

    async def drop_profiles(self, unused: Collection[ProfileKey]) -> None:
        if unused:
            await self._do("drop_profiles", *unused)

    # workers

    async def put_worker(self, worker: WorkerRecord) -> None:
        await self._do("put_worker", *_worker_arguments(worker))

    async def add_worker(self, worker: WorkerRecord) -> bool:
        return await self._do("add_worker", *_worker_arguments(worker)) is not None

    async def replace_worker(self, worker: WorkerRecord) -> bool:
        def change(stored: WorkerRecord) -> WorkerRecord | None:
            return worker.merged_onto(stored) if stored.revision == worker.revision else None

        return await self._change_worker(worker.worker_id, change) is not None

    async def apply_worker_delta(self, worker_id: WorkerId, delta: WorkerDelta) -> WorkerRecord | None:
        return await self._change_worker(worker_id, delta.apply)

    async def _change_worker(
        self, worker_id: WorkerId, change: Callable[[WorkerRecord], WorkerRecord | None]
    ) -> WorkerRecord | None:
        """Compare and set, repeated until it succeeds."""
        while (text := await self._get(f"worker:{worker_id}")) is not None:
            changed = change(_workers.decode(as_bytes(text)))
            if changed is None:
                return None
            if await self._do("replace_worker", *_worker_arguments(changed), as_bytes(text)) is not None:
                return changed
        return None

    async def get_worker(self, worker_id: WorkerId) -> WorkerRecord | None:
        text = await self._get(f"worker:{worker_id}")
        return None if text is None else _workers.decode(as_bytes(text))

    async def workers(self) -> list[WorkerRecord]:
        return [_workers.decode(as_bytes(text)) for text in as_list(await self._ask("workers"))]

    async def remove_worker(self, worker_id: WorkerId) -> None:
        await self._do("remove_worker", worker_id)

    # dispatches

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        answer = await self._join("enqueue", *codec.encode_enqueue(dispatch, job, facts))
        return codec.decode_enqueued(answer, dispatch, facts)

    async def load(self, job_id: JobId) -> Dispatch | None:
        text = await self._get(f"job:{job_id}")
        return None if text is None else decode_dispatch(text)

    async def load_many(self, job_ids: Sequence[JobId]) -> list[Dispatch | None]:
        if not job_ids:
            return []
        names = [f"{self.prefix}job:{job_id}" for job_id in job_ids]
        found = as_list(await self._client.call("MGET", *names))
        return [None if text is None else decode_dispatch(text) for text in found]

    async def peek(self, query: Peek) -> list[Candidate]:
        found = await self._ask(
            "peek",
            query.profile,
            query.worker_id,
            query.slots,
            query.lanes,
            f"{query.quantum_s!r} {len(query.warm)}",
            *query.warm,
            *query.skip,
        )
        return [_candidate(as_list(row)) for row in as_list(found)]

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        return codec.decode_leased(await self._do("lease", job_id, *codec.encode_offer(offer)))

    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None:
        text = await self._ask("leased_by_poll", poll_id)
        return None if text is None else decode_dispatch(text)

    async def write(self, write: Write) -> WriteResult | None:
        arguments = codec.encode_finish(write)
        if arguments is None:
            message = codec.encode_write(write, await self._new_payload(write))
            return codec.decode_written(await self._do("write", message), write.facts)
        return codec.decode_finished(await self._join("finish", *arguments), write.facts)

    async def _new_payload(self, write: Write) -> bytes | None:
        """Read before the write: nothing else changes a job's payload."""
        payload = None if write.job is None else write.job.get("payload")
        if payload is None or (job := await self.records.get(write.job_id)) is None:
            return None
        return codec.encode_payload(msgspec.structs.replace(job, payload=payload))

    async def heartbeat(self, refs: Sequence[LeaseRef], ttl_s: float) -> list[LeaseState]:
        if not refs:
            return []
        leases = [part for ref in refs for part in codec.encode_ref(ref)]
        states = as_list(await self._do("heartbeat", repr(ttl_s), *leases))
        return [LeaseState(ref, state != 0, state == 2) for ref, state in zip(refs, states, strict=True)]

    async def leases_of(self, *worker_ids: WorkerId) -> list[Dispatch]:
        return await self._dispatches("leases_of", *worker_ids)

    async def due(self, limit: int, after: Dispatch | None = None) -> list[Dispatch]:
        cursor = () if after is None else (repr(after.due_at), after.job_id)
        return await self._dispatches("due", limit, *cursor)

    async def next_due(self) -> float | None:
        return await self._lowest("jobs:due")

    async def _lowest(self, key: str) -> float | None:
        first = as_list(await self._client.call("ZRANGE", self.prefix + key, 0, 0, "WITHSCORES"))
        return float(as_bytes(first[1])) if first else None

    async def counts(self) -> Counts:
        head = await self._head()
        return Counts(
            waiting=head.in_lane,
            delayed=head.delayed,
            paused=head.paused,
            by_phase={
                Phase.QUEUED: head.queued,
                Phase.LEASED: head.leased,
                Phase.COMPLETED: head.completed,
                Phase.FAILED: head.failed,
                Phase.CANCELLED: head.cancelled,
            },
            payload_bytes=head.payload_bytes,
        )

    async def position(self, job_id: JobId) -> int | None:
        ahead = await self._ask("position", job_id)
        assert ahead is None or isinstance(ahead, int)
        return ahead

    async def waiting_lanes(self, limit: int) -> list[LaneBacklog]:
        return [_lane_backlog(as_list(row)) for row in as_list(await self._ask("waiting_lanes", limit))]

    async def dead_letter(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        return await self._dispatches("dead_letter", limit, after or "")

    async def unsettled(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        return await self._dispatches("unsettled", limit, after or "")

    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        purged = await self._do("purge", phase.value, repr(before), limit)
        return purged if isinstance(purged, int) else 0

    async def pause_queue(self, is_paused: bool) -> None:
        await self._do("pause_queue", int(is_paused))

    async def is_queue_paused(self) -> bool:
        return (await self._head()).is_paused

    # facts and attempts

    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]:
        return codec.decode_facts(job_id, await self._log(job_id), after)

    async def attempts(self, job_id: JobId) -> list[Attempt]:
        return codec.decode_attempts(await self._log(job_id))

    async def _log(self, job_id: JobId) -> list[object]:
        """With the dispatch, because the log has a lease only after a later entry."""
        key = f"{self.prefix}job:{job_id}"
        return as_list(await self._client.call("MGET", key, f"{key}:log"))

    async def mark_late(self, ref: LeaseRef) -> None:
        await self._do("mark_late", ref.attempt_id, ref.job_id, ref.number)

    # blocks and workflow statistics

    async def get_block(self, pair: Pair) -> Block | None:
        text = await self._ask("get_block", pair.worker_id, pair.target)
        return None if text is None else codec.decode_block(text)

    async def blocks(self, worker_id: WorkerId | None = None) -> list[Block]:
        return [codec.decode_block(text) for text in as_list(await self._ask("blocks", worker_id or ""))]

    async def put_block(self, block: Block) -> None:
        await self._do("put_block", codec.encode_block(block))

    async def lift(self, pairs: Sequence[Pair]) -> list[Block]:
        if not pairs:
            return []
        names = [name for pair in pairs for name in pair]
        return [codec.decode_block(text) for text in as_list(await self._do("lift", *names))]

    async def expired_blocks(self) -> list[Block]:
        expired = await self._do("expired_blocks")
        return [] if expired is None else [codec.decode_block(text) for text in as_list(expired)]

    async def next_block_end(self) -> float | None:
        return await self._lowest("blocks:ends")

    async def get_workflow_stats(self, workflow_hash: WorkflowHash) -> WorkflowStats | None:
        text = await self._client.call("HGET", f"{self.prefix}lessons", workflow_hash)
        return None if text is None else _workflow_stats.decode(as_bytes(text))

    async def put_workflow_stats(self, stats: WorkflowStats) -> None:
        await self._do("put_lesson", stats.workflow_hash, msgspec.json.encode(stats), MAX_WORKFLOW_STATS)

    async def add_workflow_stats(self, delta: WorkflowStatsDelta) -> WorkflowStats:
        return await self._learning.add_workflow_stats(delta)

    async def _learn(self, deltas: list[WorkflowStatsDelta]) -> WorkflowStats:
        workflow_hash = deltas[0].workflow_hash
        while True:
            text = await self._client.call("HGET", f"{self.prefix}lessons", workflow_hash)
            known = b"" if text is None else as_bytes(text)
            stats = _workflow_stats.decode(known) if known else WorkflowStats(workflow_hash)
            for delta in deltas:
                stats = delta.apply(stats)
            arguments = (workflow_hash, msgspec.json.encode(stats), MAX_WORKFLOW_STATS, known)
            if await self._do("put_lesson", *arguments) is not None:
                return stats


_PAGE_SIZE = 500


class RedisRecords:
    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def get(self, job_id: JobId) -> Job | None:
        key = f"{self._store.prefix}job:{job_id}"
        names = [key, f"{key}:payload", f"{key}:result", f"{key}:failure"]
        row = as_list(await self._store._client.call("MGET", *names))
        return None if row[0] is None else codec.decode_job(row)

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        key = f"{self._store.prefix}references"
        job_id = await self._store._client.call("HGET", key, f"{tenant}\0{reference}")
        return None if job_id is None else await self.get(JobId(as_bytes(job_id).decode()))

    async def listing(self, query: RecordQuery) -> list[Job]:
        """Each call looks at a bounded number of jobs, so that a long list delays no other call."""
        jobs: list[Job] = []
        cursor, beyond = "", query.after or ""
        while len(jobs) < query.limit:
            where = (query.tenant or "", "" if query.phase is None else query.phase.value)
            how = (query.limit - len(jobs), _PAGE_SIZE, int(query.newest_first))
            answer = await self._store._ask("list", cursor, beyond, *where, *how)
            last, still_beyond, rows = as_list(answer)
            jobs += [codec.decode_job(as_list(row)) for row in as_list(rows)]
            cursor, beyond = as_bytes(last).decode(), as_bytes(still_beyond).decode()
            if not cursor:
                break
        return jobs


def _worker_arguments(worker: WorkerRecord) -> tuple[str | bytes, ...]:
    return worker.worker_id, msgspec.json.encode(worker), worker.profile, worker.registration


def _lane_backlog(row: list[object]) -> LaneBacklog:
    oldest, waiting = decode_dispatch(row[0]), row[1]
    assert isinstance(waiting, int), "the length of a lane is a number"
    newest = oldest if row[2] is None else decode_dispatch(row[2])
    return LaneBacklog(oldest.lane, waiting, _place(oldest), _place(newest))


def _place(dispatch: Dispatch) -> QueuePlace:
    return QueuePlace(dispatch.sequence, dispatch.queued_at, dispatch.place)


def _candidate(row: list[object]) -> Candidate:
    dispatch = decode_dispatch(row[0])
    virtual_time, weight, waiting = float(as_bytes(row[1])), float(as_bytes(row[2])), row[3]
    assert isinstance(waiting, int), "the length of a lane is a number"
    return Candidate(
        dispatch.job_id,
        dispatch.lane,
        dispatch.sequence,
        dispatch.queued_at,
        virtual_time,
        weight,
        waiting,
        dispatch.place,
    )
