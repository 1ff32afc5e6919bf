"""A short kill loop for each store: the same code as `make chaos` with small numbers, and the same zeros."""

from __future__ import annotations

import pytest
from chaos.kill_loop import Size
from chaos.plan import QUICK, play
from tests.servers.postgres_server import CannotStart

SEED = 7

# One after the other: each of them has the machine's processes for itself.
pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.parametrize("part", ["sqlite", "redis", "postgres", "direct-redis"])
def test_kills_lose_nothing_double_nothing_and_explain_every_second_execution(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Within the time of a test: a job that stands still is named by the checker, with the logs kept.
    monkeypatch.setattr("chaos.kill_loop.QUIET_WITHIN_S", 60.0)
    size = QUICK[part]
    assert isinstance(size, Size)
    try:
        entry = play(part, size, SEED, lambda _: None)
    except CannotStart as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    assert entry.wrong == ()
    assert entry.is_clean
    assert entry.jobs == size.jobs
    assert entry.kills.get("worker") == size.worker_kills
    assert entry.executions >= entry.jobs
    # As its caller saw it, and once more when all was quiet.
    assert entry.compared == 2 * entry.jobs, "each result is compared with what was submitted"


def test_nothing_a_zombie_reports_changes_anything() -> None:
    entry = play("zombies-sqlite", QUICK["zombies-sqlite"], SEED, lambda _: None)
    assert entry.wrong == ()
    assert entry.is_clean
    assert entry.zombies >= 4
    assert entry.stale_refused > 0
