"""Servers that keep the models of their last run, as ComfyUI does, on a clock wound by hand: what a schedule costs.

Each server polls, loads what is missing, runs, and reports which nodes ran and which came from its cache."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.model.job import JobResult, NodeTiming, Submission
from comfyfleet.model.worker import Capabilities, Gpu, Hardware, Service
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Store
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock, SeededRandom


@dataclass(frozen=True)
class Model:
    name: str
    run_s: float = 1.0
    load_s: float = 3.0
    weight: float = 1.0


# As measured on a real card: SDXL, and SD 1.5.
CHECKPOINTS = tuple(
    Model(f"m{number}.safetensors", *((0.92, 3.4) if number < 4 else (0.5, 1.3)), weight)
    for number, weight in enumerate((30, 20, 14, 11, 10, 8, 7))
)


@dataclass
class Server:
    name: str
    speed: float = 1.0
    loaded: str | None = None
    hangs: bool = False
    engine: Engine | None = None


@dataclass
class Started:
    job_id: JobId
    model: str
    server: str
    submitted_at: float
    at: float = 0.0
    ended_at: float = 0.0
    is_cold: bool = False
    place: int = 0


def workflow(model: str | None, seed: int = 0) -> dict[str, Any]:
    loader = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": model}}
    sampler = {
        "class_type": "KSampler",
        "inputs": {"seed": seed, "model": ["1", 0], "latent_image": ["1", 0]},
    }
    saver = {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "x"}}
    if model is None:
        loader = {"class_type": "EmptyLatentImage", "inputs": {"width": 64}}
    return {"1": loader, "2": sampler, "3": saver}


def draw(
    models: Iterable[Model], count: int, seed: int, rate: float | None = None
) -> list[tuple[float, Model]]:
    """Jobs at once, or as a Poisson process."""
    chance, models = random.Random(seed), tuple(models)
    weights = [model.weight for model in models]
    at, jobs = 0.0, []
    for _ in range(count):
        if rate is not None:
            at += chance.expovariate(rate)
        jobs.append((at, chance.choices(models, weights)[0]))
    return jobs


@dataclass
class ModelFleet:
    servers: list[Server]
    models: tuple[Model, ...] = CHECKPOINTS
    rules: Rules = field(default_factory=Rules)
    engines: int = 1
    store_type: type[MemoryStore] = MemoryStore
    reports_timings: bool = True

    def __post_init__(self) -> None:
        self.clock = self.make_clock()
        self.stores = self.make_stores()
        self.runs: dict[JobId, Started] = {}
        self.order: list[Started] = []
        self.loads = 0
        self._model = {model.name: model for model in self.models}
        self._polls = itertools.count(1)
        self._numbers = itertools.count(1)
        self._events: list[tuple[float, int, Any]] = []
        self._parked: dict[str, asyncio.Task[LeasedJob | None]] = {}
        self._made = [
            Engine(store, rules=patient(self.rules), clock=self.clock, rng=SeededRandom(number))
            for number, store in enumerate(self.stores)
        ]

    def make_clock(self) -> ManualClock:
        return ManualClock()

    def make_stores(self) -> list[Store]:
        """One for each engine."""
        return [self.store_type(self.clock)] * self.engines

    @property
    def store(self) -> Store:
        return self.stores[0]

    @property
    def engine(self) -> Engine:
        return self._made[0]

    @property
    def end(self) -> float:
        return max(run.ended_at for run in self.order) - self._began

    @property
    def mean_latency(self) -> float:
        return sum(run.ended_at - run.submitted_at for run in self.order) / len(self.order)

    async def __aenter__(self) -> ModelFleet:
        for engine in self._made:
            await engine.__aenter__()
        for number, server in enumerate(self.servers):
            server.engine = server.engine or self._made[number % len(self._made)]
            await server.engine.register(RegisterWorker(WorkerId(server.name), self._offers(server)))
        self._began = self.clock.now()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._parked.values():
            task.cancel()
        await asyncio.gather(*self._parked.values(), return_exceptions=True)
        for engine in self._made:
            await engine.close()

    def _offers(self, server: Server) -> Capabilities:
        kinds = frozenset({"CheckpointLoaderSimple", "KSampler", "SaveImage", "EmptyLatentImage"})
        service = Service("comfyui", models=frozenset(self._model), node_classes=kinds)
        return Capabilities((service,), Hardware(gpu=Gpu(1, 12, f"RTX {server.speed:g}")))

    async def submit(self, model: Model | None, **options: Any) -> JobId:
        number = next(self._numbers)
        engine = self._made[number % len(self._made)]
        name = None if model is None else model.name
        submitted = await engine.submit(Submission(workflow(name, number), **options))
        place = (await engine.get(submitted.job_id)).dispatch.place
        self.runs[submitted.job_id] = Started(submitted.job_id, name or "", "", self.clock.now(), place=place)
        return submitted.job_id

    def park(self, server: Server) -> None:
        call = Poll(WorkerId(server.name), PollId(f"poll-{next(self._polls)}"), 1e9)
        assert server.engine is not None
        self._parked[server.name] = asyncio.get_running_loop().create_task(server.engine.poll(call))

    async def begin(self) -> None:
        """Servers whose poll was answered start to run."""
        for server in self.servers:
            task = self._parked.get(server.name)
            if task is None or not task.done():
                continue
            del self._parked[server.name]
            leased = task.result()
            if leased is None:
                self.park(server)
                continue
            assert server.engine is not None
            await server.engine.heartbeat(leased.worker_id, [leased.ref])
            run = self.runs[leased.job_id]
            assert not run.server, "no job is started twice"
            run.server, run.at = server.name, self.clock.now()
            self.order.append(run)
            seconds = load_s = 0.0
            if run.model:
                model = self._model[run.model]
                run.is_cold = server.loaded != run.model
                load_s = model.load_s if run.is_cold else 0.0
                seconds = model.run_s / server.speed + load_s
                server.loaded = run.model
            else:
                seconds = 1.0 / server.speed
            self.loads += run.is_cold
            if not server.hangs:
                spent = load_s if run.is_cold else None
                self.at(self.clock.now() + seconds, (server, leased, seconds, spent))

    def at(self, when: float, event: Any) -> None:
        heappush(self._events, (when, next(self._numbers), event))

    async def settle(self) -> None:
        """Until nothing more starts at this moment."""
        while True:
            await self.clock.settle()
            if not any(task.done() for task in self._parked.values()):
                return
            await self.begin()

    async def play(self, jobs: list[tuple[float, Model]]) -> None:
        """Submits each job at its time and runs until all have ended."""
        for at, model in jobs:
            self.at(self._began + at, model)
        for server in self.servers:
            self.park(server)
        await self.settle()
        await self.finish()
        assert len(self.order) == len(jobs), "every job is run"

    async def advance(self, seconds: float) -> None:
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            if self._events and self._events[0][0] <= until:
                await self._next()
            else:
                await self._wind_to(until)

    async def finish(self) -> None:
        """Until every job has ended."""
        while self._events or self._waits():
            assert self._events or self.clock.now() < self._began + 1e5, "somebody waits for ever"
            if self._events:
                await self._next()
            else:
                await self.advance(1.0)

    async def _next(self) -> None:
        """Until the next event, whichever that is by then."""
        while self.clock.now() < self._events[0][0]:
            await self._wind_to(self._events[0][0])
        while self._events and self._events[0][0] <= self.clock.now() + 1e-9:
            _, _, event = heappop(self._events)
            if isinstance(event, Model):
                await self.submit(event)
            else:
                await self._complete(*event)
        await self.settle()

    def _waits(self) -> bool:
        return any(not run.server for run in self.runs.values())

    async def _wind_to(self, when: float) -> None:
        """Stops when a server starts a job: timers of the engine may do that on the way."""
        while self.clock.now() < when:
            step = self.clock.now() + 0.05 if self._waits() and self._parked else when
            await self.clock.advance(min(when, step) - self.clock.now())
            if any(task.done() for task in self._parked.values()):
                await self.settle()
                return

    async def _complete(
        self, server: Server, leased: LeasedJob, seconds: float, load_s: float | None
    ) -> None:
        now = self.clock.now()
        loader = () if load_s is None else (NodeTiming("1", now - seconds, load_s),)
        timings = (*loader, NodeTiming("2", now, seconds - (load_s or 0.0)), NodeTiming("3", now, 0.0))
        result = JobResult(timings=timings, cached_nodes=("1",) if load_s is None else ())
        assert server.engine is not None
        self.runs[leased.job_id].ended_at = now
        await server.engine.complete(
            Completion(leased.ref, result if self.reports_timings else JobResult(), seconds)
        )
        self.park(server)


def patient(rules: Rules) -> Rules:
    """These servers send no heartbeats while they run."""
    return msgspec.structs.replace(rules, lease_ttl_s=1e6, worker_lost_s=1e9)


def servers(count: int, **options: Any) -> list[Server]:
    return [Server(f"gpu-{chr(ord('a') + number)}", **options) for number in range(count)]
