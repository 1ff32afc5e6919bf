"""Input files of a job: limits and validity, and the selection of an output of an earlier job.

The hub checks whether a file exists and who owns it. The engine knows when an earlier job has completed.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobInput, JobResult, Submission
from comfyfleet.model.workflow import Workflow
from comfyfleet.policy.rules import Rules

_MAX_ID = 64
_MAX_NAMES = 10


def check_inputs(submission: Submission, graph: Workflow, rules: Rules) -> None:
    inputs = submission.inputs
    if len(inputs) > rules.max_inputs:
        raise _refused(f"a job can have at most {rules.max_inputs} input files; this one has {len(inputs)}")
    seen: set[tuple[str, str]] = set()
    for each in inputs:
        if (each.file is None) == (each.job is None):
            raise _refused(f"the input {each.target} needs either a 'file' or a 'job'")
        if each.job is None and (each.output is not None or each.index):
            raise _refused(f"the input {each.target}: 'output' and 'index' select an output of a 'job'")
        node = graph.nodes.get(each.node)
        if node is None:
            raise _refused(f"the workflow has no node {each.node!r}; it has {_some(list(graph.nodes))}")
        if each.input not in node.inputs:
            known = _some(list(node.inputs))
            raise _refused(
                f"node {each.node} ({node.class_type}) has no input {each.input!r}; it has {known}"
            )
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
