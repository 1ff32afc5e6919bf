"""Which servers would refuse a graph: only what ComfyUI certainly refuses, and only where live servers differ."""

from __future__ import annotations

from typing import Any

import pytest

from comfyfleet.model.node_classes import NodeSignatures, read_signatures
from comfyfleet.model.workflow_hash import hash_workflow
from comfyfleet.policy.acceptance import Differences, objections


def info(
    *,
    samplers: tuple[str, ...] = ("euler",),
    required: dict[str, Any] | None = None,
    output: str = "LATENT",
    module: str = "nodes",
) -> dict[str, Any]:
    return {
        "Sampler": {
            "input": {
                "required": {"sampler_name": [list(samplers)], **(required or {})},
                "optional": {"mask": ["MASK"]},
            },
            "output": [output],
            "python_module": module,
        },
        "Decode": {
            "input": {"required": {"samples": ["LATENT"]}},
            "output": ["IMAGE"],
            "python_module": "nodes",
        },
        "Save": {
            "input": {"required": {"images": ["IMAGE"], "prefix": ["STRING"]}},
            "output": [],
            "output_node": True,
            "python_module": "nodes",
        },
    }


def signatures(**how: Any) -> NodeSignatures:
    return read_signatures(info(**how))


def graph(**inputs: Any) -> dict[str, Any]:
    return {
        "1": {"class_type": "Sampler", "inputs": {"sampler_name": "euler", **inputs}},
        "2": {"class_type": "Decode", "inputs": {"samples": ["1", 0]}},
        "3": {"class_type": "Save", "inputs": {"images": ["2", 0], "prefix": "x"}},
    }


def reasons(workflow: dict[str, Any], **how: Any) -> list[str]:
    return [each.reason for each in objections(workflow, signatures(**how))]


def test_a_graph_that_fits_has_no_objections() -> None:
    assert reasons(graph()) == []
    assert reasons(graph(mask=["9", 0], more=1)) == []


def test_a_required_input_that_is_missing_and_a_choice_that_is_not_listed_are_objections() -> None:
    assert reasons(graph(), required={"steps": ["INT", {}]}) == ["requires the input 'steps'"]
    assert reasons(graph(sampler_name="heun")) == ["does not list 'heun' for 'sampler_name'"]


def test_a_wire_of_another_type_or_from_an_output_that_is_not_there_is_an_objection() -> None:
    assert reasons(graph(), output="NOISE") == ["does not accept the link to 'samples'"]
    wrong = graph()
    wrong["2"]["inputs"]["samples"] = ["1", 3]
    assert reasons(wrong) == ["does not accept the link to 'samples'"]


@pytest.mark.parametrize("output", ["*", "LATENT,NOISE", "COMFY_MATCHTYPE_V3", "COMBO"])
def test_types_that_may_fit_are_left_to_the_server(output: str) -> None:
    assert reasons(graph(), output=output) == []


def test_a_custom_class_may_check_its_values_and_wires_by_itself() -> None:
    assert reasons(graph(sampler_name="heun"), module="custom_nodes.x", output="NOISE") == []
    assert reasons(graph(), module="custom_nodes.x", required={"steps": ["INT"]}) == [
        "requires the input 'steps'"
    ]


def test_inputs_under_names_of_their_own_are_not_missed() -> None:
    assert reasons(graph(), required={"images": ["COMFY_AUTOGROW_V3", {}]}) == []


def test_a_value_that_is_wired_or_wrapped_is_left_to_the_server() -> None:
    assert reasons(graph(sampler_name=["2", 0])) == []
    assert reasons(graph(sampler_name={"__value__": ["heun"]})) == []


def test_nodes_that_no_output_depends_on_are_not_checked_by_servers() -> None:
    orphan = {**graph(), "4": {"class_type": "Sampler", "inputs": {"sampler_name": "heun"}}}
    assert reasons(orphan) == []


def test_only_the_signatures_that_refuse_are_named() -> None:
    found = Differences(
        {"old": signatures(), "new": signatures(samplers=("euler", "heun"), required={"steps": ["INT"]})}
    )
    assert found.classes == {"Sampler"}
    assert found.refusing(graph()) == {"new"}
    assert found.refusing(graph(steps=4)) == frozenset()
    assert found.refusing(graph(steps=4, sampler_name="heun")) == {"old"}
    assert found.refusing(graph(sampler_name="heun")) == {"old", "new"}
    assert found.refusing(graph()) == {"new"}, "remembered"


def test_equal_servers_leave_nothing_to_choose() -> None:
    found = Differences({"one": signatures(), "two": signatures()})
    assert found.classes == frozenset()
    assert found.refusing(graph(sampler_name="heun")) == frozenset()


def test_a_class_that_differs_and_is_not_used_matters_to_nobody() -> None:
    other = {**signatures(), "Decode": signatures(output="NOISE")["Sampler"]}
    found = Differences({"one": signatures(), "two": other})
    used = {"1": graph()["1"], "3": {"class_type": "Save", "inputs": {"prefix": "x"}}}
    assert found.refusing(used) == frozenset()


def test_a_source_that_differs_is_noticed_at_its_wire() -> None:
    found = Differences({"one": signatures(), "two": signatures(output="NOISE")})
    assert found.refusing(graph()) == {"two"}


def test_of_graphs_with_a_lot_of_text_or_nodes_no_more_is_remembered_than_of_others() -> None:
    found = Differences({"old": signatures(), "new": signatures(samplers=("euler", "heun"))})
    long = "x" * 1_000_000
    assert found.refusing(graph(sampler_name=long)) == {"old", "new"}
    assert found.refusing(graph(sampler_name="heun")) == {"old"}
    many: dict[str, Any] = {"save": {"class_type": "Save", "inputs": {"prefix": "x"}}}
    for number in range(300):
        many[str(number)] = {"class_type": "Sampler", "inputs": {"sampler_name": "heun"}}
        many["save"]["inputs"][f"images{number}"] = [str(number), 0]
    many["save"]["inputs"]["images"] = ["0", 0]
    assert "old" in found.refusing(many)
    assert {len(key) for key in found._remembered} == {32}


def two(first: str, second: str, used: str = "1") -> dict[str, Any]:
    """Two samplers, of which one is used. Which one, and which has which value, is not told by the workflow's hash."""
    return {
        "1": {"class_type": "Sampler", "inputs": {"sampler_name": first}},
        "2": {"class_type": "Sampler", "inputs": {"sampler_name": second}},
        "3": {"class_type": "Decode", "inputs": {"samples": [used, 0]}},
        "4": {"class_type": "Save", "inputs": {"images": ["3", 0], "prefix": "x"}},
    }


@pytest.mark.parametrize("first", [0, 1])
def test_one_graph_is_not_judged_by_another_of_the_same_workflow_hash(first: int) -> None:
    found = Differences({"old": signatures(), "new": signatures(samplers=("euler", "heun"))})
    graphs = [(two("euler", "heun"), set()), (two("euler", "heun", used="2"), {"old"})]
    assert len({hash_workflow(each) for each, _ in graphs}) == 1
    for each, refusing in (graphs[first], graphs[1 - first]):
        assert found.refusing(each) == refusing
