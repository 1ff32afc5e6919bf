"""A `WorkerApi` that follows a script, and an agent on it that is quick at everything.

The script gives the jobs it was told to give, loses answers, holds them back, and writes down every call.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec

from comfyfleet.model.calls import (
    Command,
    Completion,
    FailureReport,
    HeartbeatReply,
    LeasedJob,
    Poll,
    ProgressReport,
    RegisterWorker,
    Release,
    ReportReply,
)
from comfyfleet.model.dispatch import LeaseRef, Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, LeaseToken, PollId, ProfileKey, WorkerId, WorkflowHash
from comfyfleet.model.job import Timeouts
from comfyfleet.model.worker import Capabilities, WorkerRecord
from comfyfleet.ports import Connector, WorkerApi
from comfyfleet.worker.agent import Agent, AgentSettings, AgentState
from comfyfleet.worker.journal import Journal

WORKER = WorkerId("gpu-a")


def leased_job(
    name: str = "job", *, ttl_s: float = 60.0, service: str = "comfyui", timeouts: Timeouts | None = None
) -> LeasedJob:
    ref = LeaseRef(JobId(name), 1, 1, 0, LeaseToken("token-" + name))
    return LeasedJob(
        ref, WORKER, ttl_s, 10.0, {}, WorkflowHash("hash"), service=service, timeouts=timeouts or Timeouts()
    )


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "what was waited for did not come"
        await asyncio.sleep(0.001)


@asynccontextmanager
async def no_http() -> AsyncIterator[str]:
    """The address of a server that speaks something else."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class ScriptedApi:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        """Every call as it came in, answered or not."""
        self.ttl_s = 60.0
        self.faults: defaultdict[str, deque[Exception]] = defaultdict(deque)
        """Raised, one for each call of that name, before anything happens."""
        self.lost_answers: defaultdict[str, deque[Exception]] = defaultdict(deque)
        """Raised after the call had its effect."""
        self.holds: dict[str, asyncio.Event] = {}
        """A call of that name is answered once its event is set."""
        self.orders: list[Command] = []
        """Told with the next beat."""
        self.lost: set[LeaseRef] = set()
        self.is_known = True
        self._pushed: asyncio.Queue[Command] = asyncio.Queue()
        self._jobs: deque[LeasedJob] = deque()
        self._parked: deque[asyncio.Future[None]] = deque()
        self._by_poll: dict[PollId, LeasedJob] = {}
        self._given: dict[LeaseRef, LeasedJob] = {}

    def give(self, *jobs: LeasedJob) -> None:
        self._jobs.extend(jobs)
        for parked in self._parked:
            if not parked.done():
                parked.set_result(None)

    def push(self, command: Command) -> None:
        """Tells a command over the call that waits for them."""
        self._pushed.put_nowait(command)

    @property
    def parked(self) -> int:
        return len(self._parked)

    def named(self, name: str) -> list[Any]:
        return [value for called, value in self.calls if called == name]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    async def register(self, call: RegisterWorker) -> WorkerRecord:
        await self._arrive("register", call)
        self.is_known = True
        self._answer("register")
        return WorkerRecord(call.worker_id, call.capabilities, ProfileKey("profile"), call.slots, 0.0, 0.0)

    async def poll(self, call: Poll) -> LeasedJob | None:
        await self._arrive("poll", call)
        self._check_known()
        if call.poll_id not in self._by_poll:
            try:
                async with asyncio.timeout(call.wait_s):
                    while not self._jobs:
                        parked = asyncio.get_running_loop().create_future()
                        self._parked.append(parked)
                        try:
                            await parked
                        finally:
                            self._parked.remove(parked)
            except TimeoutError:
                return None
            job = self._by_poll[call.poll_id] = self._jobs.popleft()
            self._given[job.ref] = job
        self._answer("poll")
        return self._by_poll[call.poll_id]

    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
        await self._arrive("heartbeat", tuple(refs))
        self._check_known()
        self._answer("heartbeat")
        return self._beat(refs)

    async def progress(self, reports: Sequence[ProgressReport]) -> HeartbeatReply:
        await self._arrive("progress", tuple(reports))
        self._answer("progress")
        return self._beat({report.ref: None for report in reports})

    async def complete(self, call: Completion) -> ReportReply:
        await self._arrive("complete", call)
        self._check_held(call.ref)
        self._answer("complete")
        return ReportReply(Phase.COMPLETED)

    async def fail(self, call: FailureReport) -> ReportReply:
        await self._arrive("fail", call)
        self._check_held(call.ref)
        self._answer("fail")
        return ReportReply(Phase.QUEUED, will_retry=True)

    async def release(self, call: Release) -> ReportReply:
        await self._arrive("release", call)
        self._check_held(call.ref)
        if call.reason == "declined":
            # The worst that the other side may do: whoever declines and polls gets the same job again.
            self.give(self._given[call.ref])
        self._answer("release")
        return ReportReply(Phase.QUEUED)

    async def commands(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        await self._arrive("commands", wait_s)
        try:
            async with asyncio.timeout(wait_s):
                return (await self._pushed.get(),)
        except TimeoutError:
            return ()

    async def unregister(self, worker_id: WorkerId, reason: str) -> None:
        await self._arrive("unregister", reason)
        self._answer("unregister")

    async def _arrive(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if self.faults[name]:
            raise self.faults[name].popleft()
        if name in self.holds:
            await self.holds[name].wait()

    def _answer(self, name: str) -> None:
        if self.lost_answers[name]:
            raise self.lost_answers[name].popleft()

    def _check_known(self) -> None:
        if not self.is_known:
            raise Refusal(RefusalCode.NOT_FOUND, "This worker is not registered.")

    def _check_held(self, ref: LeaseRef) -> None:
        if ref in self.lost:
            raise Refusal(RefusalCode.LEASE_LOST, "The lease is over.")

    def _beat(self, refs: Sequence[LeaseRef] | dict[LeaseRef, None]) -> HeartbeatReply:
        commands, self.orders = tuple(self.orders), []
        alive = tuple(ref for ref in refs if ref not in self.lost)
        lost = tuple(ref for ref in refs if ref in self.lost)
        return HeartbeatReply(self.ttl_s, alive, lost, commands)


QUICK = AgentSettings(
    poll_wait_s=5.0,
    heartbeat_s=0.02,
    cancel_settle_s=0.05,
    batch_s=0.002,
    health_interval_s=0.01,
    missed_checks=1,
    reconnect_grace_s=0.0,
    drain_grace_s=5.0,
    stop_grace_s=1.0,
    backoff_base_s=0.002,
    backoff_cap_s=0.01,
)


def quick(**changes: Any) -> AgentSettings:
    return msgspec.structs.replace(QUICK, **changes)


@asynccontextmanager
async def in_process(api: ScriptedApi) -> AsyncIterator[WorkerApi]:
    yield api


reach: Callable[[ScriptedApi], AbstractAsyncContextManager[WorkerApi]] = in_process
"""How an agent gets to the script; a test that puts a wire in between replaces it."""


@asynccontextmanager
async def running(
    api: ScriptedApi,
    *connectors: Connector,
    settings: AgentSettings = QUICK,
    declared: Capabilities | None = None,
    on_state: Callable[[AgentState], None] | None = None,
    journal: Journal | None = None,
) -> AsyncIterator[Agent]:
    before = asyncio.all_tasks()
    async with reach(api) as door:
        async with Agent(door, WORKER, connectors, settings, declared, on_state, journal) as agent:
            await agent.wait_for_first_check()
            yield agent
        if door is api:
            assert asyncio.all_tasks() <= before, "the agent left tasks behind"
        # Beyond the wire nobody notices that the agent does not wait for what is held back.
        for hold in api.holds.values():
            hold.set()
    await until(lambda: asyncio.all_tasks() <= before)


def cancel(job: LeasedJob) -> Command:
    return Command("cancel", job.job_id, job.ref.number)
