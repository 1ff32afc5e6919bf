"""Frames of the websocket and what a run makes of them, held to recorded conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker._comfyui import QUICK, frames, trace

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobResult
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.comfyui.listener import Message, WebSocketListener, parse_binary, parse_text
from comfyfleet.worker.connectors.comfyui.outputs import build_result
from comfyfleet.worker.connectors.comfyui.tracker import RunTracker, TrackedProgress


def messages(name: str, prompt_id: str) -> list[Message]:
    parsed = [message for message in map(parse_text, frames(name)) if message is not None]
    return [message for message in parsed if message.prompt_id == prompt_id]


def graph_of(name: str, prompt_id: str) -> dict[str, Any]:
    for line in trace(name):
        if line["dir"] == "send" and line.get("path") == "/prompt" and isinstance(line.get("body"), dict):
            body = line["body"]
            if body.get("prompt_id", prompt_id) == prompt_id:
                return dict(body["prompt"])
    raise AssertionError(f"{prompt_id} is not in {name}")


def play(
    name: str, prompt_id: str, included: tuple[str, ...] = ()
) -> tuple[RunTracker, list[TrackedProgress]]:
    tracker = RunTracker(graph_of(name, prompt_id), "http://s:1", included)
    progress: list[TrackedProgress] = []
    for index, message in enumerate(messages(name, prompt_id)):
        progress += tracker.on_message(message, float(index), 1000.0 + index)
    return tracker, progress


FIELD_NAMES = st.sampled_from(
    ["node", "nodes", "display_node", "output", "value", "max", "state", "images", "1", "2"]
)

FIRST = "6fc72a79-7f8b-4a4f-83eb-faf681a7cb2c"


def test_the_plain_run_is_told_from_start_to_end() -> None:
    tracker, progress = play("01", FIRST)
    assert tracker.is_end_reported
    result = tracker.outcome()
    assert isinstance(result, JobResult)
    (file,) = result.files
    assert file.url == "http://s:1/view?filename=run_00001_.png&subfolder=demo&type=output"
    assert progress[0].kind is ProgressKind.STARTED
    assert [timing.node_id for timing in result.timings] == ["1", "2", "3"]
    assert all(timing.seconds > 0 for timing in result.timings)
    assert result.timings[0].started_at > 1000
    last = [entry for entry in progress if entry.kind is ProgressKind.PROGRESS][-1]
    assert (last.data["nodes_done"], last.data["percentage"]) == (3, 100.0)


def test_success_alone_is_not_the_end() -> None:
    tracker = RunTracker(graph_of("01", FIRST), "http://s")
    for message in messages("01", FIRST):
        if not message.is_end_of_run:
            tracker.on_message(message, 0.0, 0.0)
    assert tracker.is_success_reported
    assert not tracker.is_end_reported


def test_a_recorded_exception_is_the_outcome() -> None:
    tracker, _ = play("07", "e-torch-oom")
    outcome = tracker.outcome(8.0)
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.vram_gb) == (FailureKind.OUT_OF_MEMORY, 8.0)


def test_a_blocked_branch_is_neither_end_nor_failure() -> None:
    tracker, _ = play("07", "444d1935-bf98-48e3-9796-b9d5dee5617a")
    assert isinstance(tracker.outcome(), JobResult)


def test_what_was_not_told_has_no_outcome() -> None:
    tracker = RunTracker({}, "http://s")
    assert tracker.outcome() is None


@pytest.mark.parametrize(
    ("prompt_id", "kind", "filename"),
    [
        ("o-lat", "latents", "x_00001_.latent"),
        ("o-webp", "images", "anim_00001_.webp"),
        ("o-vid", "images", "clip_00001_.mp4"),
        ("o-aud", "audio", "s_00001_.flac"),
        ("o-gifs", "gifs", "clip_00001.mp4"),
    ],
)
def test_every_kind_of_file_is_found(prompt_id: str, kind: str, filename: str) -> None:
    _, progress = play("14", prompt_id)
    (output,) = [entry for entry in progress if entry.kind is ProgressKind.OUTPUT]
    assert [(file["kind"], file["filename"]) for file in output.data["files"]] == [(kind, filename)]


@pytest.mark.parametrize(
    ("prompt_id", "output"),
    [
        ("o-text", {"text": ["hello"]}),
        ("o-nest", {"value": [{"a": [1, 2.5, None, True]}], "string": ["one"]}),
        (
            "o-webp",
            {
                "images": [{"filename": "anim_00001_.webp", "subfolder": "", "type": "output"}],
                "animated": [True],
            },
        ),
    ],
)
def test_outputs_that_are_no_files_are_kept(prompt_id: str, output: dict[str, Any]) -> None:
    tracker, _ = play("14", prompt_id)
    result = tracker.outcome()
    assert isinstance(result, JobResult)
    assert list(result.outputs.values()) == [output]


def test_a_batch_gives_several_files() -> None:
    tracker, _ = play("14", "o-list")
    result = tracker.outcome()
    assert isinstance(result, JobResult)
    assert [file.filename for file in result.files] == [f"8x8_0000{index}_.png" for index in (1, 2, 3)]


def test_an_expansion_is_timed_under_the_node_it_came_from() -> None:
    tracker, progress = play("14", "o-exp")
    assert {timing.node_id for timing in tracker.timings} == {"1", "2"}
    assert {entry.data["node"] for entry in progress if entry.kind is ProgressKind.PROGRESS} <= {
        "1",
        "2",
        None,
    }


def test_an_expansion_is_included_by_the_name_of_the_node_it_came_from() -> None:
    _, progress = play("14", "o-exp", included=("1",))
    assert [entry.data["node"] for entry in progress if entry.kind is ProgressKind.OUTPUT] == ["1.0.0.2"]


def test_a_run_that_never_told_its_cached_nodes_is_stuck_at_its_start() -> None:
    tracker, _ = play("18a", "orphan")
    assert tracker.has_messages
    assert not tracker.is_under_way


def test_nan_is_read() -> None:
    (executed,) = [message for message in messages("14", "o-nan") if message.kind == "executed"]
    assert executed.data["output"]["value"][1] == float("inf")


@pytest.mark.parametrize(
    "frame", ["", "{", "[]", "null", "3", '{"type": 3}', '{"type": "x", "data": []}', "[" * 9999]
)
def test_a_text_frame_that_makes_no_sense_is_passed_over(frame: str) -> None:
    assert parse_text(frame) is None


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0\0\0\1",
        b"\0\0\0\3\0\0\0\x09ab",
        b"\0\0\0\4\0\0\0\x09{}",
        b"\0\0\0\4\0\0\0\2[]image",
        b"\0\0\0\4\0\0\0\2{xjpeg",
        b"\0\0\0\x63whatever",
    ],
)
def test_a_binary_frame_that_makes_no_sense_is_passed_over(frame: bytes) -> None:
    assert parse_binary(frame) is None


def test_the_three_binary_frames_are_read() -> None:
    assert parse_binary(b"\0\0\0\1\0\0\0\2PNG") == Message("preview", None, {"format": "image/png"}, b"PNG")
    text = parse_binary(b"\0\0\0\3\0\0\0\1" + b"1working...")
    assert text == Message("text", None, {"node": "1", "text": "working..."})
    header = json.dumps(
        {"node_id": "1.0.0.1", "display_node_id": "1", "prompt_id": "p", "image_type": "image/jpeg"}
    )
    frame = b"\0\0\0\4" + len(header).to_bytes(4, "big") + header.encode() + b"JPEG"
    assert parse_binary(frame) == Message("preview", "p", {"format": "image/jpeg", "node": "1"}, b"JPEG")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELD_NAMES, inner, max_size=4),
    max_leaves=12,
)
KINDS = st.sampled_from(
    [
        "execution_start",
        "execution_cached",
        "executing",
        "progress",
        "progress_state",
        "executed",
        "execution_success",
        "execution_error",
        "execution_interrupted",
        "preview",
        "text",
        "news_of_tomorrow",
    ]
)


@given(st.lists(st.tuples(KINDS, st.dictionaries(FIELD_NAMES, ANYTHING, max_size=4)), max_size=6))
def test_no_message_whatever_its_content_upsets_a_run(heard: list[tuple[str, dict[str, Any]]]) -> None:
    tracker = RunTracker(graph_of("01", FIRST), "http://s")
    for index, (kind, data) in enumerate(heard):
        for progress in tracker.on_message(Message(kind, "p", data), float(index), float(index)):
            assert 0 <= progress.data.get("percentage", 0) <= 100
    tracker.outcome()
    assert all(timing.seconds >= 0 for timing in tracker.timings)


async def test_a_message_that_upsets_its_receiver_deafens_nobody() -> None:
    class Upset(Recorder):
        def on_message(self, message: Message) -> None:
            raise ZeroDivisionError

    ears, ours = listener(), Recorder()
    ears.attach("a", Upset())
    ears.attach("b", ours)
    ears.route(about("execution_start", "a"))
    ears.route(about("execution_start", "b"))
    assert len(ours.heard) == 1


class Recorder:
    def __init__(self) -> None:
        self.heard: list[Message] = []

    def on_message(self, message: Message) -> None:
        self.heard.append(message)

    def disconnected(self) -> None: ...
    def reconnected(self) -> None: ...


def listener() -> WebSocketListener:
    connector = ComfyUI("http://s", QUICK)
    return WebSocketListener(connector._api, QUICK, "client", lambda: None)


def about(kind: str, prompt_id: str | None, **data: Any) -> Message:
    return Message(kind, prompt_id, data)


PREVIEW = Message("preview", None, {"format": "image/jpeg"}, b"x")


def test_a_preview_whose_header_is_nested_without_end_is_passed_over() -> None:
    header = b"[" * 200_000
    assert parse_binary((4).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header + b"x") is None


async def test_a_preview_without_prompt_id_goes_to_the_prompt_that_executes() -> None:
    ears, ours, theirs = listener(), Recorder(), Recorder()
    ears.attach("a", ours)
    ears.attach("b", theirs)
    ears.route(about("execution_start", "a"))
    ears.route(PREVIEW)
    assert ours.heard[-1] is PREVIEW
    assert theirs.heard == []


async def test_a_preview_of_a_foreign_prompt_is_nobodys() -> None:
    ears, ours = listener(), Recorder()
    ears.attach("a", ours)
    ears.route(about("executing", "a", node="1"))
    ears.route(about("executing", "a", node=None))
    ears.route(PREVIEW)
    ears.route(about("progress", "foreign", value=1, max=2, node="1"))
    ears.route(PREVIEW)
    assert PREVIEW not in ours.heard


async def test_a_message_without_prompt_id_is_nobodys() -> None:
    ears, ours = listener(), Recorder()
    ears.attach("a", ours)
    ears.route(about("execution_start", "a"))
    ears.route(about("executing", None, node=None))
    ears.route(about("status", None, status={}))
    assert [message.kind for message in ours.heard] == ["execution_start"]


def test_outputs_of_any_shape_are_read() -> None:
    outputs = {
        "1": {"images": [{"filename": 3}, None, "x"], "n": 4},
        "2": None,
        "3": {"a": [{"filename": "f"}]},
    }
    result = build_result(outputs, "http://s")
    assert isinstance(result, JobResult)
    assert [file.filename for file in result.files] == ["f"]
    assert set(result.outputs) == {"1", "3"}
