"""What the editor saves becomes the graph that it would have sent itself."""

from __future__ import annotations

from typing import Any

import pytest
from tests.policy._editor import DEFINITIONS, OBJECT_INFO, Editor

from comfyfleet.model.editor_conversion import convert_workflow, is_editor_workflow, node_classes_of
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.node_classes import read_definitions
from comfyfleet.model.workflow_graph import InvalidWorkflow, parse_workflow


def convert(editor: Editor, **more: Any) -> dict[str, dict[str, Any]]:
    graph = convert_workflow(editor.saved(**more), DEFINITIONS)
    parse_workflow(graph)
    return graph


def inputs_of(kind: str, values: Any, **more: Any) -> dict[str, Any]:
    editor = Editor()
    number = editor.node(kind, values, **more)
    found: dict[str, Any] = convert(editor)[str(number)]["inputs"]
    return found


def text_to_image() -> tuple[Editor, dict[str, int]]:
    editor = Editor()
    loader = editor.node("CheckpointLoaderSimple", ["sd15.safetensors"])
    text = editor.node("CLIPTextEncode", ["a lighthouse"], title="What to paint")
    sampler = editor.node("KSampler", [7, "randomize", 20, 8, "euler", "normal", 1])
    decoder = editor.node("VAEDecode", [])
    saver = editor.node("SaveImage", ["ComfyUI"])
    editor.wire(loader, 1, text, "clip", "CLIP")
    editor.wire(loader, 0, sampler, "model", "MODEL")
    editor.wire(text, 0, sampler, "positive", "CONDITIONING")
    editor.wire(sampler, 0, decoder, "samples", "LATENT")
    editor.wire(loader, 2, decoder, "vae", "VAE")
    editor.wire(decoder, 0, saver, "images", "IMAGE")
    places = {"loader": loader, "text": text, "sampler": sampler, "decoder": decoder, "saver": saver}
    return editor, places


def test_an_ordinary_workflow_becomes_what_the_editor_exports() -> None:
    editor, _ = text_to_image()
    assert convert(editor) == {
        "1": {
            "class_type": "CheckpointLoaderSimple",
            "inputs": {"ckpt_name": "sd15.safetensors"},
            "_meta": {"title": "CheckpointLoaderSimple"},
        },
        "2": {
            "class_type": "CLIPTextEncode",
            "inputs": {"text": "a lighthouse", "clip": ["1", 1]},
            "_meta": {"title": "What to paint"},
        },
        "3": {
            "class_type": "KSampler",
            "inputs": {
                "seed": 7,
                "steps": 20,
                "cfg": 8,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1,
                "model": ["1", 0],
                "positive": ["2", 0],
            },
            "_meta": {"title": "KSampler"},
        },
        "4": {
            "class_type": "VAEDecode",
            "inputs": {"samples": ["3", 0], "vae": ["1", 2]},
            "_meta": {"title": "VAEDecode"},
        },
        "5": {
            "class_type": "SaveImage",
            "inputs": {"filename_prefix": "ComfyUI", "images": ["4", 0]},
            "_meta": {"title": "SaveImage"},
        },
    }


def test_only_a_list_of_nodes_makes_a_workflow_of_the_editor() -> None:
    assert is_editor_workflow({"nodes": [], "links": []})
    assert not is_editor_workflow({"nodes": {"class_type": "X", "inputs": {}}})
    assert not is_editor_workflow({"1": {"class_type": "X", "inputs": {}}})
    assert not is_editor_workflow([])


# values


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("Switches", [4, "fixed", True, "x"], {"seed": 4, "is_fast": True, "points": "x"}),
        ("Switches", [4, True, "x"], {"seed": 4, "is_fast": True, "points": "x"}),
        ("Switches", [4, True, False, "x"], {"seed": 4, "is_fast": False, "points": "x"}),
        ("Picker", ["b", "increment-wrap", ""], {"model_name": "b"}),
        ("LoadImageMask", ["me.png", "red", "image"], {"image": "me.png", "channel": "red"}),
        ("LoadImageMask", ["me.png", "red"], {"image": "me.png", "channel": "red"}),
        ("LoadBoth", ["me.png", "image", True], {"image": "me.png", "resize": True}),
        ("LoadBoth", ["me.png", True], {"image": "me.png", "resize": True}),
        ("Forced", [3, 9], {"size": 3, "last": 9}),
        ("Forced", [3], {"size": 3, "last": 5}),
        ("Resize", ["by factor", 2.0, "area"], {"how": "by factor", "how.factor": 2.0, "method": "area"}),
        (
            "Resize",
            ["to size", 8, 9, "nearest"],
            {"how": "to size", "how.width": 8, "how.height": 9, "method": "nearest"},
        ),
        ("CurveEditor", [[[0, 0], [1, 1]]], {"curve": {"__type__": "CURVE", "__value__": [[0, 0], [1, 1]]}}),
        ("SaveImage", [["5", "6"]], {"filename_prefix": {"__value__": ["5", "6"]}}),
        ("SaveImage", None, {"filename_prefix": "ComfyUI"}),
        (
            "VHS_VideoCombine",
            {"frame_rate": 12, "format": "gif", "crf": 19, "videopreview": {"hidden": False}},
            {"frame_rate": 12, "format": "gif", "crf": 19},
        ),
    ],
)
def test_values_find_their_inputs(kind: str, values: Any, expected: dict[str, Any]) -> None:
    assert inputs_of(kind, values) == expected


def test_values_by_name_are_preferred_where_an_editor_saved_them_too() -> None:
    named: dict[str, Any] = {"width": 8, "height": 9}
    assert inputs_of("EmptyLatentImage", [1, 2], widgets_values_named=named) == named
    named = {"model_name": "b", "control_after_generate": "randomize", "control_filter_list": ""}
    assert inputs_of("Picker", ["b", "randomize", ""], widgets_values_named=named) == {"model_name": "b"}
    points = [[0, 0], [1, 1]]
    (curve,) = inputs_of("CurveEditor", [points], widgets_values_named={"curve": points}).values()
    assert curve == {"__type__": "CURVE", "__value__": points}
    box = {"x": 1, "y": 2}
    assert inputs_of("SaveImage", [box], widgets_values_named={"filename_prefix": box}) == {
        "filename_prefix": box
    }


def test_a_server_that_gives_the_order_of_inputs_is_followed() -> None:
    content = {
        "input": {"required": {"a": ["INT", {}], "b": ["INT", {}]}},
        "input_order": {"required": ["b", "a"]},
    }
    editor = Editor()
    editor.node("Ordered", [1, 2])
    graph = convert_workflow(editor.saved(), read_definitions({"Ordered": content}))
    assert graph["1"]["inputs"] == {"b": 1, "a": 2}


def test_a_value_that_was_made_an_input_is_taken_from_its_wire() -> None:
    editor = Editor()
    source = editor.node("EmptyLatentImage", [1, 2])
    sampler = editor.node("KSampler", [7, "fixed", 20, 8, "euler", "normal", 1])
    editor.wire(source, 0, sampler, "number of steps", "INT", widget="steps")
    found = convert(editor)[str(sampler)]["inputs"]
    assert (found["seed"], found["steps"], found["cfg"]) == (7, [str(source), 0], 8)
    assert "number of steps" not in found


# what is only in the editor


def test_reroutes_primitives_and_notes_leave_no_trace() -> None:
    editor, places = text_to_image()
    editor.node("Note", ["do not forget"])
    editor.node("MarkdownNote", ["# nor this"])
    named = {"value": 99, "control_after_generate": "fixed"}
    primitive = editor.node("PrimitiveNode", [99, "fixed"], widgets_values_named=named)
    editor.wire(primitive, 0, places["sampler"], "seed", "INT", widget="seed")
    first, second = editor.node("Reroute"), editor.node("Reroute")
    editor.wire(places["text"], 0, first, "")
    editor.wire(first, 0, second, "")
    editor.wire(second, 0, places["sampler"], "negative", "CONDITIONING")
    graph = convert(editor)
    assert len(graph) == 5
    assert graph["3"]["inputs"]["seed"] == 99
    assert graph["3"]["inputs"]["negative"] == ["2", 0]


def test_a_reroute_that_hangs_in_the_air_feeds_nothing() -> None:
    editor, places = text_to_image()
    editor.wire(editor.node("Reroute"), 0, places["sampler"], "negative", "CONDITIONING")
    assert "negative" not in convert(editor)["3"]["inputs"]


def test_what_was_set_under_a_name_is_what_is_got_under_it() -> None:
    editor, places = text_to_image()
    setter = editor.node("SetNode", ["the prompt"], widgets_values_named={"Constant": "the prompt"})
    editor.wire(places["text"], 0, setter, "CONDITIONING")
    getter = editor.node("GetNode", ["the prompt"])
    editor.wire(getter, 0, places["sampler"], "negative", "CONDITIONING")
    assert convert(editor)["3"]["inputs"]["negative"] == ["2", 0]


def test_a_circle_of_reroutes_is_refused() -> None:
    editor, places = text_to_image()
    first, second = editor.node("Reroute"), editor.node("Reroute")
    editor.wire(first, 0, second, "")
    editor.wire(second, 0, first, "")
    editor.wire(second, 0, places["sampler"], "negative", "CONDITIONING")
    with pytest.raises(InvalidWorkflow, match="cycle"):
        convert(editor)


# muted and bypassed


def with_lora(mode: int) -> dict[str, Any]:
    """A LoRA between the loader and those who use it."""
    editor, places = text_to_image()
    outputs = [{"type": "MODEL"}, {"type": "CLIP"}]
    lora = editor.node("LoraLoader", ["a.safetensors", 1.0], mode=mode, outputs=outputs)
    editor.wire(places["loader"], 0, lora, "model", "MODEL")
    editor.wire(places["loader"], 1, lora, "clip", "CLIP")
    for name, slot in (("text", 1), ("sampler", 0)):
        node = editor.nodes[places[name] - 1]
        node["inputs"] = [each for each in node["inputs"] if each["name"] not in ("clip", "model")]
        kind = "CLIP" if name == "text" else "MODEL"
        editor.wire(lora, slot, places[name], kind.lower(), kind)
    return convert(editor)


def test_a_bypassed_node_hands_on_what_fits() -> None:
    assert with_lora(0)["2"]["inputs"]["clip"] == ["6", 1]
    graph = with_lora(4)
    assert "6" not in graph
    assert graph["2"]["inputs"]["clip"] == ["1", 1]
    assert graph["3"]["inputs"]["model"] == ["1", 0]


def test_of_bypassed_nodes_in_a_row_each_is_asked_for_what_the_one_before_it_takes() -> None:
    """As the editor does: behind an input of any type it is the place that counts."""
    editor, places = text_to_image()
    outputs = [{"type": "IMAGE"}]
    both = editor.node("Both", mode=4, outputs=outputs)
    editor.wire(places["loader"], 2, both, "first", "VAE")
    editor.wire(places["decoder"], 0, both, "second", "IMAGE")
    switch = editor.node("Any", mode=4, outputs=[{"type": "*"}])
    editor.wire(both, 0, switch, "any", "*")
    saver = editor.node("SaveImage", [""])
    editor.wire(switch, 0, saver, "images", "IMAGE")
    assert convert(editor)[str(saver)]["inputs"]["images"] == ["1", 2]


def test_a_muted_node_and_the_wires_from_it_are_left_out() -> None:
    graph = with_lora(2)
    assert "6" not in graph
    assert "clip" not in graph["2"]["inputs"] and "model" not in graph["3"]["inputs"]


def test_what_is_switched_off_needs_no_server() -> None:
    editor, _ = text_to_image()
    editor.node("NobodyHasThis", mode=2)
    editor.node("NorThis", mode=4)
    editor.node("Fast Groups Bypasser (rgthree)")
    assert node_classes_of(editor.saved()) == {
        "CheckpointLoaderSimple",
        "CLIPTextEncode",
        "KSampler",
        "VAEDecode",
        "SaveImage",
    }
    assert len(convert(editor)) == 5


# subgraphs


def sampling() -> dict[str, Any]:
    """A subgraph of a sampler: its model comes from outside, its seed is a widget on the outside."""
    inner = Editor()
    sampler = inner.node("KSampler", [1, "fixed", 20, 8, "euler", "normal", 1], number=3)
    inner.wire(-10, 0, sampler, "model", "MODEL")
    inner.wire(-10, 1, sampler, "seed", "INT", widget="seed")
    inner.wire(sampler, 0, -20, "latent", "LATENT")
    inner.links[-1][4] = 0
    return inner.as_subgraph("sampling", ["model", "seed"], ["latent"])


def hosting(values: Any, **more: Any) -> dict[str, Any]:
    editor = Editor()
    loader = editor.node("CheckpointLoaderSimple", ["sd15.safetensors"])
    host = editor.node("sampling", values, outputs=[{"type": "LATENT"}], **more)
    decoder = editor.node("VAEDecode", [])
    editor.wire(loader, 0, host, "model", "MODEL")
    editor.wire(host, 0, decoder, "samples", "LATENT")
    return convert(editor, definitions={"subgraphs": [sampling()]})


@pytest.mark.parametrize(
    ("values", "more", "seed"),
    [
        ([], {}, 1),
        ([42], {}, 42),
        ([42], {"properties": {"proxyWidgets": [["-1", "seed"], ["3", "steps"]]}}, 42),
        ([], {"properties": {"proxyWidgets": [["3", "seed"]]}}, 1),
    ],
)
def test_a_subgraph_is_unfolded_with_the_values_on_its_outside(
    values: list[Any], more: dict[str, Any], seed: int
) -> None:
    graph = hosting(values, **more)
    assert graph.keys() == {"1", "3", "2:3"}
    assert graph["2:3"]["inputs"]["model"] == ["1", 0]
    assert graph["2:3"]["inputs"]["seed"] == seed
    assert graph["3"]["inputs"]["samples"] == ["2:3", 0]


def test_a_widget_promoted_by_a_list_sets_the_one_within() -> None:
    graph = hosting([30], properties={"proxyWidgets": [["3", "steps"]]})
    assert (graph["2:3"]["inputs"]["steps"], graph["2:3"]["inputs"]["seed"]) == (30, 1)


def test_subgraphs_within_subgraphs_are_unfolded_too() -> None:
    middle = Editor()
    inner = middle.node("sampling", [5], number=8, outputs=[{"type": "LATENT"}])
    middle.wire(-10, 0, inner, "model", "MODEL")
    middle.wire(inner, 0, -20, "latent", "LATENT")
    middle.links[-1][4] = 0
    editor = Editor()
    loader = editor.node("CheckpointLoaderSimple", ["sd15.safetensors"])
    host = editor.node("outer", [], outputs=[{"type": "LATENT"}])
    decoder = editor.node("VAEDecode", [])
    editor.wire(loader, 0, host, "model", "MODEL")
    editor.wire(host, 0, decoder, "samples", "LATENT")
    definitions = [middle.as_subgraph("outer", ["model"], ["latent"]), sampling()]
    graph = convert(editor, definitions={"subgraphs": definitions})
    assert graph["2:8:3"]["inputs"]["model"] == ["1", 0]
    assert graph["2:8:3"]["inputs"]["seed"] == 5
    assert graph["3"]["inputs"]["samples"] == ["2:8:3", 0]


def test_a_muted_subgraph_is_left_out_whole() -> None:
    graph = hosting([42], mode=2)
    assert graph.keys() == {"1", "3"}
    assert graph["3"]["inputs"] == {}


def test_a_subgraph_that_contains_itself_is_refused() -> None:
    inner = Editor()
    inner.node("loop")
    editor = Editor()
    editor.node("loop")
    with pytest.raises(InvalidWorkflow, match="contains itself"):
        convert(editor, definitions={"subgraphs": [inner.as_subgraph("loop", [], [])]})


# no


def test_what_no_server_has_is_named_with_what_to_do() -> None:
    editor, _ = text_to_image()
    editor.node("ZebraNode")
    editor.node("AppleNode")
    with pytest.raises(Refusal, match=r"none has AppleNode, ZebraNode\. .*Export \(API\)") as refused:
        convert(editor)
    assert refused.value.code is RefusalCode.UNWORKABLE
    assert refused.value.details["missing"] == ["AppleNode", "ZebraNode"]


@pytest.mark.parametrize("kind", ["workflow>my group", "workflow/my group"])
def test_a_group_node_is_refused_by_name(kind: str) -> None:
    editor = Editor()
    editor.node(kind)
    with pytest.raises(InvalidWorkflow, match=r"group node \(my group\)"):
        convert(editor)


def test_a_workflow_of_notes_alone_is_refused() -> None:
    editor = Editor()
    editor.node("Note", ["hello"])
    with pytest.raises(InvalidWorkflow, match="This workflow has nothing to run"):
        convert(editor)


@pytest.mark.parametrize(
    "damaged",
    [
        {"nodes": [None, 7, {}], "links": [None, 3]},
        {
            "nodes": [{"id": 1, "type": "SaveImage", "inputs": [{"link": 9}], "widgets_values": 4}],
            "links": {},
        },
        {"nodes": [{"id": 1, "type": "SaveImage"}], "links": [[1, 2]], "definitions": {"subgraphs": [3]}},
        {"nodes": [{"id": 1, "type": ["a"], "mode": "x"}], "links": [[1, 2, None, 4, 5]]},
        {"nodes": [{"id": 1, "type": "SaveImage"}], "links": [[1, 2, float("inf"), 4, 5]]},
        {
            "nodes": [
                {"id": 1, "type": "SaveImage", "inputs": [{"name": "images", "type": "IMAGE", "link": 1}]},
                {"id": 2, "type": "VAEDecode", "mode": 4, "inputs": [{"name": "a", "type": "IMAGE"}]},
            ],
            "links": [[1, 2, -5, 1, 0, "IMAGE"]],
        },
    ],
)
def test_a_damaged_file_is_refused_or_read_as_far_as_it_goes(damaged: dict[str, Any]) -> None:
    try:
        convert_workflow(damaged, DEFINITIONS)
    except Refusal as refused:
        assert refused.code in (RefusalCode.INVALID_WORKFLOW, RefusalCode.UNWORKABLE)


def chain(length: int) -> dict[str, Any]:
    subgraphs = [{"id": f"s{n}", "nodes": [{"id": 1, "type": f"s{n + 1}"}]} for n in range(length)]
    last = {"id": f"s{length}", "nodes": [{"id": 1, "type": "SaveImage"}]}
    return {"nodes": [{"id": 1, "type": "s0"}], "definitions": {"subgraphs": [*subgraphs, last]}}


def many(node: dict[str, Any]) -> dict[str, Any]:
    """A node that is written once and stands there two thousand times."""
    hosts = [{"id": number, "type": "s"} for number in range(2_000)]
    return {"nodes": hosts, "definitions": {"subgraphs": [{"id": "s", "nodes": [{"id": 1, **node}]}]}}


def fan(inputs: int) -> dict[str, Any]:
    """One long text, and many inputs that get it."""
    slots = [{"name": f"{number}", "type": "*", "link": 1} for number in range(inputs)]
    text = {"id": 1, "type": "PrimitiveNode", "widgets_values": ["x" * 10_000]}
    return {"nodes": [text, {"id": 2, "type": "SaveImage", "inputs": slots}], "links": [[1, 1, 0, 2, 0, "*"]]}


@pytest.mark.parametrize(
    ("bomb", "words"),
    [
        (chain(2_000), "deep"),
        (chain(5_000), "5001 subgraphs"),
        (many({"type": "SaveImage", "widgets_values": ["x" * 20_000]}), "bytes"),
        (many({"type": "SaveImage", "title": "x" * 20_000}), "bytes"),
        (many({"type": "SaveImage", "widgets_values": [None] * 10_000}), "too large"),
        (fan(5_000), "bytes"),
        (fan(200_000), "parts"),
    ],
)
def test_a_small_file_that_unfolds_without_end_is_refused_at_once(bomb: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidWorkflow, match=words):
        convert_workflow(bomb, DEFINITIONS)


def test_a_node_of_very_many_inputs_is_read_in_one_go() -> None:
    slots = [{"name": f"{number}", "type": "*"} for number in range(100_000)]
    graph = convert_workflow({"nodes": [{"id": 1, "type": "SaveImage", "inputs": slots}]}, DEFINITIONS)
    assert graph.keys() == {"1"}


@pytest.mark.parametrize(
    "content", [None, 3, {"input": None}, {"input": {"required": 3}}, {"input": {"required": {"a": None}}}]
)
def test_a_definition_that_cannot_be_understood_does_no_harm(content: Any) -> None:
    found = read_definitions({**OBJECT_INFO, "Odd": content})
    assert found.get("Odd", ()) == ()
    assert found["KSampler"] == DEFINITIONS["KSampler"]
