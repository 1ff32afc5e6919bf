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
from comfyfleet.model.workflow import resolve_seeds

_encode = msgspec.json.Encoder(order="sorted").encode


def runnable_workflow(job: Job) -> dict[str, Any]:
    """The graph with the seeds that were drawn for it."""
    workflow = job.payload.workflow
    if not job.seeds:
        return workflow
    drawn = iter(job.seeds.values())
    return resolve_seeds(workflow, lambda: next(drawn))[0].to_graph()


def job_sha256(job: Job, workflow: dict[str, Any] | None = None) -> bytes:
    """Of a job whose files are all known. `workflow`: its graph with seeds, where that is at hand."""
    payload = job.payload
    return _digest(
        job.job_id,
        payload.requirements.service,
        runnable_workflow(job) if workflow is None else workflow,
        payload.attachments,
        payload.input_files,
        payload.include_outputs,
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
) -> bytes:
    content = {
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
    return sha256(_encode(content)).digest()
