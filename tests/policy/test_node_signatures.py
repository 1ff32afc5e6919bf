"""What is read of `/object_info` to tell which servers accept the same workflows."""

from __future__ import annotations

from typing import Any

import pytest

from comfyfleet.model.node_classes import InputSignature, read_catalog, read_signatures


def described(
    required: dict[str, Any], module: str = "nodes", outputs: tuple[Any, ...] = ("IMAGE",), **more: Any
) -> dict[str, Any]:
    return {
        "X": {"input": {"required": required}, "output": list(outputs), "python_module": module, **more},
    }


def group(info: dict[str, Any]) -> str:
    return read_catalog(info).signature()


def choices(info: dict[str, Any], **how: bool) -> Any:
    return read_signatures(info, **how)["X"].inputs["mode"].choices


def test_inputs_outputs_and_where_a_class_comes_from_are_read() -> None:
    info = described({"mode": [["b", "a"]], "size": ["INT", {"min": 1, "max": 64}], "image": ["IMAGE"]})
    info["X"]["input"]["optional"] = {"mask": ["MASK"]}
    signature = read_signatures(info)["X"]
    assert signature.inputs == {
        "mode": InputSignature("COMBO", True, ("a", "b")),
        "size": InputSignature("INT", True, None, 1.0, 64.0),
        "image": InputSignature("IMAGE", True),
        "mask": InputSignature("MASK"),
    }
    assert signature.outputs == ("IMAGE",)
    assert signature.is_core


@pytest.mark.parametrize(
    ("module", "is_core"),
    [
        ("nodes", True),
        ("comfy_extras.nodes_custom_sampler", True),
        ("comfy_api_nodes.nodes_kling", True),
        ("custom_nodes.nodes_of_mine", False),
        (None, False),
    ],
)
def test_only_what_comes_with_comfyui_has_choices_that_count(module: Any, is_core: bool) -> None:
    info = described({"mode": [["a", "b"]]}, module)
    assert read_signatures(info)["X"].is_core is is_core
    assert choices(info) == (("a", "b") if is_core else None)


@pytest.mark.parametrize(
    "spec",
    [
        [["one.safetensors", "two.ckpt"]],
        [["a.png"], {"image_upload": True}],
        [["sub/folder", "b"]],
        [["clip.mp4"]],
        [[]],
        [["a", {"not": "a choice"}]],
        [[str(number) for number in range(1001)]],
        ["COMBO", {"options": ["a"], "remote": {"route": "/x"}}],
        ["COMBO", {}],
    ],
)
def test_lists_of_what_lies_on_a_disk_are_no_choices(spec: Any) -> None:
    assert choices(described({"mode": spec}), checks_new_style=True) is None


def test_values_of_new_style_combos_count_where_the_server_checks_them() -> None:
    info = described({"mode": ["COMBO", {"options": ["a", "b"]}]})
    assert choices(info) is None
    assert choices(info, checks_new_style=True) == ("a", "b")


def test_equal_nodes_are_equal_whatever_lies_on_the_disk_and_in_whatever_order() -> None:
    one = described({"ckpt_name": [["a.safetensors"]], "mode": [["a", "b"]]}, description="what it is")
    two = described(
        {"ckpt_name": [["b.safetensors", "c.safetensors"]], "mode": [["a", "b"]]}, category="other"
    )
    assert group(one) == group(two)
    two["Y"], one["Y"] = one["X"], one["X"]
    assert group(one) == group({name: two[name] for name in ("Y", "X")})


@pytest.mark.parametrize(
    "other",
    [
        described({"mode": [["a", "b", "c"]]}),
        described({"mode": [["a", "b"]], "steps": ["INT", {"default": 1}]}),
        described({"mode": ["STRING"]}),
        described({"mode": [["a", "b"]]}, outputs=("LATENT",)),
        described({"mode": [["a", "b"]]}, "custom_nodes.x"),
    ],
)
def test_another_version_of_a_node_is_another_group(other: dict[str, Any]) -> None:
    assert group(described({"mode": [["a", "b"]]})) != group(other)


@pytest.mark.parametrize(
    "broken",
    [
        {"X": None},
        {"X": {"input": []}},
        {"X": {"input": {"required": {"a": None, "b": [], "c": [None]}}}},
        {"X": {"input": {"required": {"a": ["COMFY_DYNAMICCOMBO_V3", {"options": 5}]}}}},
    ],
)
def test_what_cannot_be_understood_is_left_out(broken: dict[str, Any]) -> None:
    assert isinstance(read_signatures(broken), dict)
    assert group(broken)


def test_the_type_of_an_input_is_that_of_its_wires_and_not_of_its_widget() -> None:
    info = described({"value": ["FLOAT,INT", {"widgetType": "FLOAT"}]})
    assert read_signatures(info)["X"].inputs["value"].kind == "FLOAT,INT"
