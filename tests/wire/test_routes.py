"""The table of routes is whole, and the documents made from it say what it says."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from tests.wire._protocol_tables import body_table, page, problem_table

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.wire.openapi import document
from comfyfleet.wire.problems import KINDS, problem_response, refusal_in
from comfyfleet.wire.route import Route
from comfyfleet.wire.routes import ROUTES
from comfyfleet.wire.status_names import StatusDialect, parse_status, status_name

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_the_protocol_is_the_table() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    assert page(ROUTES) in text
    assert problem_table() in text
    assert body_table(ROUTES) in text
    for phase in (Phase.QUEUED, Phase.LEASED):
        row = " | ".join(
            status_name(phase, dialect)
            for dialect in (
                StatusDialect.REST,
                StatusDialect.POOL,
                StatusDialect.SOCKET,
                StatusDialect.BROKER,
            )
        )
        assert f"| {row} |" in text


def test_every_name_and_every_door_stands_in_the_table_once() -> None:
    names = [route.name for route in ROUTES]
    doors = [(route.method, path) for route in ROUTES for path in route.paths]
    assert len(set(names)) == len(names)
    assert len(set(doors)) == len(doors)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_route_says_what_it_answers_and_its_other_names_have_the_same_parts(route: Route) -> None:
    assert route.answers and route.summary and route.tag
    for path in route.paths:
        assert tuple(part[1:-1] for part in path.split("/") if part.startswith("{")) == route.parameters
    assert route.body is None or route.query is None


def test_every_refusal_has_one_status_and_comes_back_as_itself() -> None:
    assert KINDS.keys() == set(RefusalCode)
    for code in RefusalCode:
        answered = problem_response(Refusal(code, "why", missing=["a"]), "request")
        again = refusal_in(answered.status, msgspec.json.encode(answered.body))
        assert isinstance(again, Refusal)
        assert (again.code, again.message, again.details["missing"]) == (code, "why", ["a"])
        assert 400 <= answered.status <= 503


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"code": "unheard_of"}', b"\xff"])
def test_an_answer_that_is_no_problem_is_a_fault(body: bytes) -> None:
    assert isinstance(refusal_in(502, body), Fault)


@pytest.mark.parametrize("named", ["self", "message", "args", "details"])
def test_whatever_stands_beside_a_problem_it_is_read(named: str) -> None:
    again = refusal_in(503, msgspec.json.encode({"code": "unavailable", "detail": "why", named: 1}))
    assert isinstance(again, Refusal) and again.message == "why"


@pytest.mark.parametrize("said", ["soon", [], {}, True, -1, 1e400])
def test_a_time_to_wait_that_is_none_is_left_out(said: object) -> None:
    body = msgspec.json.encode({"code": "unavailable", "retry_after_s": said})
    again = refusal_in(503, body.replace(b"null", b"1e400"))
    assert not isinstance(again, Refusal) or "retry_after_s" not in again.details


def test_statuses_are_understood_from_every_dialect() -> None:
    for dialect, phase in itertools.product(StatusDialect, Phase):
        assert parse_status(status_name(phase, dialect)) is phase


def test_the_document_names_every_door_and_no_schema_is_missing() -> None:
    found = document(ROUTES, "1")
    text = msgspec.json.encode(found).decode()
    assert {route.path for route in ROUTES} == found["paths"].keys()
    for route in ROUTES:
        operation = found["paths"][route.path][route.method.lower()]
        assert tuple(operation.get("x-aliases", ())) == route.aliases
        assert all(f"`{alias}`" in operation["description"] for alias in route.aliases)
    assert found["openapi"] == "3.1.0"
    for name in found["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text
    enrol = found["paths"]["/api/worker/enrol"]["post"]["requestBody"]
    assert enrol["x-max-bytes"] == 4096 and "4 KiB" in enrol["description"]
    ids = [operation["operationId"] for methods in found["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
