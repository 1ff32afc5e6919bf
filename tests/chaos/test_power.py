"""Power that goes takes nothing with it that was acknowledged; and a cut that does take something is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.plan import QUICK, play

from chaos import power

SEED = 7

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.parametrize("part", ["power-sqlite", "power-redis"])
def test_every_cut_after_the_last_acknowledged_commit_reopens_with_every_job(part: str) -> None:
    entry = play(part, QUICK[part], SEED, lambda _: None)
    assert entry.wrong == ()
    assert entry.is_clean
    assert entry.cuts > 5
    assert entry.jobs >= 30


# Where commits are small, all jobs may stand in the first third of SQLite's log; the first of Redis' is its library.
@pytest.mark.parametrize(("kind", "part"), [("sqlite", 20), ("redis", 3)])
def test_a_cut_into_what_was_acknowledged_is_noticed(
    kind: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: cut early in the log instead of behind it, jobs are gone."""

    def too_early(log: Path, _start: int, _kind: str, _most: int) -> list[int]:
        return [log.stat().st_size // part]

    monkeypatch.setattr(power, "_points", too_early)
    entry = play(f"power-{kind}", QUICK[f"power-{kind}"], SEED, lambda _: None)
    assert entry.lost > 0
    assert not entry.is_clean
