"""The SHA-256 of what a lease runs. The dispatch carries it from the submit; the agent verifies it before the run.

The job id is part of the digest, so the payload of another job never fits. Drawn seeds are part of the graph. Metadata,
timeouts and URLs are not part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.editor_conversion import WorkflowVariant, graph_for
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Attachment, Job
from comfyfleet.model.payload import COMFYUI, with_drawn_seeds
from comfyfleet.model.workflow import with_seeds

_encode = msgspec.json.Encoder(order="sorted").encode


def runnable_workflow(job: Job, signature: str | None = None) -> dict[str, Any]:
    """The payload with the drawn seeds; a graph of ComfyUI as a server with this signature needs it."""
    workflow = graph_for(job.payload.workflow, job.payload.variants, signature)
    if not job.seeds:
        return workflow
    if job.payload.requirements.service == COMFYUI or _draws_for_nodes(workflow, job.seeds):
        return with_seeds(workflow, job.seeds).to_graph()
    return with_drawn_seeds(workflow, job.seeds)


def _draws_for_nodes(workflow: dict[str, Any], seeds: Mapping[str, int]) -> bool:
    """Whether the seeds are those of nodes: older versions read the payload of every service as a graph."""
    return all(isinstance(workflow.get(node_id), dict) for node_id in seeds)


def job_sha256(job: Job) -> bytes:
    """The digest of a job whose files are all known. It covers every variant that a lease may run."""
    return _job_digest(job, runnable_workflow(job), job.payload.variants)


def lease_sha256(job: Job, workflow: dict[str, Any], carried: bytes | None) -> bytes:
    """The digest of a lease that runs this graph. `carried` is the digest that the dispatch has from the submit."""
    if carried is not None and not job.payload.variants:
        return carried
    if carried is not None and carried != job_sha256(job):
        # The record does not belong to the dispatch. The agent detects the mismatch and does not run it.
        return carried
    return _job_digest(job, workflow, ())


def _job_digest(job: Job, workflow: dict[str, Any], variants: Sequence[WorkflowVariant]) -> bytes:
    payload = job.payload
    return _digest(
        job.job_id,
        payload.requirements.service,
        workflow,
        payload.attachments,
        payload.input_files,
        payload.include_outputs,
        variants,
    )


def leased_sha256(job: LeasedJob) -> bytes:
    """The digest of a lease as it arrived at the agent."""
    return _digest(
        job.job_id,
        job.service,
        job.workflow,
        job.attachments,
        job.inputs,
        job.include_outputs,
    )


def _digest(
    job_id: JobId,
    service: str,
    workflow: dict[str, Any],
    attachments: Sequence[Attachment],
    inputs: Sequence[InputFile],
    include_outputs: Sequence[str],
    variants: Sequence[WorkflowVariant] = (),
) -> bytes:
    content: dict[str, Any] = {
        "job_id": job_id,
        "service": service,
        "workflow": workflow,
        "attachments": [
            [each.filename, each.node, each.input, each.kind, sha256(each.data).hexdigest()]
            for each in attachments
        ],
        "inputs": [[each.node, each.input, each.file_id, each.kind] for each in inputs],
        "include_outputs": include_outputs,
    }
    if variants:
        content["variants"] = variants
    return sha256(_encode(content)).digest()
