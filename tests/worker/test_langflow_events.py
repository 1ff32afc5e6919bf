"""The LangFlow connector reads streams, answers and settings: recorded ones, broken ones, wrong ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.worker._langflow import TRACES

from comfyfleet.model.failure import FailureKind
from comfyfleet.worker.connectors.comfyui.api import AnswerTooLarge, ApiAnswer
from comfyfleet.worker.connectors.langflow import PLUGIN, LangFlow
from comfyfleet.worker.connectors.langflow.events import EventReader, RunEvents, StreamEvent, stored_file
from comfyfleet.worker.connectors.langflow.job_status import JobState, read_status
from comfyfleet.worker.connectors.langflow.settings import parse_base, read_settings

_FLOW = "61ad970a-132e-4f09-a4be-31397f1edc7e"


def _recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text().splitlines()]


def _statuses(name: str) -> list[tuple[JobState, FailureKind | None]]:
    found = []
    for event in _recorded(name):
        if event.get("for", "").startswith("GET /api/v2/workflows?job_id="):
            status = read_status(ApiAnswer(event["status"], event["body"]))
            assert status is not None
            found.append((status.state, status.failure.kind if status.failure else None))
    return found


def test_recorded_states_are_read() -> None:
    crashed = (JobState.FAILED, FailureKind.CRASHED)
    assert _statuses("08-workflows-v2-background-failure") == [
        (JobState.FAILED, FailureKind.NODE_ERROR),
        (JobState.COMPLETED, None),
    ]
    assert _statuses("09-workflows-v2-stop")[:3] == [
        (JobState.RUNNING, None),
        (JobState.UNCLEAR, None),
        (JobState.CANCELLED, None),
    ]
    assert _statuses("13-server-killed-mid-run")[2:6] == [
        crashed,
        (JobState.QUEUED, None),
        crashed,
        (JobState.QUEUED, None),
    ]
    assert _statuses("19-terminated-and-timeouts") == [
        (JobState.UNCLEAR, None),
        (JobState.FAILED, FailureKind.NODE_ERROR),
        (JobState.COMPLETED, None),
    ]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, {"detail": "Internal Server Error"}),
        (502, "<html>proxy</html>"),
        (200, {}),
        (200, "text"),
        (200, {"status": "unknown"}),
        (404, {"detail": "Not Found"}),
        (307, ""),
    ],
)
def test_other_answers_say_nothing_about_a_job(status: int, body: Any) -> None:
    assert read_status(ApiAnswer(status, body)) is None


def test_a_recorded_failure_has_component_class_and_words() -> None:
    (event,) = (each for each in _recorded("08-workflows-v2-background-failure") if each.get("status") == 500)
    status = read_status(ApiAnswer(500, event["body"]))
    assert status is not None and status.failure is not None
    failure = status.failure
    assert failure.message == "Lab Raise failed: the lab component refuses: bg boom"
    assert (failure.node_id, failure.exception_type) == ("LabRaise-m", "ValueError")


def test_recorded_events_give_progress_and_the_end() -> None:
    events = RunEvents()
    seen = []
    for each in _recorded("06-workflows-v2-background"):
        if each.get("channel") == "sse":
            events.take(StreamEvent(each["id"], each["json"]))
            seen.append(events.progress)
    assert seen[0] == (0, 3) and seen[-1] == (3, 3) and seen == sorted(seen)
    assert events.has_ended and events.last_id == "9" and events.failure is None
    assert events.outputs["ChatOutput-z"]["content"] == "slept 2.0: bg 1"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_a_stream_is_read_however_it_is_cut(size: int, line: bytes) -> None:
    blocks = [b'data: {"event": "a"}' + line + b"id: 1", b": keepalive", b'{"event": "b"}', b"nonsense"]
    text = b"".join(block + line + line for block in blocks) + b'data: {"event": "c"}'
    reader = EventReader(1000)
    found = [event for at in range(0, len(text), size) for event in reader.feed(text[at : at + size])]
    found += reader.finish()
    assert [(each.event_id, each.content["event"]) for each in found] == [
        ("1", "a"),
        (None, "b"),
        (None, "c"),
    ]


def test_a_stream_has_a_limit() -> None:
    reader = EventReader(100)
    assert list(reader.feed(b"x" * 100)) == []
    with pytest.raises(AnswerTooLarge, match="more than 100 bytes"):
        list(reader.feed(b"x"))


@pytest.mark.parametrize(
    "content",
    [
        {"event": "vertices_sorted", "data": {"to_run": "all"}},
        {"event": "end_vertex", "data": {"build_data": {"id": 3}}},
        {"event": "end_vertex", "data": {"build_data": {"id": "a", "data": {"results": [1]}}}},
        {"event": "add_message", "data": {"data": {"files": [None, {"path": 3}], "sender": "Machine"}}},
        {"event": "error", "data": {"content_blocks": [{"contents": 5}], "properties": []}},
        {"event": "output", "data": []},
        {"event": ["x"]},
        {"type": None},
    ],
)
def test_events_of_an_unknown_shape_break_nothing(content: dict[str, Any]) -> None:
    events = RunEvents()
    events.take(StreamEvent("1", content))
    assert events.files == {}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (f"{_FLOW}/a b.png", (_FLOW, "a b.png")),
        (f"/srv/data/{_FLOW}/a.png", (_FLOW, "a.png")),
        (f"{_FLOW}/..", None),
        (f"{_FLOW}/../../etc/passwd", None),
        ("/etc/passwd", None),
        ("https://example.org/a.png", None),
        (f"{_FLOW}/a\nb", None),
        (None, None),
    ],
)
def test_only_files_of_the_storage_are_outputs(path: Any, found: tuple[str, str] | None) -> None:
    file = stored_file(path, "ChatOutput-z")
    assert (file and (file.subfolder, file.filename)) == found


def test_settings_are_read_from_texts_and_named_when_they_are_wrong() -> None:
    assert read_settings({"start_s": "3", "poll_s": 9}).start_s == 3.0
    for options, words in (
        ({"start_s": 0}, "start_s"),
        ({"keys": "a"}, "'keys'"),
    ):
        with pytest.raises(ValueError, match=words):
            read_settings(options)
    for key in ("sk-\n1", "sk-\u00e4", ""):
        with pytest.raises(ValueError, match="copy it again") as refused:
            read_settings({"key": key})
        assert "sk-" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "base"),
    [
        ("flows:7860", "http://flows:7860"),
        ("https://flows.example/langflow/", "https://flows.example/langflow"),
        ("http://[::1]:7860", "http://[::1]:7860"),
    ],
)
def test_addresses_are_read(address: str, base: str) -> None:
    assert parse_base(address) == base


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ftp://flows", "http or https"),
        ("http://ada:secret@flows", "no user or password"),
        ("http://", "needs a host"),
        ("http://flows:7860?x-api-key=k", "needs a host"),
        ("http://flows:99999", "[Pp]ort"),
    ],
)
def test_wrong_addresses_are_refused(address: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        parse_base(address)
    assert "secret" not in str(refused.value)


def test_the_plugin_makes_a_connector_with_the_settings_of_the_table() -> None:
    connector = PLUGIN.connect("flows:7860", {"start_s": 2})
    assert isinstance(connector, LangFlow)
    assert (connector.settings.start_s, connector.url, PLUGIN.payload.service) == (
        2,
        "http://flows:7860",
        "langflow",
    )
