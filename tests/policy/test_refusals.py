"""Whose word a refusal is: that of the graph, of one server, or of all servers like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comfyfleet.model.failure import Failure, FailureKind, bounded
from comfyfleet.model.ids import ProfileKey, WorkerId
from comfyfleet.model.node_classes import read_signatures
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.policy.acceptance import (
    applies_to_signature,
    concerns_structure,
    is_refusal,
    signature_for,
    without_signatures,
)
from comfyfleet.policy.feasibility import is_feasible, misses

_TRACES = Path(__file__).resolve().parents[1] / "data" / "comfyui_traces"
A = WorkerId("a")


def said(*types: str, kind: FailureKind = FailureKind.INVALID_WORKFLOW) -> Failure:
    errors = [
        {"type": each, "message": "", "details": "", "extra_info": {"input_name": "mode"}} for each in types
    ]
    entry = {"errors": errors, "dependent_outputs": ["2"], "class_type": "KSampler"}
    return Failure(kind, "no", node_errors={"1": entry} if types else None)


def recorded() -> list[dict[str, Any]]:
    """What real servers of 0.3.64 and 0.7.0 answered to prompts that the other one accepts."""
    lines = map(
        json.loads, (_TRACES / "26-refusals-that-depend-on-the-version.jsonl").read_text().splitlines()
    )
    return [line["body"]["node_errors"] for line in lines if line.get("status") == 400]


def server(signature: str | None) -> Capabilities:
    return Capabilities((Service("comfyui", signature=signature),))


def record(signature: str | None) -> WorkerRecord:
    return WorkerRecord(A, server(signature), ProfileKey("profile"), 1, 0.0, 0.0)


def test_recorded_refusals_of_one_version_are_no_verdict_on_the_graph() -> None:
    bodies = recorded()
    assert len(bodies) == 2
    for errors in bodies:
        assert is_refusal(Failure(FailureKind.INVALID_WORKFLOW, "no", node_errors=errors))


@pytest.mark.parametrize("types", [(), ("dependency_cycle",), ("value_not_in_list", "dependency_cycle")])
def test_a_graph_that_every_server_refuses_is_no_matter_of_the_server(types: tuple[str, ...]) -> None:
    assert not is_refusal(said(*types))


def test_what_our_own_check_found_is_no_servers_refusal() -> None:
    entry = {"errors": [{"type": "required_input_missing"}], "dependent_outputs": [], "class_type": "X"}
    assert not is_refusal(Failure(FailureKind.INVALID_WORKFLOW, "no", node_errors={"1": entry}))


def test_a_missing_file_is_the_callers_to_bring() -> None:
    assert not is_refusal(said("custom_validation_failed", kind=FailureKind.MISSING_INPUT))


@pytest.mark.parametrize(
    ("types", "is_structural", "speaks"),
    [
        (("required_input_missing",), True, True),
        (("return_type_mismatch", "required_input_missing"), True, True),
        (("value_bigger_than_max", "required_input_missing"), False, True),
        (("value_not_in_list",), False, False),
        (("exception_during_validation",), False, False),
        (("custom_validation_failed",), False, False),
    ],
)
def test_how_far_a_refusal_reaches(types: tuple[str, ...], is_structural: bool, speaks: bool) -> None:
    assert is_refusal(said(*types))
    assert concerns_structure(said(*types)) is is_structural
    assert applies_to_signature(said(*types), None) is speaks


@pytest.mark.parametrize(
    ("module", "choices", "kind", "speaks"),
    [
        ("nodes", ["euler", "heun"], "value_not_in_list", True),
        ("nodes", ["a.safetensors"], "value_not_in_list", False),
        ("custom_nodes.mine", ["euler"], "value_not_in_list", False),
        ("nodes", ["euler"], "exception_during_inner_validation", True),
        ("custom_nodes.mine", ["euler"], "exception_during_inner_validation", False),
        ("nodes", ["euler"], "custom_validation_failed", False),
        ("custom_nodes.mine", ["euler"], "required_input_missing", True),
    ],
)
def test_a_refusal_speaks_for_equal_servers_where_its_reason_is_part_of_the_signature(
    module: str, choices: list[str], kind: str, speaks: bool
) -> None:
    described = {"input": {"required": {"mode": [choices]}}, "python_module": module}
    assert applies_to_signature(said(kind), read_signatures({"KSampler": described})) is speaks


def test_a_class_without_a_signature_goes_past_every_server_that_has_it() -> None:
    anywhere = RequirementClass(Requirements())
    assert signature_for(anywhere, record("old")) == "old"
    refusing = frozenset({"old"})
    cls = without_signatures(anywhere, refusing)
    assert not is_feasible(cls, A, server("old"))
    assert "do not accept this workflow" in misses(cls, A, server("old"))[0].reason
    assert is_feasible(cls, A, server("new"))
    assert is_feasible(cls, A, server(None)), "what is not known is found out by trying"
    assert without_signatures(cls, refusing) is cls


def test_node_errors_with_long_lists_of_choices_keep_what_was_refused() -> None:
    info = {"input_name": "lora", "input_config": [[f"style {number}" for number in range(20_000)], {}]}
    error = {"type": "value_not_in_list", "message": "", "details": "", "extra_info": info}
    entry = {"errors": [error], "dependent_outputs": ["2"], "class_type": "Styles"}
    kept = bounded(Failure(FailureKind.INVALID_WORKFLOW, "no", node_errors={"1": entry, "2": entry}))
    assert is_refusal(kept)
    assert kept.node_errors is not None
    assert kept.node_errors["2"]["errors"][0]["extra_info"] == {"input_name": "lora"}
