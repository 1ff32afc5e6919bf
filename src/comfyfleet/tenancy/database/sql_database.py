"""A tenant database: jobs with payload and result, rounds with their outbox, the credit ledger.

One database can serve many tenants. It stores and guards what policy decides. Each method runs one SQL generator in a
transaction (`writing`), as a read (`reading`) or as reads of one moment (`snapshot`), and may be repeated. The
generator's module says what the method does; `docs/ledger.md` explains the steps S1 … T2. `sqlite/` and `postgres/`
provide the `SqlExecutor`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from comfyfleet.model.ids import TenantId
from comfyfleet.ports import DocumentStore
from comfyfleet.tenancy.database import ledger as credit_ledger
from comfyfleet.tenancy.database import reports, rounds, tenant_rows
from comfyfleet.tenancy.database.documents import TenantDocumentStore
from comfyfleet.tenancy.database.executor import SqlExecutor, Work
from comfyfleet.tenancy.database.values import PostingResult, RoundEnd, RoundEnded, RoundStart, RoundStarted

_P = ParamSpec("_P")
_Answer = TypeVar("_Answer")
Method = Callable[Concatenate["TenantDatabase", _P], Coroutine[Any, Any, _Answer]]


def reading(work: Callable[_P, Work[_Answer]]) -> Method[_P, _Answer]:
    async def method(self: TenantDatabase, /, *args: _P.args, **named: _P.kwargs) -> _Answer:
        return await self._executor.read(lambda: work(*args, **named))

    return method


def snapshot(work: Callable[_P, Work[_Answer]]) -> Method[_P, _Answer]:
    async def method(self: TenantDatabase, /, *args: _P.args, **named: _P.kwargs) -> _Answer:
        return await self._executor.snapshot(lambda: work(*args, **named))

    return method


def writing(work: Callable[_P, Work[_Answer]]) -> Method[_P, _Answer]:
    async def method(self: TenantDatabase, /, *args: _P.args, **named: _P.kwargs) -> _Answer:
        return await self._executor.transact(lambda: work(*args, **named))

    return method


def posting(work: Callable[_P, Work[PostingResult]]) -> Method[_P, PostingResult]:
    async def method(self: TenantDatabase, /, *args: _P.args, **named: _P.kwargs) -> PostingResult:
        try:
            return await self._executor.transact(lambda: work(*args, **named))
        except credit_ledger.RolledBack as answer:
            return answer.outcome

    return method


class TenantDatabase:
    def __init__(self, executor: SqlExecutor) -> None:
        self._executor = executor

    async def open(self) -> None:
        """Connects and migrates. Call this once, first."""
        await self._executor.open()

    async def close(self) -> None:
        await self._executor.close()

    def documents(self, tenant: TenantId) -> DocumentStore:
        """The documents of this tenant, such as file records."""
        return TenantDocumentStore(self._executor, tenant)

    # rounds

    async def open_round(self, opening: RoundStart) -> RoundStarted:
        """S1: writes the job (or its next round), the hold and the outbox entry, if the account covers it."""
        try:
            return await self._executor.transact(lambda: rounds.open_round(opening))
        except credit_ledger.RolledBack as answer:
            return RoundStarted(answer.outcome, await self.account(opening.job.tenant))

    async def end_round(self, ending: RoundEnd) -> RoundEnded:
        """T1: settles the hold, ends the round and closes its outbox entry."""
        try:
            return await self._executor.transact(lambda: rounds.end_round(ending))
        except credit_ledger.RolledBack as answer:
            return RoundEnded(answer.outcome, await self.settlement(ending.settlement.hold_id))

    outbox = reading(rounds.outbox)
    count_open = reading(rounds.count_open)
    mark_sent = writing(rounds.mark_sent)
    send_again = writing(rounds.send_again)
    leasable = reading(rounds.leasable)
    put_payload = writing(rounds.put_payload)
    stage = writing(rounds.stage)
    save_failure = writing(reports.save_failure)
    failures_of = reading(reports.failures_of)
    open_round_of = snapshot(rounds.open_round_of)
    phases = reading(rounds.phases)
    forget_events = writing(rounds.forget_events)
    ended_jobs = reading(rounds.ended_jobs)
    forget_jobs = writing(rounds.forget_jobs)

    # records

    get = reading(rounds.get)
    get_many = reading(rounds.get_many)
    by_reference = reading(rounds.by_reference)
    listing = reading(rounds.listing)

    # ledger

    hold = reading(credit_ledger.hold)
    settlement = reading(credit_ledger.settlement)
    open_holds = reading(credit_ledger.open_holds)
    account = reading(credit_ledger.account)
    grant = posting(credit_ledger.grant)
    confirm = posting(credit_ledger.confirm)
    void = posting(credit_ledger.void)
    adjust = posting(credit_ledger.adjust)
    grant_of = reading(reports.grant_of)
    grants = reading(reports.grants)
    receipts = reading(reports.receipts)
    statement = reading(credit_ledger.statement)
    account_at = reading(credit_ledger.account_at)
    runs = reading(rounds.runs)
    usage = reading(reports.usage)
    ledger = snapshot(credit_ledger.ledger)

    # relocation and deletion

    create_account = writing(tenant_rows.create_account)
    freeze_account = writing(tenant_rows.freeze_account)
    unfreeze_account = writing(tenant_rows.unfreeze_account)
    has_account = reading(tenant_rows.has_account)
    fence_of = reading(tenant_rows.fence_of)
    rows_of = reading(tenant_rows.rows_of)
    import_rows = writing(tenant_rows.import_rows)
    erase = writing(tenant_rows.erase)
