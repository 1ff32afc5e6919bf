"""The same submission again: known by what was sent, however the fleet has changed, and by what it means."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.policy._editor import Editor

from comfyfleet.model.ids import JobId
from comfyfleet.model.job import JobInput, Submission
from comfyfleet.policy.admission import digest_of, is_repeat

GRAPH: dict[str, Any] = {"10": {"class_type": "LoadImage", "inputs": {"image": "x.png", "upload": "image"}}}
BROUGHT = JobInput("10", "image", "f_1")


def sent(**fields: Any) -> Submission:
    return Submission(fields.pop("workflow", GRAPH), **{"reference": "r", **fields})


def kept(submission: Submission, **found_out: Any) -> Submission:
    return msgspec.structs.replace(submission, sent=digest_of(submission), **found_out)


def editors() -> dict[str, Any]:
    editor = Editor()
    editor.node("EmptyImage", [64, 64, 1, 255])
    return editor.saved()


def test_only_what_is_not_kept_as_it_came_needs_a_digest() -> None:
    assert digest_of(sent()) is None
    assert digest_of(sent(inputs=(BROUGHT,), reference=None)) is None
    for submission in (sent(workflow=editors()), sent(inputs=(BROUGHT,)), sent(after=(JobId("one"),))):
        assert digest_of(submission) is not None


def test_what_was_found_out_about_a_submission_does_not_make_it_another() -> None:
    asked = sent(workflow=editors(), inputs=(BROUGHT,), after=(JobId("one"),))
    learned = msgspec.structs.replace(BROUGHT, sha256="aa", size=3)
    known = kept(asked, workflow=GRAPH, after=(JobId("01a1"),), inputs=(learned,))
    assert is_repeat(known, asked)
    assert is_repeat(known, msgspec.structs.replace(asked, inputs=(learned,), traceparent="another"))


@pytest.mark.parametrize(
    "changed",
    [{"priority": 1}, {"inputs": ()}, {"after": (JobId("two"),)}, {"metadata": {"a": 1}}, {"workflow": {}}],
)
def test_another_body_is_another_submission(changed: dict[str, Any]) -> None:
    asked = sent(workflow=editors(), inputs=(BROUGHT,), after=(JobId("one"),))
    known = kept(asked, workflow=GRAPH, after=(JobId("01a1"),))
    assert not is_repeat(known, msgspec.structs.replace(asked, **changed))


def test_the_order_of_names_in_what_was_sent_does_not_matter() -> None:
    workflow = editors()
    turned = dict(reversed(workflow.items()))
    assert list(turned) != list(workflow)
    assert digest_of(sent(workflow=turned)) == digest_of(sent(workflow=workflow))


def test_what_is_no_json_has_no_digest() -> None:
    assert digest_of(sent(inputs=(BROUGHT,), metadata={"a": object()})) is None
    assert digest_of(sent(inputs=(BROUGHT,), metadata={"a": "\ud800"})) is None
