"""Credits while everything is killed: `make chaos` has the long form."""

from __future__ import annotations

import pytest
from chaos.plan import QUICK, play
from tests.servers.postgres_server import CannotStart

SEED = 7

# Its processes want the machine for themselves.
pytestmark = [pytest.mark.xdist_group("chaos"), pytest.mark.timeout(300)]


def test_every_hold_is_settled_once_as_its_job_ended_whatever_was_killed() -> None:
    try:
        entry = play("credits", QUICK["credits"], SEED, lambda _: None)
    except CannotStart as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    assert entry.wrong == (), "\n".join(entry.wrong)
    assert entry.is_clean
    assert entry.kills == {"engine": 2, "worker": 2, "server": 1, "pool": 2}
    assert entry.consumed > 0 and entry.refunded > 0
    assert entry.consumed + entry.refunded >= 150
