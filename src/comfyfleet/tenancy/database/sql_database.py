"""`TenantDatabase` over a `SqlExecutor`, which `sqlite/` and `postgres/` provide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.failure import FailureText
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.ledger import (
    Account,
    CreditGrant,
    Hold,
    HoldId,
    Ledger,
    Posting,
    Receipt,
    RunEntry,
    Settlement,
    UsageBy,
    UsageLine,
)
from comfyfleet.ports import DocumentStore
from comfyfleet.tenancy.database import ledger, reports, rounds, tenant_export
from comfyfleet.tenancy.database.documents import TenantDocumentStore
from comfyfleet.tenancy.database.executor import Row, SqlExecutor, Work
from comfyfleet.tenancy.database.port import (
    MAX_PAGE,
    OpenRound,
    OutboxEntry,
    PostingResult,
    RoundEnd,
    RoundEnded,
    RoundStart,
    RoundStarted,
)


class SqlTenantDatabase:
    def __init__(self, executor: SqlExecutor) -> None:
        self._executor = executor

    async def open(self) -> None:
        await self._executor.open()

    async def close(self) -> None:
        await self._executor.close()

    def documents(self, tenant: TenantId) -> DocumentStore:
        return TenantDocumentStore(self._executor, tenant)

    # rounds

    async def open_round(self, opening: RoundStart) -> RoundStarted:
        try:
            return await self._executor.transact(lambda: rounds.open_round(opening))
        except ledger.RolledBack as answer:
            return RoundStarted(answer.outcome, await self.account(opening.job.tenant))

    async def outbox(self, *, is_sent: bool, after: HoldId | None, limit: int) -> list[OutboxEntry]:
        return await self._executor.read(lambda: rounds.outbox(is_sent, after, _page(limit)))

    async def count_open(self, tenant: TenantId, most: int) -> int:
        return await self._executor.read(lambda: rounds.count_open(tenant, most))

    async def mark_sent(self, hold_id: HoldId) -> bool:
        return await self._executor.transact(lambda: rounds.mark(hold_id, "sent"))

    async def send_again(self, hold_id: HoldId) -> bool:
        return await self._executor.transact(lambda: rounds.mark(hold_id, "unsent"))

    async def leasable(self, hold_id: HoldId) -> Job | None:
        return await self._executor.read(lambda: rounds.leasable(hold_id))

    async def put_payload(self, hold_id: HoldId, payload: Submission) -> bool:
        return await self._executor.transact(lambda: rounds.put_payload(hold_id, payload))

    async def stage(self, hold_id: HoldId, attempt_id: str, result: JobResult, at: float) -> bool:
        return await self._executor.transact(lambda: rounds.stage(hold_id, attempt_id, result, at))

    async def keep_failure(self, hold_id: HoldId, attempt_id: str, text: FailureText, at: float) -> bool:
        return await self._executor.transact(lambda: reports.keep_failure(hold_id, attempt_id, text, at))

    async def failures_of(self, job_ids: Sequence[JobId]) -> Mapping[str, FailureText]:
        assert len(job_ids) <= MAX_PAGE, "at most one page"
        return await self._executor.read(lambda: reports.failures_of(job_ids))

    async def open_round_of(self, hold_id: HoldId, attempt_id: str | None) -> OpenRound | None:
        return await self._executor.snapshot(lambda: rounds.open_round_of(hold_id, attempt_id))

    async def end_round(self, ending: RoundEnd) -> RoundEnded:
        try:
            return await self._executor.transact(lambda: rounds.end_round(ending))
        except ledger.RolledBack as answer:
            return RoundEnded(answer.outcome, await self.settlement(ending.settlement.hold_id))

    async def phases(self, hold_ids: Sequence[HoldId]) -> dict[HoldId, Phase | None]:
        assert len(hold_ids) <= MAX_PAGE, "at most one page"
        return await self._executor.read(lambda: rounds.phases(hold_ids))

    async def forget_events(self, before: float, limit: int) -> int:
        return await self._executor.transact(lambda: rounds.forget_events(before, _page(limit)))

    async def ended_jobs(self, phase: Phase, before: float, limit: int) -> list[JobId]:
        return await self._executor.read(lambda: rounds.ended_jobs(phase, before, _page(limit)))

    async def forget_jobs(self, job_ids: Sequence[JobId], before: float) -> int:
        assert len(job_ids) <= MAX_PAGE, "at most one page"
        return await self._executor.transact(lambda: rounds.forget_jobs(job_ids, before))

    # records

    async def get(self, job_id: JobId) -> Job | None:
        return await self._executor.read(lambda: rounds.get(job_id))

    async def get_many(self, job_ids: Sequence[JobId]) -> Mapping[JobId, Job]:
        assert len(job_ids) <= MAX_PAGE, "at most one page"
        return await self._executor.read(lambda: rounds.get_many(job_ids))

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        return await self._executor.read(lambda: rounds.by_reference(tenant, reference))

    async def listing(
        self,
        *,
        tenant: TenantId | None,
        phase: Phase | None,
        limit: int,
        after: JobId | None,
        newest_first: bool = False,
    ) -> list[Job]:
        return await self._executor.read(
            lambda: rounds.listing(tenant, phase, _page(limit), after, newest_first)
        )

    # ledger

    async def hold(self, hold_id: HoldId) -> Hold | None:
        return await self._executor.read(lambda: ledger.hold(hold_id))

    async def settlement(self, hold_id: HoldId) -> Settlement | None:
        return await self._executor.read(lambda: ledger.settlement(hold_id))

    async def open_holds(self, before: float, limit: int) -> list[Hold]:
        return await self._executor.read(lambda: ledger.open_holds(before, _page(limit)))

    async def account(self, tenant: TenantId) -> Account:
        return await self._executor.read(lambda: ledger.account(tenant))

    async def grant(self, grant: CreditGrant, posting: Posting | None) -> PostingResult:
        return await self._post(lambda: ledger.grant(grant, posting))

    async def confirm(self, posting: Posting) -> PostingResult:
        return await self._post(lambda: ledger.confirm(posting))

    async def void(self, tenant: TenantId, grant_id: str) -> PostingResult:
        return await self._post(lambda: ledger.void(tenant, grant_id))

    async def adjust(self, posting: Posting) -> PostingResult:
        return await self._post(lambda: ledger.adjust(posting))

    async def grant_of(self, tenant: TenantId, grant_id: str) -> CreditGrant | None:
        return await self._executor.read(lambda: reports.grant_of(tenant, grant_id))

    async def grants(
        self, tenant: TenantId, *, after: tuple[float, str] | None, limit: int
    ) -> list[CreditGrant]:
        return await self._executor.read(lambda: reports.grants(tenant, after, _page(limit)))

    async def receipts(self, tenant: TenantId, job_id: JobId, *, limit: int) -> list[Receipt]:
        return await self._executor.read(lambda: reports.receipts(tenant, job_id, _page(limit)))

    async def statement(self, tenant: TenantId, *, after: int, limit: int) -> list[Posting]:
        return await self._executor.read(lambda: ledger.statement(tenant, after, _page(limit)))

    async def account_at(self, tenant: TenantId, number: int) -> Account:
        return await self._executor.read(lambda: ledger.account_at(tenant, number))

    async def runs(self, tenant: TenantId, *, after: int, limit: int) -> list[RunEntry]:
        return await self._executor.read(lambda: rounds.runs(tenant, after, _page(limit)))

    async def usage(
        self, tenant: TenantId | None, *, since: float, until: float, by: Collection[UsageBy], limit: int
    ) -> list[UsageLine]:
        return await self._executor.read(lambda: reports.usage(tenant, since, until, by, limit))

    async def ledger(self, tenant: TenantId) -> Ledger:
        return await self._executor.snapshot(lambda: ledger.ledger(tenant))

    # relocation and deletion

    async def create_account(self, tenant: TenantId) -> None:
        await self._executor.transact(lambda: tenant_export.create_account(tenant))

    async def freeze_account(self, tenant: TenantId, fence: int) -> bool:
        return await self._executor.transact(lambda: tenant_export.freeze_account(tenant, fence))

    async def unfreeze_account(self, tenant: TenantId, fence: int) -> bool:
        return await self._executor.transact(lambda: tenant_export.unfreeze_account(tenant, fence))

    async def has_account(self, tenant: TenantId) -> bool:
        return await self._executor.read(lambda: tenant_export.has_account(tenant))

    async def fence_of(self, tenant: TenantId) -> int | None:
        return await self._executor.read(lambda: tenant_export.fence_of(tenant))

    async def rows_of(self, tenant: TenantId, part: str, *, after: Row | None, limit: int) -> list[Row]:
        return await self._executor.read(lambda: tenant_export.rows_of(tenant, part, after, _page(limit)))

    async def take_rows(self, tenant: TenantId, fence: int, part: str, rows: Sequence[Row]) -> bool:
        return await self._executor.transact(lambda: tenant_export.take_rows(tenant, fence, part, rows))

    async def erase(self, tenant: TenantId, fence: int, limit: int) -> int | None:
        return await self._executor.transact(lambda: tenant_export.erase(tenant, fence, _page(limit)))

    async def _post(self, begin: Callable[[], Work[PostingResult]]) -> PostingResult:
        try:
            return await self._executor.transact(begin)
        except ledger.RolledBack as answer:
            return answer.outcome


def _page(limit: int) -> int:
    return max(1, min(limit, MAX_PAGE))
