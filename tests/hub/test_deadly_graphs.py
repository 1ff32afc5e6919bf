"""Graphs that kill a ComfyUI server's execution thread: no door takes them, and no agent sends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.hub._hub import running_hub
from tests.hub.test_conversion import hub_with_agent
from tests.policy._editor import Editor
from tests.pool._fleet import fleet
from tests.worker._comfyui import Attempt, leased, server_and_connector

from comfyfleet import FleetClient, Refusal
from comfyfleet.model.access import Role
from comfyfleet.model.errors import RefusalCode
from comfyfleet.model.failure import FailureKind

TRACES = Path(__file__).parents[1] / "data" / "comfyui_traces"


def recorded(name: str) -> dict[str, Any]:
    """The prompt after which the recorded server never ran anything again."""
    (path,) = TRACES.glob(f"{name}-*.jsonl")
    events = map(json.loads, path.read_text().splitlines())
    prompts = (event["body"]["prompt"] for event in events if event.get("path") == "/prompt")
    found: dict[str, Any] = next(prompts)
    return found


def with_source(value: Any) -> dict[str, Any]:
    return {"9": {"class_type": "PreviewAny", "inputs": {"source": value}}}


DEADLY = {
    "18d": recorded("18d"),
    "18a": recorded("18a"),
    "a float for the slot": with_source({"__value__": ["a", 0.5]}),
    "wrapped twice": with_source({"__value__": {"__value__": ["a", 1]}}),
    "a node that exists": {**with_source({"__value__": ["1", 0]}), "1": {"class_type": "X", "inputs": {}}},
    "an input that no class declares": with_source("x")
    | {"8": {"class_type": "X", "inputs": {"y": ["a", 0]}}},
}


@pytest.mark.parametrize("graph", DEADLY.values(), ids=DEADLY.keys())
async def test_the_hub_refuses_it_and_names_node_and_input(graph: dict[str, Any]) -> None:
    async with running_hub() as rig:
        answer = await rig.post("/api/jobs", {"payload": {"workflow": graph}})
        assert (answer.status, answer.code) == (422, "invalid_workflow")
        (node,) = answer.body["node_errors"]
        assert node in ("8", "9")
        assert f"node '{node}'" in answer.body["detail"]
        assert (await rig.get("/api/stats")).body["waiting"] == 0


async def test_the_refusal_names_the_input_and_what_is_wrong_with_it() -> None:
    async with running_hub() as rig:
        answer = await rig.post("/api/jobs", {"payload": {"workflow": DEADLY["18d"]}})
        (error,) = answer.body["node_errors"]["9"]["errors"]
        assert error["type"] == "value_looks_like_link"
        assert error["extra_info"] == {"input_name": "source", "received_value": ["a", 1]}


@pytest.mark.parametrize("graph", DEADLY.values(), ids=DEADLY.keys())
async def test_a_connector_sends_it_to_no_server(graph: dict[str, Any]) -> None:
    async with server_and_connector() as (fake, connector):
        failure = await Attempt(connector, leased(graph)).failure()
        assert failure.kind is FailureKind.INVALID_WORKFLOW
        assert failure.node_id in ("8", "9")
        assert fake.stats.prompts_accepted == 0


async def test_a_pool_refuses_it() -> None:
    async with fleet() as it:
        with pytest.raises(Refusal, match="node '9': Input 'source'") as refused:
            await it.pool.enqueue(DEADLY["18d"])
        assert refused.value.code is RefusalCode.INVALID_WORKFLOW


async def test_a_workflow_of_the_editor_that_becomes_one_is_refused() -> None:
    editor = Editor()
    empty = editor.node("EmptyImage", [64, 64, 1, 255])
    saver = editor.node("SaveImage", [["a", 1]])
    editor.wire(empty, 0, saver, "images", "IMAGE")
    async with hub_with_agent() as (rig, _), FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
        with pytest.raises(Refusal, match="filename_prefix") as refused:
            await client.submit(editor.saved())
        assert refused.value.code is RefusalCode.INVALID_WORKFLOW
