"""Payloads as values: identity, drawn seeds, and services that nobody can read."""

from __future__ import annotations

from typing import Any

import pytest

from comfyfleet.model.payload import OpaqueFormat, payload_hash, with_drawn_seeds
from comfyfleet.model.workflow_graph import InvalidWorkflow


def test_the_identity_belongs_to_a_service() -> None:
    assert payload_hash("a", {"x": 1}) == payload_hash("a", {"x": 1.0})
    assert payload_hash("a", {"x": 1}) != payload_hash("b", {"x": 1})


def test_drawn_seeds_are_put_into_a_copy() -> None:
    payload: dict[str, Any] = {"seed": -1, "body": {"seed": -1, "deep": {"seed": -1}, "prompt": "x"}}
    changed = with_drawn_seeds(payload, {"seed": 1, "body.seed": 2, "body.deep.seed": 3, "gone.seed": 4})
    assert changed == {"seed": 1, "body": {"seed": 2, "deep": {"seed": 3}, "prompt": "x"}}
    assert payload == {"seed": -1, "body": {"seed": -1, "deep": {"seed": -1}, "prompt": "x"}}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"a": "x"}, {"a": "y"}, True),
        ({"a": 1}, {"a": 2.5}, True),
        ({"a": ["x"]}, {"a": ["y", "z"]}, True),
        ({"a": "x"}, {"b": "x"}, False),
        ({"a": "x"}, {"a": 1}, False),
        ({"a": True}, {"a": 1}, False),
        ({"a": None}, {"a": "null"}, False),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, False),
        ({"a": [{"b": 1}]}, {"a": [1]}, False),
    ],
)
def test_a_payload_that_nobody_reads_is_known_by_its_keys_and_types(
    one: dict[str, Any], other: dict[str, Any], is_same: bool
) -> None:
    read = OpaqueFormat("own").read
    assert (read(one).workflow_hash == read(other).workflow_hash) is is_same
    assert read(one).inputs is None


@pytest.mark.parametrize("value", [float("nan"), "\ud800", object()])
def test_what_is_not_json_is_refused_with_its_field(value: object) -> None:
    with pytest.raises(InvalidWorkflow, match="The field 'a' of the payload is not JSON"):
        OpaqueFormat("own").read({"a": value})


def test_a_payload_nested_without_end_is_refused() -> None:
    deep: Any = 1
    for _ in range(10_000):
        deep = {"a": deep}
    with pytest.raises(InvalidWorkflow, match="nested too deeply"):
        OpaqueFormat("own").read(deep)
