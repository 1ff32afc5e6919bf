"""Reading a graph: what is refused and in which words, what a graph needs, and how a copy is changed."""

from __future__ import annotations

import copy
import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from tests.policy._workflows import Graph, changed, graphs, text_to_image

from comfyfleet.model.errors import RefusalCode
from comfyfleet.model.workflow import (
    asks_for_seed,
    read_needs,
    with_filename_prefix,
    with_input,
    with_seeds,
)
from comfyfleet.model.workflow_graph import InvalidWorkflow, NodeLink, is_wire, parse_workflow
from comfyfleet.model.workflow_hash import exact_hash, hash_workflow

NODE: dict[str, Any] = {"class_type": "EmptyImage", "inputs": {"width": 8}}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[]", "object of nodes by id, but this is a list"),
        (b'"text"', "but this is a string"),
        (b"null", "but this is null"),
        (b"3", "but this is a number"),
        (b"true", "but this is a boolean"),
        (b"{not json", "is not valid JSON"),
        ("{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b'{"1":{"class_type":"A","inputs":{"x":NaN}}}', "JSON has no NaN, infinities and lone surrogates"),
        (b'{"1":{"class_type":"A","inputs":{"x":1e999}}}', "is not valid JSON"),
        (
            b'{"1":{"class_type":"A","inputs":{"x":"\\ud800"}}}',
            "JSON has no NaN, infinities and lone surrogates",
        ),
        (
            '{"1":{"class_type":"A","inputs":{"x":"\ud800"}}}',
            "JSON has no NaN, infinities and lone surrogates",
        ),
        (b"[" * 100_000, "nested deeper than"),
        ({}, "has no nodes"),
        (
            {"last_node_id": 2, "nodes": [], "links": [], "version": 0.4},
            r"save it with 'Export \(API\)'",
        ),
        ({"prompt": {"1": NODE}, "client_id": "x"}, "pass only the content of its 'prompt'"),
        ({1: NODE}, "Node ids are strings, but 1 is int"),
    ],
)
def test_what_is_not_a_graph_at_all_is_refused_without_node_errors(raw: Any, message: str) -> None:
    with pytest.raises(InvalidWorkflow, match=message) as refused:
        parse_workflow(raw)
    assert refused.value.node_errors == {}
    assert refused.value.code is RefusalCode.INVALID_WORKFLOW


def test_an_object_without_any_node_is_told_to_be_no_workflow() -> None:
    with pytest.raises(
        InvalidWorkflow, match=r"This is no workflow: pass a file saved with 'Export \(API\)'"
    ):
        parse_workflow(b'{"a":1}')
    with pytest.raises(InvalidWorkflow) as refused:
        parse_workflow({"1": NODE, "a": 1})
    assert "Export" not in str(refused.value)


def test_a_value_that_is_neither_mapping_nor_text_is_refused() -> None:
    raw: Any = [1]
    with pytest.raises(InvalidWorkflow, match="but this is a list"):
        parse_workflow(raw)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ("text", "invalid_node", "A node is an object, but this is a string"),
        (None, "invalid_node", "A node is an object, but this is null"),
        ({"inputs": {}}, "missing_class_type", "has no class_type"),
        ({"class_type": "  ", "inputs": {}}, "missing_class_type", "has no class_type"),
        ({"class_type": 5, "inputs": {}}, "missing_class_type", "has no class_type"),
        ({"class_type": "A"}, "missing_inputs", "The node has no inputs: give it an object"),
        ({"class_type": "A", "inputs": []}, "missing_inputs", "has inputs that are a list"),
        ({"class_type": "A", "inputs": None}, "missing_inputs", "has inputs that are null"),
        (
            {"class_type": "A", "inputs": {"x": ["77", 0]}},
            "linked_node_missing",
            "node '77', which is not in",
        ),
        ({"class_type": "A", "inputs": {"x": ["euler", 0.5]}}, "linked_node_missing", "always a link"),
        *(
            ({"class_type": "A", "inputs": {"x": value}}, "value_looks_like_link", "Input 'x' has the list")
            for value in (
                {"__value__": ["a", 1]},
                {"__value__": ["1", 0]},
                {"__value__": ["a", 0.5]},
                {"__value__": ["a", True]},
                {"__value__": {"__value__": ["a", 1]}},
                {"__type__": "CURVE", "__value__": ["a", 1]},
            )
        ),
        ({"class_type": "A", "inputs": {"x": ["1", -1]}}, "bad_linked_input", "output -1 of node '1'"),
        ({"class_type": "A", "inputs": {"x": ["1", 0.0]}}, "bad_linked_input", "output 0.0 of node '1'"),
        ({"class_type": "A", "inputs": {"x": ["1", True]}}, "bad_linked_input", "output True of node '1'"),
        ({"class_type": "A", "inputs": {"x": ["1", 65536]}}, "bad_linked_input", "integer from 0 to 65535"),
        ({"class_type": "A", "inputs": {"x": ["9", 0]}}, "dependency_cycle", "depends on its own output"),
        (
            {"class_type": "A", "inputs": {"x": float("nan")}},
            "invalid_input_value",
            "'x' is not a JSON value: nan",
        ),
        ({"class_type": "A", "inputs": {"x": [-float("inf")]}}, "invalid_input_value", "-inf is not a JSON"),
        ({"class_type": "A", "inputs": {"x": "\ud800"}}, "invalid_input_value", "lone surrogate"),
        ({"class_type": "A", "inputs": {"x": {1, 2}}}, "invalid_input_value", "set is not a JSON type"),
        ({"class_type": "A", "inputs": {"x": 1 << 1024}}, "invalid_input_value", "more than 1024 bits"),
        ({"class_type": "A", "inputs": {"x": nested(62)}}, "invalid_input_value", "nested too deeply"),
        ({"class_type": "A", "inputs": {}, "_meta": nested(62)}, "invalid_input_value", "nested too deeply"),
    ],
)
def test_a_faulty_node_is_named_even_when_nothing_depends_on_it(
    content: Any, kind: str, message: str
) -> None:
    with pytest.raises(InvalidWorkflow, match=message) as refused:
        parse_workflow(
            {"1": NODE, "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0]}}, "9": content}
        )
    assert str(refused.value).startswith("The workflow is not valid: node '9': ")
    assert list(refused.value.node_errors) == ["9"]
    entry = refused.value.node_errors["9"]
    assert entry["errors"][0]["type"] == kind
    assert set(entry) == {"errors", "dependent_outputs", "class_type"}
    assert set(entry["errors"][0]) == {"type", "message", "details", "extra_info"}
    assert entry["class_type"] == (content.get("class_type") if isinstance(content, dict) else None)


def test_every_fault_of_a_graph_is_reported_at_once() -> None:
    graph = {"1": {}, "2": {"class_type": "A", "inputs": {"x": ["7", -1]}}, "3": NODE}
    with pytest.raises(InvalidWorkflow, match=r"\(and 3 more, see node_errors\)") as refused:
        parse_workflow(graph)
    kinds = {
        node: [error["type"] for error in entry["errors"]]
        for node, entry in refused.value.node_errors.items()
    }
    assert kinds == {
        "1": ["missing_class_type", "missing_inputs"],
        "2": ["linked_node_missing", "bad_linked_input"],
    }
    assert refused.value.details["node_errors"] == refused.value.node_errors


def test_only_the_nodes_of_a_cycle_are_blamed_for_it() -> None:
    graph = {
        "1": NODE,
        "2": {"class_type": "A", "inputs": {"x": ["3", 0], "y": ["1", 0]}},
        "3": {"class_type": "A", "inputs": {"x": ["2", 0]}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0]}},
    }
    with pytest.raises(InvalidWorkflow, match="depends on its own output") as refused:
        parse_workflow(graph)
    assert list(refused.value.node_errors) == ["2", "3"]


def chain(length: int) -> Graph:
    graph: Graph = {"0": {"class_type": "A", "inputs": {}}}
    for number in range(1, length):
        graph[str(number)] = {"class_type": "A", "inputs": {"x": [str(number - 1), 0]}}
    return graph


def test_the_number_of_nodes_is_bounded() -> None:
    parse_workflow(chain(5), max_nodes=5)
    with pytest.raises(InvalidWorkflow, match="has 5 nodes, and at most 4 are allowed"):
        parse_workflow(chain(5), max_nodes=4)
    many = {str(number): NODE for number in range(5001)}
    with pytest.raises(InvalidWorkflow, match="has 5001 nodes"):
        parse_workflow(many)


def test_the_length_of_chains_is_bounded() -> None:
    parse_workflow(chain(400))
    with pytest.raises(InvalidWorkflow, match="longest chain of links has 401 nodes, and at most 400"):
        parse_workflow(chain(401))
    with pytest.raises(InvalidWorkflow, match="at most 2 are allowed"):
        parse_workflow(chain(3), max_chain=2)


def test_a_long_chain_behind_a_cycle_is_refused_quickly_and_by_the_cycle_alone() -> None:
    graph = chain(5000)
    graph["0"]["inputs"]["x"] = ["1", 0]
    with pytest.raises(InvalidWorkflow) as refused:
        parse_workflow(graph)
    assert list(refused.value.node_errors) == ["0", "1"]


@pytest.mark.parametrize(
    "value",
    [
        [512, 512],
        ["a", "b"],
        ["1"],
        [],
        ["1", 0, 1],
        [["1", 0]],
        {"__value__": ["1", "0"]},
        {"__value__": ["1", 0, 1]},
        {"__value__": [["1", 0]]},
        {"a": {"__value__": ["1", 0]}},
        [{"__value__": ["1", 0]}],
        ["1", None],
        {"a": ["77", 0]},
    ],
)
def test_a_list_that_is_not_a_string_and_a_number_is_a_value(value: Any) -> None:
    workflow = parse_workflow({"1": NODE, "2": {"class_type": "A", "inputs": {"x": value}}})
    assert workflow.nodes["2"].links == {}
    assert not is_wire(value)


def test_wires_are_read_in_the_order_of_their_names_and_nodes_after_their_sources() -> None:
    workflow = parse_workflow(text_to_image())
    assert list(workflow.nodes["3"].links.items()) == [
        ("latent_image", NodeLink("5", 0)),
        ("model", NodeLink("4", 0)),
        ("negative", NodeLink("7", 0)),
        ("positive", NodeLink("6", 0)),
    ]
    seen: set[str] = set()
    for node_id in workflow.order:
        assert {link.node for link in workflow.nodes[node_id].links.values()} <= seen
        seen.add(node_id)
    assert seen == set(text_to_image())


def test_bytes_text_a_mapping_and_a_view_of_it_are_the_same_workflow() -> None:
    graph = text_to_image()
    text = json.dumps(graph)
    view = MappingProxyType({node_id: MappingProxyType(content) for node_id, content in graph.items()})
    parsed = parse_workflow(graph)
    assert parsed == parse_workflow(text) == parse_workflow(text.encode()) == parse_workflow(view)
    assert parsed == parse_workflow(b"\xef\xbb\xbf" + text.encode())
    assert parsed.to_graph() == graph


def test_wires_written_as_tuples_are_wires() -> None:
    workflow = parse_workflow({"1": NODE, "2": {"class_type": "A", "inputs": {"x": ("1", 0)}}})
    assert workflow.nodes["2"].links == {"x": NodeLink("1", 0)}


def test_a_workflow_does_not_change_with_the_mapping_it_was_read_from() -> None:
    graph = text_to_image()
    workflow = parse_workflow(graph)
    graph["3"]["inputs"]["seed"] = 5
    graph["3"]["inputs"]["model"][1] = 2
    assert workflow.to_graph() == text_to_image()


@given(graphs())
def test_a_parsed_graph_is_given_back_as_it_came(graph: Graph) -> None:
    assert parse_workflow(graph).to_graph() == graph


# --- needs -----------------------------------------------------------------------------------------------------------


def test_needs_are_the_classes_and_the_model_files_of_a_graph() -> None:
    needs = read_needs(text_to_image())
    assert needs.node_classes == {
        "KSampler",
        "CheckpointLoaderSimple",
        "EmptyLatentImage",
        "CLIPTextEncode",
        "VAEDecode",
        "SaveImage",
    }
    assert needs.models == {"sd/v1-5.safetensors"}
    assert needs.input_files == frozenset()


def test_models_are_found_at_any_depth_and_in_any_case() -> None:
    inputs = {"lora_1": {"on": True, "lora": "a\\b\\c.Safetensors"}, "list": {"__value__": ["x.GGUF", "y"]}}
    assert read_needs({"1": {"class_type": "A", "inputs": inputs}}).models == {"a/b/c.Safetensors", "x.GGUF"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", "as in style.safetensors"),
        ("prompt_2", "x.pt"),
        ("notes", "first\nmodel.pt"),
        ("vae_name", "taesd"),
        ("lora_name", "None"),
        ("filename_prefix", "run.bin"),
        ("ckpt_name", ""),
    ],
)
def test_what_is_no_file_is_no_need(name: str, value: str) -> None:
    assert read_needs({"1": {"class_type": "A", "inputs": {name: value}}}).models == frozenset()


def test_input_files_are_what_loading_nodes_name() -> None:
    graph = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "a.png", "upload": "image"}},
        "2": {"class_type": "LoadImageMask", "inputs": {"image": "masks\\b.png [input]", "channel": "alpha"}},
        "3": {"class_type": "LoadAudio", "inputs": {"audio": "c.flac"}},
        "4": {"class_type": "LoadVideo", "inputs": {"file": "d.mp4"}},
        "5": {"class_type": "VHS_LoadVideo", "inputs": {"video": "e.mp4", "frame_load_cap": 0}},
        "6": {"class_type": "LoadImageOutput", "inputs": {"image": "f.png [output]"}},
        "7": {"class_type": "SaveImage", "inputs": {"image": "g.png"}},
        "8": {"class_type": "LoadImage", "inputs": {"image": ["1", 0]}},
    }
    needs = read_needs(graph)
    assert needs.input_files == {"a.png", "masks/b.png", "c.flac", "d.mp4", "e.mp4", "f.png [output]"}
    assert needs.models == frozenset()


# --- changed copies --------------------------------------------------------------------------------------------------


def test_another_input_is_set_in_a_copy() -> None:
    workflow = parse_workflow(text_to_image())
    other = with_input(workflow, "6", "text", "a red fox")
    assert other.to_graph() == changed(text_to_image(), "6", "text", "a red fox")
    assert workflow.to_graph() == text_to_image()
    assert hash_workflow(other) == hash_workflow(workflow)


def test_a_changed_input_is_checked() -> None:
    assert with_input(text_to_image(), "3", "negative", ["6", 0]).nodes["3"].links["negative"] == NodeLink(
        "6", 0
    )
    with pytest.raises(InvalidWorkflow, match="depends on its own output"):
        with_input(text_to_image(), "4", "ckpt_name", ["8", 0])
    with pytest.raises(InvalidWorkflow, match="nan is not a JSON number"):
        with_input(text_to_image(), "3", "cfg", float("nan"))
    with pytest.raises(InvalidWorkflow, match="The workflow has no node '99'"):
        with_input(text_to_image(), "99", "cfg", 1)


def test_seeds_of_minus_one_are_found_and_replaced_by_node() -> None:
    graph: Graph = {
        "1": {"class_type": "KSampler", "inputs": {"seed": -1, "steps": -1}},
        "2": {"class_type": "KSamplerAdvanced", "inputs": {"noise_seed": -1.0}},
        "3": {"class_type": "KSampler", "inputs": {"seed": 7}},
        "4": {"class_type": "KSampler", "inputs": {"seed": ["1", 0]}},
        "5": {"class_type": "KSampler", "inputs": {"seed": "-1"}},
    }
    asking = [node_id for node_id, node in parse_workflow(graph).nodes.items() if asks_for_seed(node)]
    assert asking == ["1", "2"]
    resolved = with_seeds(graph, {"1": 2**64 - 1, "2": 42})
    expected = copy.deepcopy(graph)
    expected["1"]["inputs"]["seed"] = 2**64 - 1
    expected["2"]["inputs"]["noise_seed"] = 42
    assert resolved.to_graph() == expected
    assert resolved == parse_workflow(expected)
    assert exact_hash(resolved) == exact_hash(expected)


def test_a_filename_prefix_gets_its_folder_and_a_wire_stays() -> None:
    graph: Graph = {
        "1": {
            "class_type": "SaveImage",
            "inputs": {"filename_prefix": "ComfyUI"},
            "_meta": {"title": "Save"},
        },
        "2": {"class_type": "SaveImage", "inputs": {"filename_prefix": "/abs\\name"}},
        "3": {"class_type": "SaveImage", "inputs": {"filename_prefix": ["1", 0]}},
        "4": {"class_type": "SaveImage", "inputs": {"filename_prefix": ""}},
        "5": {"class_type": "PreviewImage", "inputs": {}},
    }
    prefixed = with_filename_prefix(graph, "attempts/a1/")
    names = [content["inputs"].get("filename_prefix") for content in prefixed.to_graph().values()]
    assert names == ["attempts/a1/ComfyUI", "attempts/a1/abs\\name", ["1", 0], "attempts/a1/", None]
    assert prefixed.nodes["1"].content["_meta"] == {"title": "Save"}
    assert prefixed == parse_workflow(prefixed.to_graph())


@pytest.mark.parametrize("name", ["../other/x", "a/../../b", "..\\x", ".."])
def test_a_name_that_leads_out_of_its_folder_is_refused(name: str) -> None:
    graph = {"1": {"class_type": "SaveImage", "inputs": {"filename_prefix": name}}}
    with pytest.raises(InvalidWorkflow, match="leave out") as refused:
        with_filename_prefix(graph, "a1")
    assert refused.value.node_errors["1"]["errors"][0]["extra_info"] == {"input_name": "filename_prefix"}


@pytest.mark.parametrize("prefix", ["", "/", "..", "a/../b"])
def test_a_prefix_that_names_no_folder_is_a_mistake_of_the_program(prefix: str) -> None:
    with pytest.raises(ValueError, match="must name a folder"):
        with_filename_prefix(text_to_image(), prefix)
