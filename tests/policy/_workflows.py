"""Graphs for the tests of workflows: one that everybody knows, and random ones."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

Graph = dict[str, Any]

# A busy machine, or the first use of the Unicode tables, is no reason to fail.


def text_to_image() -> Graph:
    """The default workflow of ComfyUI, as its editor exports it."""
    return {
        "3": {
            "class_type": "KSampler",
            "inputs": {
                "seed": 156680208700286,
                "steps": 20,
                "cfg": 8,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1,
                "model": ["4", 0],
                "positive": ["6", 0],
                "negative": ["7", 0],
                "latent_image": ["5", 0],
            },
            "_meta": {"title": "KSampler"},
        },
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd\\v1-5.safetensors"}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 512, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "beautiful scenery", "clip": ["4", 1]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "text, watermark", "clip": ["4", 1]}},
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
        "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "ComfyUI", "images": ["8", 0]}},
    }


def changed(graph: Graph, node: str, name: str, value: Any) -> Graph:
    graph = copy.deepcopy(graph)
    graph[node]["inputs"][name] = value
    return graph


literals = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text('ab. \n\\"é\U0001f600', max_size=8),
    st.sampled_from(["a.safetensors", "dir\\b.CKPT", "c.gguf", "a sunny day"]),
    st.lists(st.integers(0, 9), max_size=3),
    st.fixed_dictionaries({"on": st.booleans(), "lora": st.sampled_from(["x.pt", "y.pt", "None"])}),
)
names = st.sampled_from(["a", "b", "clip_name1", "lora_name", "model", "text", "é", "\U0001f600", "\ufb01"])
classes = st.sampled_from(["Load", "Sample", "Save", "Mix"])


@st.composite
def graphs(draw: st.DrawFn, max_size: int = 10) -> Graph:
    """Random graphs without cycles: each node takes wires from earlier ones only. Few classes, so that twins occur."""
    graph: Graph = {}
    for number in range(draw(st.integers(1, max_size))):
        inputs: dict[str, Any] = {}
        for name in draw(st.lists(names, unique=True, max_size=4)):
            if number and draw(st.booleans()):
                inputs[name] = [str(draw(st.integers(0, number - 1))), draw(st.integers(0, 2))]
            else:
                inputs[name] = draw(literals)
        graph[str(number)] = {"class_type": draw(classes), "inputs": inputs}
    return graph


def renumbered(graph: Graph, ids: list[str], order: list[str]) -> Graph:
    """The same graph with other ids, its nodes and their inputs in another order."""
    new = dict(zip(graph, ids, strict=True))
    result: Graph = {}
    for node_id in order:
        content = graph[node_id]
        inputs = {
            name: [new[value[0]], value[1]]
            if isinstance(value, list) and len(value) == 2 and value[0] in new
            else value
            for name, value in reversed(content["inputs"].items())
        }
        result[new[node_id]] = {
            "inputs": inputs,
            "class_type": content["class_type"],
            "_meta": {"title": node_id},
        }
    return result
