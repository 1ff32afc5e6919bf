"""Drives a tenant database like engine and policy do: makes holds, settlements and postings."""

from __future__ import annotations

import itertools

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import ClassKey, JobId, TenantId, WorkflowHash
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.ledger import Hold, HoldId
from comfyfleet.policy import accounting
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import PostingResult, RoundEnd, RoundEnded, RoundStart, RoundStarted

ACME, BORG = TenantId("acme"), TenantId("borg")
DONE, KNOWN, SHORT, REFUSED = (
    PostingResult.DONE,
    PostingResult.KNOWN,
    PostingResult.SHORT,
    PostingResult.REFUSED,
)


class LedgerDriver:
    def __init__(self, database: TenantDatabase, prefix: str = "job") -> None:
        self.database = database
        self._prefix = prefix
        self._numbers = itertools.count(1)

    def new_name(self) -> JobId:
        return JobId(f"{self._prefix}-{next(self._numbers):06d}")

    async def grant(self, amount: int, tenant: TenantId = ACME, grant_id: str | None = None) -> PostingResult:
        given = accounting.grant(grant_id or self.new_name(), tenant, amount, 1.0)
        return await self.database.grant(given, accounting.posting_of(given))

    def opening(
        self,
        amount: int,
        tenant: TenantId = ACME,
        *,
        job_id: JobId | None = None,
        round_: int = 1,
        reference: str | None = None,
    ) -> RoundStart:
        job_id = job_id or self.new_name()
        hold = accounting.reserve(HoldId(job_id, round_), tenant, amount, 2.0)
        payload = Submission({"1": {"class_type": "X", "inputs": {"text": "ж\u2028"}}}, reference=reference)
        text = WorkflowHash("hash")
        return RoundStart(
            Job(job_id, tenant, text, 2.0, payload, reference=reference, round=round_),
            hold,
            accounting.posting_of(hold),
            Dispatch(job_id, ClassKey("class"), text, 0, tenant=tenant, round=round_),
        )

    async def submit(self, amount: int, tenant: TenantId = ACME) -> Hold:
        opening = self.opening(amount, tenant)
        opened = await self.database.open_round(opening)
        assert opened.outcome is DONE
        return opening.hold

    async def end(self, hold: Hold, phase: Phase, cost: int = 0, event_id: str = "") -> RoundEnded:
        return await self.database.end_round(self.ending(hold, phase, cost, event_id))

    def ending(self, hold: Hold, phase: Phase, cost: int = 0, event_id: str = "") -> RoundEnd:
        settlement = accounting.settle(hold, phase, cost, 3.0)
        posting = accounting.settling_posting(hold, settlement)
        changes = {"result": JobResult({"9": {"images": []}})} if phase is Phase.COMPLETED else {}
        return RoundEnd(event_id or f"event {hold.hold_id}", settlement, posting, phase, changes)

    async def is_open(self, hold_id: HoldId) -> bool:
        return await self.database.leasable(hold_id) is not None

    async def retry(self, hold: Hold) -> RoundStarted:
        job_id, round_ = hold.hold_id
        return await self.database.open_round(
            self.opening(hold.amount, hold.tenant, job_id=job_id, round_=round_ + 1)
        )

    async def check(self, *tenants: TenantId) -> None:
        for tenant in tenants or (ACME,):
            assert accounting.problems(await self.database.ledger(tenant)) == []
