"""An engine on a memory store with time wound by hand, and workers that do only what a test says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, Poll, RegisterWorker, ReportReply
from comfyfleet.model.fact import Event, Fact, FleetEvent
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, PollId, WorkerId, WorkflowHash
from comfyfleet.model.job import JobResult, Submission
from comfyfleet.model.payload_digest import leased_sha256
from comfyfleet.model.requirement import Preferences
from comfyfleet.model.worker import Capabilities, Gpu, Hardware, Service
from comfyfleet.policy.failover import SmartFailover
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock, SeededRandom
from comfyfleet.worker.connectors.simulated_payload import SimulatedFormat


def graph(kind: str = "KSampler", model: str | None = None, **inputs: Any) -> dict[str, Any]:
    """A small workflow; another kind or model is another workflow hash."""
    first: dict[str, Any] = {"class_type": kind, "inputs": dict(inputs)}
    if model is not None:
        first["inputs"]["ckpt_name"] = model
    return {
        "1": first,
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }


def offers(
    *kinds: str,
    models: tuple[str, ...] = (),
    vram_gb: float = 24,
    name: str = "comfyui",
    signature: str | None = None,
) -> Capabilities:
    node_classes = frozenset({*kinds, "SaveImage"})
    service = Service(name, models=frozenset(models), node_classes=node_classes, signature=signature)
    return Capabilities((service,), Hardware(gpu=Gpu(1, vram_gb, "RTX")))


class Picky(SmartFailover):
    """Keeps every workflow from the workers it is told to."""

    def __init__(self, rules: Rules, refuses: Callable[[WorkerId], bool]) -> None:
        super().__init__(rules)
        self._refuses = refuses

    def should_skip(self, worker_id: WorkerId, workflow_hash: WorkflowHash, now: float) -> bool:
        return self._refuses(worker_id)


class Rig:
    def __init__(self, store: type[MemoryStore] = MemoryStore, **rules: Any) -> None:
        self.clock = ManualClock()
        self.store = store(self.clock)
        self.engine = Engine(
            self.store,
            rules=Rules(**rules),
            clock=self.clock,
            rng=SeededRandom(),
            formats={"simulated": SimulatedFormat()},
        )
        self.events: list[Event] = []
        self.engine.bus.listen(self.events.append)
        self._polls = itertools.count(1)

    def replace_strategy(self, refuses: Callable[[WorkerId], bool]) -> None:
        strategy = Picky(self.engine.rules, refuses)
        self.engine = Engine(
            self.store, rules=self.engine.rules, clock=self.clock, rng=SeededRandom(), strategy=strategy
        )

    @staticmethod
    def prefer(*workers: str) -> Preferences:
        return Preferences(workers=tuple(WorkerId(name) for name in workers))

    async def __aenter__(self) -> Rig:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def worker(self, name: str, *kinds: str, slots: int = 1, **offered: Any) -> WorkerId:
        worker_id = WorkerId(name)
        await self.engine.register(
            RegisterWorker(worker_id, offers(*(kinds or ("KSampler",)), **offered), slots)
        )
        return worker_id

    async def submit(self, workflow: dict[str, Any] | None = None, **options: Any) -> JobId:
        return (await self.engine.submit(Submission(workflow or graph(), **options))).job_id

    async def poll(self, worker: str, wait_s: float = 0) -> LeasedJob | None:
        call = Poll(WorkerId(worker), PollId(f"poll-{next(self._polls)}"), wait_s)
        return await self.engine.poll(call)

    async def take(self, worker: str) -> LeasedJob:
        leased = await self.poll(worker)
        assert leased is not None, f"{worker} found no job"
        assert leased.payload_sha256 == leased_sha256(leased).hex(), "an agent would not run it"
        await self.engine.heartbeat(leased.worker_id, [leased.ref])
        return leased

    def park(self, worker: str, wait_s: float = 1e9) -> asyncio.Task[LeasedJob | None]:
        return asyncio.get_running_loop().create_task(self.poll(worker, wait_s))

    async def complete(self, leased: LeasedJob, seconds: float = 1.0) -> ReportReply:
        return await self.engine.complete(Completion(leased.ref, JobResult(), seconds))

    async def fail(
        self, leased: LeasedJob, kind: FailureKind = FailureKind.NODE_ERROR, **more: Any
    ) -> ReportReply:
        return await self.engine.fail(FailureReport(leased.ref, Failure(kind, "it broke", **more)))

    async def settle(self) -> None:
        await self.clock.settle()

    def facts(self, job_id: JobId) -> list[str]:
        return [
            event.kind.value for event in self.events if isinstance(event, Fact) and event.job_id == job_id
        ]

    def fleet_events(self, kind: str) -> list[FleetEvent]:
        return [event for event in self.events if isinstance(event, FleetEvent) and event.kind == kind]
