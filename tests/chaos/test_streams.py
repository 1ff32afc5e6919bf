"""A few hundred streams at two hubs on each store that hubs can share, with some milliseconds to it; `make chaos` has
ten thousand. And the checker is shown streams with each thing wrong."""

from __future__ import annotations

import pytest
from chaos.plan import QUICK, play
from chaos.stream_checker import Ended, Streamed, check_streams
from tests.servers.postgres_server import CannotStart


@pytest.mark.xdist_group("chaos")
def test_every_stream_ends_with_its_job_and_with_what_came_of_it() -> None:
    try:
        entry = play("streams", QUICK["streams"], 7, lambda _: None)
    except CannotStart as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    assert entry.wrong == ()
    assert entry.is_clean
    assert entry.streams >= 300


def test_a_stream_that_ends_with_its_own_result_or_failure_is_right() -> None:
    found = check_streams(
        {"a": "made of a"},
        [Streamed("a", Ended("failed", 1, "made of a")), Streamed("a", Ended("completed", 2, "made of a"))],
    )
    assert (found.jobs, found.streams, found.open, found.without, found.wrong) == (1, 2, 0, 0, ())


@pytest.mark.parametrize(
    ("ended", "open_", "without", "words"),
    [
        (None, 1, 0, "still open"),
        (Ended("completed", 1), 0, 1, "with nothing"),
        (Ended("failed", 1), 0, 1, "with nothing"),
        (Ended("completed", 1, "made of b"), 0, 1, "another job's result"),
        (Ended("no end after ['queued']"), 0, 1, "no end"),
        (Ended("answered 404"), 0, 1, "answered 404"),
    ],
)
def test_a_stream_that_is_wrong_is_found(ended: Ended | None, open_: int, without: int, words: str) -> None:
    found = check_streams({"a": "made of a", "b": "made of b"}, [Streamed("a", ended)])
    assert (found.open, found.without) == (open_, without)
    assert words in found.wrong[0]
