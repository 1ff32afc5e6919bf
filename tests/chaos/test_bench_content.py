"""A bench in which a job ran with another job's content ends, and says which."""

from __future__ import annotations

import pytest
from bench._content import Mixed, check_content


def test_what_ran_as_it_was_submitted_is_counted() -> None:
    assert check_content({"a": 1, "b": 2}, [("b", 2), ("a", 1), ("a", 1)]) == 3


@pytest.mark.parametrize("ran", [("b", 1), ("c", 1)])
def test_a_job_that_ran_with_another_jobs_content_or_that_nobody_submitted_is_named(
    ran: tuple[str, int],
) -> None:
    with pytest.raises(Mixed, match=f"job {ran[0]} "):
        check_content({"a": 1, "b": 2}, [("a", 1), ran])
