"""The contract of tenant databases for reading (runs, receipts, grants, ledgers) and for retention."""

from __future__ import annotations

import msgspec

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash
from comfyfleet.model.ledger import Account, FlatPrice, HoldId, Outcome, Receipt, RunEntry, UsageBy, UsageLine
from comfyfleet.policy import accounting
from comfyfleet.testing.contract.ledger_driver import ACME, BORG, DONE, KNOWN, REFUSED, SHORT, LedgerDriver


class TenantLedgerContract:
    async def test_what_rounds_took_is_listed_once_each_in_their_order(self, driver: LedgerDriver) -> None:
        holds = [await driver.submit(0) for _ in range(3)]
        runs = [
            RunEntry(
                hold.hold_id,
                ACME,
                WorkflowHash("hash"),
                "comfyui",
                "completed",
                3.0,
                WorkerId("gpu"),
                2,
                1500,
                7,
            )
            for hold in holds
        ]
        for hold, run in zip(holds, runs, strict=True):
            ending = msgspec.structs.replace(driver.ending(hold, Phase.COMPLETED), run=run)
            assert (await driver.database.end_round(ending)).outcome is DONE
            assert (await driver.database.end_round(ending)).outcome is KNOWN
        first = await driver.database.runs(ACME, after=0, limit=2)
        rest = await driver.database.runs(ACME, after=first[-1].number, limit=2)
        assert [msgspec.structs.replace(each, number=0) for each in (*first, *rest)] == runs
        assert await driver.database.runs(BORG, after=0, limit=2) == []

    async def test_a_job_has_a_receipt_for_each_of_its_rounds(self, driver: LedgerDriver) -> None:
        await driver.grant(100)
        opening = msgspec.structs.replace(driver.opening(80), price=FlatPrice(80))
        hold, job_id = opening.hold, opening.job.job_id
        await driver.database.open_round(opening)
        await driver.end(hold, Phase.FAILED)
        await driver.retry(hold)
        second = HoldId(job_id, 2)
        run = RunEntry(second, ACME, WorkflowHash("h"), "comfyui", "completed", 3.0, WorkerId("gpu"), 1, 9)
        again = msgspec.structs.replace(hold, hold_id=second)
        ending = msgspec.structs.replace(driver.ending(again, Phase.COMPLETED, 30), run=run)
        assert (await driver.database.end_round(ending)).outcome is DONE
        first, last = await driver.database.receipts(ACME, job_id, limit=9)
        assert first == Receipt(hold.hold_id, "failed", 2.0, 80, FlatPrice(80), 3.0, Outcome.REFUNDED)
        assert last == Receipt(
            second, "completed", 2.0, 80, None, 3.0, Outcome.CONSUMED, 30, "", WorkerId("gpu"), 1, 9
        )
        assert await driver.database.receipts(ACME, job_id, limit=1) == [last]
        assert await driver.database.receipts(BORG, job_id, limit=9) == []

    async def test_grants_are_listed_by_their_ids(self, driver: LedgerDriver) -> None:
        for name, tenant in (("b", ACME), ("a", ACME), ("c", BORG)):
            await driver.grant(5, tenant, name)
        listed = await driver.database.grants(ACME, after=None, limit=9)
        assert [each.grant_id for each in listed] == ["a", "b"]
        assert (
            await driver.database.grants(ACME, after=(listed[0].at, listed[0].grant_id), limit=9)
            == listed[1:]
        )
        assert await driver.database.grant_of(ACME, "b") == listed[1]
        assert await driver.database.grant_of(ACME, "c") is None

    async def test_what_rounds_took_is_added_up_by_what_is_asked_for(self, driver: LedgerDriver) -> None:
        took = [
            # tenant, workflow, worker, when, phase, GPU milliseconds, cost
            (ACME, "a", "gpu-1", 86_399.9, Phase.COMPLETED, 1_000, 5),
            (ACME, "a", "gpu-2", 86_400.0, Phase.COMPLETED, 2_000, None),
            (ACME, "b", "gpu-1", 90_000.0, Phase.FAILED, 4_000, 7),
            (BORG, "a", "gpu-1", 90_000.0, Phase.COMPLETED, 8_000, None),
        ]
        for tenant, workflow, worker, at, phase, milliseconds, cost in took:
            hold = await driver.submit(0, tenant)
            run = RunEntry(
                hold.hold_id, tenant, WorkflowHash(workflow), "x", phase.value, at, WorkerId(worker), 1,
                milliseconds, 3, cost,
            )  # fmt: skip
            await driver.database.end_round(msgspec.structs.replace(driver.ending(hold, phase), run=run))

        async def asked(
            tenant: TenantId | None, *by: UsageBy, since: float = 0.0, until: float = 1e9
        ) -> list[UsageLine]:
            return await driver.database.usage(tenant, since=since, until=until, by=by, limit=100)

        line = UsageLine
        assert await asked(None, "tenant") == [
            line(ACME, None, None, None, 3, 2, 3, 7_000, 9, 12),
            line(BORG, None, None, None, 1, 1, 1, 8_000, 3, None),
        ]
        assert await asked(None) == [line(None, None, None, None, 4, 3, 4, 15_000, 12, 12)]
        assert await asked(ACME, "worker", "day") == [
            line(None, None, WorkerId("gpu-1"), 0, 1, 1, 1, 1_000, 3, 5),
            line(None, None, WorkerId("gpu-1"), 1, 1, 0, 1, 4_000, 3, 7),
            line(None, None, WorkerId("gpu-2"), 1, 1, 1, 1, 2_000, 3, None),
        ]
        assert [(each.workflow_hash, each.rounds) for each in await asked(ACME, "workflow")] == [
            ("a", 2),
            ("b", 1),
        ]
        assert await asked(None, since=1e9) == []
        assert (await asked(ACME, since=86_400.0, until=90_000.0))[0].gpu_milliseconds == 2_000

    # retention

    async def test_old_jobs_are_forgotten_with_their_references_and_the_book_stays(
        self, driver: LedgerDriver
    ) -> None:
        database = driver.database
        await driver.grant(100)
        opening = driver.opening(10, reference="mine")
        await database.open_round(opening)
        job_id, hold_id = opening.job.job_id, opening.hold.hold_id
        await driver.end(opening.hold, Phase.COMPLETED, 4)
        failed, still_open = await driver.submit(10), await driver.submit(10)
        await driver.end(failed, Phase.FAILED)
        # The rounds of a driver end at 3.
        assert await database.ended_jobs(Phase.COMPLETED, 3.0, 9) == []
        assert await database.ended_jobs(Phase.COMPLETED, 3.1, 9) == [job_id]
        assert await database.ended_jobs(Phase.FAILED, 3.1, 9) == [failed.hold_id.job_id]
        assert await database.ended_jobs(Phase.CANCELLED, 3.1, 9) == []
        both = [job_id, still_open.hold_id.job_id]
        assert await database.forget_jobs(both, 3.0) == 0
        assert await database.forget_jobs(both, 3.1) == 1
        assert await database.get(job_id) is None and await database.by_reference(ACME, "mine") is None
        assert await database.leasable(still_open.hold_id) is not None
        assert await database.account(ACME) == Account(ACME, 96, 10)
        assert (await database.phases([hold_id]))[hold_id] is Phase.COMPLETED
        late = await driver.end(opening.hold, Phase.COMPLETED, 4, "a copy that comes late")
        assert late.outcome is KNOWN and late.settlement is not None and late.settlement.consumed == 4
        assert (await database.open_round(driver.opening(10, reference="mine"))).outcome is DONE

    async def test_a_job_that_goes_on_again_is_not_old(self, driver: LedgerDriver) -> None:
        hold = await driver.submit(0)
        await driver.end(hold, Phase.FAILED)
        assert (await driver.retry(hold)).outcome is DONE
        assert await driver.database.ended_jobs(Phase.FAILED, 9.0, 9) == []
        assert await driver.database.forget_jobs([hold.hold_id.job_id], 9.0) == 0

    async def test_forgetting_goes_page_by_page_the_oldest_first(self, driver: LedgerDriver) -> None:
        for _ in range(3):
            await driver.end(await driver.submit(0), Phase.CANCELLED)
        first = await driver.database.ended_jobs(Phase.CANCELLED, 9.0, 2)
        assert len(first) == 2 and await driver.database.forget_jobs(first, 9.0) == 2
        (last,) = await driver.database.ended_jobs(Phase.CANCELLED, 9.0, 2)
        assert last not in first

    # ledger

    async def test_a_correction_never_takes_what_is_held(self, driver: LedgerDriver) -> None:
        await driver.grant(100)
        await driver.submit(80)
        down = accounting.posting_of(accounting.adjust("a1", ACME, -21, 4.0, "too much"))
        assert await driver.database.adjust(down) is SHORT
        fitting = accounting.posting_of(accounting.adjust("a2", ACME, -20, 4.0, "typing error"))
        assert [await driver.database.adjust(fitting) for _ in range(2)] == [DONE, KNOWN]
        other = accounting.posting_of(accounting.adjust("a2", ACME, 7, 4.0, "another under its name"))
        assert await driver.database.adjust(other) is REFUSED
        assert await driver.database.account(ACME) == Account(ACME, 80, 80)

    async def test_a_grant_that_is_repeated_is_given_once(self, driver: LedgerDriver) -> None:
        assert [await driver.grant(5, grant_id="once") for _ in range(2)] == [DONE, KNOWN]
        assert await driver.grant(6, grant_id="once") is REFUSED, "another one under its name"
        assert await driver.grant(5, BORG, grant_id="once") is DONE, "ids are the tenant's own"
        assert await driver.database.account(ACME) == Account(ACME, 5)

    async def test_a_statement_reads_on_behind_the_last_number(self, driver: LedgerDriver) -> None:
        await driver.grant(100)
        await driver.grant(7, BORG)
        hold = await driver.submit(10)
        await driver.end(hold, Phase.COMPLETED, 10)
        first = await driver.database.statement(ACME, after=0, limit=2)
        rest = await driver.database.statement(ACME, after=first[-1].number, limit=2)
        assert [each.kind for each in (*first, *rest)] == ["grant", "reserve", "consume"]
        assert [each.balance for each in (*first, *rest)] == [100, 0, -10]

    async def test_holds_that_are_open_for_long_are_found(self, driver: LedgerDriver) -> None:
        await driver.submit(0)
        settled = await driver.submit(0)
        await driver.end(settled, Phase.FAILED)
        assert [each.hold_id.job_id for each in await driver.database.open_holds(2.5, 10)] == ["job-000001"]
        assert await driver.database.open_holds(2.0, 10) == []
