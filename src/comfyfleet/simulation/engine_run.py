"""Runs a workload through the real engine with the memory store on simulated time.

Callers submit, agents park polls, acknowledge, run and report as real ones do, and the engine learns from their reports
as in production. Messages take no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.ids import JobId, PollId, TenantId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.policy.rules import Rules
from comfyfleet.simulation.event_loop import SimulatedClock, SimulatedRandom, run_simulated
from comfyfleet.simulation.graphs import WorkflowGraphs
from comfyfleet.simulation.world import DETECTION_S, ServerSpec, SimulatedJob, SimulatedServer
from comfyfleet.stores.memory import MemoryStore

_FOREVER_S = 1e9
_SHORT_POLL_S, _LONG_POLL_S = 30.0, 3600.0
_HEARTBEAT_S = 20.0
_KEEP_S = 120.0
_PATIENCE = 10
"""The simulation gives up when nothing has ended for so many times the longest job, plus a lease time."""

OnSubmit = Callable[[Engine, JobId, SimulatedJob], Awaitable[None]]
"""Is called after each submission, for example to ask the engine what it expects of the job."""


def run_engine(
    specs: Sequence[ServerSpec],
    jobs: Sequence[SimulatedJob],
    *,
    rules: Rules | None = None,
    weights: dict[str, float] | None = None,
    seed: int = 0,
    on_submit: OnSubmit | None = None,
) -> None:
    """Fills in what became of each job. A job that nobody could run stays as it is."""
    run_simulated(_EngineRun(specs, jobs, rules or Rules(), weights or {}, seed, on_submit).run())


class _EngineRun:
    def __init__(
        self,
        specs: Sequence[ServerSpec],
        jobs: Sequence[SimulatedJob],
        rules: Rules,
        weights: dict[str, float],
        seed: int,
        on_submit: OnSubmit | None,
    ) -> None:
        self._on_submit = on_submit
        self._servers = [SimulatedServer(index, spec) for index, spec in enumerate(specs)]
        self._jobs, self._weights, self._seed = jobs, weights, seed
        self._has_absences = any(spec.absences for spec in specs)
        self._poll_s = _SHORT_POLL_S if self._has_absences else _LONG_POLL_S
        ttl_s = rules.lease_ttl_s if self._has_absences else _FOREVER_S
        # Heartbeats of a server that stays change nothing before its job ends, so they are left out.
        self._rules = msgspec.structs.replace(
            rules,
            lease_ttl_s=ttl_s,
            worker_lost_s=rules.worker_lost_s if self._has_absences else _FOREVER_S,
            keep_completed_s=_KEEP_S,
            max_attempts=1_000,
            max_worker_faults=1_000,
            give_up_workers=1_000,
        )
        names = {job.workflow.name: job.workflow for job in jobs}
        self._graphs = WorkflowGraphs(list(names.values()))
        self._by_id: dict[JobId, SimulatedJob] = {}
        self._left = len(jobs)
        self._ended_at_s = 0.0
        self._is_done: asyncio.Future[None]
        self._engine: Engine
        self._clock: SimulatedClock

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._is_done = loop.create_future()
        self._clock = SimulatedClock(loop)
        store = MemoryStore(self._clock)
        self._engine = Engine(store, rules=self._rules, clock=self._clock, rng=SimulatedRandom(self._seed))
        async with self._engine:
            for tenant, weight in sorted(self._weights.items()):
                await store.fair_share.put_terms(TenantTerms(TenantId(tenant), weight=weight))
            tasks = [asyncio.create_task(self._live(server)) for server in self._servers]
            tasks += [asyncio.create_task(self._submit_all()), asyncio.create_task(self._watch())]
            for task in tasks:
                task.add_done_callback(self._on_task_end)
            try:
                if self._left:
                    await self._is_done
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._is_done.done():
            self._is_done.set_exception(error)

    # callers

    async def _submit_all(self) -> None:
        loop = asyncio.get_running_loop()
        for job in self._jobs:
            if job.arrives_s > loop.time():
                await asyncio.sleep(job.arrives_s - loop.time())
            submission = Submission(
                self._graphs.graph(job.workflow, job.number),
                tenant=TenantId(job.tenant),
                priority=job.priority,
            )
            submitted = await self._engine.submit(submission, is_own=True)
            self._by_id[submitted.job_id] = job
            if self._on_submit is not None:
                await self._on_submit(self._engine, submitted.job_id, job)

    async def _watch(self) -> None:
        """Ends a simulation in which nothing happens any more, such as one whose servers never return."""
        longest_s = max((job.workflow.load_s + job.workflow.run_s for job in self._jobs), default=0.0)
        slowest = min(min(server.spec.speed, server.spec.disk_speed) for server in self._servers)
        absences = [returns for server in self._servers for _, returns in server.spec.absences]
        limit_s = _PATIENCE * longest_s / slowest + DETECTION_S
        last_change_s = max((*absences, *(job.arrives_s for job in self._jobs)), default=0.0)
        loop = asyncio.get_running_loop()
        while (quiet_s := max(last_change_s, self._ended_at_s) + limit_s - loop.time()) > 0:
            await asyncio.wait((self._is_done,), timeout=quiet_s)
        self._end()

    def _end(self) -> None:
        if not self._is_done.done():
            self._is_done.set_result(None)

    # servers and their agents

    async def _live(self, server: SimulatedServer) -> None:
        loop = asyncio.get_running_loop()
        for leaves, returns in server.spec.absences:
            agent = asyncio.create_task(self._serve(server))
            agent.add_done_callback(self._on_task_end)
            try:
                await asyncio.sleep(max(0.0, leaves - loop.time()))
            finally:
                agent.cancel()
                await asyncio.gather(agent, return_exceptions=True)
            if server.job is not None:
                server.job.restarts += 1
                server.job = None
            server.restart()
            await asyncio.sleep(max(0.0, returns - loop.time()))
        await self._serve(server)

    async def _serve(self, server: SimulatedServer) -> None:
        engine, worker_id, loop = self._engine, WorkerId(server.spec.name), asyncio.get_running_loop()
        await engine.register(RegisterWorker(worker_id, self._graphs.capabilities(server.spec)))
        polls = 0
        while True:
            polls += 1
            call = Poll(worker_id, PollId(f"{loop.time():.6f}-{polls}"), self._poll_s)
            leased = await engine.poll(call)
            if leased is not None:
                await self._run(server, leased)

    async def _run(self, server: SimulatedServer, leased: LeasedJob) -> None:
        engine, loop, job = self._engine, asyncio.get_running_loop(), self._by_id[leased.job_id]
        await engine.heartbeat(leased.worker_id, [leased.ref])
        began_at = self._clock.now()
        loaded = [model.name for model in server.missing(job.workflow)]
        load_s, run_s = server.begin(job, loop.time())
        end_s = loop.time() + load_s + run_s
        while self._has_absences and end_s - loop.time() > _HEARTBEAT_S:
            await asyncio.sleep(_HEARTBEAT_S)
            await engine.heartbeat(leased.worker_id, [leased.ref])
        await asyncio.sleep(max(0.0, end_s - loop.time()))
        server.job = None
        result = self._graphs.result(job.workflow, loaded, load_s, run_s, began_at)
        await engine.complete(Completion(leased.ref, result, load_s + run_s))
        job.end_s = self._ended_at_s = end_s
        del self._by_id[leased.job_id]
        self._left -= 1
        if not self._left:
            self._end()
