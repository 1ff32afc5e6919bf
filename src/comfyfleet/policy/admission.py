"""Limits for a submission and its input files, the rate limit, and the recognition of a repeated submission.

The hub checks whether a file exists and who owns it. The engine knows when an earlier job has completed, whose output
becomes an input. If the stored job differs from the request (an editor workflow, names of files and other jobs), a
digest of the request identifies the repeat, however the fleet has changed since. The engine finds the job with the same
reference.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import NamedTuple

import msgspec

from comfyfleet.model.editor_conversion import is_editor_workflow
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobInput, JobResult, Submission
from comfyfleet.model.payload import COMFYUI, PayloadReading
from comfyfleet.model.workflow_graph import InvalidWorkflow, Workflow, decoded_graph
from comfyfleet.policy.rules import MAX_PRIORITY, MIN_PRIORITY, Rules

MAX_SERVICE = 256


def check_submission(submission: Submission, rules: Rules) -> None:
    check_priority(submission.priority)
    check_service(submission.requirements.service)
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


def check_service(name: str) -> None:
    if not (0 < len(name) <= MAX_SERVICE and name.isprintable() and name == name.strip()):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{name[:80]!r} is not the name of a service: it has 1 to {MAX_SERVICE} printable characters and no space "
            "at its ends, such as 'comfyui'",
            field="service",
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
    inputs, workflow = submission.inputs, submission.workflow
    # The format of another service may change what it stores.
    is_kept = submission.requirements.service == COMFYUI and not is_editor_workflow(workflow)
    if submission.reference is None or (is_kept and not inputs and not submission.after):
        return None
    # The hub added these fields, not the caller.
    named = tuple(msgspec.structs.replace(each, sha256=None, size=None) for each in inputs)
    try:
        # The digest must not depend on how the JSON was written: nodes may still be text.
        workflow = decoded_graph(workflow)
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


_MAX_ID = 64
_MAX_NAMES = 10


def check_inputs(submission: Submission, graph: Workflow | PayloadReading, rules: Rules) -> None:
    inputs = submission.inputs
    if len(inputs) > rules.max_inputs:
        raise _refused(f"a job can have at most {rules.max_inputs} input files; this one has {len(inputs)}")
    seen: set[tuple[str, str]] = set()
    for each in inputs:
        if (each.file is None) == (each.job is None):
            raise _refused(f"the input {each.target} needs either a 'file' or a 'job'")
        if each.job is None and (each.output is not None or each.index):
            raise _refused(f"the input {each.target}: 'output' and 'index' select an output of a 'job'")
        _check_place(each, graph)
        if (each.node, each.input) in seen:
            raise _refused(f"the input {each.target} has two files")
        seen.add((each.node, each.input))
    attached = sum(len(attachment.data) for attachment in submission.attachments)
    size = attached + sum(each.size or 0 for each in inputs)
    if inputs and size > rules.max_attachment_bytes:
        raise Refusal(
            RefusalCode.TOO_LARGE,
            f"the inputs have {size} bytes together; at most {rules.max_attachment_bytes} are allowed",
            field="inputs",
        )


def _check_place(each: JobInput, graph: Workflow | PayloadReading) -> None:
    if isinstance(graph, PayloadReading):
        places = graph.inputs
        if places is not None and each.target not in places:
            raise _refused(f"the payload takes no file at {each.target}; it takes: {_some(sorted(places))}")
        return
    node = graph.nodes.get(each.node)
    if node is None:
        raise _refused(f"the workflow has no node {each.node!r}; it has {_some(list(graph.nodes))}")
    if each.input not in node.inputs:
        known = _some(list(node.inputs))
        raise _refused(f"node {each.node} ({node.class_type}) has no input {each.input!r}; it has {known}")


def output_of(wanted: JobInput, result: JobResult) -> str | Failure:
    """The selected output file of the earlier job. Its outputs are final, so a failure to find one is final too."""
    files = list(result.files)
    if wanted.output is None:
        # A preview counts only if there are no other outputs.
        named = [file for file in files if file.folder == "output"] or files
    else:
        named = [file for file in files if file.node_id == wanted.output] or [
            file for file in files if fnmatchcase(file.filename, wanted.output)
        ]
    which = "" if wanted.output is None else f" like {wanted.output!r}"
    if wanted.index >= len(named):
        there = _some([f"{file.filename} (node {file.node_id})" for file in files])
        number = f"no output {wanted.index}{which}" if named else f"no output{which}"
        return _missing(wanted, f"has {number}; it has {there}")
    file = named[wanted.index]
    # A direct worker may have written anything to the store.
    if file.file_id is None or not (0 < len(file.file_id) <= _MAX_ID and file.file_id.isprintable()):
        return _missing(
            wanted,
            f"has {file.filename} only on its server, because its worker uploads no files to a hub. "
            "Submit that job with requirements.needs_files",
        )
    return file.file_id


def _missing(wanted: JobInput, what: str) -> Failure:
    return Failure(
        FailureKind.MISSING_INPUT,
        f"the input {wanted.target} is missing: the job {wanted.job} {what}",
        node_id=wanted.node,
        missing=(wanted.target,),
    )


def _refused(message: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, message, field="inputs")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (", ".join(names[:_MAX_NAMES]) or "none") + more


class TokenBucket(msgspec.Struct, frozen=True, gc=False):
    """The rate limit of submits: a bucket that refills evenly and holds the tokens of one minute. Its tokens that were
    left at a time."""

    left: float
    at: float


class TokenDraw(NamedTuple):
    bucket: TokenBucket
    tokens: int
    wait_s: float
    """How long until the next token, if there is none."""


def take_tokens(bucket: TokenBucket | None, per_minute: int, wanted: int, now: float) -> TokenDraw:
    """Take at most `wanted` tokens. An unknown bucket is full."""
    left = float(per_minute)
    if bucket is not None:
        # A clock that goes back adds no tokens.
        left = min(left, bucket.left + max(0.0, now - bucket.at) * per_minute / 60)
        now = max(now, bucket.at)
    turns = min(wanted, int(left))
    wait_s = 0.0 if turns else (1.0 - left) * 60 / per_minute if per_minute else 60.0
    return TokenDraw(TokenBucket(left - turns, now), turns, wait_s)
