"""What is leased and downloaded was made from what its caller submitted: the checker finds what was not, and 2,000
leases are played in earnest. `make chaos` has 50,000, over every store, number of hubs and delay."""

from __future__ import annotations

import pytest
from chaos.content import Cell, Size, every_cell, run
from chaos.content_checker import Asked, Compared, Got, Leased, compare
from chaos.made import made_from
from tests.servers.postgres_server import CannotStart

SEED = 7
ANN, BOB = ({"1": {"class_type": "Chaos", "inputs": {"nonce": name}}} for name in ("ann", "bob"))
ASKED = (Asked("j1", "ann", made_from(ANN)), Asked("j2", "bob", made_from(BOB)))
LEASED = (Leased("j1", made_from(ANN)), Leased("j2", made_from(BOB)))
GOT = (Got("j1", "result", made_from(ANN)), Got("j2", "result", made_from(BOB)))


def test_each_job_with_its_own_payload_and_output_is_clean() -> None:
    assert compare(ASKED, LEASED, GOT) == Compared(jobs=2, leases=2, outputs=2)


def test_a_lease_with_the_payload_of_another_tenants_job_is_mixed() -> None:
    found = compare(ASKED, (LEASED[0], Leased("j2", made_from(ANN))), GOT)
    assert (found.mixed, found.across_tenants, found.foreign) == (1, 1, 0)
    assert found.wrong == ("the lease of j2 carried another payload: that of j1 of ann",)


def test_a_lease_with_a_payload_that_nobody_submitted_is_mixed() -> None:
    found = compare(ASKED, (*LEASED, Leased("j1", made_from({}))), GOT)
    assert (found.mixed, found.across_tenants) == (1, 0)


@pytest.mark.parametrize("name", ["result", "file"])
def test_a_download_that_was_made_from_another_jobs_payload_is_found(name: str) -> None:
    found = compare(ASKED, LEASED, (*GOT, Got("j2", name, made_from(ANN))))
    assert found.foreign == 1
    words = f"the {name} of j2 was not made from what its caller submitted: {made_from(ANN)}"
    assert found.wrong == (words,)


def test_a_job_of_which_nothing_was_downloaded_is_lost() -> None:
    found = compare(ASKED, LEASED, GOT[:1])
    assert (found.lost, found.wrong) == (1, ("nothing could be downloaded of j2",))


def test_the_cells_are_every_store_with_every_number_of_hubs_and_delay_that_it_can_have() -> None:
    cells = every_cell(50_000)
    assert sum(cell.leases for cell in cells) >= 50_000
    assert len(cells) == 14
    assert {(cell.hubs, cell.delay_ms) for cell in cells if cell.store == "postgres"} == {
        (hubs, delay) for hubs in (1, 2) for delay in (0, 2, 5)
    }


# Hubs, a store and a dozen tenants, on a machine that others use too.
@pytest.mark.xdist_group("chaos")
@pytest.mark.parametrize(
    "cell",
    [
        Cell("memory", 1, 0, 400),
        Cell("sqlite", 1, 0, 500),
        Cell("redis", 2, 2, 800),
        Cell("postgres", 2, 2, 300),
    ],
    ids=lambda cell: cell.store,
)
def test_no_lease_carries_and_no_caller_downloads_what_is_another_jobs(cell: Cell) -> None:
    try:
        found = run(Size((cell,)), SEED, lambda _: None)
    except CannotStart as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    assert found.wrong == ()
    assert found.whole.leases >= cell.leases
    assert found.whole.outputs > found.whole.jobs >= 0.9 * cell.leases, "most leases end in a download"
