"""The store contract for tenants: their terms, their caps, and the time they are charged."""

from __future__ import annotations

import asyncio
from math import inf

import msgspec

from comfyfleet.model.dispatch import Change, LeaseRef, Readiness
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.testing.contract.store_bench import (
    FAST,
    FOR_FAST,
    SLOW,
    A,
    B,
    StoreBench,
    completion,
    release,
    tenant,
)
from comfyfleet.testing.leases import lease_next

ANN, BOB, EVE = tenant("ann"), tenant("bob"), tenant("eve")


class FairShareContract:
    # terms

    async def test_terms_are_kept_until_they_are_removed(self, bench: StoreBench) -> None:
        shares = bench.store.fair_share
        assert await shares.terms() == []
        bob = TenantTerms(BOB, 2.5, 7, bench.clock.now() + 60)
        ann = TenantTerms(ANN, 0.1, held_until=inf)
        for terms in (bob, ann):
            await shares.put_terms(terms)
        assert await shares.terms() == [ann, bob]
        assert (await shares.get(BOB)).terms == bob
        changed = msgspec.structs.replace(bob, weight=3.0, held_until=None)
        await shares.put_terms(changed)
        await shares.remove_terms(ANN)
        await shares.remove_terms(EVE)
        assert await shares.terms() == [changed]
        assert (await shares.get(ANN)).terms is None

    async def test_without_terms_nobody_is_charged(self, bench: StoreBench) -> None:
        first = await bench.enqueue(tenant=ANN)
        await bench.enqueue(tenant=BOB)
        second = await bench.enqueue(tenant=ANN)
        for expected in (first.job_id, None, second.job_id):
            leased = await bench.lease_next()
            assert leased is not None
            assert expected in (None, leased.job_id)
        assert (await bench.store.fair_share.get(ANN)).virtual_time == 0
        assert (await bench.candidates(A, FAST, 1)) == []
        await bench.enqueue(tenant=EVE)
        assert [each.weight for each in await bench.candidates(A, FAST, 1)] == [0.0]

    async def test_what_waits_and_runs_is_counted_when_the_first_terms_come(self, bench: StoreBench) -> None:
        await bench.leased(tenant=ANN)
        await bench.enqueue(tenant=ANN)
        await bench.enqueue(tenant=ANN, standing=Readiness.DELAYED, wake_at=bench.clock.now() + 5)
        await bench.leased(tenant=BOB)
        await bench.store.fair_share.put_terms(TenantTerms(BOB, max_leased=1))
        ann, bob = await bench.store.fair_share.get(ANN), await bench.store.fair_share.get(BOB)
        assert (ann.waiting, ann.leased, bob.leased, bob.is_at_cap) == (1, 1, 1, True)
        await bench.enqueue(tenant=BOB)
        assert await self._leases(bench) == [ANN]

    # charges

    async def test_a_lease_is_charged_by_the_weight_and_put_right_at_its_end(self, bench: StoreBench) -> None:
        shares = bench.store.fair_share
        await shares.put_terms(TenantTerms(ANN, weight=2.0))
        ref = await self._lease(bench, ANN, charge_s=30.0)
        assert await self._times(bench, ANN) == (15.0, 0.0)
        await bench.store.write(completion(ref, 50.0))
        assert await self._times(bench, ANN) == (25.0, 0.0)

    async def test_virtual_time_never_falls_and_an_overcharge_is_deducted_from_the_next(
        self, bench: StoreBench
    ) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN))
        ref = await self._lease(bench, ANN, charge_s=30.0)
        await bench.store.write(completion(ref, 2.0))
        assert await self._times(bench, ANN) == (30.0, 28.0)
        ref = await self._lease(bench, ANN, charge_s=10.0)
        assert await self._times(bench, ANN) == (30.0, 18.0)
        await bench.store.write(completion(ref, 40.0))
        assert await self._times(bench, ANN) == (42.0, 0.0)

    async def test_where_nobody_says_how_long_it_took_the_estimate_stands(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN))
        ref = await self._lease(bench, ANN, charge_s=30.0)
        await bench.store.write(completion(ref))
        assert await self._times(bench, ANN) == (30.0, 0.0)

    async def test_who_has_no_terms_is_charged_too_once_somebody_has(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN))
        await self._lease(bench, BOB, charge_s=30.0)
        assert await self._times(bench, BOB) == (30.0, 0.0)
        await bench.store.fair_share.remove_terms(ANN)
        await self._lease(bench, BOB, charge_s=30.0)
        assert await self._times(bench, BOB) == (60.0, 0.0)

    async def test_leases_follow_the_charges_at_once(self, bench: StoreBench) -> None:
        """Also if one step finishes a job and leases the next, and if the tenant has many lanes."""
        await bench.store.fair_share.put_terms(TenantTerms(BOB, weight=3.0))
        for number in range(8):
            await bench.enqueue(tenant=ANN, workflow_hash=f"hash-{number}")
        for _ in range(8):
            await bench.enqueue(tenant=BOB)
        assert await self._leases(bench, 8) == [ANN, BOB, BOB, BOB, ANN, BOB, BOB, BOB]

    async def test_an_end_and_the_next_lease_are_both_charged(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN))
        ref = await self._lease(bench, ANN, charge_s=10.0)
        await bench.enqueue(tenant=BOB)
        await bench.enqueue(tenant=ANN)
        offer = msgspec.structs.replace(bench.offer(), charge_s=4.0)
        finished = await bench.store.write(completion(ref, 25.0))
        taken = await lease_next(bench.store, offer)
        assert finished is not None
        assert taken is not None
        assert taken.dispatch.tenant == BOB
        assert await self._times(bench, ANN) == (25.0, 0.0)
        assert await self._times(bench, BOB) == (14.0, 0.0)

    # new tenants

    async def test_a_tenant_that_begins_to_wait_starts_with_the_least_served_that_runs(
        self, bench: StoreBench
    ) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN))
        await self._lease(bench, ANN, charge_s=50.0)
        await bench.store.fair_share.charge(BOB, 80.0)
        await self._lease(bench, BOB, charge_s=5.0)
        await bench.enqueue(tenant=EVE)
        assert await self._times(bench, EVE) == (50.0, 0.0)
        # It already waits, so the time that others are charged meanwhile is its gain.
        await self._lease(bench, ANN, charge_s=50.0)
        await bench.enqueue(tenant=EVE)
        assert await self._times(bench, EVE) == (50.0, 0.0)

    async def test_where_nobody_runs_it_starts_with_the_least_served_that_waits(
        self, bench: StoreBench
    ) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN))
        for name, seconds in ((ANN, 40.0), (BOB, 60.0)):
            await bench.store.fair_share.charge(name, seconds)
        await bench.store.fair_share.put_terms(TenantTerms(BOB))
        await bench.enqueue(tenant=BOB)
        await bench.enqueue(tenant=ANN)
        assert await self._times(bench, ANN) == (60.0, 0.0)
        await bench.enqueue(tenant=EVE)
        assert await self._times(bench, EVE) == (60.0, 0.0)

    async def test_one_that_waits_for_what_nobody_runs_does_not_hold_the_others_back(
        self, bench: StoreBench
    ) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN))
        await bench.enqueue(FOR_FAST, tenant=ANN)
        await bench.enqueue(tenant=BOB)
        assert await self._leases(bench, 1, B, SLOW, charge_s=70.0) == [BOB]
        await bench.enqueue(tenant=EVE)
        assert await self._times(bench, EVE) == (70.0, 0.0)

    async def test_where_nobody_else_has_anything_it_starts_with_who_was_served_most(
        self, bench: StoreBench
    ) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN))
        ref = await self._lease(bench, ANN, charge_s=50.0)
        await bench.store.write(completion(ref))
        await bench.enqueue(tenant=BOB)
        assert await self._times(bench, BOB) == (50.0, 0.0)

    async def test_a_job_that_goes_back_to_its_lane_begins_nothing(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN))
        ref = await self._lease(bench, ANN, charge_s=1.0)
        await self._lease(bench, BOB, charge_s=90.0)
        written = await bench.store.write(release(ref))
        assert written is not None
        assert await self._times(bench, ANN) == (1.0, 0.0)
        await bench.change(written.dispatch, Change(priority=7))
        assert await self._times(bench, ANN) == (1.0, 0.0)

    # caps

    async def test_a_tenant_at_its_cap_is_not_seen_and_not_leased(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN, max_leased=2))
        first, second, third = [await bench.enqueue(tenant=ANN) for _ in range(3)]
        other = await bench.enqueue(tenant=BOB)
        refs = []
        for job in (first, second):
            written = await bench.store.lease(job.job_id, bench.offer())
            assert written is not None
            refs.append(written.dispatch.lease_ref())
        before = await bench.state()
        assert await bench.store.lease(third.job_id, bench.offer()) is None
        assert await bench.peek() == [other.job_id]
        assert [await bench.peek(B, SLOW), await bench.peek(A, FAST)] == [[other.job_id]] * 2
        bench.polls.pop()
        assert await bench.state() == before
        assert await self._leases(bench, 2) == [BOB]
        assert (await bench.store.fair_share.get(ANN)).is_at_cap
        await bench.store.write(completion(refs[0]))
        assert await bench.peek() == [third.job_id]
        assert await self._leases(bench, 2) == [ANN]

    async def test_a_cap_counts_whatever_ends_a_lease(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN, max_leased=1))
        leased, ref = await bench.leased(tenant=ANN)
        other = await bench.enqueue(tenant=ANN)
        await bench.store.write(release(ref))
        assert await bench.peek() == [leased.job_id, other.job_id]
        again = await bench.lease_next()
        assert again is not None
        assert await bench.peek() == []
        await bench.cancel(again)
        assert await bench.peek() == [other.job_id]
        taken = await bench.store.lease(other.job_id, bench.offer())
        assert taken is not None
        last = await bench.enqueue(tenant=ANN)
        finished = await bench.store.write(completion(taken.dispatch.lease_ref()))
        taken = await lease_next(bench.store, bench.offer())
        assert finished is not None
        assert taken is not None
        assert taken.dispatch.job_id == last.job_id

    async def test_a_cap_that_is_changed_counts_at_once(self, bench: StoreBench) -> None:
        shares = bench.store.fair_share
        await bench.leased(tenant=ANN)
        await shares.put_terms(TenantTerms(ANN, max_leased=1))
        await bench.enqueue(tenant=ANN)
        assert await bench.peek() == []
        await shares.put_terms(TenantTerms(ANN, max_leased=2))
        assert len(await bench.peek()) == 1
        await shares.put_terms(TenantTerms(ANN, max_leased=0))
        assert await bench.lease_next() is None
        await shares.remove_terms(ANN)
        assert await bench.lease_next() is not None

    async def test_many_at_once_never_pass_a_cap(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN, max_leased=3))
        jobs = [await bench.enqueue(tenant=ANN) for _ in range(8)]
        asked = [lease_next(bench.store, bench.offer()) for _ in range(6)]
        named = [bench.store.lease(job.job_id, bench.offer(B)) for job in jobs]
        taken = [each for each in await asyncio.gather(*asked, *named) if each is not None]
        assert len(taken) == 3
        assert (await bench.store.fair_share.get(ANN)).leased == 3

    async def test_one_that_was_at_its_cap_starts_anew_with_its_next_lease(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN, max_leased=1))
        ref = await self._lease(bench, ANN, charge_s=1.0)
        waiting = await bench.enqueue(tenant=ANN)
        await self._lease(bench, BOB, charge_s=70.0)
        # While another tenant waits, nobody is compared with one that is kept out.
        await bench.enqueue(tenant=EVE)
        assert await self._times(bench, EVE) == (71.0, 0.0)
        await bench.store.write(completion(ref))
        assert await self._times(bench, ANN) == (1.0, 0.0)
        offer = msgspec.structs.replace(bench.offer(), charge_s=2.0)
        assert await bench.store.lease(waiting.job_id, offer) is not None
        assert await self._times(bench, ANN) == (73.0, 0.0)

    # holds

    async def test_a_tenant_that_is_held_gets_nothing_until_its_time(self, bench: StoreBench) -> None:
        shares = bench.store.fair_share
        waiting = await bench.enqueue(tenant=ANN)
        other = await bench.enqueue(tenant=BOB)
        await shares.put_terms(TenantTerms(ANN, held_until=bench.clock.now() + 10))
        assert await shares.next_hold_end() == bench.clock.now() + 10
        assert await bench.peek() == [other.job_id]
        assert await bench.store.lease(waiting.job_id, bench.offer()) is None
        await bench.clock.advance(9.5)
        assert await bench.peek() == [other.job_id]
        await bench.clock.advance(0.5)
        assert await shares.next_hold_end() is None
        assert await bench.store.lease(waiting.job_id, bench.offer()) is not None
        assert await bench.peek() == [other.job_id]

    async def test_a_hold_that_is_over_shows_the_tenant_to_whoever_looks(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN, held_until=bench.clock.now() + 10))
        waiting = await bench.enqueue(tenant=ANN)
        assert await bench.lease_next() is None
        assert await bench.peek(B, SLOW) == []
        await bench.clock.advance(10)
        assert await bench.peek(B, SLOW) == [waiting.job_id]
        assert await bench.lease_next() is not None

    async def test_a_hold_without_end_is_lifted_by_hand(self, bench: StoreBench) -> None:
        shares = bench.store.fair_share
        await bench.enqueue(tenant=ANN)
        await shares.put_terms(TenantTerms(ANN, held_until=inf))
        await bench.clock.advance(1e9)
        assert await bench.lease_next() is None
        await shares.put_terms(TenantTerms(ANN))
        assert await bench.lease_next() is not None

    async def test_what_runs_while_its_tenant_is_held_may_end(self, bench: StoreBench) -> None:
        await bench.store.fair_share.put_terms(TenantTerms(ANN, max_leased=1))
        _, ref = await bench.leased(tenant=ANN)
        await bench.store.fair_share.put_terms(TenantTerms(ANN, max_leased=1, held_until=inf))
        await bench.enqueue(tenant=ANN)
        assert await bench.store.write(completion(ref)) is not None
        assert await bench.lease_next() is None

    # waking

    async def test_whoever_waits_is_told_when_a_tenant_comes_free(self, bench: StoreBench) -> None:
        told = asyncio.Event()
        await bench.store.fair_share.put_terms(TenantTerms(ANN, max_leased=1))
        _, ref = await bench.leased(tenant=ANN)
        await bench.enqueue(tenant=ANN)
        assert await bench.lease_next() is None
        bench.store.listen(told.set)
        await asyncio.sleep(0.2)
        told.clear()
        await bench.store.write(completion(ref))
        await asyncio.wait_for(told.wait(), 5)
        assert await bench.lease_next() is not None
        await bench.enqueue(tenant=ANN)
        assert await bench.lease_next() is None
        told.clear()
        await bench.store.fair_share.put_terms(TenantTerms(ANN, max_leased=2))
        await asyncio.wait_for(told.wait(), 5)

    @staticmethod
    async def _lease(bench: StoreBench, name: TenantId, charge_s: float) -> LeaseRef:
        job = await bench.enqueue(tenant=name)
        offer = msgspec.structs.replace(bench.offer(), charge_s=charge_s)
        written = await bench.store.lease(job.job_id, offer)
        assert written is not None
        return written.dispatch.lease_ref()

    @staticmethod
    async def _leases(
        bench: StoreBench, count: int = 10, worker: object = A, profile: object = FAST, charge_s: float = 10.0
    ) -> list[TenantId]:
        """The tenants whose jobs are leased, in order, until none is left."""
        tenants = []
        for _ in range(count):
            offer = bench.offer(worker, profile)  # type: ignore[arg-type]
            written = await lease_next(bench.store, msgspec.structs.replace(offer, charge_s=charge_s))
            if written is None:
                break
            tenants.append(written.dispatch.tenant)
        return tenants

    @staticmethod
    async def _times(bench: StoreBench, name: TenantId) -> tuple[float, float]:
        share = await bench.store.fair_share.get(name)
        return share.virtual_time, share.credit
