"""Random worlds full of faults: the real engine, a store, and everything that can go wrong, from a seed.

Messages are lost on their way or on the way back, repeated and delayed; clocks jump; engines crash between any two
writes and start again on the same store; servers freeze, die and return. Half of the worlds have two engines on one
store. After the given number of messages the faults end, and every job must come to its end.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, Poll, RegisterWorker, Release
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.payload_digest import leased_sha256
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Store
from comfyfleet.simulation.event_loop import SimulatedClock, SimulatedRandom, run_simulated
from comfyfleet.simulation.graphs import WorkflowGraphs
from comfyfleet.simulation.promises import PromiseChecker, payload_digest
from comfyfleet.simulation.store_connection import ConnectionLost, StoreConnection
from comfyfleet.simulation.workload import checkpoints
from comfyfleet.simulation.world import ServerSpec, SimulatedServer
from comfyfleet.stores.memory import MemoryStore

T = TypeVar("T")

_RULES = Rules(
    lease_ttl_s=15.0,
    acknowledge_s=5.0,
    max_attempts=10_000,
    max_worker_faults=10_000,
    max_releases=10_000,
    give_up_workers=10_000,
    cooldown_s=5.0,
    retry_cap_s=5.0,
)
_HEARTBEAT_S = 5.0
_POLL_S = 20.0
_LOST = 0.04
"""Of the messages, on each way."""
_REPEATED = 0.03
_SHARE_OF_LONG_FREEZES = 0.04
_FAULT_EVERY_S = 6.0
_LARGEST_JUMP_S = 120.0
_DOWN_S = 3.0
"""How long an engine is down after a crash, at most."""
_REST_S = 900.0
"""While jobs are open, one of them ends at least so often after the last fault, apart from jumps of the clocks."""
_DAY_S = 86_400.0


class SharedMemoryStore(MemoryStore):
    """A memory store that several engines use, as if each were a process of its own."""

    @property
    def is_shared(self) -> bool:
        return True


class WorldResult(msgspec.Struct, frozen=True):
    seed: int
    steps: int
    jobs: int
    crashes: int
    violations: tuple[str, ...]


MakeStore = Callable[[SimulatedClock, bool], Any]
"""Makes a store from its clock. True: several engines share it."""


def memory_store(clock: SimulatedClock, is_shared: bool) -> MemoryStore:
    return SharedMemoryStore(clock) if is_shared else MemoryStore(clock)


def run_world(seed: int, steps: int = 2_000, make_store: MakeStore = memory_store) -> WorldResult:
    """Plays the world of this seed, until so many messages were sent."""
    return run_simulated(_play(seed, steps, make_store))


async def _play(seed: int, steps: int, make_store: MakeStore) -> WorldResult:
    return await FaultWorld(seed, steps, make_store).play()


class EngineProcess:
    """One engine process after the other on the same machine. Callers that wait are cut off by a crash."""

    def __init__(self, world: FaultWorld, number: int, clock: SimulatedClock) -> None:
        self._world, self._number, self.clock = world, number, clock
        self._engine: Engine | None = None
        self._connection: StoreConnection | None = None
        self._cut: asyncio.Event = asyncio.Event()
        self.starts = 0

    @property
    def engine(self) -> Engine:
        if self._engine is None or self._connection is None or self._connection.is_broken:
            raise ConnectionLost("the engine is down")
        return self._engine

    async def live(self) -> None:
        """Starts the engine again after each crash."""
        while True:
            self.starts += 1
            self._cut = asyncio.Event()
            self._connection = StoreConnection(self._world.store, self._world.rng, self._world.checker)
            engine = Engine(
                cast(Store, self._connection),
                rules=_RULES,
                clock=self.clock,
                rng=SimulatedRandom(self._world.seed * 1_000 + self._number * 100 + self.starts),
                workers_may_outlive_it=True,
            )
            try:
                with suppress(ConnectionLost):
                    await engine.__aenter__()
                    self._engine = engine
                    await self._connection.broken.wait()
            finally:
                self._connection.break_now()
                self._engine = None
                self._cut.set()
                # A crashed process ends nothing in good order; its tasks only have to go.
                with suppress(Exception):
                    await engine.close()
            await asyncio.sleep(self._world.rng.random() * _DOWN_S)

    def crash(self) -> None:
        """At one of the next writes, or now."""
        if self._connection is not None:
            if self._world.rng.random() < 0.8:
                self._connection.break_after(self._world.rng.randint(1, 12))
            else:
                self._connection.break_now()

    async def call(self, work: Callable[[Engine], Awaitable[T]]) -> T:
        """Raises `ConnectionLost` if the process crashes before it has answered."""
        engine, cut, connection = self.engine, self._cut, self._connection
        answer = asyncio.ensure_future(work(engine))
        crash = asyncio.ensure_future(cut.wait())
        try:
            await asyncio.wait((answer, crash), return_when=asyncio.FIRST_COMPLETED)
        finally:
            crash.cancel()
            if not answer.done():
                answer.cancel()
            await asyncio.gather(answer, crash, return_exceptions=True)
        if connection is None or connection.is_broken or answer.cancelled():
            raise ConnectionLost("the engine has crashed")
        return answer.result()


class FaultWorld:
    def __init__(self, seed: int, steps: int, make_store: MakeStore) -> None:
        self.seed, self._steps = seed, steps
        self.rng = random.Random(seed)
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._engine_count = self.rng.choice((1, 2))
        clocks = [SimulatedClock(loop) for _ in range(self._engine_count)]
        # One engine has its store on its own machine.
        self._store_clock = clocks[0] if self._engine_count == 1 else SimulatedClock(loop)
        self._clocks = list({id(clock): clock for clock in (*clocks, self._store_clock)}.values())
        self.store = make_store(self._store_clock, self._engine_count > 1)
        self._workflows = checkpoints(self.rng.randint(1, 7))
        longest_s = 1.5 * max(each.run_s + each.load_s for each in self._workflows)
        self.checker = PromiseChecker(self.store, self._store_clock, longest_s)
        self._processes = [EngineProcess(self, number, clock) for number, clock in enumerate(clocks)]
        self._servers = [
            SimulatedServer(number, ServerSpec(f"gpu-{number + 1}"))
            for number in range(self.rng.randint(1, 5))
        ]
        self._graphs = WorkflowGraphs(self._workflows)
        self._mean_gap_s = self.rng.uniform(2.0, 12.0) / len(self._servers)
        self.steps, self._jobs = 0, 0
        self._is_calm = False
        self._calm = asyncio.Event()
        self._open: set[JobId] = set()

    async def play(self) -> WorldResult:
        tasks = [asyncio.create_task(process.live()) for process in self._processes]
        tasks += [asyncio.create_task(self._live(server)) for server in self._servers]
        tasks.append(asyncio.create_task(self._break_things()))
        callers = [asyncio.create_task(self._submit_jobs()) for _ in range(2)]
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            await self._calm.wait()
            await asyncio.gather(*callers)
            await self._come_to_rest()
        finally:
            for task in (*tasks, *callers):
                task.cancel()
            await asyncio.gather(*tasks, *callers, return_exceptions=True)
        await self.checker.check_end()
        crashes = sum(process.starts - 1 for process in self._processes)
        return WorldResult(self.seed, self.steps, self._jobs, crashes, tuple(self.checker.violations))

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.checker.violations.append(f"{type(error).__name__} in the simulation: {error}")
            self._end_faults()

    def _end_faults(self) -> None:
        self._is_calm = True
        self._calm.set()

    async def _come_to_rest(self) -> None:
        """Until no job is open, or none has ended for a long time. One server may have hundreds of jobs to do."""
        rest_s, fewest, ended_at_s = _REST_S + 2 * self.checker.jumps_s, math.inf, self._loop.time()
        while self._loop.time() < ended_at_s + rest_s:
            counts = await self.store.counts()
            left = counts.waiting + counts.delayed + counts.paused + counts.by_phase["leased"]
            if not left:
                return
            if left < fewest:
                fewest, ended_at_s = left, self._loop.time()
            await asyncio.sleep(1.0)

    # messages

    async def send(self, process: EngineProcess, work: Callable[[Engine], Awaitable[T]]) -> T:
        """One message and its answer, which may be lost."""
        rng = self.rng
        if not self._is_calm:
            self.steps += 1
            if self.steps >= self._steps:
                self._end_faults()
        if not self._is_calm:
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.3)
            if rng.random() < _LOST:
                await asyncio.sleep(rng.random())
                raise ConnectionLost("the message was lost")
            if rng.random() < _REPEATED:
                with suppress(Fault, Refusal):
                    await process.call(work)
        answer = await process.call(work)
        if not self._is_calm and rng.random() < _LOST:
            await asyncio.sleep(rng.random())
            raise ConnectionLost("the answer was lost")
        return answer

    def _any_process(self) -> EngineProcess:
        return self.rng.choice(self._processes)

    async def _persist(self, work: Callable[[Engine], Awaitable[T]]) -> T:
        """Sends until there is an answer."""
        while True:
            try:
                return await self.send(self._any_process(), work)
            except Fault:
                await asyncio.sleep(0.1 + self.rng.random())

    # callers

    async def _submit_jobs(self) -> None:
        rng = self.rng
        while not self._is_calm:
            await asyncio.sleep(rng.expovariate(1 / self._mean_gap_s))
            self._jobs += 1
            workflow = rng.choice(self._workflows)
            graph = self._graphs.graph(workflow, self._jobs)
            # The reference makes a repeated submission safe.
            submission = Submission(
                graph,
                reference=f"job-{self._jobs}",
                priority=rng.choice((0, 0, 0, 5)),
                metadata={"workflow": workflow.name},
                retry_delay_s=0.5,
            )
            submitted = await self._persist(lambda engine, what=submission: engine.submit(what))  # type: ignore[misc]
            self.checker.submitted(submitted.job_id, graph)
            if rng.random() < 0.03:
                await asyncio.sleep(rng.random() * 5)
                self.checker.cancelled(submitted.job_id)
                with suppress(Refusal):
                    # It may have ended before.
                    await self._persist(lambda engine, what=submitted.job_id: engine.cancel(what))  # type: ignore[misc]

    # servers and their agents

    async def _live(self, server: SimulatedServer) -> None:
        while True:
            agent = asyncio.create_task(self._serve(server))
            try:
                while not agent.done():
                    await asyncio.wait((agent,), timeout=self.rng.expovariate(1 / 120.0))
                    if not self._is_calm and not agent.done():
                        break
            finally:
                agent.cancel()
                await asyncio.gather(agent, return_exceptions=True)
            if agent.done() and not agent.cancelled() and (error := agent.exception()) is not None:
                raise error
            server.restart()
            if not self._is_calm:
                await asyncio.sleep(self.rng.random() * 60)

    async def _serve(self, server: SimulatedServer) -> None:
        worker_id, polls = WorkerId(server.spec.name), itertools.count(int(self._loop.time() * 1_000))
        process, is_registered, poll_id = self._any_process(), False, PollId("")
        while True:
            try:
                if not is_registered:
                    call = RegisterWorker(worker_id, self._graphs.capabilities(server.spec))
                    await self.send(process, lambda engine, what=call: engine.register(what))  # type: ignore[misc]
                    is_registered = True
                poll_id = poll_id or PollId(f"poll-{next(polls)}")
                poll = Poll(worker_id, poll_id, _POLL_S)
                leased = await self.send(process, lambda engine, what=poll: engine.poll(what))  # type: ignore[misc]
                poll_id = PollId("")
            except Fault:
                # The same poll again: its answer may be a lease that got lost.
                process = self._any_process()
                await asyncio.sleep(0.2 + self.rng.random())
                continue
            except Refusal as refusal:
                if refusal.code is not RefusalCode.NOT_FOUND:
                    raise
                is_registered = False
                await asyncio.sleep(0.2)
                continue
            if leased is not None:
                await self._run(server, leased)

    async def _run(self, server: SimulatedServer, leased: LeasedJob) -> None:
        rng = self.rng
        self.checker.leased_payload(leased.job_id, leased.workflow)
        if leased.payload_sha256 != leased_sha256(leased).hex():
            failure = Failure(FailureKind.PAYLOAD_MISMATCH, "the payload is not the submitted one")
            await self._report(lambda engine: engine.fail(FailureReport(leased.ref, failure)))
            return
        workflow = self._workflow_of(leased)
        loaded = [model.name for model in server.missing(workflow)]
        load_s = sum(model.load_s for model in server.missing(workflow)) * rng.uniform(0.8, 1.2)
        run_s = workflow.run_s * rng.uniform(0.7, 1.3)
        server.use(workflow)
        if not await self._heartbeat(leased):
            return
        began_at, left_s = self._store_clock.now(), load_s + run_s
        while left_s > 0:
            await asyncio.sleep(min(left_s, _HEARTBEAT_S))
            left_s -= _HEARTBEAT_S
            if not self._is_calm and rng.random() < _SHARE_OF_LONG_FREEZES:
                # The machine stands still. Its lease may end, and it does not know.
                await asyncio.sleep(rng.random() * 4 * _RULES.lease_ttl_s)
            elif left_s > 0 and not await self._heartbeat(leased):
                return
        if not self._is_calm and rng.random() < 0.03:
            failure = Failure(FailureKind.NODE_ERROR, "the sampler failed")
            await self._report(lambda engine: engine.fail(FailureReport(leased.ref, failure, run_s)))
            return
        result = self._graphs.result(workflow, loaded, load_s, run_s, began_at)
        # As a picture depends on its workflow, so that a mix-up shows.
        result = msgspec.structs.replace(
            result, outputs={"15": {"digest": [payload_digest(leased.workflow)]}}
        )
        call = Completion(leased.ref, result, load_s + run_s)
        if await self._report(lambda engine: engine.complete(call)):
            self.checker.reported(call)

    def _workflow_of(self, leased: LeasedJob) -> Any:
        name = (leased.metadata or {})["workflow"]
        return next(workflow for workflow in self._workflows if workflow.name == name)

    async def _heartbeat(self, leased: LeasedJob) -> bool:
        """False: the agent stops the run."""
        try:
            reply = await self.send(
                self._any_process(), lambda engine: engine.heartbeat(leased.worker_id, [leased.ref])
            )
        except Fault:
            return True
        except Refusal:
            return True
        if leased.ref in reply.lost:
            return False
        if any(command.job_id == leased.job_id and command.action == "cancel" for command in reply.commands):
            await self._report(lambda engine: engine.release(Release(leased.ref, "cancelled")))
            return False
        return True

    async def _report(self, work: Callable[[Engine], Awaitable[Any]]) -> bool:
        """Reports until an engine answers. False: the lease is over."""
        try:
            await self._persist(work)
        except Refusal as refusal:
            if refusal.code is not RefusalCode.LEASE_LOST:
                raise
            return False
        return True

    # faults

    async def _break_things(self) -> None:
        rng = self.rng
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._calm.wait(), rng.expovariate(1 / _FAULT_EVERY_S))
                return
            if rng.random() < 0.75:
                rng.choice(self._processes).crash()
                self.checker.allowance_s += _DOWN_S
            elif rng.random() < 0.5:
                jump_s = rng.choice((-1, 1)) * rng.random() ** 2 * _LARGEST_JUMP_S
                rng.choice(self._clocks).set_by(jump_s)
                self.checker.jumps_s += abs(jump_s)
                self.checker.allowance_s += abs(jump_s)
