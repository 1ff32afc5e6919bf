"""The tenant's side of a job: the submission, the job record and the result."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.editor_conversion import WorkflowVariant
from comfyfleet.model.failure import Failure
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import DEFAULT_TENANT, JobId, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.requirement import Preferences, Requirements
from comfyfleet.model.webhook import Webhook

Urgency = Literal["low", "normal", "high", "critical"]


class Timeouts(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The agent watches accept, start and stall, which end an attempt. Total starts at the submit and ends the job."""

    accept_s: float | None = None
    start_s: float | None = None
    stall_s: float | None = None
    total_s: float | None = None


class Attachment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that the agent uploads to the server before the run, and the node input that gets its name."""

    filename: str
    data: bytes
    node: str
    input: str
    kind: Literal["image", "mask"] = "image"


class JobInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of the hub for a node input: an uploaded file, or an output of an earlier job."""

    node: str
    input: str
    file: str | None = None
    """The file id. For an output of an earlier job it is known when that job has completed."""
    job: JobId | None = None
    """The earlier job."""
    output: str | None = None
    """Selects the outputs by node id or by a pattern for the file name. None: any."""
    index: int = 0
    """Which of several outputs, in the order of the result."""
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
    """The caller's trace. A repeated submission may have another one."""
    variants: tuple[WorkflowVariant, ...] = ()
    """Variants of an editor workflow for servers whose nodes have other inputs. The submit computes them."""
    sent: str | None = None
    """A digest of the request, if the store does not hold the request as sent."""

    @property
    def input_files(self) -> tuple[InputFile, ...]:
        """The known files. When the job may be leased, all are known."""
        return tuple(
            InputFile(each.node, each.input, each.file, kind=each.kind)
            for each in self.inputs
            if each.file is not None
        )

    def payload_bytes(self) -> int:
        """The stored size: JSON plus raw attachments."""
        attached = sum(len(attachment.data) for attachment in self.attachments)
        plain = msgspec.structs.replace(self, attachments=()) if attached else self
        return len(msgspec.json.encode(plain)) + attached


class OutputFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """An output file of a run."""

    node_id: str
    kind: str
    """The key under which the node reported it: images, gifs, video, audio, latents …"""
    filename: str
    subfolder: str = ""
    folder: str = "output"
    url: str | None = None
    file_id: str | None = None
    """The file id at the hub, if it was uploaded."""


class NodeTiming(msgspec.Struct, frozen=True, gc=False):
    node_id: str
    started_at: float
    seconds: float


class JobResult(msgspec.Struct, frozen=True, omit_defaults=True):
    outputs: dict[str, dict[str, Any]] = {}
    """By node id, as the service reported them; only `include_outputs`, if given."""
    files: tuple[OutputFile, ...] = ()
    timings: tuple[NodeTiming, ...] = ()
    cached_nodes: tuple[str, ...] = ()


class Job(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The record of a job. Its phase follows the dispatch. Only the record holds payload and result."""

    job_id: JobId
    tenant: TenantId
    workflow_hash: WorkflowHash
    submitted_at: float
    payload: Submission
    reference: str | None = None
    seeds: dict[str, int] | None = None
    priority: int | None = None
    """Set if the priority changed after the submit."""
    phase: Phase = Phase.QUEUED
    round: int = 1
    worker_id: WorkerId | None = None
    prompt_id: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    """When the job ended, also if it failed or was cancelled."""
    result: JobResult | None = None
    failure: Failure | None = None
    """The failure of the last attempt. Success clears it."""
    is_late: bool = False
    unreadable: str | None = None
    """Why the payload cannot be decrypted. The reader sets it; it is never stored."""
