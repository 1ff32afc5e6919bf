"""What a tenant asked for: the submission, its record, and what came of it. The tenant's side of the house."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.failure import Failure
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import DEFAULT_TENANT, JobId, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.requirement import Preferences, Requirements
from comfyfleet.model.webhook import Webhook
from comfyfleet.model.workflow_variants import WorkflowVariant

Urgency = Literal["low", "normal", "high", "critical"]


class Timeouts(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Accept, start and stall end an attempt and are watched by the agent; total ends the job, from its submit."""

    accept_s: float | None = None
    start_s: float | None = None
    stall_s: float | None = None
    total_s: float | None = None


class Attachment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file to place on the server before the run, and the node input that gets its name there."""

    filename: str
    data: bytes
    node: str
    input: str
    kind: Literal["image", "mask"] = "image"


class JobInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that a hub keeps, and the node input that gets it: one that was uploaded, or what an earlier job left."""

    node: str
    input: str
    file: str | None = None
    """The hub's own name for it. Of an earlier job's output it is known once that job has completed."""
    job: JobId | None = None
    """The earlier job whose output it is."""
    output: str | None = None
    """Which of its outputs: those of a node, or those whose name is like a pattern. None means any."""
    index: int = 0
    """Which of several, in the order of the result."""
    kind: Literal["image", "mask"] = "image"
    sha256: str | None = None
    size: int | None = None

    @property
    def target(self) -> str:
        return f"{self.node}.{self.input}"


class Submission(msgspec.Struct, frozen=True, omit_defaults=True):
    workflow: dict[str, Any]
    reference: str | None = None
    """The caller's own id, unique within the tenant."""
    tenant: TenantId = DEFAULT_TENANT
    priority: int = 0
    urgency: Urgency = "normal"
    tier: int = 0
    requirements: Requirements = Requirements()
    preferences: Preferences = Preferences()
    metadata: dict[str, Any] | None = None
    max_attempts: int | None = None
    retry_delay_s: float | None = None
    timeouts: Timeouts = Timeouts()
    not_before: float | None = None
    deadline: float | None = None
    on_deadline: Literal["fail", "flag"] = "fail"
    include_outputs: tuple[str, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    require_workable: bool = False
    after: tuple[JobId, ...] = ()
    """Jobs of the same tenant that must complete first."""
    inputs: tuple[JobInput, ...] = ()
    webhook: Webhook | None = None
    traceparent: str | None = None
    """The caller's trace, where it has one. A repeat may come with another."""
    variants: tuple[WorkflowVariant, ...] = ()
    """Found out at submit, of a workflow of the editor: as servers run it whose nodes have other inputs."""
    sent: str | None = None
    """A digest of what was sent, where that is not kept as it came."""

    @property
    def input_files(self) -> tuple[InputFile, ...]:
        """Those that are known; all of them, once the job may be leased."""
        if not self.inputs:
            return ()
        return tuple(
            InputFile(each.node, each.input, each.file, kind=each.kind)
            for each in self.inputs
            if each.file is not None
        )

    def payload_bytes(self) -> int:
        """What it takes to keep: as JSON, and attachments as they are."""
        attached = sum(len(attachment.data) for attachment in self.attachments)
        plain = msgspec.structs.replace(self, attachments=()) if attached else self
        return len(msgspec.json.encode(plain)) + attached


class OutputFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file a run left on its server."""

    node_id: str
    kind: str
    """images, gifs, video, audio, latents …: the key the node reported it under."""
    filename: str
    subfolder: str = ""
    folder: str = "output"
    url: str | None = None
    file_id: str | None = None
    """Where it was uploaded: the hub's own name for it."""


class NodeTiming(msgspec.Struct, frozen=True, gc=False):
    node_id: str
    started_at: float
    seconds: float


class JobResult(msgspec.Struct, frozen=True, omit_defaults=True):
    outputs: dict[str, dict[str, Any]] = {}
    """By node id, as the service reported them, narrowed to the included outputs where some were named."""
    files: tuple[OutputFile, ...] = ()
    timings: tuple[NodeTiming, ...] = ()
    cached_nodes: tuple[str, ...] = ()


class Job(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The record of a job. Its phase follows the dispatch; payload and result live only here."""

    job_id: JobId
    tenant: TenantId
    workflow_hash: WorkflowHash
    submitted_at: float
    payload: Submission
    reference: str | None = None
    seeds: dict[str, int] | None = None
    priority: int | None = None
    """Where it was changed since the submit."""
    phase: Phase = Phase.QUEUED
    round: int = 1
    worker_id: WorkerId | None = None
    prompt_id: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    result: JobResult | None = None
    failure: Failure | None = None
    """The last attempt's failure; cleared on success."""
    is_late: bool = False
    unreadable: str | None = None
    """Why what was sealed of it cannot be opened (any more). Said by whoever reads it, and never kept."""
