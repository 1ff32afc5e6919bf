"""Workflows in files: pictures, sounds and videos as ComfyUI saves them, JSON of any usual shape, and what is said of
a file that holds none. A hostile file costs neither time nor memory."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from comfyfleet.model.file_metadata import MAX_TEXT_BYTES
from comfyfleet.model.workflow import read_workflow_file, workflow_in
from comfyfleet.model.workflow_graph import InvalidWorkflow

GRAPH = {"1": {"class_type": "EmptyImage", "inputs": {"width": 8, "text": "Grüße"}}}
EDITOR = {"nodes": [{"id": 1, "type": "EmptyImage"}], "links": [], "version": 0.4}
NEXT_STEP = (
    "Pass the file as ComfyUI saved it, or a JSON file saved with 'Export (API)' "
    "(in older releases 'Save (API Format)')."
)
PROMPT, WORKFLOW = json.dumps(GRAPH), json.dumps(EDITOR)


def read(content: bytes, name: str = "cat.png") -> dict[str, Any]:
    return read_workflow_file(io.BytesIO(content), name)


def refused(content: bytes, name: str = "cat.png") -> str:
    with pytest.raises(InvalidWorkflow) as caught:
        read(content, name)
    return caught.value.message


# --- files as they are written -----------------------------------------------------------------------------------


def saved(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, format=kind, **options)
    return buffer.getvalue()


def png(**texts: str) -> bytes:
    chunks = PngInfo()
    for name, text in texts.items():
        chunks.add_text(name, text)
    return saved("PNG", pnginfo=chunks)


def packed_png(chunk: str) -> bytes:
    chunks = PngInfo()
    if chunk == "zTXt":
        chunks.add_text("prompt", PROMPT, zip=True)
    else:
        chunks.add_itxt("prompt", json.dumps(GRAPH, ensure_ascii=False), zip=chunk == "packed iTXt")
    return saved("PNG", pnginfo=chunks)


def exif(kind: str, **texts: str) -> bytes:
    """As ComfyUI writes it: one tag for each, downwards from the model of the camera."""
    tags = Image.Exif()
    for tag, (name, text) in zip((0x0110, 0x010F, 0x010E), texts.items(), strict=False):
        tags[tag] = f"{name}:{text}"
    return saved(kind, exif=tags)


def flac(**texts: str) -> bytes:
    comments = [f"{name}={text}".encode() for name, text in texts.items()]
    block = struct.pack("<I", 4) + b"test" + struct.pack("<I", len(comments))
    block += b"".join(struct.pack("<I", len(each)) + each for each in comments)
    stream = b"\x00" + (34).to_bytes(3, "big") + bytes(34)
    return b"fLaC" + stream + b"\x84" + len(block).to_bytes(3, "big") + block + bytes(100)


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def mp4(**texts: str) -> bytes:
    """As ffmpeg writes it where it is told to keep any name (`use_metadata_tags`), behind the content."""
    names = b"".join(box(b"mdta", name.encode()) for name in texts)
    keys = box(b"keys", bytes(4) + struct.pack(">I", len(texts)) + names)
    values = [box(b"data", struct.pack(">II", 1, 0) + text.encode()) for text in texts.values()]
    items = b"".join(box(struct.pack(">I", number), value) for number, value in enumerate(values, start=1))
    handler = box(b"hdlr", bytes(8) + b"mdta" + bytes(13))
    meta = box(b"meta", handler + keys + box(b"ilst", items))
    return box(b"ftyp", b"isom" + bytes(4)) + box(b"mdat", bytes(1000)) + box(b"moov", box(b"udta", meta))


def mp4_with_comment(text: str) -> bytes:
    value = box(b"\xa9cmt", box(b"data", struct.pack(">II", 1, 0) + text.encode()))
    meta = box(b"meta", bytes(4) + box(b"hdlr", bytes(8) + b"mdir" + bytes(13)) + box(b"ilst", value))
    return box(b"ftyp", b"isom" + bytes(4)) + box(b"moov", box(b"udta", meta))


def element(kind: int, content: bytes) -> bytes:
    head = kind.to_bytes((kind.bit_length() + 7) // 8, "big")
    return head + (len(content) | 1 << 56).to_bytes(8, "big") + content


def webm(**texts: str) -> bytes:
    tags = [
        element(
            0x7373, element(0x67C8, element(0x45A3, name.upper().encode()) + element(0x4487, text.encode()))
        )
        for name, text in texts.items()
    ]
    segment = element(0x1F43B675, bytes(1000)) + element(0x1254C367, b"".join(tags))
    # Written as a stream: the size of the whole is not known.
    return element(0x1A45DFA3, bytes(10)) + b"\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xff" + segment


Writer = Callable[..., bytes]
WRITERS: dict[str, Writer] = {
    "cat.png": png,
    "cat.webp": lambda **texts: exif("WEBP", **texts),
    "cat.jpg": lambda **texts: exif("JPEG", **texts),
    "cat.flac": flac,
    "cat.mp4": mp4,
    "cat.webm": webm,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_comfyui_saved_is_read_as_the_workflow_in_it(name: str) -> None:
    write = WRITERS[name]
    # What was run comes before what the editor showed.
    assert read(write(prompt=PROMPT, workflow=WORKFLOW), name) == GRAPH
    assert read(write(workflow=WORKFLOW), name) == EDITOR
    if name not in ("cat.jpg", "cat.webp"):
        assert refused(write(other="x"), name) == (
            f"{name} carries no workflow: its metadata has other, but neither prompt nor workflow. {NEXT_STEP}"
        )


@pytest.mark.parametrize("chunk", ["zTXt", "iTXt", "packed iTXt"])
def test_packed_and_unicode_texts_of_a_picture_are_read(chunk: str) -> None:
    assert read(packed_png(chunk)) == GRAPH


def test_a_comment_that_holds_both_is_read() -> None:
    assert read(mp4_with_comment(json.dumps({"prompt": PROMPT, "workflow": EDITOR})), "cat.mp4") == GRAPH


def test_nan_that_comfyui_leaves_beside_inputs_is_no_obstacle() -> None:
    text = '{"1": {"class_type": "LoadImage", "inputs": {}, "is_changed": [NaN]}}'
    assert read(png(prompt=text))["1"]["is_changed"] == [None]


# --- shapes of JSON ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [GRAPH, {"prompt": GRAPH}, {"workflow": GRAPH}, {"prompt": GRAPH, "client_id": "x"}]
)
def test_every_usual_shape_of_json_is_read(given: dict[str, Any]) -> None:
    assert workflow_in(given) == GRAPH
    assert read(json.dumps(given).encode(), "flow.json") == GRAPH
    assert read(b"\xef\xbb\xbf" + json.dumps(given).encode(), "flow.json") == GRAPH


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_json_that_a_windows_shell_wrote_is_read(encoding: str) -> None:
    """PowerShell's `>` writes two bytes for each character, and says so in the first two."""
    mark = "" if encoding == "utf-16" else "\ufeff"
    assert read((mark + PROMPT).encode(encoding), "flow.json") == GRAPH


def test_text_in_an_older_encoding_is_told_as_such() -> None:
    told = refused(json.dumps(GRAPH, ensure_ascii=False).encode("latin-1"), "flow.json")
    assert told == "flow.json is text, but not UTF-8: save it as UTF-8."


def test_a_workflow_of_the_editor_is_read_in_any_wrapping() -> None:
    for given in (EDITOR, {"workflow": EDITOR}, {"prompt": GRAPH, "workflow": EDITOR}):
        assert workflow_in(given) == (GRAPH if "prompt" in given else EDITOR)


def test_a_node_may_be_called_prompt_or_workflow() -> None:
    graph = {"prompt": GRAPH["1"], "workflow": GRAPH["1"]}
    assert workflow_in(graph) == graph


def test_what_cannot_be_seeked_in_is_read_too() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    assert read_workflow_file(Pipe(png(prompt=PROMPT)), "<stdin>") == GRAPH


# --- files that hold none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"<!DOCTYPE html><p>", "a web page"),
        (b"PK\x03\x04" + bytes(60), "a ZIP archive"),
        (b"GIF89a" + bytes(60), "a GIF picture"),
        (bytes(100), "a binary file of another kind"),
        (b"hello", "text that is not JSON"),
        (b"[1, 2]", "its top level is a list, not an object. Pass a file saved with 'Export (API)'"),
        (b"null\n", "its top level is a single value, not an object."),
        (b'{"1": ', "is not valid JSON: it ends too early, in line 1. Save the whole file again"),
        (b'{"1": {"class_type": "A",\n  "inputs": {"x": 1,}}}', "trailing comma in object in line 2, column"),
    ],
)
def test_a_file_of_another_kind_is_told_as_what_it_is(content: bytes, words: str) -> None:
    told = refused(content, "thing.json")
    assert told.startswith("thing.json") and words in told


def test_a_picture_without_a_workflow_says_so() -> None:
    for kind, name in (("PNG", "cat.png"), ("WEBP", "cat.webp"), ("JPEG", "cat.jpg")):
        told = refused(saved(kind), name)
        assert told == f"{name} carries no workflow: it was saved without metadata. {NEXT_STEP}"
    assert "another program saved it" in refused(png(parameters="a cat, Steps: 20"))
    assert "carries a prompt that is not a workflow" in refused(png(prompt=PROMPT[:-5]))


def test_a_picture_that_ends_too_early_keeps_its_workflow_or_is_told_as_truncated() -> None:
    whole = png(prompt=PROMPT)
    assert read(whole[:-20]) == GRAPH
    for cut in (saved("PNG")[:-20], SIGNATURE, SIGNATURE + b"garbage that is no chunk"):
        told = refused(cut)
        assert told == "cat.png cannot be read as a PNG file: it is truncated: copy or download it again."


# --- hostile files -------------------------------------------------------------------------------------------------


def chunk(kind: bytes, content: bytes, size: int | None = None) -> bytes:
    head = struct.pack(">I4s", len(content) if size is None else size, kind)
    return head + content + bytes(4)


SIGNATURE = b"\x89PNG\r\n\x1a\n"
BOMB = zlib.compress(bytes(1 << 20) * 64, 9)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (SIGNATURE + chunk(b"tEXt", b"prompt\0{}", 0x7FFFFFFF), "claims 2147483647 bytes"),
        (SIGNATURE + chunk(b"zTXt", b"prompt\0\0" + BOMB), "compressed text has more than"),
        (SIGNATURE + chunk(b"iTXt", b"prompt\0\1\0\0\0" + BOMB), "compressed text has more than"),
        (SIGNATURE + chunk(b"zTXt", b"prompt\0\0nonsense"), "damaged or truncated"),
        (SIGNATURE + chunk(b"iTXt", b"prompt"), "damaged or truncated"),
        (SIGNATURE + chunk(b"abcd", b"") * 100_001, "more than 100000 parts"),
        (
            SIGNATURE + chunk(b"tEXt", b"a\0b") * 300,
            "more than 200 texts, or more than 33554432 bytes of text",
        ),
        (b"fLaC\x84\xff\xff\xff" + bytes(50), "claims 16777215 bytes|truncated"),
    ],
)
def test_a_hostile_file_is_refused_with_little_memory(content: bytes, words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidWorkflow, match=words):
            read(content)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_TEXT_BYTES
    finally:
        tracemalloc.stop()


def test_texts_that_point_to_the_same_bytes_are_bounded_together() -> None:
    """An EXIF of a megabyte whose 60,000 entries each claim all of it."""
    count = 60_000
    entries = b"".join(struct.pack("<HHII", 0x0110, 2, 1 << 20, 0) for _ in range(count))
    block = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", count) + entries + bytes(1 << 20)
    content = b"RIFF" + bytes(4) + b"WEBP" + struct.pack("<4sI", b"EXIF", len(block)) + block
    assert "more than 200 texts, or more than" in refused(content, "cat.webp")


def test_texts_of_nothing_but_zeros_count_as_what_was_read() -> None:
    """What is left of them is empty, and reading them all would take as long as a hostile file likes."""
    zeros = zlib.compress(bytes(MAX_TEXT_BYTES - 1), 9)
    packed = SIGNATURE + chunk(b"zTXt", b"a\0\0" + zeros) * 3
    entries = b"".join(struct.pack("<HHII", 0x0110, 2, MAX_TEXT_BYTES, 0) for _ in range(3))
    block = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 3) + entries
    block += bytes(MAX_TEXT_BYTES - len(block))
    shared = b"RIFF" + bytes(4) + b"WEBP" + struct.pack("<4sI", b"EXIF", len(block)) + block
    assert "more than 200 texts, or more than" in refused(packed)
    assert "more than 200 texts, or more than" in refused(shared, "cat.webp")


def test_names_of_texts_count_as_what_was_read_and_are_told_in_bounds() -> None:
    long = bytes([97]) * (MAX_TEXT_BYTES // 2)
    assert "more than 200 texts, or more than" in refused(SIGNATURE + chunk(b"tEXt", long) * 5)
    words = refused(SIGNATURE + chunk(b"tEXt", long) + chunk(b"tEXt", b"a\x1b[2J\0b"))
    assert len(words) < 1_000 and "\x1b" not in words


@pytest.mark.parametrize("depth", [900, 980, 990, 5_000])
def test_however_much_is_around_a_workflow_it_is_looked_for_in_a_bounded_number_of_objects(
    depth: int,
) -> None:
    content = b'{"prompt":' * depth + b"{}" + b"}" * depth
    assert "carries a prompt that is not a workflow" in refused(
        SIGNATURE + chunk(b"tEXt", b"prompt\0" + content)
    )
    try:
        assert "1" not in read(content, "flow.json")
    except InvalidWorkflow as error:
        assert "nested deeper" in str(error)


def test_an_object_that_holds_itself_is_no_workflow() -> None:
    around: dict[str, Any] = {}
    around["prompt"] = around
    assert workflow_in(around) == around


@pytest.mark.parametrize("value", ["[],", '{"":0},', "0,"])
def test_json_of_more_values_than_any_workflow_has_is_refused_before_it_is_read(value: str) -> None:
    text = '{"a": [' + value * 2_000_001 + "0]}"
    packed = SIGNATURE + chunk(b"zTXt", b"prompt\0\0" + zlib.compress(text.encode(), 9))
    tracemalloc.start()
    try:
        assert "more than 2000000 values, which is too many" in refused(text.encode(), "flow.json")
        assert "carries a prompt that is not a workflow" in refused(packed)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_TEXT_BYTES
    finally:
        tracemalloc.stop()


def test_deep_boxes_and_tags_end() -> None:
    inner = b""
    for _ in range(2_000):
        inner = box(b"udta", inner)
    assert "without metadata" in refused(box(b"ftyp", bytes(8)) + box(b"moov", inner), "cat.mp4")
    tags = b""
    for _ in range(2_000):
        tags = element(0x67C8, tags)
    segment = element(0x18538067, element(0x1254C367, tags))
    assert "without metadata" in refused(element(0x1A45DFA3, b"") + segment, "cat.webm")


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_cut_off_anywhere_is_refused_in_words_or_read(name: str) -> None:
    whole = WRITERS[name](prompt=PROMPT, workflow=WORKFLOW)
    for end in range(0, len(whole), max(1, len(whole) // 200)):
        try:
            assert read(whole[:end], name) in (GRAPH, EDITOR)
        except InvalidWorkflow as error:
            assert error.message.startswith(name)
