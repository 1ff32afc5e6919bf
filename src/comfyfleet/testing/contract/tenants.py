"""The contract of tenant databases as tests: subclass `TenantDatabaseContract` and give it `connect`.

`LedgerDriver` (`ledger_driver.py`) stands in for engine and policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.ledger import Account, FlatPrice, HoldId, Outcome
from comfyfleet.policy import accounting
from comfyfleet.ports import RecordQuery
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import OpenRound, RoundEnded, RoundStart, RoundStarted
from comfyfleet.testing.contract.ledger_driver import ACME, BORG, DONE, KNOWN, REFUSED, SHORT, LedgerDriver
from comfyfleet.testing.contract.tenant_documents import TenantDocumentsContract
from comfyfleet.testing.contract.tenant_ledger import TenantLedgerContract

Connect = Callable[[], TenantDatabase]
"""Each call is another process's view of the same database, empty at first and not yet opened."""


class TenantDatabaseContract(TenantLedgerContract, TenantDocumentsContract):
    @pytest.fixture
    async def driver(self, connect: Connect) -> AsyncIterator[LedgerDriver]:
        database = connect()
        await database.open()
        driver = LedgerDriver(database)
        yield driver
        await driver.check(ACME, BORG)
        # The test may have opened another one meanwhile.
        await driver.database.close()

    # S1

    async def test_a_job_comes_back_as_it_was_submitted(self, driver: LedgerDriver) -> None:
        await driver.grant(100)
        opening = driver.opening(30, reference="mine")
        opened = await driver.database.open_round(opening)
        assert opened == RoundStarted(DONE, Account(ACME, 100, 30), opening.job)
        assert await driver.database.get(opening.job.job_id) == opening.job
        assert await driver.database.by_reference(ACME, "mine") == opening.job
        assert await driver.database.by_reference(BORG, "mine") is None
        assert await driver.database.hold(opening.hold.hold_id) == opening.hold

    async def test_a_job_the_account_does_not_cover_leaves_nothing_behind(self, driver: LedgerDriver) -> None:
        await driver.grant(100)
        await driver.submit(60)
        opening = driver.opening(41)
        assert await driver.database.open_round(opening) == RoundStarted(SHORT, Account(ACME, 100, 60))
        assert await driver.database.get(opening.job.job_id) is None
        assert await driver.database.hold(opening.hold.hold_id) is None
        assert len(await driver.database.outbox(is_sent=False, after=None, limit=10)) == 1
        assert (await driver.database.open_round(driver.opening(40))).outcome is DONE

    async def test_a_book_that_was_begun_is_known_from_one_that_was_not(self, driver: LedgerDriver) -> None:
        await driver.database.create_account(BORG)
        assert await driver.database.has_account(BORG) and not await driver.database.has_account(ACME)
        await driver.database.freeze_account(BORG, 1)
        assert await driver.database.has_account(BORG)

    async def test_a_job_that_costs_nothing_needs_no_account(self, driver: LedgerDriver) -> None:
        await driver.submit(0)
        assert await driver.database.account(ACME) == Account(ACME)

    async def test_open_rounds_are_counted_for_each_tenant_up_to_a_bound(self, driver: LedgerDriver) -> None:
        first, *_ = [await driver.submit(0) for _ in range(3)]
        await driver.submit(0, BORG)
        assert [await driver.database.count_open(ACME, most) for most in (0, 2, 3, 9)] == [0, 2, 3, 3]
        await driver.end(first, Phase.FAILED)
        assert await driver.database.count_open(ACME, 9) == 2
        await driver.retry(first)
        assert await driver.database.count_open(ACME, 9) == 3
        assert await driver.database.count_open(BORG, 9) == 1

    async def test_a_submit_that_is_repeated_is_known_and_holds_once(self, driver: LedgerDriver) -> None:
        await driver.grant(100)
        opening = driver.opening(80, reference="mine")
        await driver.database.open_round(opening)
        same = await driver.database.open_round(opening)
        assert (same.outcome, same.account.held, same.job) == (KNOWN, 80, opening.job)
        other = await driver.database.open_round(driver.opening(80, reference="mine"))
        assert (other.outcome, other.job) == (KNOWN, opening.job), "whatever the account covers"

    async def test_an_id_that_another_tenant_has_is_refused_without_a_word_about_it(
        self, driver: LedgerDriver
    ) -> None:
        await driver.submit(0)
        opened = await driver.database.open_round(driver.opening(0, BORG, job_id=JobId("job-000001")))
        assert (opened.outcome, opened.job) == (REFUSED, None)

    async def test_credits_that_are_pending_fund_nothing(self, driver: LedgerDriver) -> None:
        for grant_id in ("paid", "bounced"):
            pending = accounting.grant(grant_id, ACME, 100, 1.0, is_pending=True)
            assert await driver.database.grant(pending, None) is DONE
            assert await driver.database.grant(pending, None) is KNOWN
        assert await driver.database.open_round(driver.opening(1)) == RoundStarted(
            SHORT, Account(ACME, 0, 0, 200)
        )
        assert await driver.grant(100, grant_id="paid") is REFUSED, "it is to be confirmed"
        more = accounting.posting_of(accounting.grant("paid", ACME, 101, 5.0))
        assert await driver.database.confirm(more) is REFUSED, "not what was promised"
        confirmed = accounting.posting_of(accounting.grant("paid", ACME, 100, 5.0))
        assert [await driver.database.confirm(confirmed) for _ in range(2)] == [DONE, KNOWN]
        assert [await driver.database.void(ACME, "bounced") for _ in range(2)] == [DONE, KNOWN]
        assert await driver.database.void(ACME, "paid") is REFUSED
        assert (
            await driver.database.confirm(accounting.posting_of(accounting.grant("no", ACME, 1, 5.0)))
            is REFUSED
        )
        assert await driver.database.account(ACME) == Account(ACME, 100)
        assert (await driver.database.open_round(driver.opening(100))).outcome is DONE

    async def test_of_two_spends_at_the_same_instant_one_is_short(
        self, driver: LedgerDriver, connect: Connect
    ) -> None:
        another = connect()
        await another.open()
        try:
            for number in range(20):
                tenant = TenantId(f"tenant-{number}")
                await driver.grant(100, tenant)
                opened = await asyncio.gather(
                    *(each.open_round(driver.opening(80, tenant)) for each in (driver.database, another))
                )
                assert sorted(each.outcome for each in opened) == [DONE, SHORT]
                await driver.check(tenant)
        finally:
            await another.close()

    # S2, S3, L2

    async def test_the_outbox_gives_what_is_to_be_sent_page_by_page(self, driver: LedgerDriver) -> None:
        holds = [await driver.submit(0) for _ in range(5)]
        first = await driver.database.outbox(is_sent=False, after=None, limit=3)
        rest = await driver.database.outbox(is_sent=False, after=first[-1].hold_id, limit=3)
        assert [each.hold_id for each in (*first, *rest)] == [each.hold_id for each in holds]
        assert first[0].dispatch == driver.opening(0, job_id=holds[0].hold_id.job_id).dispatch
        assert [await driver.database.mark_sent(holds[0].hold_id) for _ in range(2)] == [True, True]
        assert len(await driver.database.outbox(is_sent=False, after=None, limit=9)) == 4
        (sent,) = await driver.database.outbox(is_sent=True, after=None, limit=9)
        assert sent.hold_id == holds[0].hold_id
        assert await driver.database.send_again(sent.hold_id)
        assert len(await driver.database.outbox(is_sent=False, after=None, limit=9)) == 5

    async def test_what_has_ended_is_closed_and_is_never_sent_again(self, driver: LedgerDriver) -> None:
        hold = await driver.submit(0)
        other = await driver.submit(0)
        rounds = [hold.hold_id, other.hold_id, HoldId(other.hold_id.job_id, 2)]
        assert await driver.database.phases(rounds) == {hold.hold_id: None, other.hold_id: None}
        await driver.end(hold, Phase.CANCELLED)
        assert not await driver.database.mark_sent(hold.hold_id)
        assert not await driver.database.send_again(hold.hold_id)
        assert await driver.database.phases(rounds) == {hold.hold_id: Phase.CANCELLED, other.hold_id: None}
        assert [e.hold_id for e in await driver.database.outbox(is_sent=False, after=None, limit=9)] == [
            other.hold_id
        ]

    async def test_a_round_is_open_until_it_has_ended(self, driver: LedgerDriver) -> None:
        hold = await driver.submit(0)
        assert await driver.is_open(hold.hold_id)
        assert not await driver.is_open(HoldId(hold.hold_id.job_id, 2))
        assert not await driver.is_open(HoldId(JobId("nobody's"), 1))
        await driver.end(hold, Phase.FAILED)
        assert not await driver.is_open(hold.hold_id)

    async def test_a_job_is_leased_with_its_payload_as_it_is_by_then(self, driver: LedgerDriver) -> None:
        opening = driver.opening(0)
        await driver.database.open_round(opening)
        assert await driver.database.leasable(opening.hold.hold_id) == opening.job
        filled = Submission({"2": {"class_type": "Y", "inputs": {}}})
        assert await driver.database.put_payload(opening.hold.hold_id, filled)
        leasable = await driver.database.leasable(opening.hold.hold_id)
        assert leasable is not None and leasable.payload == filled
        await driver.end(opening.hold, Phase.FAILED)
        assert not await driver.database.put_payload(opening.hold.hold_id, opening.job.payload)
        other = await driver.submit(0)
        assert set(
            await driver.database.get_many([opening.job.job_id, JobId("nobody's"), other.hold_id.job_id])
        ) == {opening.job.job_id, other.hold_id.job_id}

    # T1

    async def test_what_an_attempt_left_counts_when_the_round_ends_with_it(
        self, driver: LedgerDriver
    ) -> None:
        await driver.grant(100)
        price = FlatPrice(10)
        opening = msgspec.structs.replace(driver.opening(10), price=price)
        await driver.database.open_round(opening)
        hold_id = opening.hold.hold_id
        left, other = JobResult({"1": {}}), JobResult({"2": {}})
        await driver.database.stage(hold_id, "first", other, 3.0)
        await driver.database.stage(hold_id, "second", other, 3.0)
        await driver.database.stage(hold_id, "second", left, 4.0)
        settled = await driver.database.open_round_of(hold_id, "second")
        assert settled == OpenRound(opening.hold, price, opening.job, left)
        third = await driver.database.open_round_of(hold_id, "third")
        assert third is not None and third.result is None
        ending = driver.ending(opening.hold, Phase.COMPLETED, 10)
        await driver.database.end_round(ending)
        assert await driver.database.open_round_of(hold_id, "second") is None
        await driver.database.stage(hold_id, "second", other, 5.0)
        job = await driver.database.get(hold_id.job_id)
        assert job is not None and job.result == ending.changes["result"], "what comes late changes nothing"

    async def test_a_completed_round_takes_what_it_cost_and_returns_the_rest(
        self, driver: LedgerDriver
    ) -> None:
        await driver.grant(100)
        hold = await driver.submit(80)
        ended = await driver.end(hold, Phase.COMPLETED, 30)
        assert ended.outcome is DONE and ended.settlement is not None and ended.settlement.consumed == 30
        assert await driver.database.account(ACME) == Account(ACME, 70)
        job = await driver.database.get(hold.hold_id.job_id)
        assert job is not None and job.phase is Phase.COMPLETED
        assert job.result == JobResult({"9": {"images": []}}) and job.payload.workflow

    @pytest.mark.parametrize("phase", [Phase.FAILED, Phase.CANCELLED])
    async def test_any_other_end_gives_everything_back(self, driver: LedgerDriver, phase: Phase) -> None:
        await driver.grant(100)
        hold = await driver.submit(80)
        await driver.end(hold, phase, 30)
        assert await driver.database.account(ACME) == Account(ACME, 100)

    async def test_a_hold_is_settled_once_whoever_says_what_later(self, driver: LedgerDriver) -> None:
        await driver.grant(100)
        hold = await driver.submit(80)
        first = await driver.end(hold, Phase.COMPLETED, 30, "first")
        assert await driver.end(hold, Phase.COMPLETED, 30, "first") == RoundEnded(KNOWN, first.settlement)
        assert await driver.end(hold, Phase.CANCELLED, 0, "second") == RoundEnded(KNOWN, first.settlement)
        assert await driver.database.forget_events(10.0, 10) == 2
        assert await driver.end(hold, Phase.FAILED, 0, "first") == RoundEnded(KNOWN, first.settlement)
        assert await driver.database.account(ACME) == Account(ACME, 70)

    async def test_an_event_is_taken_in_once(self, driver: LedgerDriver) -> None:
        first, second = await driver.submit(0), await driver.submit(0)
        assert (await driver.end(first, Phase.FAILED, 0, "event")).outcome is DONE
        assert await driver.end(second, Phase.FAILED, 0, "event") == RoundEnded(KNOWN, None)
        assert await driver.is_open(second.hold_id)

    async def test_of_two_settlements_at_the_same_instant_one_stands(
        self, driver: LedgerDriver, connect: Connect
    ) -> None:
        another = connect()
        await another.open()
        try:
            await driver.grant(1000)
            for number in range(20):
                hold = await driver.submit(50)
                one, two = await asyncio.gather(
                    driver.end(hold, Phase.COMPLETED, 20, "same" * (number % 2) + str(number)),
                    another.end_round(
                        driver.ending(hold, Phase.FAILED, 0, "same" * (number % 2) + str(number))
                    ),
                )
                assert sorted([one.outcome, two.outcome]) == [DONE, KNOWN]
                assert one.settlement == two.settlement
        finally:
            await another.close()

    async def test_an_end_of_something_unknown_is_refused_and_may_come_again(
        self, driver: LedgerDriver
    ) -> None:
        opening = driver.opening(0)
        assert await driver.end(opening.hold, Phase.FAILED) == RoundEnded(REFUSED, None)
        await driver.database.open_round(opening)
        assert (await driver.end(opening.hold, Phase.FAILED)).outcome is DONE

    # rounds

    async def test_a_retry_by_hand_has_a_hold_of_its_own(self, driver: LedgerDriver) -> None:
        await driver.grant(100)
        hold = await driver.submit(80)
        assert (await driver.retry(hold)).outcome is REFUSED, "the first round goes on"
        await driver.end(hold, Phase.FAILED)
        assert [(await driver.retry(hold)).outcome for _ in range(2)] == [DONE, KNOWN]
        late = await driver.end(hold, Phase.FAILED, 0, "a late copy")
        assert late.outcome is KNOWN
        assert await driver.database.account(ACME) == Account(ACME, 100, 80), "the second hold is untouched"
        second = HoldId(hold.hold_id.job_id, 2)
        assert await driver.is_open(second) and not await driver.is_open(hold.hold_id)
        again = await driver.database.hold(second)
        assert again is not None
        await driver.end(again, Phase.COMPLETED, 80)
        assert await driver.database.account(ACME) == Account(ACME, 20)

    async def test_a_retry_the_account_does_not_cover_leaves_the_job_as_it_was(
        self, driver: LedgerDriver
    ) -> None:
        await driver.grant(100)
        hold = await driver.submit(80)
        await driver.end(hold, Phase.FAILED)
        await driver.submit(50)
        assert (await driver.retry(hold)).outcome is SHORT
        job = await driver.database.get(hold.hold_id.job_id)
        assert job is not None and (job.round, job.phase) == (1, Phase.FAILED)

    async def test_no_round_is_left_out(self, driver: LedgerDriver) -> None:
        hold = await driver.submit(0)
        await driver.end(hold, Phase.FAILED)
        third = driver.opening(0, job_id=hold.hold_id.job_id, round_=3)
        assert (await driver.database.open_round(third)).outcome is REFUSED
        assert (await driver.retry(hold)).outcome is DONE

    async def test_a_completed_job_has_no_further_round(self, driver: LedgerDriver) -> None:
        hold = await driver.submit(0)
        await driver.end(hold, Phase.COMPLETED)
        assert (await driver.retry(hold)).outcome is REFUSED

    # reading

    async def test_jobs_are_listed_by_tenant_and_phase_either_way(self, driver: LedgerDriver) -> None:
        holds = [await driver.submit(0, tenant) for tenant in (ACME, BORG, ACME, ACME)]
        await driver.end(holds[2], Phase.FAILED)
        names = [each.hold_id.job_id for each in holds]

        async def listed(phase: Phase | None, after: JobId | None, newest_first: bool) -> list[JobId]:
            found = await driver.database.listing(
                RecordQuery(tenant=ACME, phase=phase, limit=2, after=after, newest_first=newest_first)
            )
            return [each.job_id for each in found]

        assert await listed(None, None, False) == [names[0], names[2]]
        assert await listed(None, names[2], False) == [names[3]]
        assert await listed(None, None, True) == [names[3], names[2]]
        assert await listed(Phase.FAILED, None, False) == [names[2]]

    async def test_what_was_answered_is_there_after_a_restart(
        self, driver: LedgerDriver, connect: Connect
    ) -> None:
        await driver.grant(100)
        hold = await driver.submit(80)
        await driver.database.close()
        driver.database = connect()
        await driver.database.open()
        assert await driver.database.account(ACME) == Account(ACME, 100, 80)
        ended = await driver.end(hold, Phase.COMPLETED, 80)
        assert ended.settlement is not None and ended.settlement.outcome is Outcome.CONSUMED

    async def test_a_caller_that_gives_up_leaves_all_or_nothing(self, driver: LedgerDriver) -> None:
        await driver.grant(1000)
        for waits in range(12):
            opening = driver.opening(10)
            submitting = asyncio.ensure_future(driver.database.open_round(opening))
            for _ in range(waits):
                await asyncio.sleep(0)
            submitting.cancel()
            await asyncio.gather(submitting, return_exceptions=True)
            is_there = await driver.database.get(opening.job.job_id) is not None
            assert await driver.is_open(opening.hold.hold_id) == is_there
            await driver.check()

    async def test_what_cannot_be_kept_is_refused_and_changes_nothing(self, driver: LedgerDriver) -> None:
        opening = driver.opening(0)
        payload = Submission({"1": {"value": 2**80}})
        job = Job(opening.job.job_id, ACME, opening.job.workflow_hash, 2.0, payload)
        with pytest.raises(Refusal):
            await driver.database.open_round(RoundStart(job, opening.hold, opening.posting, opening.dispatch))
        assert await driver.database.get(job.job_id) is None
