"""The SHA-256 of what a lease runs: a dispatch carries it from the submit, and the agent compares it before it runs.

Owns what is part of the digest and in which form. The id of the job is part of it, so the payload of another job never
fits, and seeds that were drawn are in the graph as they run. What does not run (metadata, timeouts, links) is not part.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Attachment, Job
from comfyfleet.model.workflow import with_seeds
from comfyfleet.model.workflow_variants import WorkflowVariant, graph_for

_encode = msgspec.json.Encoder(order="sorted").encode


def runnable_workflow(job: Job, signature: str | None = None) -> dict[str, Any]:
    """The graph as a server with this signature runs it, with the seeds that were drawn for it."""
    workflow = graph_for(job.payload.workflow, job.payload.variants, signature)
    return with_seeds(workflow, job.seeds).to_graph() if job.seeds else workflow


def job_sha256(job: Job) -> bytes:
    """Of a job whose files are all known, with every graph that a lease on it may run."""
    return _job_digest(job, runnable_workflow(job), job.payload.variants)


def lease_sha256(job: Job, workflow: dict[str, Any], carried: bytes | None) -> bytes:
    """Of a lease that runs this graph of the job. `carried`: what the dispatch says of the job since its submit."""
    if carried is not None and not job.payload.variants:
        return carried
    if carried is not None and carried != job_sha256(job):
        # The record is not that of the dispatch: the agent finds that out, and runs nothing.
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
    """Of a lease as it arrived."""
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
