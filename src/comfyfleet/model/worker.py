"""Workers: declared capabilities, live values, the worker record, and the limits towards a ComfyUI server.

Capabilities form the worker's profile and filter jobs. Live values (free memory, load, loaded models) only rank.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from comfyfleet.model.ids import ProfileKey, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.requirement import CostTier, Environment, Isolation


class Gpu(msgspec.Struct, frozen=True, omit_defaults=True):
    count: int = 0
    memory_gb: float = 0
    model: str = ""


class Cpu(msgspec.Struct, frozen=True, omit_defaults=True):
    cores: int = 0
    threads: int = 0


class Memory(msgspec.Struct, frozen=True, omit_defaults=True):
    total_gb: float = 0


class Hardware(msgspec.Struct, frozen=True, omit_defaults=True):
    gpu: Gpu = Gpu()
    cpu: Cpu = Cpu()
    memory: Memory = Memory()


class Service(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kind of software that a worker runs jobs on, such as ComfyUI. None for models or node classes: the service
    has no such list to match."""

    name: str
    providers: tuple[str, ...] = ()
    version: str | None = None
    models: frozenset[str] | None = None
    """Names without ComfyUI's category: a checkpoint and a LoRA of the same name are one entry."""
    node_classes: frozenset[str] | None = None
    signature: str | None = None
    """Hash of what its nodes accept (`node_classes.py`). Servers with equal signatures accept the same workflows.
    None: not known."""


class TenantAccess(msgspec.Struct, frozen=True, omit_defaults=True):
    isolation: Isolation = "none"
    allowed: tuple[TenantId, ...] = ()
    denied: tuple[TenantId, ...] = ()


class Location(msgspec.Struct, frozen=True, omit_defaults=True):
    region: str | None = None
    compliance: tuple[str, ...] = ()


class Performance(msgspec.Struct, frozen=True, omit_defaults=True):
    quality_levels: tuple[str, ...] = ()
    speed: float = 1.0


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    tier: CostTier = "standard"
    rate_per_hour: float | None = None


class Capabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """The static side of a worker, which matching uses."""

    services: tuple[Service, ...]
    hardware: Hardware = Hardware()
    tenant_access: TenantAccess = TenantAccess()
    location: Location = Location()
    performance: Performance = Performance()
    cost: Cost = Cost()
    environment: Environment = "self_hosted"
    moves_files: bool = False
    """The worker fetches inputs from a hub and uploads outputs there."""
    has_hub: bool = False
    """The worker takes its jobs from a hub. The hub sets this field."""
    is_fake: bool = False
    """The worker only simulates work."""
    works_beside_real: bool = False
    """A fake worker that takes jobs although the fleet has real workers."""

    @property
    def worker_class(self) -> str:
        """Workers of one class should need equal time for the same workflow."""
        gpu = self.hardware.gpu
        return f"{gpu.model or 'unknown'}/{gpu.memory_gb:g}GB/x{gpu.count}"


class LiveState(msgspec.Struct, frozen=True, omit_defaults=True):
    free_vram_gb: float | None = None
    available_ram_gb: float | None = None
    loaded_models: frozenset[str] = frozenset()
    last_workflow: WorkflowHash | None = None


class WorkerStatus(StrEnum):
    IDLE = "idle"
    BUSY = "busy"
    DRAINING = "draining"
    PAUSED = "paused"
    OFFLINE = "offline"


class WorkerRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    worker_id: WorkerId
    capabilities: Capabilities
    profile: ProfileKey
    slots: int
    connected_at: float
    last_seen_at: float
    live: LiveState = LiveState()
    is_draining: bool = False
    is_paused: bool = False
    is_offline: bool = False
    offline_reason: str = ""
    """The worker's own reason, or that of the engine that noticed its loss."""
    was_lost: bool = False
    """It last went offline without deregistering."""
    quarantined_until: float | None = None
    completed: int = 0
    failed: int = 0
    busy_s: float = 0.0
    disconnects: int = 0
    registrations: int = 0
    revision: int = 0
    """The number of writes, except those of totals and heartbeats."""
    instance: str = ""
    """The agent that uses this worker id. Empty: not given."""

    @property
    def registration(self) -> str:
        """It changes when the worker registers again or comes back."""
        return f"{self.registrations} {self.connected_at!r}"

    def takes_work(self, now: float) -> bool:
        return not (
            self.is_draining
            or self.is_paused
            or self.is_offline
            or (self.quarantined_until is not None and now < self.quarantined_until)
        )

    def matches_like(self, other: WorkerRecord) -> bool:
        """Whether matching treats both alike."""
        return (
            self.capabilities == other.capabilities
            and self.profile == other.profile
            and (self.is_offline, self.is_paused, self.is_draining, self.quarantined_until)
            == (other.is_offline, other.is_paused, other.is_draining, other.quarantined_until)
        )

    def is_other(self, instance: str) -> bool:
        """Whether another agent owns this record. False if one of them is not known."""
        return bool(instance and self.instance) and instance != self.instance

    def merged_onto(self, stored: WorkerRecord) -> WorkerRecord:
        """Merge with the stored record: only deltas change totals, and `last_seen_at` never decreases."""
        return msgspec.structs.replace(
            self,
            completed=stored.completed,
            failed=stored.failed,
            busy_s=stored.busy_s,
            last_seen_at=max(self.last_seen_at, stored.last_seen_at),
            revision=stored.revision + 1,
        )


class WorkerDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a run or heartbeat adds to a record, independent of concurrent changes."""

    completed: int = 0
    failed: int = 0
    busy_s: float = 0.0
    seen_at: float = 0.0
    live: LiveState | None = None

    def apply(self, worker: WorkerRecord) -> WorkerRecord:
        return msgspec.structs.replace(
            worker,
            completed=worker.completed + self.completed,
            failed=worker.failed + self.failed,
            busy_s=worker.busy_s + self.busy_s,
            last_seen_at=max(worker.last_seen_at, self.seen_at),
            live=worker.live if self.live is None else self.live,
        )


MEGABYTE = 1 << 20

Bytes = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_answer_bytes: Bytes = 128 * MEGABYTE
    """The maximum size of a response. A larger response is not read to its end."""
    max_answer_values: Bytes = 4_000_000
    """The maximum number of JSON values in a response. A decoded empty list takes twenty times its text."""
    max_message_bytes: Bytes = 128 * MEGABYTE
    """The maximum of a WebSocket message, and of all outputs and of all pictures of one run together."""
    max_file_bytes: Bytes = 64 * 1024 * MEGABYTE
    """The maximum size of a file that is saved to disk."""
    max_fetch_bytes: Bytes = 1024 * MEGABYTE
    """The maximum size of a file that is read into memory."""
    min_free_bytes: Annotated[int, Meta(ge=0)] = 1024 * MEGABYTE
    """The free disk space that must remain after a file is saved."""
    broken_s: Seconds = 300.0
    """After a response above these limits the server is not used for so long."""
    occupied_s: Seconds = 120.0
    """How long a prompt waits behind a prompt of another client that shows no progress. Then the job is released, and
    the server is not used until that prompt ends. After its end the next one is waited for twice as long."""
    occupied_dead_s: Seconds = 900.0
    """If such a prompt has not ended after so long, the server's execution thread counts as dead."""
    dead_worker_s: Seconds = 600.0
    """A server with a dead execution thread is tried again after so long, if its queue is empty."""
