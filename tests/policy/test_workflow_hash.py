"""The two identities of a workflow: what must not change them, what must, and the published vectors."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._examples import examples
from tests.policy._workflows import Graph, changed, graphs, literals, renumbered, text_to_image

from comfyfleet.model.canonical_json import NotCanonicalError, canonical_json
from comfyfleet.model.workflow_graph import parse_workflow
from comfyfleet.model.workflow_hash import (
    EDITOR_INPUTS,
    EDITOR_INPUTS_OF,
    EXACT_HASH_VERSION,
    MAX_PASSES,
    MODEL_EXTENSIONS,
    PROSE_INPUTS,
    RESOURCE_INPUTS,
    WORKFLOW_HASH_VERSION,
    exact_hash,
    hash_workflow,
)

DOCS = Path(__file__).parents[2] / "docs"
VECTORS: dict[str, Any] = json.loads((DOCS / "workflow-hash-vectors.json").read_text("utf-8"))


@settings(max_examples=examples(200))
@given(graphs(), st.data())
def test_ids_and_orders_do_not_change_the_hash(graph: Graph, data: st.DataObject) -> None:
    expected = hash_workflow(graph)
    # Five for each of two hundred graphs: a thousand renumberings.
    for _ in range(5):
        ids = data.draw(
            st.lists(st.text("abc:019", min_size=1, max_size=6), unique=True, min_size=len(graph))
        )
        order = data.draw(st.permutations(list(graph)))
        assert hash_workflow(renumbered(graph, ids[: len(graph)], order)) == expected


@pytest.mark.parametrize(
    ("node", "name", "value"),
    [
        ("6", "text", "a red fox"),
        ("6", "text", "drawn like in style.safetensors"),
        ("6", "text", "embedding:easynegative.pt"),
        ("3", "seed", 18446744073709551615),
        ("3", "steps", 50),
        ("3", "cfg", 7.5),
        ("3", "sampler_name", "dpmpp_2m"),
        ("5", "width", 1024),
        ("5", "width", [512, 512]),
        ("5", "width", None),
        ("9", "filename_prefix", "other/name"),
        ("4", "ckpt_name", "sd/v1-5.safetensors"),
    ],
)
def test_what_a_caller_varies_from_job_to_job_keeps_the_hash(node: str, name: str, value: Any) -> None:
    other = changed(text_to_image(), node, name, value)
    assert hash_workflow(other) == hash_workflow(text_to_image())
    assert exact_hash(other) != exact_hash(text_to_image())


def test_titles_change_neither_hash() -> None:
    graph = text_to_image()
    for content in graph.values():
        content["_meta"] = {"title": "renamed"}
    assert hash_workflow(graph) == hash_workflow(text_to_image())
    assert exact_hash(graph) == exact_hash(text_to_image())


@pytest.mark.parametrize(
    ("node", "name", "value"),
    [
        ("4", "ckpt_name", "sd/xl.safetensors"),
        ("4", "ckpt_name", "SD/v1-5.safetensors"),
        ("4", "anything", "x.SafeTensors"),
        ("3", "cfg", ["5", 0]),
        ("3", "positive", ["7", 0]),
        ("3", "positive", "a literal"),
        ("8", "vae", ["4", 1]),
        ("5", "another", 1),
        ("5", "nested", {"on": True, "lora": "y.pt"}),
    ],
)
def test_another_model_wire_or_input_changes_the_hash(node: str, name: str, value: Any) -> None:
    assert hash_workflow(changed(text_to_image(), node, name, value)) != hash_workflow(text_to_image())


@pytest.mark.parametrize(
    ("class_type", "name"),
    [
        ("SaveAudio", "audioUI"),
        ("LoadImage", "upload"),
        ("Preview3D", "image"),
        ("PreviewAny", "previewMode"),
    ],
)
def test_an_input_that_only_the_editor_has_counts_as_a_wire_alone(class_type: str, name: str) -> None:
    def graph(**more: Any) -> Graph:
        return {
            "1": {"class_type": "LoadThing", "inputs": {}},
            "2": {"class_type": class_type, "inputs": {"source": ["1", 0], **more}},
        }

    assert hash_workflow(graph(**{name: "x.safetensors"})) == hash_workflow(graph())
    assert exact_hash(graph(**{name: ""})) != exact_hash(graph())
    assert hash_workflow(graph(**{name: ["1", 0]})) != hash_workflow(graph())
    assert hash_workflow(graph(beside="")) != hash_workflow(graph())


def test_the_name_of_a_preview_is_an_ordinary_input_of_other_classes() -> None:
    other = changed(text_to_image(), "9", "image", "")
    assert hash_workflow(other) != hash_workflow(text_to_image())


def test_another_class_changes_the_hash() -> None:
    graph = text_to_image()
    graph["8"]["class_type"] = "VAEDecodeTiled"
    assert hash_workflow(graph) != hash_workflow(text_to_image())


def test_another_input_name_changes_the_hash() -> None:
    graph = text_to_image()
    graph["5"]["inputs"]["length"] = graph["5"]["inputs"].pop("height")
    assert hash_workflow(graph) != hash_workflow(text_to_image())


def test_swapping_the_prompts_of_a_sampler_keeps_the_hash_because_prompts_do_not_count() -> None:
    graph = text_to_image()
    inputs = graph["3"]["inputs"]
    inputs["positive"], inputs["negative"] = inputs["negative"], inputs["positive"]
    assert hash_workflow(graph) == hash_workflow(text_to_image())


def test_a_node_nobody_uses_counts() -> None:
    graph = text_to_image()
    graph["99"] = {"class_type": "Note", "inputs": {}}
    assert hash_workflow(graph) != hash_workflow(text_to_image())
    again = {**graph, "100": {"class_type": "Note", "inputs": {}}}
    assert hash_workflow(again) != hash_workflow(graph)


def branches(*samplers: str) -> Graph:
    """One save for each name given, fed by the sampler of that name."""
    graph: Graph = {name: {"class_type": "KSampler", "inputs": {"seed": 1}} for name in samplers}
    for number, name in enumerate(samplers):
        graph[f"save{number}"] = {"class_type": "SaveImage", "inputs": {"images": [name, 0]}}
    return graph


def test_one_sampler_for_two_saves_differs_from_two_equal_samplers() -> None:
    assert hash_workflow(branches("a", "a")) != hash_workflow(branches("a", "b"))


def test_equal_numbers_of_equal_nodes_that_are_shared_differently_differ() -> None:
    # Three samplers and six saves in both: 2 + 2 + 2 against 1 + 2 + 3. Seen from the sources alone they are equal.
    assert hash_workflow(branches(*"aabbcc")) != hash_workflow(branches(*"abbccc"))


def test_a_second_pass_along_the_wires_tells_apart_what_two_passes_leave_equal() -> None:
    def graph(second: str) -> Graph:
        """Two equal sources, of which one is also saved; who takes both ends from which source differs."""
        return {
            "a": {"class_type": "Load", "inputs": {}},
            "b": {"class_type": "Load", "inputs": {}},
            "mark": {"class_type": "Save", "inputs": {"x": ["a", 0]}},
            "p": {"class_type": "Mix", "inputs": {"x": ["a", 0]}},
            "q": {"class_type": "Mix", "inputs": {"x": ["b", 0]}},
            "r": {"class_type": "Join", "inputs": {"one": ["p", 0], "two": [second, 0]}},
            "s": {
                "class_type": "Join",
                "inputs": {"one": ["q", 0], "two": ["q" if second == "p" else "p", 0]},
            },
        }

    assert hash_workflow(graph("p")) != hash_workflow(graph("q"))


def test_whether_an_integral_number_is_written_as_a_float_changes_neither_hash() -> None:
    other = changed(text_to_image(), "3", "cfg", 8.0)
    assert exact_hash(other) == exact_hash(text_to_image())


def test_node_ids_and_unknown_parts_of_a_node_belong_to_the_exact_hash() -> None:
    graph = text_to_image()
    ids = [f"n{node_id}" for node_id in graph]
    other = renumbered(graph, ids, list(graph))
    assert exact_hash(other) != exact_hash(graph)
    graph["5"]["is_changed"] = ["x"]
    assert exact_hash(graph) != exact_hash(text_to_image())


@given(graphs(), st.data())
def test_exactly_the_same_graph_has_the_same_exact_hash_in_any_order(
    graph: Graph, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(list(graph)))
    assert exact_hash(renumbered(graph, list(graph), order)) == exact_hash(graph)


@given(graphs(), literals)
def test_raw_and_parsed_graphs_have_the_same_hashes(graph: Graph, value: Any) -> None:
    graph["0"]["inputs"]["extra"] = value
    before = copy.deepcopy(graph)
    parsed = parse_workflow(json.dumps(graph))
    assert (hash_workflow(parsed), exact_hash(parsed)) == (hash_workflow(graph), exact_hash(graph))
    assert graph == before


def test_hashes_are_equal_in_every_process() -> None:
    code = (
        "import sys, json; from comfyfleet.model.workflow_hash import exact_hash, hash_workflow;"
        "g = json.load(sys.stdin); print(hash_workflow(g), exact_hash(g))"
    )
    for hash_seed in ("0", "4711"):
        answer = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(text_to_image()),
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert answer.stdout.split() == [hash_workflow(text_to_image()), exact_hash(text_to_image())]


# --- the specification, written down a second time -----------------------------------------------------------------


def reference_resources(name: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return [found for key in sorted(value) for found in reference_resources(name, value[key])]
    if isinstance(value, list):
        return [found for item in value for found in reference_resources(name, item)]
    if not isinstance(value, str) or value == "" or "\n" in value:
        return []
    stem = re.sub(r"[_0-9]*\Z", "", name)
    by_name = stem in RESOURCE_INPUTS
    by_extension = stem not in PROSE_INPUTS and any(value.lower().endswith(end) for end in MODEL_EXTENSIONS)
    return [value.replace("\\", "/")] if by_name or by_extension else []


def reference_hash(graph: Graph) -> str:
    """docs/workflow-hash.md, step by step, without regard to speed."""
    wires: dict[str, list[tuple[str, str]]] = {}
    colour: dict[str, bytes] = {}
    for node_id, content in graph.items():
        described: dict[str, Any] = {}
        wires[node_id] = []
        for name, value in sorted(content["inputs"].items()):
            is_wire = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
            if is_wire and isinstance(value[1], int):
                described[name] = value[1]
                wires[node_id].append((name, value[0]))
            elif name not in EDITOR_INPUTS and name not in EDITOR_INPUTS_OF.get(content["class_type"], ()):
                described[name] = reference_resources(name, value) or None
        colour[node_id] = canonical_json([content["class_type"], described])

    def along(node_id: str, new: dict[str, bytes]) -> bytes:
        if node_id not in new:
            sources = [along(source, new) for _, source in wires[node_id]]
            new[node_id] = sha256(colour[node_id] + b"".join(sources)).digest()
        return new[node_id]

    def against(node_id: str, new: dict[str, bytes]) -> bytes:
        if node_id not in new:
            entries = [
                against(consumer, new) + number.to_bytes(4, "big")
                for consumer, taken in wires.items()
                for number, (_, source) in enumerate(taken)
                if source == node_id
            ]
            new[node_id] = sha256(colour[node_id] + b"".join(sorted(entries))).digest()
        return new[node_id]

    distinct = 0
    for number in range(16):
        new: dict[str, bytes] = {}
        for node_id in graph:
            (along, against)[number % 2](node_id, new)
        colour = new
        before, distinct = distinct, len(set(colour.values()))
        if distinct == len(graph) or distinct == before:
            break
    return sha256(b"comfyfleet-workflow/1\n" + b"".join(sorted(colour.values()))).hexdigest()


@settings(max_examples=examples(300))
@given(graphs(max_size=14))
def test_the_hash_is_what_its_specification_says(graph: Graph) -> None:
    assert hash_workflow(graph) == reference_hash(graph)


# --- the published vectors -----------------------------------------------------------------------------------------


def test_the_vectors_are_of_this_version() -> None:
    assert VECTORS["workflow_hash_version"] == WORKFLOW_HASH_VERSION
    assert VECTORS["exact_hash_version"] == EXACT_HASH_VERSION


@pytest.mark.parametrize("vector", VECTORS["canonical_json"], ids=lambda vector: vector["name"])
def test_the_published_canonical_texts_hold(vector: dict[str, str]) -> None:
    assert canonical_json(json.loads(vector["json"])) == vector["canonical"].encode()


@pytest.mark.parametrize("vector", VECTORS["not_canonical"], ids=lambda vector: vector["name"])
def test_the_published_refusals_hold(vector: dict[str, str]) -> None:
    with pytest.raises(NotCanonicalError):
        canonical_json(json.loads(vector["json"]))


@pytest.mark.parametrize("vector", VECTORS["workflows"], ids=lambda vector: vector["name"])
def test_the_published_hashes_hold(vector: dict[str, Any]) -> None:
    assert hash_workflow(vector["graph"]) == vector["workflow_hash"] == reference_hash(vector["graph"])
    assert exact_hash(vector["graph"]) == vector["exact_hash"]


def test_the_vectors_say_which_graphs_share_a_hash() -> None:
    by_hash: dict[str, list[str]] = {}
    for vector in VECTORS["workflows"]:
        by_hash.setdefault(vector["workflow_hash"], []).append(vector["name"])
    shared = sorted(sorted(group) for group in by_hash.values() if len(group) > 1)
    assert shared == sorted(sorted(group) for group in VECTORS["equal_workflow_hashes"])


def test_the_page_shows_the_hashes_and_lists_of_the_code() -> None:
    page = (DOCS / "workflow-hash.md").read_text("utf-8")
    shown = dict(re.findall(r"^\| `([\w-]+)` \| `([0-9a-f]{64})` \|", page, re.MULTILINE))
    assert shown == {vector["name"]: vector["workflow_hash"] for vector in VECTORS["workflows"]}
    words = set(re.findall(r"`([^`]+)`", page))
    assert words >= {*MODEL_EXTENSIONS, *RESOURCE_INPUTS, *PROSE_INPUTS, *EDITOR_INPUTS, *EDITOR_INPUTS_OF}
    assert words >= {name for names in EDITOR_INPUTS_OF.values() for name in names}
    assert f"{MAX_PASSES} passes" in page
