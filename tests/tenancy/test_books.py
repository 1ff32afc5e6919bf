"""Random days of a tenant database, beside a book kept in memory: every invariant holds after every step.

Tenants are new in each day, so one database serves all of them. Submits and ends come twice at the same instant, over
two connections; a process dies in the middle of a transaction; copies of events come late.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests._examples import examples
from tests.tenancy._databases import tenant_schema

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import TenantId
from comfyfleet.model.ledger import Account, Hold, HoldId
from comfyfleet.policy import accounting
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import PostingResult
from comfyfleet.testing.contract.ledger_driver import LedgerDriver

_Answer = TypeVar("_Answer")

which = st.integers(0, 1)
pick = st.integers(0, 50)
amounts = st.integers(0, 120)
phases = st.sampled_from([Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED])


class Days:
    """The databases and the loop that all days share."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runner = asyncio.Runner()
        self.numbers = itertools.count()
        self.databases = [self.opened(), self.opened()]

    def opened(self) -> TenantDatabase:
        async def connect() -> TenantDatabase:
            database = open_tenant_database(self.url)
            await database.open()
            return database

        return self.runner.run(connect())

    def close(self) -> None:
        for each in self.databases:
            self.runner.run(each.close())
        self.runner.close()


class Day(RuleBasedStateMachine):
    days: Days

    @initialize()
    def begin(self) -> None:
        number = next(self.days.numbers)
        self.tenants = [TenantId(f"ann-{number}"), TenantId(f"bob-{number}")]
        self.tellers = [
            LedgerDriver(each, f"day-{number}-{which}") for which, each in enumerate(self.days.databases)
        ]
        self.balance = dict.fromkeys(self.tenants, 0)
        self.pending: dict[str, tuple[TenantId, int]] = {}
        self.open: dict[HoldId, Hold] = {}
        self.ended: dict[HoldId, tuple[Hold, Phase, int]] = {}

    def run(self, work: Awaitable[_Answer]) -> _Answer:
        async def awaited() -> _Answer:
            return await work

        return self.days.runner.run(awaited())

    def available(self, tenant: TenantId) -> int:
        return self.balance[tenant] - sum(each.amount for each in self.open.values() if each.tenant == tenant)

    def chosen(self, holds: dict[HoldId, Any], number: int) -> Any:
        return list(holds.values())[number % len(holds)] if holds else None

    # credits

    @rule(tenant=which, amount=st.integers(1, 200))
    def grant(self, tenant: int, amount: int) -> None:
        assert self.run(self.tellers[0].grant(amount, self.tenants[tenant])) is PostingResult.DONE
        self.balance[self.tenants[tenant]] += amount

    @rule(tenant=which, amount=st.integers(1, 200))
    def promise(self, tenant: int, amount: int) -> None:
        name = str(self.tellers[0].new_name())
        pending = accounting.grant(name, self.tenants[tenant], amount, 1.0, is_pending=True)
        assert self.run(self.tellers[0].database.grant(pending, None)) is PostingResult.DONE
        self.pending[name] = (self.tenants[tenant], amount)

    @rule(number=pick, is_paid=st.booleans())
    def decide(self, number: int, is_paid: bool) -> None:
        if not self.pending:
            return
        name = list(self.pending)[number % len(self.pending)]
        tenant, amount = self.pending.pop(name)
        database = self.tellers[0].database
        if is_paid:
            posting = accounting.posting_of(accounting.grant(name, tenant, amount, 2.0))
            assert self.run(database.confirm(posting)) is PostingResult.DONE
            assert self.run(database.confirm(posting)) is PostingResult.KNOWN
            self.balance[tenant] += amount
        else:
            assert self.run(database.void(tenant, name)) is PostingResult.DONE

    @rule(tenant=which, amount=st.integers(-100, 100).filter(bool))
    def correct(self, tenant: int, amount: int) -> None:
        name = self.tenants[tenant]
        posting = accounting.posting_of(
            accounting.adjust(self.tellers[0].new_name(), name, amount, 3.0, "why")
        )
        is_covered = self.available(name) + amount >= 0
        outcome = self.run(self.tellers[0].database.adjust(posting))
        assert outcome is (PostingResult.DONE if is_covered else PostingResult.SHORT)
        self.balance[name] += amount if is_covered else 0

    # rounds

    @rule(tenant=which, amount=amounts)
    def submit(self, tenant: int, amount: int) -> None:
        opening = self.tellers[0].opening(amount, self.tenants[tenant])
        is_covered = amount <= self.available(self.tenants[tenant])
        for outcome in (
            (PostingResult.DONE, PostingResult.KNOWN)
            if is_covered
            else (PostingResult.SHORT, PostingResult.SHORT)
        ):
            assert self.run(self.tellers[0].database.open_round(opening)).outcome is outcome
        if is_covered:
            self.open[opening.hold.hold_id] = opening.hold

    @rule(tenant=which, first=amounts, second=amounts)
    def submit_at_the_same_instant(self, tenant: int, first: int, second: int) -> None:
        name, before = self.tenants[tenant], self.available(self.tenants[tenant])
        openings = [
            driver.opening(amount, name) for driver, amount in zip(self.tellers, (first, second), strict=True)
        ]

        async def both() -> list[PostingResult]:
            answers = await asyncio.gather(
                *(
                    driver.database.open_round(opening)
                    for driver, opening in zip(self.tellers, openings, strict=True)
                )
            )
            return [each.outcome for each in answers]

        accepted = []
        for opening, outcome in zip(openings, self.run(both()), strict=True):
            if outcome is PostingResult.DONE:
                self.open[opening.hold.hold_id] = opening.hold
                accepted.append(opening.hold.amount)
            else:
                assert outcome is PostingResult.SHORT
        assert sum(accepted) <= before
        assert len(accepted) == 2 or first + second > before, "both fit, and one was refused"
        assert accepted or min(first, second) > before, "one fits, and none was accepted"

    @rule(tenant=which, amount=amounts, waits=st.integers(0, 12))
    def die_while_submitting(self, tenant: int, amount: int, waits: int) -> None:
        opening = self.tellers[0].opening(amount, self.tenants[tenant])

        async def given_up() -> bool:
            submitting = asyncio.ensure_future(self.tellers[0].database.open_round(opening))
            for _ in range(waits):
                await asyncio.sleep(0)
            submitting.cancel()
            await asyncio.gather(submitting, return_exceptions=True)
            return await self.tellers[0].database.get(opening.job.job_id) is not None

        if self.run(given_up()):
            self.open[opening.hold.hold_id] = opening.hold

    @rule(number=pick, phase=phases, cost=amounts, is_raced=st.booleans())
    def end(self, number: int, phase: Phase, cost: int, is_raced: bool) -> None:
        hold: Hold | None = self.chosen(self.open, number)
        if hold is None:
            return

        async def told() -> list[PostingResult]:
            tellers = self.tellers if is_raced else self.tellers[:1]
            answers = await asyncio.gather(
                *(
                    driver.end(hold, phase, cost, f"{which} {hold.hold_id}")
                    for which, driver in enumerate(tellers)
                )
            )
            return sorted(each.outcome for each in answers)

        assert self.run(told()) == [PostingResult.DONE, PostingResult.KNOWN][: 1 + is_raced]
        del self.open[hold.hold_id]
        taken = min(cost, hold.amount) if phase is Phase.COMPLETED else 0
        self.balance[hold.tenant] -= taken
        self.ended[hold.hold_id] = (hold, phase, taken)

    @rule(number=pick, phase=phases, cost=amounts, copy=which)
    def tell_late(self, number: int, phase: Phase, cost: int, copy: int) -> None:
        if (found := self.chosen(self.ended, number)) is None:
            return
        hold, _, taken = found
        answer = self.run(self.tellers[copy].end(hold, phase, cost, f"{copy} {hold.hold_id}"))
        assert answer.outcome is PostingResult.KNOWN
        assert answer.settlement is not None and answer.settlement.consumed == taken

    @rule(number=pick)
    def retry(self, number: int) -> None:
        if (found := self.chosen(self.ended, number)) is None:
            return
        hold, phase, _ = found
        following = HoldId(hold.hold_id.job_id, hold.hold_id.round + 1)
        outcome = self.run(self.tellers[0].retry(hold)).outcome
        if following in self.open or following in self.ended:
            assert outcome is PostingResult.KNOWN
        elif phase is Phase.COMPLETED:
            assert outcome is PostingResult.REFUSED
        elif hold.amount > self.available(hold.tenant):
            assert outcome is PostingResult.SHORT
        else:
            assert outcome is PostingResult.DONE
            self.open[following] = Hold(following, hold.tenant, hold.amount, 2.0)

    @rule(number=pick, is_sent=st.booleans())
    def relay(self, number: int, is_sent: bool) -> None:
        if (hold := self.chosen(self.open, number)) is not None:
            database = self.tellers[0].database
            assert self.run((database.mark_sent if is_sent else database.send_again)(hold.hold_id))
        if (found := self.chosen(self.ended, number)) is not None:
            assert not self.run(self.tellers[0].database.send_again(found[0].hold_id))

    @rule()
    def start_anew(self) -> None:
        self.run(self.days.databases[0].close())
        self.days.databases[0] = self.tellers[0].database = self.days.opened()

    @invariant()
    def every_book_is_right(self) -> None:
        for tenant in self.tenants:
            ledger = self.run(self.tellers[1].database.ledger(tenant))
            assert accounting.problems(ledger) == []
            held = sum(each.amount for each in self.open.values() if each.tenant == tenant)
            pending = sum(amount for name, amount in self.pending.values() if name == tenant)
            assert ledger.account == Account(tenant, self.balance[tenant], held, pending)

    @invariant()
    def what_is_open_is_open_and_nothing_else(self) -> None:
        for hold_id in [*self.open, *self.ended]:
            assert self.run(self.tellers[1].is_open(hold_id)) == (hold_id in self.open)


@contextmanager
def days_of(url: str) -> Iterator[type[Day]]:
    days = Days(url)
    try:
        yield type("ThisDay", (Day,), {"days": days})
    finally:
        days.close()


# Thirty days of single commits: on a busy machine they take their time.
@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_every_invariant_holds_after_every_step_of_any_day(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path / 'tenants.db'}" if kind == "sqlite" else tenant_schema(request.config)
    with days_of(url) as day:
        run_state_machine_as_test(day, settings=settings(max_examples=examples(30), stateful_step_count=25))
