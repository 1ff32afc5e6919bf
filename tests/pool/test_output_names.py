"""Patterns for the names of outputs: nothing is overwritten, and nothing leaves its folder, whatever a server says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet import OutputFile
from comfyfleet.pool.output_files import OutputNames, write_new

JOB = "01a1df4f-9c1f-77ee-86bf-157f9ac945c2"
CAT = OutputFile("9", "images", "cat_00001_.png")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("out", "out/cat_00001_.png"),
        ("out/{job}_{node}_{index}{ext}", f"out/{JOB}_9_2.png"),
        ("out/{job}/{name}{ext}", f"out/{JOB}/cat_00001_.png"),
        ("out/{job}/", f"out/{JOB}/cat_00001_.png"),
        ("{index:03}{ext}", "002.png"),
        ("out/{job}", f"out/{JOB}.png"),
        ("out/{name}", "out/cat_00001_.png"),
        ("out/{index}_{name}", "out/2_cat_00001_.png"),
        ("out/{index}.jpg", "out/2.jpg"),
        ("a/../out/{index}{ext}", "a/../out/2.png"),
        ("out/{{x}}{index}{ext}", "out/{x}2.png"),
    ],
)
def test_a_pattern_names_the_job_the_node_and_the_number(text: str, path: str) -> None:
    assert OutputNames.read(text).path(CAT, JOB, 2) == Path(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("out/{jobb}{ext}", "the fields are {job}, {node}"),
        ("out/{job", "write a literal brace twice"),
        ("out/}", "write a literal brace twice"),
        ("out/{}{ext}", "the fields are {job}"),
        ("out/{job.__class__}", "the fields are {job}"),
        ("out/{job!r}", "accepts no format"),
        ("out/{index:999}", "accepts no format"),
        ("out/{job}/../x{ext}", "lead out of its folder"),
    ],
)
def test_a_pattern_that_cannot_be_understood_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        OutputNames.read(text)


HOSTILE = st.lists(st.sampled_from([*"./\\ab:\x00\n~", "..", "con", "é" * 80]), max_size=8).map("".join)


@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_name_of_a_server_leads_out_of_the_folder(filename: str, node: str, job: str) -> None:
    file = OutputFile(node, "images", filename)
    for text, depth in (("out", 1), ("out/{node}{name}{ext}", 1), ("out/{job}/{node}/{name}{ext}", 3)):
        path = OutputNames.read(text).path(file, job, 1)
        below = path.relative_to("out").parts
        assert len(below) == depth and not {"..", ".", ""} & set(below)
        assert all(len(part.encode()) <= 255 and "\x00" not in part for part in below)


async def test_what_has_the_same_name_gets_the_first_free_one(tmp_path: Path) -> None:
    place = OutputNames.read(f"{tmp_path}/new/{{node}}{{ext}}")
    paths = [await write_new(place, CAT, bytes([number]), job=JOB, index=number) for number in range(3)]
    assert [path.name for path in paths] == ["9.png", "9-2.png", "9-3.png"]
    assert [path.read_bytes() for path in paths] == [b"\0", b"\1", b"\2"]
