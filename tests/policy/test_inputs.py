"""The files a job brings: what may be asked for, and which output of an earlier job is meant."""

from __future__ import annotations

from typing import Any

import pytest

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Attachment, JobInput, JobResult, OutputFile, Submission
from comfyfleet.model.workflow import with_input
from comfyfleet.model.workflow_graph import parse_workflow
from comfyfleet.model.workflow_hash import hash_workflow
from comfyfleet.policy.admission import as_asked, check_inputs, output_of
from comfyfleet.policy.rules import Rules

GRAPH: dict[str, Any] = {
    "10": {"class_type": "LoadImage", "inputs": {"image": "", "mode": "rgb"}},
    "11": {"class_type": "SaveImage", "inputs": {"images": ["10", 0], "filename_prefix": "x"}},
}
FIRST = JobId("first")


def refusal(*inputs: JobInput, **rules: Any) -> Refusal:
    with pytest.raises(Refusal) as refused:
        check_inputs(Submission(GRAPH, inputs=inputs), parse_workflow(GRAPH), Rules(**rules))
    return refused.value


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (JobInput("12", "image", "f_1"), "no node '12'; it has 10, 11"),
        (JobInput("10", "picture", "f_1"), "node 10 (LoadImage) has no input 'picture'; it has image, mode"),
        (JobInput("10", "image"), "needs either a 'file' or a 'job'"),
        (JobInput("10", "image", "f_1", FIRST), "needs either a 'file' or a 'job'"),
        (JobInput("10", "image", "f_1", index=1), "select an output of a 'job'"),
    ],
)
def test_an_input_that_cannot_be_wired_is_refused_by_its_name(wrong: JobInput, words: str) -> None:
    found = refusal(wrong)
    assert found.code is RefusalCode.INVALID_REQUEST and words in found.message
    assert found.details["field"] == "inputs"


def test_one_input_gets_one_file_and_number_and_size_are_bounded() -> None:
    one, other = JobInput("10", "image", "f_1", size=6), JobInput("10", "mode", "f_2", size=5)
    assert "has two files" in refusal(one, one).message
    assert "at most 1 input files" in refusal(one, other, max_inputs=1).message
    assert refusal(one, other, max_attachment_bytes=10).code is RefusalCode.TOO_LARGE
    attached = Submission(GRAPH, inputs=(one,), attachments=(Attachment("a", b"12345", "10", "mode"),))
    with pytest.raises(Refusal):
        check_inputs(attached, parse_workflow(GRAPH), Rules(max_attachment_bytes=10))
    check_inputs(attached, parse_workflow(GRAPH), Rules(max_attachment_bytes=11))


def left(node: str, filename: str, folder: str = "output", file_id: str | None = "") -> OutputFile:
    return OutputFile(node, "images", filename, folder=folder, file_id=filename if file_id == "" else file_id)


RESULT = JobResult(
    files=(
        left("7", "preview.png", folder="temp"),
        left("9", "a_00001_.png"),
        left("9", "a_00002_.png"),
        left("20", "clip.mp4"),
    )
)


@pytest.mark.parametrize(
    ("output", "index", "found"),
    [
        (None, 0, "a_00001_.png"),
        (None, 2, "clip.mp4"),
        ("9", 1, "a_00002_.png"),
        ("7", 0, "preview.png"),
        ("*.mp4", 0, "clip.mp4"),
        ("a_*.png", 1, "a_00002_.png"),
    ],
)
def test_an_output_is_meant_by_node_by_pattern_or_by_place(
    output: str | None, index: int, found: str
) -> None:
    assert output_of(JobInput("10", "image", job=FIRST, output=output, index=index), RESULT) == found


@pytest.mark.parametrize(
    ("output", "index", "words"),
    [
        ("9", 2, "no output 2 like '9'; it has preview.png (node 7), a_00001_.png (node 9)"),
        ("*.wav", 0, "no output like '*.wav'"),
        (None, 3, "no output 3;"),
    ],
)
def test_an_output_that_is_not_there_is_the_callers_fault_and_told_with_what_is(
    output: str | None, index: int, words: str
) -> None:
    found = output_of(JobInput("10", "image", job=FIRST, output=output, index=index), RESULT)
    assert isinstance(found, Failure) and found.kind is FailureKind.MISSING_INPUT
    assert words in found.message and FIRST in found.message


def test_a_preview_is_meant_only_where_nothing_else_is() -> None:
    only = JobResult(files=(left("7", "preview.png", folder="temp"),))
    assert output_of(JobInput("10", "image", job=FIRST), only) == "preview.png"


def test_what_stayed_on_its_server_cannot_be_had_and_says_what_would_help() -> None:
    stayed = JobResult(files=(left("9", "a.png", file_id=None),))
    found = output_of(JobInput("10", "image", job=FIRST), stayed)
    assert isinstance(found, Failure) and "needs_files" in found.message


def test_a_repeat_is_known_by_content_not_by_the_name_of_an_upload() -> None:
    def brought(file: str, sha256: str) -> Submission:
        return Submission(GRAPH, inputs=(JobInput("10", "image", file, sha256=sha256),))

    assert as_asked(brought("f_1", "aa")) == as_asked(brought("f_2", "aa"))
    assert as_asked(brought("f_1", "aa")) != as_asked(brought("f_1", "bb"))


def test_the_workflow_hash_does_not_depend_on_the_name_of_a_picture() -> None:
    names = ("", "example.png", "f_0199.png", "comfyfleet/1234/f_0199.webp", "clip.mp4")
    assert len({hash_workflow(with_input(GRAPH, "10", "image", name)) for name in names}) == 1
