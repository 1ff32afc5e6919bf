"""Whether a submission is one that was taken before: by what was sent, or by what it means.

What was sent is known by a digest where it is not kept as it came (a workflow of the editor, names of files and of
other jobs): it is the same however the fleet has changed since. Which job has the reference is the engine's to find.
"""

from __future__ import annotations

from hashlib import sha256

import msgspec

from comfyfleet.model.conversion import is_editor_workflow
from comfyfleet.model.job import Submission
from comfyfleet.model.workflow import InvalidWorkflow, decoded_graph

_ENCODER = msgspec.json.Encoder(order="sorted")


def digest_of(submission: Submission) -> str | None:
    """Of what was sent, before anything was found out about it. None: it is kept as it came, and needs none."""
    inputs, is_kept = submission.inputs, not is_editor_workflow(submission.workflow)
    if submission.reference is None or (is_kept and not inputs and not submission.after):
        return None
    # What the hub found out about a file is not the caller's.
    named = tuple(msgspec.structs.replace(each, sha256=None, size=None) for each in inputs)
    try:
        # What was meant, not how it was written: nodes may still be text.
        workflow = decoded_graph(submission.workflow)
        sent = msgspec.structs.replace(
            submission, workflow=workflow, inputs=named, traceparent=None, sent=None
        )
        return sha256(_ENCODER.encode(sent)).hexdigest()
    except (TypeError, ValueError, OverflowError, RecursionError, InvalidWorkflow):
        # It is no JSON, and will be refused as such.
        return None


def is_repeat(kept: Submission, submission: Submission) -> bool:
    if kept.sent is not None and kept.sent == (submission.sent or digest_of(submission)):
        return True
    # What was attached to a completed job is not kept.
    if not kept.attachments:
        submission = msgspec.structs.replace(submission, attachments=())
    return as_asked(kept) == as_asked(submission)


def as_asked(submission: Submission) -> Submission:
    """Without what was found out later or belongs to one request alone (its trace), and with files told by their
    content: so a repeat is known again."""
    inputs = tuple(
        msgspec.structs.replace(each, file=None) if each.job is not None or each.sha256 is not None else each
        for each in submission.inputs
    )
    workflow = decoded_graph(submission.workflow)
    return msgspec.structs.replace(
        submission, workflow=workflow, inputs=inputs, variants=(), traceparent=None, sent=None
    )
