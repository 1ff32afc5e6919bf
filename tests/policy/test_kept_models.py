"""What a server keeps beside the models of its last run, as its reports show it."""

from __future__ import annotations

import pytest

from comfyfleet.model.job import JobResult, NodeTiming
from comfyfleet.policy.demand import ModelSet
from comfyfleet.policy.kept_models import KeptModels, had_models
from comfyfleet.policy.run_times import RunReport

A, B, C, D = (frozenset({name}) for name in "abcd")


def after(*runs: tuple[ModelSet, bool | None]) -> KeptModels:
    kept = KeptModels()
    for models, had_them in runs:
        kept = kept.after_run(models, had_them)
    return kept


def test_a_server_keeps_the_models_of_its_last_run_until_it_shows_more() -> None:
    kept = after((A, False), (B, False), (C, False))
    assert (kept.loaded, kept.goes) == (C, None)
    assert after((A, False), (B, False), (A, False)).loaded == A


def test_models_that_an_earlier_run_left_show_how_much_is_kept() -> None:
    kept = after((A, False), (B, False), (A, True))
    assert (kept.loaded, kept.goes) == (A | B, B)
    assert after((A, False), (B, False), (C, False), (A, True)).loaded == A | B | C


def test_with_room_left_nothing_goes() -> None:
    kept = after((A, False), (B, False), (A, True))._replace(size=3)
    assert kept.goes == frozenset()


def test_models_that_were_gone_show_how_little_is_kept() -> None:
    kept = after((A, False), (B, False), (C, False), (A, True), (D, False), (B, False))
    # Of four sets B was the last, so three are kept.
    assert (kept.loaded, kept.goes) == (B | D | A, A)
    assert after((A, False), (B, False), (A, True), (B, False)).loaded == B


def test_a_report_that_does_not_say_teaches_nothing() -> None:
    assert after((A, False), (B, False), (A, None)).loaded == A


def test_what_runs_now_comes_first() -> None:
    kept = after((A, False), (B, False), (A, True)).while_running(C)
    assert (kept.loaded, kept.goes) == (C | A, A)


@pytest.mark.parametrize(
    ("timed", "cached", "expected"),
    [
        (("loader", "sampler"), (), False),
        (("sampler",), ("loader",), True),
        # The node that names the file is neither timed nor cached.
        (("sampler",), (), None),
        ((), ("loader",), None),
    ],
)
def test_a_report_says_whether_the_models_were_there(
    timed: tuple[str, ...], cached: tuple[str, ...], expected: bool | None
) -> None:
    result = JobResult(timings=tuple(NodeTiming(node, 0.0, 1.0) for node in timed), cached_nodes=cached)
    report = RunReport(3.0, result, {"loader": A}, frozenset({"sampler"}), A, 1.0, None)
    assert had_models(report, A) is expected
