"""Limits for a submission, and the recognition of a repeated submission.

If the stored job differs from the request (an editor workflow, names of files and other jobs), a digest of the request
identifies the repeat, however the fleet has changed since. The engine finds the job with the same reference.
"""

from __future__ import annotations

import math
from hashlib import sha256

import msgspec

from comfyfleet.model.editor_conversion import is_editor_workflow
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.job import Submission
from comfyfleet.model.workflow import InvalidWorkflow, decoded_graph
from comfyfleet.policy.rules import MAX_PRIORITY, MIN_PRIORITY, Rules


def check_submission(submission: Submission, rules: Rules) -> None:
    check_priority(submission.priority)
    timeouts = submission.timeouts
    for name, value in (
        ("not_before", submission.not_before),
        ("deadline", submission.deadline),
        ("retry_delay", submission.retry_delay_s),
        ("the accept timeout", timeouts.accept_s),
        ("the start timeout", timeouts.start_s),
        ("the stall timeout", timeouts.stall_s),
        ("the total timeout", timeouts.total_s),
        ("max_processing_s", submission.requirements.max_processing_s),
    ):
        if value is not None and not (math.isfinite(value) and value >= 0):
            message = f"{name} is {value}; it must be a number of seconds that is not negative"
            raise Refusal(RefusalCode.INVALID_REQUEST, message)
    if submission.max_attempts is not None and submission.max_attempts < 1:
        raise Refusal(RefusalCode.INVALID_REQUEST, "max_attempts must be at least 1")
    if submission.urgency not in rules.urgency_points:
        known = ", ".join(rules.urgency_points)
        raise Refusal(RefusalCode.INVALID_REQUEST, f"urgency {submission.urgency!r} is not one of {known}")
    check_dependencies(submission, rules)
    if submission.metadata:
        try:
            size = len(msgspec.json.encode(submission.metadata))
        except (TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise Refusal(RefusalCode.INVALID_REQUEST, f"metadata must be plain JSON: {error}") from error
        if size > rules.max_metadata_bytes:
            raise Refusal(
                RefusalCode.TOO_LARGE,
                f"metadata has {size} bytes; at most {rules.max_metadata_bytes} are allowed",
            )
    attached = sum(len(attachment.data) for attachment in submission.attachments)
    if attached > rules.max_attachment_bytes:
        raise Refusal(
            RefusalCode.TOO_LARGE,
            f"the attachments have {attached} bytes together; at most {rules.max_attachment_bytes} are allowed",
        )


def check_dependencies(submission: Submission, rules: Rules) -> None:
    if len(submission.after) > rules.max_dependencies:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"a job can wait for at most {rules.max_dependencies} other jobs; this one names {len(submission.after)}",
            field="after",
        )


def check_priority(priority: int) -> None:
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"priority {priority} is outside {MIN_PRIORITY} … {MAX_PRIORITY}"
        )


def check_room(waiting: int, open_bytes: int, size: int, rules: Rules) -> None:
    """`size` is the payload of the new job."""
    if size > rules.max_open_bytes:
        raise Refusal(
            RefusalCode.TOO_LARGE,
            f"the payload has {size} bytes; all open jobs together may have {rules.max_open_bytes}",
        )
    if open_bytes + size > rules.max_open_bytes:
        raise Refusal(
            RefusalCode.QUEUE_FULL,
            f"open jobs use {open_bytes} of {rules.max_open_bytes} bytes, so {size} more do not fit; "
            "try again when some jobs have ended",
            open_bytes=open_bytes,
        )
    if waiting >= rules.max_waiting:
        raise Refusal(
            RefusalCode.QUEUE_FULL,
            f"the queue is full: {waiting} jobs wait; try again when some of them have run",
            waiting=waiting,
        )


_ENCODER = msgspec.json.Encoder(order="sorted")


def digest_of(submission: Submission) -> str | None:
    """The digest of a request. None: the stored job equals the request, so a repeat needs no digest."""
    inputs, is_kept = submission.inputs, not is_editor_workflow(submission.workflow)
    if submission.reference is None or (is_kept and not inputs and not submission.after):
        return None
    # The hub added these fields, not the caller.
    named = tuple(msgspec.structs.replace(each, sha256=None, size=None) for each in inputs)
    try:
        # The digest must not depend on how the JSON was written: nodes may still be text.
        workflow = decoded_graph(submission.workflow)
        sent = msgspec.structs.replace(
            submission, workflow=workflow, inputs=named, traceparent=None, sent=None
        )
        return sha256(_ENCODER.encode(sent)).hexdigest()
    except (TypeError, ValueError, OverflowError, RecursionError, InvalidWorkflow):
        # It is not JSON and will be refused later.
        return None


def is_repeat(kept: Submission, submission: Submission) -> bool:
    if kept.sent is not None and kept.sent == (submission.sent or digest_of(submission)):
        return True
    # A completed job has lost its attachments.
    if not kept.attachments:
        submission = msgspec.structs.replace(submission, attachments=())
    return as_asked(kept) == as_asked(submission)


def as_asked(submission: Submission) -> Submission:
    """The submission for comparison with a repeat: without derived fields and the trace, with files by content."""
    inputs = tuple(
        msgspec.structs.replace(each, file=None) if each.job is not None or each.sha256 is not None else each
        for each in submission.inputs
    )
    workflow = decoded_graph(submission.workflow)
    return msgspec.structs.replace(
        submission, workflow=workflow, inputs=inputs, variants=(), traceparent=None, sent=None
    )
