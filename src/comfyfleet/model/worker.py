"""Who takes leases, and what it offers.

Capabilities are what a worker declares plus what its agent discovered. Live values (free memory, load, what is loaded)
stand apart: they rank, they never filter, and they are not part of a profile.

How much of a ComfyUI server a worker reads, and how long it puts up with one that is of no use.

Data only, apart from the connector that heeds it, so that the command line knows the names without loading that.
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
    """One kind of work a worker does. None for models or node classes: the service has no such list to match."""

    name: str
    providers: tuple[str, ...] = ()
    version: str | None = None
    models: frozenset[str] | None = None
    node_classes: frozenset[str] | None = None
    signature: str | None = None
    """Hash of what its nodes accept (`node_classes.py`): servers with one signature accept the same workflows.
    None: it is not known."""


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
    """Seed of every matching decision: the static side of a worker."""

    services: tuple[Service, ...]
    hardware: Hardware = Hardware()
    tenant_access: TenantAccess = TenantAccess()
    location: Location = Location()
    performance: Performance = Performance()
    cost: Cost = Cost()
    environment: Environment = "self_hosted"
    moves_files: bool = False
    """It has a hub to fetch a job's inputs from, and to bring its outputs to."""
    has_hub: bool = False
    """It takes its jobs from a hub. The hub says so, whatever the worker declares."""
    is_fake: bool = False
    """It only pretends to work: what it makes is no result that anybody waits for."""
    works_beside_real: bool = False
    """A fake that takes jobs although the fleet has workers that are none."""

    @property
    def worker_class(self) -> str:
        """Workers of one class are expected to take equally long for the same workflow."""
        gpu = self.hardware.gpu
        return f"{gpu.model or 'unknown'}/{gpu.memory_gb:g}GB/x{gpu.count}"


class LiveState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is true just now. Ranks only."""

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
    """What was said when it went: by itself, or by whoever missed it."""
    was_lost: bool = False
    """When it last went, it was missed."""
    quarantined_until: float | None = None
    completed: int = 0
    failed: int = 0
    busy_s: float = 0.0
    disconnects: int = 0
    registrations: int = 0
    revision: int = 0
    """How often it was written, but for its totals and signs of life."""
    instance: str = ""
    """Which agent works under this name. Empty: it has not said."""

    @property
    def registration(self) -> str:
        """The same as long as it has neither registered anew nor come back."""
        return f"{self.registrations} {self.connected_at!r}"

    def takes_work(self, now: float) -> bool:
        return not (
            self.is_draining
            or self.is_paused
            or self.is_offline
            or (self.quarantined_until is not None and now < self.quarantined_until)
        )

    def matches_like(self, other: WorkerRecord) -> bool:
        """Whether both are equal in everything that decides who may take what."""
        return (
            self.capabilities == other.capabilities
            and self.profile == other.profile
            and (self.is_offline, self.is_paused, self.is_draining, self.quarantined_until)
            == (other.is_offline, other.is_paused, other.is_draining, other.quarantined_until)
        )

    def is_other(self, instance: str) -> bool:
        """Whether this is another agent's, as far as both say who they are."""
        return bool(instance and self.instance) and instance != self.instance

    def over(self, stored: WorkerRecord) -> WorkerRecord:
        """This, written over what stands in the store: totals are only ever added to, and nobody is seen earlier."""
        return msgspec.structs.replace(
            self,
            completed=stored.completed,
            failed=stored.failed,
            busy_s=stored.busy_s,
            last_seen_at=max(self.last_seen_at, stored.last_seen_at),
            revision=stored.revision + 1,
        )


class WorkerDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a run or a sign of life adds to a record, whatever others change in it at the same time."""

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
    """What an answer of the server may have; one that has more is not read to its end."""
    max_answer_values: Bytes = 4_000_000
    """How many values there may be in it: decoded, an empty list takes twenty times its text."""
    max_message_bytes: Bytes = 128 * MEGABYTE
    """What a message of the websocket may have, and all outputs together that are heard of one run, and all pictures
    that one run sends."""
    max_file_bytes: Bytes = 64 * 1024 * MEGABYTE
    """What a file of the server may have that is saved on this machine."""
    max_fetch_bytes: Bytes = 1024 * MEGABYTE
    """What a file may have that is read into memory."""
    min_free_bytes: Annotated[int, Meta(ge=0)] = 1024 * MEGABYTE
    """What no file of the server takes of the disk that it is saved on."""
    broken_s: Seconds = 300.0
    """A server that sends more than it may is not used for so long, then tried again."""

    occupied_s: Seconds = 120.0
    """A prompt of ours waits for so long behind one of somebody else's that shows no sign of life: ours is given back,
    and the server is not used until that one has ended. Where it ends, the next is waited for twice as long."""
    occupied_dead_s: Seconds = 900.0
    """Such a prompt of somebody else's has not ended after so long: the server's execution thread is dead."""
    dead_worker_s: Seconds = 600.0
    """A server whose execution thread was found dead is tried again after so long, should nothing wait in its queue."""
