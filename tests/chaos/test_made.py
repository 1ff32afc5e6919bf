"""What was made from another graph shows itself, in a result, in a picture, in a file, and through any language."""

from __future__ import annotations

import json

import pytest
from chaos.callers import made_of, result_of
from chaos.made import file_made_from, graph_in, made_from
from chaos.watchers import picture_of
from PIL import Image
from tests.acceptance._process import picture_workflow

from comfyfleet.model.job import JobResult
from comfyfleet.testing.fake_comfyui import pictures

OWN, ANOTHER = picture_workflow("own"), picture_workflow("another's")


def test_what_is_made_from_another_graph_is_another_thing() -> None:
    assert made_from(OWN) == made_from(json.loads(json.dumps(OWN)))
    assert made_from(OWN) != made_from(ANOTHER)
    assert file_made_from(OWN) != file_made_from(ANOTHER)


def test_a_language_with_one_kind_of_number_makes_no_difference() -> None:
    assert made_from({"cfg": 7.0, "more": [0.5, 1.0]}) == made_from({"cfg": 7, "more": [0.5, 1]})
    assert made_from({"cfg": 7.0}) != made_from({"cfg": 7.5})


@pytest.mark.parametrize("graph", [OWN, ANOTHER])
def test_a_result_tells_what_it_was_made_from_whoever_made_it(graph: dict[str, object]) -> None:
    in_python = made_of(result_of("e1", graph))
    in_node = made_of(JobResult({"9": {"text": ["made by node"], "made_from": [graph]}}))
    assert in_python == in_node == made_from(graph)
    assert made_of(JobResult()) is made_of(None) is None


def test_a_picture_tells_the_graph_it_was_made_from() -> None:
    found = graph_in(pictures.png(Image.new("RGB", (8, 8)), {"prompt": json.dumps(ANOTHER)}))
    assert found == ANOTHER
    assert picture_of(found) == picture_of(ANOTHER) != picture_of(OWN)
    assert picture_of(graph_in(pictures.png(Image.new("RGB", (8, 8))))) != picture_of(OWN)
