"""Goal 6: a whole pool, from enqueue to completed, is as fast with a long queue as with a short one.

Four servers behind a stub that finishes at once; workflows of twelve nodes, each with a seed of its own, hashed at
every enqueue. The pools live in one process and take turns. A third one, without a goal, has a thousand different
workflows in its queue: what a round looks at and ranks then is bounded, but more than one lane.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from bench._content import check_content
from bench._measure import (
    Case,
    Entry,
    Plan,
    clear_memory,
    cpu_s,
    entry,
    in_turn,
    ratio,
    ratio_range,
    settle_memory,
)
from comfyfleet import Server, WorkflowPool
from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.job import JobResult
from comfyfleet.worker.connectors.simulated import Reporter, SimulatedConnector

_SLICE = 80
_SERVERS = 4


class StopWatch:
    """Counts the jobs of a slice, notes when the first began and the last ended, and holds the queue then."""

    def __init__(self) -> None:
        self.pool: WorkflowPool | None = None
        self.is_over = asyncio.Event()
        self.seconds = 0.0
        self._count = 0
        self._started = 0.0
        self.ran: list[tuple[str, dict[str, Any]]] = []

    def restart(self) -> None:
        self.is_over.clear()
        self._count = 0

    async def tick(self) -> None:
        self._count += 1
        if self._count == 1:
            self._started = cpu_s()
        elif self._count == _SLICE:
            self.seconds = cpu_s() - self._started
            assert self.pool is not None
            await self.pool.pause_queue()
            self.is_over.set()


class StubConnector(SimulatedConnector):
    def __init__(self, watch: StopWatch) -> None:
        super().__init__(keep_runs=1)
        self._watch = watch

    async def process_job(self, job: LeasedJob, report: Reporter) -> JobResult:
        self._watch.ran.append((job.job_id, job.workflow))
        await self._watch.tick()
        return await super().process_job(job, report)


class PoolRig:
    def __init__(self, kinds: int = 1) -> None:
        self._kinds = kinds
        self._watch = StopWatch()
        self.pool = self._watch.pool = WorkflowPool(
            [Server(connector=StubConnector(self._watch), id=f"server-{n}") for n in range(_SERVERS)]
        )
        self._made = 0
        self._asked: dict[str, int] = {}
        """The seed of each job that waits."""

    async def fill(self, jobs: int) -> None:
        await self.pool.start()
        await self.pool.pause_queue()
        for _ in range(jobs - _SLICE):
            job = await self.pool.enqueue(self._next())
            self._asked[job] = self._made

    async def rates(self, slices: int) -> tuple[float, float]:
        """Jobs a second, enqueued and run. A slice comes in and leaves again, so the queue stays as long as it is."""
        enqueuing = running = 0.0
        for _ in range(slices):
            workflows = [self._next() for _ in range(_SLICE)]
            started = cpu_s()
            jobs = [await self.pool.enqueue(workflow) for workflow in workflows]
            enqueuing += cpu_s() - started
            self._asked |= {job: _seed(workflow) for job, workflow in zip(jobs, workflows, strict=True)}
            self._watch.restart()
            await self.pool.resume_queue()
            await self._watch.is_over.wait()
            running += self._watch.seconds
            ran, self._watch.ran = self._watch.ran, []
            check_content(self._asked, [(job, _seed(workflow)) for job, workflow in ran])
        return slices * _SLICE / enqueuing, slices * (_SLICE - 1) / running

    def _next(self) -> dict[str, Any]:
        self._made += 1
        return twelve_nodes(self._made, self._made % self._kinds)


async def pool_throughput(plan: Plan, kind: str) -> list[Entry]:
    few, many, mixed = PoolRig(), PoolRig(), PoolRig(kinds=1000)
    waiting, mixed_waiting = plan.size(100_000), plan.size(10_000)
    slices = plan.repeats(20)
    await few.fill(100)
    await many.fill(waiting)
    await mixed.fill(mixed_waiting)
    settle_memory()
    enqueuing: dict[str, list[float]] = {"few": [], "many": [], "mixed": []}

    def case(name: str, rig: PoolRig) -> Case:
        async def measure() -> float:
            enqueued, run = await rig.rates(slices)
            enqueuing[name].append(enqueued)
            return run

        return measure

    rigs = {"few": few, "many": many, "mixed": mixed}
    cases = {name: case(name, rig) for name, rig in rigs.items()}
    await in_turn(cases, 1)
    for warm_up in enqueuing.values():
        warm_up.clear()
    running = await in_turn(cases, plan.rounds)
    for rig in rigs.values():
        await rig.pool.close()
    clear_memory()
    return [
        _entry("6a", kind, "pool, jobs/s at 100,000 waiting / at 100", running, waiting),
        _entry("6b", kind, "pool, enqueues/s with hash at 100,000 waiting / at 100", enqueuing, waiting),
    ]


def _entry(goal: str, kind: str, name: str, rates: dict[str, list[float]], waiting: int) -> Entry:
    middle = {case: round(statistics.median(found)) for case, found in rates.items()}
    return entry(
        goal,
        kind,
        name,
        ratio(rates["many"], rates["few"]),
        ">= 0.7",
        "ratio",
        range=ratio_range(rates["many"], rates["few"]),
        waiting=[100, waiting],
        per_cpu_second=[middle["few"], middle["many"]],
        per_cpu_second_with_1000_workflows=middle["mixed"],
        servers=_SERVERS,
    )


def twelve_nodes(seed: int, kind: int = 0) -> dict[str, Any]:
    """A picture with a style and an upscaled second pass. Another kind is another style, so another workflow hash."""
    style = _TWELVE["9"]
    if kind:
        style = {**style, "inputs": {**style["inputs"], "lora_name": f"style-{kind}.safetensors"}}
    return {
        **_TWELVE,
        "9": style,
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["9", 0],
                "positive": ["2", 0],
                "negative": ["3", 0],
                "latent_image": ["4", 0],
                "seed": seed,
                "steps": 20,
                "cfg": 7.5,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
            },
        },
    }


def _seed(workflow: dict[str, Any]) -> int:
    return int(workflow["5"]["inputs"]["seed"])


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


_TWELVE: dict[str, Any] = {
    "1": _node("CheckpointLoaderSimple", ckpt_name="base.safetensors"),
    "2": _node("CLIPTextEncode", text="a lighthouse at dusk, oil on canvas", clip=["9", 1]),
    "3": _node("CLIPTextEncode", text="blurry, text", clip=["9", 1]),
    "4": _node("EmptyLatentImage", width=1024, height=1024, batch_size=1),
    "6": _node("LatentUpscale", samples=["5", 0], upscale_method="bislerp", width=1536, height=1536),
    "7": _node(
        "KSamplerAdvanced", model=["9", 0], positive=["2", 0], negative=["3", 0], latent_image=["6", 0]
    ),
    "8": _node("VAEDecode", samples=["7", 0], vae=["10", 0]),
    "9": _node(
        "LoraLoader", model=["1", 0], clip=["1", 1], lora_name="style.safetensors", strength_model=0.8
    ),
    "10": _node("VAELoader", vae_name="fine.safetensors"),
    "11": _node("ImageSharpen", image=["8", 0], sharpen_radius=1, sigma=1.0, alpha=0.5),
    "12": _node("SaveImage", images=["11", 0], filename_prefix="lighthouse"),
}
