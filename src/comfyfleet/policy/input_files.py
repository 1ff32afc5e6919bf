"""The files that a job brings: whether they may be asked for so, and which output of an earlier job is meant.

Whether a file is there, and whose it is, is the hub's to say; when an earlier job has completed is the engine's.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobInput, JobResult, Submission
from comfyfleet.model.workflow import Workflow
from comfyfleet.policy.rules import Rules

_MAX_ID = 64
_MANY = 10
"""So many names are told of what there is instead."""


def check_inputs(submission: Submission, graph: Workflow, rules: Rules) -> None:
    inputs = submission.inputs
    if len(inputs) > rules.max_inputs:
        raise _refused(f"a job brings at most {rules.max_inputs} files, this one {len(inputs)}")
    seen: set[tuple[str, str]] = set()
    for each in inputs:
        if (each.file is None) == (each.job is None):
            raise _refused(f"the input {each.target} is either a 'file' or the output of a 'job'")
        if each.job is None and (each.output is not None or each.index):
            raise _refused(f"the input {each.target}: 'output' and 'index' choose among what a 'job' left")
        node = graph.nodes.get(each.node)
        if node is None:
            raise _refused(f"the workflow has no node {each.node!r}; it has {_some(list(graph.nodes))}")
        if each.input not in node.inputs:
            known = _some(list(node.inputs))
            raise _refused(
                f"node {each.node} ({node.class_type}) has no input {each.input!r}; it has {known}"
            )
        if (each.node, each.input) in seen:
            raise _refused(f"two files are given for the input {each.target}")
        seen.add((each.node, each.input))
    attached = sum(len(attachment.data) for attachment in submission.attachments)
    size = attached + sum(each.size or 0 for each in inputs)
    if inputs and size > rules.max_attachment_bytes:
        raise Refusal(
            RefusalCode.TOO_LARGE,
            f"the inputs have {size} bytes together; at most {rules.max_attachment_bytes} are taken",
            field="inputs",
        )


def output_of(wanted: JobInput, result: JobResult) -> str | Failure:
    """The file that is meant among those the job left. What it left is final, so a failure to find it is too."""
    files = list(result.files)
    if wanted.output is None:
        # A preview is meant only where nothing else is there.
        named = [file for file in files if file.folder == "output"] or files
    else:
        named = [file for file in files if file.node_id == wanted.output] or [
            file for file in files if fnmatchcase(file.filename, wanted.output)
        ]
    which = "" if wanted.output is None else f" like {wanted.output!r}"
    if wanted.index >= len(named):
        there = _some([f"{file.filename} (node {file.node_id})" for file in files])
        number = f"no output {wanted.index}{which}" if named else f"no output{which}"
        return _missing(wanted, f"left {number}; it left {there}")
    file = named[wanted.index]
    # A worker directly on a store may have written anything there.
    if file.file_id is None or not (0 < len(file.file_id) <= _MAX_ID and file.file_id.isprintable()):
        return _missing(
            wanted,
            f"left {file.filename} on its server alone: it ran on a worker that brings no files to a hub. "
            "Submit it with requirements.needs_files",
        )
    return file.file_id


def _missing(wanted: JobInput, what: str) -> Failure:
    return Failure(
        FailureKind.MISSING_INPUT,
        f"the input {wanted.target} cannot be had: the job {wanted.job} {what}",
        node_id=wanted.node,
        missing=(wanted.target,),
    )


def _refused(message: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, message, field="inputs")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return (", ".join(names[:_MANY]) or "none") + more
