"""Two hubs do the same thing, and one is held up between any two of its calls while the other does it whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.tenancy._town import WORKERS, SharedMemory, Town

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import TenantId
from comfyfleet.tenancy import reconciler

MOMENTS = range(1, 16)
WHOLE = 100


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "LOOK_AGAIN_S", 0.0)


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    databases = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    town = Town(SharedMemory().opened, databases, 1)
    await town.begin()
    await town.grant(paying(town), 100)
    yield town
    await town.check()
    await town.come_to_rest()
    await town.check_at_rest()
    await town.end()


def paying(town: Town) -> TenantId:
    """Its jobs cost ten."""
    return town.tenants[0]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_job_that_two_hubs_retry_gets_one_more_round(town: Town, moment: int) -> None:
    await town.submit(town.hubs[0], paying(town))
    await town.take(town.hubs[0], WORKERS[0])
    await town.fail(town.hubs[0], 0, FailureKind.INVALID_WORKFLOW)
    await town.do_at_once([town.retry(hub, 0) for hub in town.hubs], [(0, moment), (1, WHOLE)])
    account = await town.book_of(paying(town)).account(paying(town))
    assert (account.balance, account.held) == (100, 10)


@pytest.mark.parametrize("moment", range(1, 22))
async def test_a_job_that_two_hubs_submit_under_one_reference_is_one_job(town: Town, moment: int) -> None:
    # The second has seen that the reference is new; then the first goes on.
    both = [town.submit(hub, paying(town), "order 7") for hub in town.hubs]
    await town.do_at_once(both, [(1, 3), (0, moment), (1, WHOLE)])
    assert len(town.taken) == 2 and len(set(town.taken)) == 1
    account = await town.book_of(paying(town)).account(paying(town))
    assert (account.balance, account.held) == (100, 10)


@pytest.mark.parametrize("moment", range(1, 22))
async def test_a_job_that_is_cancelled_while_it_is_submitted_stays_cancelled(town: Town, moment: int) -> None:
    both = [town.submit(town.hubs[0], paying(town)), town.cancel_the_next(town.hubs[1])]
    await town.do_at_once(both, [(0, moment), (1, WHOLE)])
    await town.check()
    dispatch = await town.central.load(town.taken[0])
    assert dispatch is not None
    # Where it could not be seen yet, there was nothing to cancel.
    account = await town.book_of(paying(town)).account(paying(town))
    assert account.held == (0 if dispatch.phase is Phase.CANCELLED else 10)


@pytest.mark.parametrize("moment", range(1, 10))
async def test_an_end_that_two_relays_find_is_settled_once(town: Town, moment: int) -> None:
    # More is held than this one: or the book would refuse to let go twice for want of it.
    for _ in range(2):
        await town.submit(town.hubs[0], paying(town))
    await town.take(town.hubs[0], WORKERS[0])
    # Its hub dies before T1.
    town.hubs[0].fate.arm(4, "crash", is_after=False)
    await town.do(town.complete(town.hubs[0], 0, 1))
    assert len(await town.central.unsettled(10)) == 1
    await town.do_at_once([town.relay(hub) for hub in town.hubs], [(0, moment), (1, WHOLE)])
    await town.check()
    account = await town.book_of(paying(town)).account(paying(town))
    assert (account.balance, account.held) == (90, 10)
