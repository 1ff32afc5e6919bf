"""The simulated world: models, workflows, jobs, and servers that load models.

A server runs one job at a time. What a job needs and the server does not hold is loaded first; that time is not
useful. Two kinds of cache exist: `last` keeps the models of the last prompt, as ComfyUI does by default; `lru` keeps
what fits into VRAM, the least recently used first to go.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import msgspec

Cache = Literal["last", "lru"]
DETECTION_S = 60.0
"""How long it takes until anybody notices that a server has died: the lease time of a hub."""


class SimulatedModel(msgspec.Struct, frozen=True, gc=False):
    """A model file. `load_s` is the time on a server with `disk_speed` 1."""

    name: str
    size_gb: float
    load_s: float


class SimulatedWorkflow(msgspec.Struct, frozen=True, gc=False):
    """Jobs of one workflow differ in their prompt and seed only. `run_s` is the time on a server with `speed` 1 that
    has the models loaded; `weight` is the share of requests."""

    name: str
    models: tuple[SimulatedModel, ...]
    run_s: float
    weight: float = 1.0

    @property
    def load_s(self) -> float:
        return sum(model.load_s for model in self.models)

    @property
    def largest_gb(self) -> float:
        return max((model.size_gb for model in self.models), default=0.0)


class SimulatedJob(msgspec.Struct, gc=False, eq=False):
    """A job, and what became of it."""

    number: int
    arrives_s: float
    workflow: SimulatedWorkflow
    tenant: str = "default"
    priority: int = 0
    run_factor: float = 1.0
    """This job's run time as a share of the workflow's."""
    load_factor: float = 1.0
    server: str = ""
    start_s: float = -1.0
    load_s: float = 0.0
    end_s: float = -1.0
    restarts: int = 0

    @property
    def has_ended(self) -> bool:
        return self.end_s >= 0

    @property
    def latency_s(self) -> float:
        return self.end_s - self.arrives_s

    @property
    def wait_s(self) -> float:
        return self.start_s - self.arrives_s


class ServerSpec(msgspec.Struct, frozen=True):
    """`absences`: from when to when the server is away; the job it runs at the start of one is lost with it."""

    name: str
    vram_gb: float = 12.0
    speed: float = 1.0
    disk_speed: float = 1.0
    cache: Cache = "last"
    absences: tuple[tuple[float, float], ...] = ()

    def fits(self, workflow: SimulatedWorkflow) -> bool:
        return workflow.largest_gb <= self.vram_gb


class SimulatedServer:
    """A server with what it has loaded, and the job that it runs."""

    __slots__ = ("_resident", "given", "index", "is_away", "job", "queue", "spec")

    def __init__(self, index: int, spec: ServerSpec) -> None:
        self.index, self.spec = index, spec
        self._resident: OrderedDict[str, SimulatedModel] = OrderedDict()
        self.job: SimulatedJob | None = None
        self.is_away = False
        self.queue: list[SimulatedJob] = []
        """Only for policies that give a job to a server at once."""
        self.given = 0

    def fits(self, workflow: SimulatedWorkflow) -> bool:
        return self.spec.fits(workflow)

    def is_warm(self, workflow: SimulatedWorkflow) -> bool:
        return all(model.name in self._resident for model in workflow.models)

    def missing(self, workflow: SimulatedWorkflow) -> list[SimulatedModel]:
        return [model for model in workflow.models if model.name not in self._resident]

    def use(self, workflow: SimulatedWorkflow) -> None:
        """Loads what the workflow needs. What has to go goes."""
        if not workflow.models:
            return
        needed = {model.name for model in workflow.models}
        if self.spec.cache == "last":
            for name in [name for name in self._resident if name not in needed]:
                del self._resident[name]
        else:
            held = sum(model.size_gb for model in self._resident.values())
            held += sum(model.size_gb for model in self.missing(workflow))
            for name in [name for name in self._resident if name not in needed]:
                if held <= self.spec.vram_gb:
                    break
                held -= self._resident.pop(name).size_gb
        for model in workflow.models:
            self._resident[model.name] = model
            self._resident.move_to_end(model.name)

    def restart(self) -> None:
        self._resident.clear()

    def begin(self, job: SimulatedJob, now_s: float) -> tuple[float, float]:
        """Begins the job and returns the seconds of loading and of running."""
        load_s = sum(model.load_s for model in self.missing(job.workflow))
        load_s *= job.load_factor / self.spec.disk_speed
        run_s = job.workflow.run_s / self.spec.speed * job.run_factor
        self.use(job.workflow)
        self.job = job
        job.server, job.start_s, job.load_s = self.spec.name, now_s, load_s
        return load_s, run_s
