"""How far a run is: in words, in parts of the whole that its sampler is most of, and in seconds still to come."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pool._fleet import text_to_image
from tests.worker._comfyui import frames

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.job import NodeTiming
from comfyfleet.worker.connectors.comfyui.listener import Message, parse_text
from comfyfleet.worker.connectors.comfyui.progress_estimate import (
    MAX_WORKFLOWS,
    Forecast,
    NodeDurations,
    NodeWeights,
    guess,
)
from comfyfleet.worker.connectors.comfyui.tracker import RunTracker, TrackedProgress

HASH = WorkflowHash("h")


def hear(tracker: RunTracker, at: float, kind: str, **data: Any) -> dict[str, Any]:
    message = parse_text(json.dumps({"type": kind, "data": {"prompt_id": "p", **data}}))
    assert message is not None
    progress = [
        progress for progress in tracker.on_message(message, at, at) if progress.kind is ProgressKind.PROGRESS
    ]
    return progress[-1].data if progress else {}


def started(weights: NodeWeights | None = None, steps: int = 20) -> RunTracker:
    graph = text_to_image(steps=steps)
    tracker = RunTracker(graph, "http://x", weights=weights or NodeDurations().weights(HASH, graph))
    hear(tracker, 0.0, "execution_start")
    hear(tracker, 0.0, "execution_cached", nodes=[])
    return tracker


# in words


def test_a_step_is_told_in_words() -> None:
    tracker = started(steps=8)
    assert hear(tracker, 1.0, "executing", node="3")["message"] == "KSampler"
    assert hear(tracker, 2.0, "progress", node="3", value=3, max=8)["message"] == "KSampler: step 3 of 8"
    assert hear(tracker, 3.0, "executing", node="8")["message"] == "VAEDecode"
    assert hear(tracker, 3.0, "progress", node="8", value=1, max=1)["message"] == "VAEDecode"


def test_what_a_node_says_of_itself_stands_until_the_next_node() -> None:
    tracker = started()
    hear(tracker, 1.0, "executing", node="3")
    (progress,) = tracker.on_message(
        Message("text", "p", {"node": "3", "text": "asking the service"}), 1.0, 1.0
    )
    assert progress.data["message"] == "asking the service"
    assert hear(tracker, 2.0, "progress", node="3", value=3, max=8)["message"] == "asking the service"
    assert hear(tracker, 3.0, "executing", node="8")["message"] == "VAEDecode"


def test_a_recorded_run_is_told_in_words_and_its_percentage_never_goes_back() -> None:
    graph = {
        "1": {"class_type": "LabSlow", "inputs": {"steps": 4}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0]}},
    }
    heard = [message for message in map(parse_text, frames("03")) if message is not None]
    prompt_id = next(message.prompt_id for message in heard if message.prompt_id)
    tracker = RunTracker(graph, "http://x")
    progress: list[TrackedProgress] = []
    for at, message in enumerate(each for each in heard if each.prompt_id == prompt_id):
        progress += tracker.on_message(message, float(at), float(at))
    told = [each.data for each in progress if each.kind is ProgressKind.PROGRESS]
    steps = [each["message"] for each in told if "step" in each.get("message", "")]
    assert steps[0].startswith("LabSlow: step 1 of ")
    percentages = [each["percentage"] for each in told]
    assert percentages == sorted(percentages) and percentages[-1] == 100.0


# in parts of the whole


def test_a_sampler_is_most_of_the_bar_before_anything_was_learned() -> None:
    tracker = started(steps=20)
    for at, node in enumerate(("4", "5", "6", "7")):
        before = hear(tracker, float(at), "executing", node=node)["percentage"]
    before = hear(tracker, 5.0, "executing", node="3")["percentage"]
    after = hear(tracker, 9.0, "executing", node="8")["percentage"]
    assert before < 15 and after > 80
    tracker = started(steps=20)
    hear(tracker, 5.0, "executing", node="3")
    half = hear(tracker, 6.0, "progress", node="3", value=10, max=20)["percentage"]
    assert 35 < half < 50


@pytest.mark.parametrize(
    "name", ["KSamplerSelect", "BasicScheduler", "CLIPTextEncode", "CheckpointLoaderSimple"]
)
def test_what_only_prepares_sampling_weighs_little(name: str) -> None:
    assert (
        guess({"class_type": name, "inputs": {"steps": 30}})
        < guess({"class_type": "SamplerCustomAdvanced", "inputs": {}}) / 5
    )


def test_what_was_learned_decides_and_counts_for_each_step() -> None:
    durations, graph = NodeDurations(), text_to_image(steps=10)
    timings = [NodeTiming("4", 0.0, 30.0), NodeTiming("3", 0.0, 20.0), NodeTiming("8", 0.0, 10.0)]
    durations.record(HASH, graph, timings)
    known = durations.weights(HASH, text_to_image(steps=30))
    assert known.are_seconds
    assert (known.by_node["4"], known.by_node["3"], known.by_node["8"]) == (30.0, 60.0, 10.0)
    # Nothing was learned of the others: they weigh what they weighed beside those that are known.
    assert 0 < known.by_node["9"] < 10
    assert durations.weights(WorkflowHash("other"), graph) == NodeDurations().weights(HASH, graph)


def test_nodes_of_an_equal_workflow_with_other_ids_are_not_taken_for_others() -> None:
    durations = NodeDurations()
    durations.record(HASH, {"1": {"class_type": "KSampler", "inputs": {}}}, [NodeTiming("1", 0.0, 50.0)])
    assert not durations.weights(HASH, {"1": {"class_type": "VAEDecode", "inputs": {}}}).are_seconds


def test_only_so_much_is_remembered() -> None:
    durations, graph = NodeDurations(), {"1": {"class_type": "A", "inputs": {}}}
    for number in range(MAX_WORKFLOWS + 1):
        durations.record(WorkflowHash(str(number)), graph, [NodeTiming("1", 0.0, 1.0)])
    assert not durations.weights(WorkflowHash("0"), graph).are_seconds
    assert durations.weights(WorkflowHash(str(MAX_WORKFLOWS)), graph).are_seconds


def test_cached_nodes_are_no_part_of_the_run() -> None:
    graph = text_to_image()
    tracker = RunTracker(graph, "http://x", weights=NodeDurations().weights(HASH, graph))
    first = hear(tracker, 0.0, "execution_cached", nodes=["4", "5", "6", "7", "3"])
    assert (first["percentage"], first["nodes_done"]) == (0.0, 5)
    assert hear(tracker, 0.0, "execution_cached", nodes=list(graph))["percentage"] == 100.0


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "step", "end", "leave"]),
        st.sampled_from(["a", "b", "c", "none"]),
        st.floats(-5, 50),
        st.floats(-5, 50),
    ),
    max_size=40,
)


@given(_EVENTS, st.booleans())
def test_whatever_happens_the_forecast_is_a_share_and_a_time(events: list[Any], are_seconds: bool) -> None:
    forecast = Forecast(NodeWeights({"a": 1.0, "b": 20.0, "c": 0.0}, are_seconds))
    for at, (what, node, value, most) in enumerate(events):
        match what:
            case "begin":
                forecast.begin(node, float(at))
            case "step":
                forecast.step(node, value, most, float(at))
            case "end":
                forecast.end(node)
            case "leave":
                forecast.leave_out([node])
        assert 0 <= forecast.share() <= 1
        remaining_s = forecast.remaining_s(float(at))
        assert remaining_s is None or remaining_s >= 0


# in seconds


def test_the_pace_of_the_steps_tells_how_long_it_takes() -> None:
    forecast = Forecast(NodeWeights({"sampler": 20.0, "decoder": 2.0}))
    forecast.begin("sampler", 0.0)
    assert forecast.remaining_s(0.0) is None
    # The model is loaded for 30 s; then each step takes two.
    forecast.step("sampler", 1, 20, 32.0)
    assert forecast.remaining_s(32.0) is None
    forecast.step("sampler", 5, 20, 40.0)
    assert forecast.remaining_s(40.0) == pytest.approx(15 * 2 + 2.0 * 2)


def test_what_was_learned_tells_it_before_the_first_step_and_after_the_last() -> None:
    forecast = Forecast(NodeWeights({"sampler": 60.0, "decoder": 10.0}, are_seconds=True))
    assert forecast.remaining_s(0.0) == 70.0
    forecast.begin("sampler", 0.0)
    assert forecast.remaining_s(15.0) == 55.0
    # Twice as fast as it was learned.
    forecast.step("sampler", 1, 20, 16.0)
    forecast.step("sampler", 3, 20, 19.0)
    assert forecast.remaining_s(19.0) == pytest.approx(17 * 1.5 + 10)
    forecast.end("sampler")
    forecast.begin("decoder", 45.0)
    assert forecast.remaining_s(49.0) == 6.0
    forecast.end("decoder")
    assert forecast.remaining_s(50.0) == 0.0
