"""The contract of payload formats: a pure reader with a stable hash, whose refusals name the field."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from comfyfleet.model.canonical_json import check_canonical
from comfyfleet.model.payload import PayloadFormat, PayloadReading
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.testing.contract.json_schema import accepts


class PayloadFormatContract:
    """Inherit it and set the class attributes.

    A payload format needs no server, so these tests need no scene.
    """

    payload_format: PayloadFormat
    same: Sequence[Mapping[str, Any]]
    """At least two payloads that do the same with other values: another text, another seed."""
    other: Sequence[Mapping[str, Any]]
    """Payloads that do something else, each another thing."""
    wrong: Sequence[tuple[str, Any]]
    """The name of a field, and a payload in which it is missing or wrong."""

    def test_there_is_something_to_check(self) -> None:
        assert len(self.same) >= 2 and self.other and self.wrong
        assert len({msgspec.json.encode(each, order="deterministic") for each in self.same}) == len(self.same)
        assert self.payload_format.service

    def test_reading_changes_nothing_and_always_has_the_same_result(self) -> None:
        for payload in (*self.same, *self.other):
            before = copy.deepcopy(dict(payload))
            first, second = self.payload_format.read(payload), self.payload_format.read(_reordered(payload))
            assert payload == before, "read changes the payload that it is given"
            assert first == second, "the order of the fields makes a difference"

    def test_what_was_read_is_read_again_at_the_worker_with_the_same_result(self) -> None:
        for payload in (*self.same, *self.other):
            first = self.payload_format.read(payload)
            stored = msgspec.json.decode(msgspec.json.encode(first.payload))
            assert stored == first.payload, "the payload is a JSON object"
            assert self.payload_format.read(stored) == first

    def test_the_hash_ignores_values_and_changes_with_what_is_done(self) -> None:
        hashes = {self._read(payload).workflow_hash for payload in self.same}
        assert len(hashes) == 1, "payloads that do the same have one hash"
        others = {self._read(payload).workflow_hash for payload in self.other}
        assert len(others) == len(self.other) and not hashes & others
        assert all(hashes)

    def test_needs_are_names(self) -> None:
        for payload in (*self.same, *self.other):
            reading = self._read(payload)
            for names in (reading.models, reading.node_classes):
                assert all(name.strip() for name in names)

    def test_the_paths_of_seeds_lead_to_values_that_ask_for_one(self) -> None:
        for payload in (*self.same, *self.other):
            reading = self._read(payload)
            for path in reading.seeds:
                assert _value_at(reading.payload, path) == -1, f"{path} does not ask for a seed"

    def test_wrong_payloads_are_refused_by_the_name_of_the_field(self) -> None:
        for field, payload in self.wrong:
            with pytest.raises(InvalidWorkflow) as refused:
                self.payload_format.read(payload)
            assert field in str(refused.value), f"{field!r} is not named in: {refused.value}"

    def test_no_nonsense_is_accepted_and_none_breaks_the_reader(self) -> None:
        deep: dict[str, Any] = {}
        for _ in range(5_000):
            deep = {"x": deep}
        for nonsense in ({"": None}, deep, {"\ud800": 1}, {"x": float("nan")}):
            with pytest.raises(InvalidWorkflow):
                self.payload_format.read(nonsense)
        payload = self.same[0]
        for name in payload:
            for value in (
                None,
                [],
                {},
                10**400,
                "",
                True,
                deep,
                [deep],
                float("inf"),
                "\ud800",
                {"x": {"y": float("nan")}},
            ):
                try:
                    reading = self.payload_format.read({**payload, name: value})
                except InvalidWorkflow as refused:
                    assert len(str(refused)) < 10_000
                else:
                    # NaN and the like would reach no store.
                    check_canonical(reading.payload)

    def test_the_schema_accepts_what_is_read(self) -> None:
        schema = self.payload_format.json_schema()
        msgspec.json.encode(schema)
        for payload in (*self.same, *self.other):
            problem = accepts(schema, payload)
            assert problem is None, problem
        refused = [field for field, payload in self.wrong if accepts(schema, payload) is not None]
        assert refused or not self.wrong, "the schema accepts every wrong payload, so it says nothing"

    def _read(self, payload: Mapping[str, Any]) -> PayloadReading:
        return self.payload_format.read(payload)


def _reordered(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _reordered(value[name]) for name in reversed(list(value))}
    return [_reordered(each) for each in value] if isinstance(value, list) else value


def _value_at(payload: Any, path: str) -> Any:
    for part in path.split("."):
        payload = payload[int(part)] if isinstance(payload, list) else payload[part]
    return payload
