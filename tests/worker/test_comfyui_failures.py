"""What servers said in recorded conversations, and what it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.worker._comfyui import answers, trace

from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobResult
from comfyfleet.worker.connectors.comfyui import failures
from comfyfleet.worker.connectors.comfyui.outputs import read_entry

INVALID, NODE, MODEL, INPUT = (
    FailureKind.INVALID_WORKFLOW,
    FailureKind.MISSING_NODE,
    FailureKind.MISSING_MODEL,
    FailureKind.MISSING_INPUT,
)


def refusals() -> Iterator[tuple[str, int, Any]]:
    """The remark before each recorded refusal, its status and body."""
    note = ""
    for line in trace("06"):
        if line["dir"] == "note":
            note = line["text"]
        elif line["dir"] == "recv" and line["for"] == "POST /prompt" and line["status"] != 200:
            yield note, line["status"], line.get("body")


EXPECTED = {
    "no prompt key": (INVALID, ()),
    "empty prompt": (INVALID, ()),
    "unknown node type": (NODE, ("NoSuchNode",)),
    "node without class_type": (INVALID, ()),
    "no output node": (INVALID, ()),
    "required input missing": (INVALID, ()),
    "value out of range": (INVALID, ()),
    "wrong value type": (INVALID, ()),
    "link to a node that is not in the prompt": (INVALID, ()),
    "link type mismatch": (INVALID, ()),
    "bad link shape": (INVALID, ()),
    "missing model: checkpoint name not installed": (MODEL, ("missing.safetensors",)),
    "missing input file for LoadImage": (INPUT, ("not_there.png",)),
    "value not in a fixed list": (INVALID, ()),
    "static cycle": (INVALID, ()),
    "prompt is a list": (INVALID, ()),
    "body is not JSON": (FailureKind.TRANSIENT, ()),
    "prompt is a string": (FailureKind.TRANSIENT, ()),
    "extra_data null": (FailureKind.TRANSIENT, ()),
    "number not numeric": (FailureKind.TRANSIENT, ()),
    "node with inputs missing, on the output path": (INVALID, ()),
    "foreign Origin header on a loopback Host": (FailureKind.DEAD_WORKER, ()),
    "UI-format workflow (nodes/links) posted by mistake": (FailureKind.TRANSIENT, ()),
}


def test_every_recorded_refusal_is_expected() -> None:
    assert {note for note, _, _ in refusals()} == set(EXPECTED)


@pytest.mark.parametrize(
    ("note", "status", "body"), list(refusals()), ids=[note for note, _, _ in refusals()]
)
def test_a_recorded_refusal_is_classified(note: str, status: int, body: Any) -> None:
    failure = failures.refused_prompt(status, body)
    assert (failure.kind, failure.missing) == EXPECTED[note]


def test_a_refusal_keeps_the_servers_words_and_node_errors() -> None:
    body = next(body for note, _, body in refusals() if note == "required input missing")
    failure = failures.refused_prompt(400, body)
    assert "Required input is missing: color" in failure.message
    assert failure.node_errors == body["node_errors"]
    assert (failure.node_id, failure.node_type) == ("1", "EmptyImage")


def test_newer_servers_name_a_missing_node_in_another_way() -> None:
    bodies = [line["body"] for line in answers("23", "POST /prompt") if line["status"] == 400]
    found = [failures.refused_prompt(400, body) for body in bodies]
    kinds = [failure.kind for failure in found]
    assert kinds == [INVALID, INVALID, INVALID, NODE, INVALID, INVALID]
    assert found[3].missing == ("NoSuchNode",)
    assert found[3].node_id == "1"
    assert found[5].node_errors is not None


def test_an_invalid_graph_outweighs_a_missing_file_and_that_a_missing_model() -> None:
    def error(kind: str, **extra: Any) -> dict[str, Any]:
        return {
            "errors": [
                {"type": kind, "message": "m", "details": extra.pop("details", ""), "extra_info": extra}
            ],
            "class_type": "X",
        }

    model = error(
        "value_not_in_list", received_value="a.safetensors", input_name="ckpt_name", input_config=[[]]
    )
    file = error("custom_validation_failed", details="image - Invalid image file: a.png")
    broken = error("required_input_missing")
    assert failures.invalid_nodes({"1": model}).kind is MODEL
    assert failures.invalid_nodes({"1": model, "2": file}).kind is INPUT
    assert failures.invalid_nodes({"1": model, "2": file, "3": broken}).kind is INVALID
    assert failures.invalid_nodes({"1": model, "2": file}).missing == ("a.png",)


@pytest.mark.parametrize(
    ("name", "value", "config", "kind"),
    [
        ("ckpt_name", "no-extension", [["x"]], MODEL),
        ("lora_name2", "mine", [[]], MODEL),
        ("weights", "mine", [["a.safetensors"]], MODEL),
        ("weights", "mine", ["COMBO", {"options": ["a.gguf"]}], MODEL),
        ("image", "photo.png", [["a.png"]], INPUT),
        ("video", "clip.mp4", ["COMBO", {"options": []}], INPUT),
        ("sampler_name", "magic", [["euler"]], INVALID),
    ],
)
def test_a_value_that_is_no_choice_may_be_a_model_a_file_or_a_mistake(
    name: str, value: str, config: list[Any], kind: FailureKind
) -> None:
    extra = {"received_value": value, "input_name": name, "input_config": config}
    error = {"type": "value_not_in_list", "message": "Value not in list", "details": "", "extra_info": extra}
    assert failures.invalid_nodes({"1": {"errors": [error], "class_type": "X"}}).kind is kind


EXCEPTIONS = {
    "e-valueerror": FailureKind.NODE_ERROR,
    "e-torch-oom": FailureKind.OUT_OF_MEMORY,
    "e-memoryerror": FailureKind.OUT_OF_MEMORY,
    "e-filenotfounderror": MODEL,
    "e-runtimeerror": FailureKind.NODE_ERROR,
    "e-cpu-oom": FailureKind.OUT_OF_MEMORY,
    "e-corrupt": FailureKind.NODE_ERROR,
    "e-vanish": MODEL,
}


def exceptions() -> dict[str, dict[str, Any]]:
    found = {}
    for line in trace("07"):
        content = line.get("json")
        if content and content["type"] == "execution_error" and failures.is_end(content["data"]):
            found[content["data"]["prompt_id"]] = content["data"]
    return found


@pytest.mark.parametrize(("prompt_id", "kind"), list(EXCEPTIONS.items()))
def test_a_recorded_exception_is_classified(prompt_id: str, kind: FailureKind) -> None:
    data = exceptions()[prompt_id]
    failure = failures.execution_error(data, 24.0)
    assert failure.kind is kind
    assert failure.exception_type == data["exception_type"]
    assert failure.message == data["exception_message"].strip()
    assert failure.vram_gb == (24.0 if kind is FailureKind.OUT_OF_MEMORY else None)


def test_every_recorded_exception_is_expected() -> None:
    assert set(exceptions()) == set(EXCEPTIONS)


def test_a_vanished_model_is_named() -> None:
    assert failures.execution_error(exceptions()["e-vanish"]).missing == ("vanishing.safetensors",)


def test_a_blocked_branch_is_no_end() -> None:
    blocked = [
        line["json"]["data"]
        for line in trace("07")
        if line.get("json", {}).get("data", {}).get("exception_type") == "ExecutionBlocked"
    ]
    assert blocked
    assert not failures.is_end(blocked[0])


@pytest.mark.parametrize(
    ("exception_type", "message", "kind"),
    [
        ("torch.cuda.OutOfMemoryError", "CUDA out of memory. Tried to allocate", FailureKind.OUT_OF_MEMORY),
        ("RuntimeError", "CUDA out of memory.", FailureKind.OUT_OF_MEMORY),
        ("RuntimeError", "MPS backend out of memory (MPS allocated", FailureKind.OUT_OF_MEMORY),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/m/a.safetensors'", MODEL),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/m/a.csv'", FailureKind.NODE_ERROR),
        ("", "", FailureKind.NODE_ERROR),
    ],
)
def test_an_exception_is_classified_by_type_or_words(
    exception_type: str, message: str, kind: FailureKind
) -> None:
    data = {"exception_type": exception_type, "exception_message": message}
    failure = failures.execution_error(data)
    assert failure.kind is kind
    assert failure.message


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, FailureKind.DEAD_WORKER),
        (404, FailureKind.DEAD_WORKER),
        (413, FailureKind.MISSING_INPUT),
        (400, FailureKind.MISSING_INPUT),
        (500, FailureKind.TRANSIENT),
        (429, FailureKind.TRANSIENT),
    ],
)
def test_a_refused_upload_is_classified(status: int, kind: FailureKind) -> None:
    failure = failures.refused_upload(status, "no", "a.png")
    assert failure.kind is kind
    assert "a.png" in failure.message


def test_a_body_of_any_shape_makes_a_failure() -> None:
    bodies: list[Any] = [
        None,
        "",
        [],
        {"error": "no"},
        {"error": {}},
        {"error": {"message": 1}, "node_errors": []},
        3,
    ]
    for body in bodies:
        assert failures.refused_prompt(400, body).message
    assert failures.invalid_nodes({"1": None, "2": {"errors": [None]}, "3": {}}).kind is INVALID


def history(name: str, prompt_id: str) -> dict[str, Any]:
    for line in answers(name, f"GET /history/{prompt_id}"):
        return dict(line["body"][prompt_id])
    raise AssertionError(f"no history of {prompt_id} in {name}")


def test_history_says_that_a_run_failed_and_why() -> None:
    failure = read_entry(history("07", "e-valueerror"), "http://s")
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.node_id) == (FailureKind.NODE_ERROR, "2")


def test_history_says_that_a_run_was_interrupted() -> None:
    failure = read_entry(history("09", "r1"), "http://s")
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.node_type) == (FailureKind.INTERRUPTED, "LabSlow")


def test_history_says_that_a_run_with_a_blocked_branch_completed() -> None:
    result = read_entry(history("07", "444d1935-bf98-48e3-9796-b9d5dee5617a"), "http://s")
    assert isinstance(result, JobResult)
    assert [file.filename for file in result.files] == ["blk2_00002_.png"]


def test_history_names_the_cached_nodes() -> None:
    result = read_entry(history("14", "o-exp2"), "http://s")
    assert isinstance(result, JobResult)
    assert result.cached_nodes == ("1", "2")


def test_a_history_entry_that_makes_no_sense_is_a_failure_or_an_empty_result() -> None:
    failed = read_entry({"status": {"status_str": "error", "messages": "?"}}, "http://s")
    assert isinstance(failed, Failure)
    assert failed.kind is FailureKind.UNKNOWN
    assert read_entry({}, "http://s") == JobResult()
