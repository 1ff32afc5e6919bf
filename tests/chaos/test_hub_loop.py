"""A hub killed three times under load, and five thousand requests and frames that nobody should send: `make chaos` has
the long form of both."""

from __future__ import annotations

import pytest
from chaos.plan import QUICK, play

SEED = 7

# Twenty processes on a machine that others use too.
pytestmark = pytest.mark.xdist_group("chaos")


def test_a_hub_killed_under_load_loses_no_job_and_no_watcher_misses_a_change() -> None:
    entry = play("hub", QUICK["hub"], SEED, lambda _: None)
    assert entry.wrong == ()
    assert entry.is_clean
    assert entry.kills == {"hub": 3}
    # Two watchers, the caller and a last reader of each job, one more job for each worker to come back for.
    assert entry.streams == 4 * entry.jobs == 4 * 123
    assert entry.compared == 2 * entry.jobs, "each result and picture is compared with what was submitted"
    assert entry.returns > 0, "a kill that no watcher feels proves nothing"


def test_nothing_that_is_sent_makes_the_hub_fail_or_grow_and_it_works_afterwards() -> None:
    entry = play("fuzz", QUICK["fuzz"], SEED, lambda _: None)
    assert entry.wrong == ()
    assert entry.requests + entry.frames >= 5_000
    assert {"200", "201", "400", "401", "403", "404", "409", "413", "422"} <= entry.statuses.keys()
