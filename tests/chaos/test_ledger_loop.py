"""Credits while everything is killed: `make chaos` has the long form."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from chaos.callers import result_of
from chaos.ledger_loop import _wrong
from chaos.made import made_from
from chaos.plan import QUICK, play
from tests.servers.postgres_server import CannotStart

from comfyfleet.model.dispatch import Phase
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.testing.contract.ledger_driver import LedgerDriver

SEED = 7

# Its processes want the machine for themselves.
pytestmark = pytest.mark.xdist_group("chaos")


async def test_a_book_whose_result_was_made_from_another_payload_is_noticed(tmp_path: Path) -> None:
    own, another = ({"1": {"inputs": {"nonce": name}}} for name in ("own", "another"))
    database = open_tenant_database(f"sqlite:///{tmp_path}/tenants.db")
    await database.open()
    teller = LedgerDriver(database)
    hold = await teller.submit(0)
    ending = teller.ending(hold, Phase.COMPLETED)
    ending = msgspec.structs.replace(ending, changes={"result": result_of("e1", own)})
    await database.end_round(ending)
    ledger = await database.ledger(hold.tenant)
    for told, is_wrong in ((own, False), (another, True)):
        found = await _wrong(ledger, database, {hold.hold_id.job_id: ("e1", made_from(told))})
        assert any("its book says" in each for each in found) is is_wrong
    await database.close()


def test_every_hold_is_settled_once_as_its_job_ended_whatever_was_killed() -> None:
    try:
        entry = play("credits", QUICK["credits"], SEED, lambda _: None)
    except CannotStart as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    assert entry.wrong == (), "\n".join(entry.wrong)
    assert entry.is_clean
    assert entry.kills == {"engine": 2, "worker": 2, "server": 1, "database": 2}
    assert entry.consumed > 0 and entry.refunded > 0
    assert entry.consumed + entry.refunded >= 150
