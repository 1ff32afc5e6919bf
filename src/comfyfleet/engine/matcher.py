"""Matches waiting jobs with parked polls. Each parked poll is an idle slot.

After a pass, a slot without a job found none that it may take. So later passes look only at what changed: a
new slot, or a new job for the profiles that may take it. Policy ranks and assigns; the store grants the
lease, and the matcher looks again if it refuses."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple

from comfyfleet.engine.context import EngineContext, stop
from comfyfleet.engine.overtake_tracker import OvertakeTracker
from comfyfleet.model.dispatch import Candidate, Dispatch, LaneKey, LeaseOffer, WriteResult
from comfyfleet.model.ids import JobId, PollId, ProfileKey, TenantId, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.policy.assignment import RankKey, WaitingJob, assign, rank_key, score, warmth
from comfyfleet.policy.failover import SmartFailover
from comfyfleet.policy.fair_share import TenantTurn, charge_s, due_now, tenant_turns
from comfyfleet.policy.workflow_stats import expected_s
from comfyfleet.ports import Peek, Timer
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

_RELEARN_EVERY_S = 0.05  # all classes are read each time, and thousands may come in a row
_TENANT_PATIENCE_S = 0.1  # so long a round waits for the databases of tenants


class LeaseGrant(NamedTuple):
    """A lease, with the job's record if it was read together with the lease."""

    dispatch: Dispatch
    record: Job | None


class ParkedPoll:
    __slots__ = ("answer", "load", "offer", "poll_id", "worker_id")

    def __init__(self, worker_id: WorkerId, poll_id: PollId, load: int | None = None) -> None:
        self.worker_id, self.poll_id, self.load = worker_id, poll_id, load
        self.offer: LeaseOffer | None = None  # with which a job was last asked for
        self.answer: asyncio.Future[LeaseGrant | None] = asyncio.get_running_loop().create_future()


class Matcher:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._parked: dict[PollId, ParkedPoll] = {}
        self._parked_of: Counter[WorkerId] = Counter()
        self._looking: dict[PollId, ParkedPoll] = {}
        self._served_by_park: set[ParkedPoll] = set()
        """Slots that their own poll serves. A pass skips them, or it would lease a second job for them."""
        self._slow_leases: dict[ParkedPoll, asyncio.Task[bool]] = {}
        """Slots whose lease waits for a tenant database. A pass skips them."""
        self._running: asyncio.Task[None] | None = None
        # A custom strategy may treat equal workers differently.
        self._asks_for_each = type(context.strategy).should_skip is not SmartFailover.should_skip
        self._overtaking = OvertakeTracker()
        self._timer: Timer | None = None
        self._is_outdated = False
        """Another engine has added a class to the table since it was read here."""
        self._relearning: Timer | None = None
        self._is_closed = False

    @property
    def idle_slots(self) -> int:
        return len(self._parked)

    def has_parked(self, worker_id: WorkerId) -> bool:
        return worker_id in self._parked_of

    # parking

    async def park(self, slot: ParkedPoll) -> None:
        if (older := self._parked.get(slot.poll_id)) is not None:
            # The same poll came again, so the first caller has hung up.
            self._send_away(older)
        self._parked[slot.poll_id] = self._looking[slot.poll_id] = slot
        self._parked_of[slot.worker_id] += 1
        if self._running is None:
            # The usual case: no pass runs, so serve the slot without a task.
            del self._looking[slot.poll_id]
            self._served_by_park.add(slot)
            try:
                await self._serve([slot])
            finally:
                self._served_by_park.discard(slot)
                # `_looking` holds what arrived for this slot meanwhile.
                self._start()
        if not slot.answer.done():
            self._arm()

    async def wait_for_pass(self, slot: ParkedPoll) -> None:
        """Waits until the slot has its answer or no pass looks for one."""
        while (
            not slot.answer.done() and (looking := self._slow_leases.get(slot) or self._running) is not None
        ):
            await asyncio.wait((looking, slot.answer), return_when=asyncio.FIRST_COMPLETED)

    def unpark(self, slot: ParkedPoll) -> None:
        if self._parked.get(slot.poll_id) is not slot:
            return
        del self._parked[slot.poll_id]
        self._looking.pop(slot.poll_id, None)
        self._parked_of[slot.worker_id] -= 1
        if not self._parked_of[slot.worker_id]:
            del self._parked_of[slot.worker_id]

    def _send_away(self, slot: ParkedPoll) -> None:
        self.unpark(slot)
        if not slot.answer.done():
            slot.answer.set_result(None)

    def cancel_polls(self, worker_id: WorkerId) -> None:
        """Answers the worker's parked polls with no job."""
        for slot in [slot for slot in self._parked.values() if slot.worker_id == worker_id]:
            self._send_away(slot)

    # waking

    def job_arrived(self, dispatch: Dispatch) -> None:
        """Looks for a slot, unless the job is delayed, paused, held or has ended."""
        if not self._parked or not dispatch.stands_in_lane:
            return
        fleet = self._context.fleet
        profiles, workers = fleet.profiles_for(dispatch.class_key), fleet.workers
        self._look(
            slot
            for slot in self._parked.values()
            if (worker := workers.get(slot.worker_id)) is not None and worker.profile in profiles
        )

    def worker_freed(self, worker_id: WorkerId) -> None:
        """After a block, quarantine or pause of the worker ended."""
        self._look(slot for slot in self._parked.values() if slot.worker_id == worker_id)

    def everything_changed(self) -> None:
        self._look(self._parked.values())

    def reload_workers(self) -> None:
        """After another engine changed a worker: read it before the next pass."""
        self._context.fleet.is_fresh_since = float("-inf")
        self.everything_changed()

    def reload_classes(self) -> None:
        """After another engine added a class, for which equal workers may have split."""
        self._is_outdated = True
        clock = self._context.clock
        wait_s = self._context.fleet.is_fresh_since + _RELEARN_EVERY_S - clock.monotonic()
        if wait_s <= 0:
            self.everything_changed()
        elif self._relearning is None and not self._is_closed:
            self._relearning = clock.call_at(clock.now() + wait_s, self._relearn_now)

    def _relearn_now(self) -> None:
        self._relearning = None
        self.everything_changed()

    def _look(self, slots: Iterable[ParkedPoll]) -> None:
        for slot in slots:
            self._looking[slot.poll_id] = slot
        self._start()

    def _start(self) -> None:
        if self._running is not None or self._is_closed:
            return
        if any(not self._is_served(slot) for slot in self._looking.values()):
            self._running = in_background(self._run(), name="matching pass")

    async def _run(self) -> None:
        try:
            while slots := self._take_looking():
                await self._serve(slots)
        except Exception:
            log_failure(_LOG, "a matching pass failed; the next one, within a second, tries again")
        finally:
            self._running = None
            self._start()

    def _is_served(self, slot: ParkedPoll) -> bool:
        return slot in self._served_by_park or slot in self._slow_leases

    def _take_looking(self) -> list[ParkedPoll]:
        """The slots of the next pass, without those served elsewhere."""
        slots = [slot for slot in self._looking.values() if not self._is_served(slot)]
        self._looking = {poll_id: slot for poll_id, slot in self._looking.items() if self._is_served(slot)}
        return slots

    def _arm(self) -> None:
        """A lost wake-up costs a second, never a job."""
        if self._timer is None and not self._is_closed:
            clock = self._context.clock
            self._timer = clock.call_at(clock.now() + self._context.rules.round_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._parked:
            self.everything_changed()
            self._arm()

    async def close(self) -> None:
        self._is_closed = True
        for slot in list(self._parked.values()):
            if not slot.answer.done():
                slot.answer.set_result(None)
        self._parked.clear()
        self._parked_of.clear()
        self._looking.clear()
        await stop(self._timer, self._relearning, self._running, *self._slow_leases.values())

    # matching

    async def _serve(self, slots: list[ParkedPoll]) -> None:
        """Serves until each slot has a job or there is none for it."""
        now = self._context.clock.now()
        if self._context.store.is_shared:
            # Limits the age of what this engine knows about other engines' workers and classes.
            max_age_s = _RELEARN_EVERY_S if self._is_outdated else self._context.rules.round_s
            if self._context.clock.monotonic() >= self._context.fleet.is_fresh_since + max_age_s:
                self._is_outdated = False
                await self._context.fleet.sync()
        refused: set[tuple[str, JobId]] = set()
        while True:
            workers = self._context.fleet.workers
            waiting = {
                slot.poll_id: slot
                for slot in slots
                if not slot.answer.done()
                and slot not in self._slow_leases
                and (worker := workers.get(slot.worker_id)) is not None
                and self._context.fleet.takes_work(worker, now)
            }
            if not waiting:
                return
            jobs, lanes = await self._candidates(waiting, now)
            if not jobs:
                return
            chosen = assign(jobs)
            self._note_overtaken(jobs, lanes, chosen, waiting)
            due = self._due(chosen, lanes)
            # Oldest first, so that the head of a lane leaves first.
            pairs = sorted(due.items(), key=lambda pair: lanes[pair[1]].sequence)
            leased = await self._lease_all(
                [(waiting[PollId(poll_id)], lanes[job_id]) for poll_id, job_id in pairs]
            )
            if all(leased) and len(due) == len(chosen):
                return
            again = {pair for pair, is_leased in zip(pairs, leased, strict=True) if not is_leased}
            if again and again <= refused:
                # Offered and refused twice. The next pass looks again.
                return
            refused |= again

    def _due(self, chosen: dict[str, JobId], seen: dict[JobId, Candidate]) -> dict[str, JobId]:
        """What to lease at once: everything, unless fair shares apply and there are several slots."""
        if len(chosen) == 1 or not (turn := self._turns(seen)):
            return chosen
        return due_now(chosen, seen, turn, self._context.rules.quantum_s)

    async def _lease_all(self, pairs: list[tuple[ParkedPoll, Candidate]]) -> list[bool]:
        """False: look again."""
        if not self._context.reaches_tenants:
            return await _all_of([self._lease(slot, candidate) for slot, candidate in pairs])
        # Each lease reads its tenant's database; a slow one must not delay the others.
        tasks = [asyncio.create_task(self._lease(slot, candidate), name="lease") for slot, candidate in pairs]
        try:
            await asyncio.wait(tasks, timeout=_TENANT_PATIENCE_S)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        for (slot, _), task in zip(pairs, tasks, strict=True):
            if not task.done():
                self._slow_leases[slot] = task
                task.add_done_callback(partial(self._on_lease_done, slot))
        return [not task.done() or task.result() for task in tasks]

    def _on_lease_done(self, slot: ParkedPoll, task: asyncio.Task[bool]) -> None:
        del self._slow_leases[slot]
        if not task.cancelled() and (error := task.exception()) is not None:
            log_failure(
                _LOG, "a lease failed; the next matching pass, within a second, tries again", error=error
            )
        if self._parked.get(slot.poll_id) is slot:
            self._look([slot])

    async def _lease(self, slot: ParkedPoll, candidate: Candidate) -> bool:
        context = self._context
        worker = context.fleet.workers.get(slot.worker_id)
        if slot.answer.done() or worker is None:
            return True
        slot.offer = offer = context.offer(worker, slot.poll_id, candidate.lane.workflow_hash)
        written, record = await self._leased(candidate.job_id, offer)
        if written is None:
            # The reason may be a block that this engine did not know.
            for block in await context.store.blocks(worker.worker_id):
                context.fleet.cache_block(block)
            # Or the worker has registered again at another engine.
            await context.fleet.recheck_worker(worker)
            return False
        self.unpark(slot)
        context.publish(written)
        if slot.answer.done():
            # The poll ended while its job was leased.
            await context.requeue_undelivered(written.dispatch)
        else:
            slot.answer.set_result(LeaseGrant(written.dispatch, record))
        return True

    async def _leased(self, job_id: JobId, offer: LeaseOffer) -> tuple[WriteResult | None, Job | None]:
        """The lease, and the job's record if it was read along and is still current."""
        store = self._context.store
        if not store.is_shared:
            return await store.lease(job_id, offer), None
        # Each is a call to another process, and a granted lease needs the record next.
        written, record = await asyncio.gather(
            store.lease(job_id, offer), store.records.get(job_id), return_exceptions=True
        )
        if isinstance(written, BaseException):
            raise written
        if written is None or isinstance(record, BaseException) or not _belongs(record, written.dispatch):
            return written, None
        return written, record

    async def _candidates(
        self, slots: dict[PollId, ParkedPoll], now: float
    ) -> tuple[list[WaitingJob], dict[JobId, Candidate]]:
        """Every job that some slot may take, with its ranks. Equal slots share one query."""
        fleet = self._context.fleet
        alike: dict[tuple[ProfileKey, WorkerId | None], list[ParkedPoll]] = defaultdict(list)
        for slot in slots.values():
            profile = fleet.workers[slot.worker_id].profile
            is_single = self._asks_for_each or slot.worker_id in fleet.with_blocks
            alike[profile, slot.worker_id if is_single else None].append(slot)
        groups = list(alike.values())
        seen: dict[JobId, Candidate] = {}
        takers: dict[JobId, tuple[int, ...]] = {}
        for number, ((profile, _), group) in enumerate(alike.items()):
            for candidate in await self._peek(profile, group[0].worker_id, len(slots), now):
                seen[candidate.job_id] = candidate
                takers[candidate.job_id] = (*takers.get(candidate.job_id, ()), number)
        if any(candidate.lane.class_key not in fleet.classes for candidate in seen.values()):
            # Another engine's class must be known before it can be ranked.
            await fleet.sync()
            known = {job_id: each for job_id, each in seen.items() if each.lane.class_key in fleet.classes}
            return self._ranked(known, takers, groups), known
        return self._ranked(seen, takers, groups), seen

    async def _peek(
        self, profile: ProfileKey, worker_id: WorkerId, slots: int, now: float
    ) -> list[Candidate]:
        """The store's candidates without those that the failover strategy refuses."""
        rules, strategy = self._context.rules, self._context.strategy
        skip: frozenset[str] = frozenset()
        while True:
            query = Peek(profile, worker_id, slots, rules.window_lanes, rules.quantum_s, skip)
            found = await self._context.store.peek(query)
            hashes = {candidate.lane.workflow_hash for candidate in found}
            refused = {each for each in hashes if strategy.should_skip(worker_id, each, now)}
            if not refused:
                return found
            skip |= refused

    def _ranked(
        self,
        seen: dict[JobId, Candidate],
        takers: dict[JobId, tuple[int, ...]],
        groups: list[list[ParkedPoll]],
    ) -> list[WaitingJob]:
        """Jobs of a lane differ only in age, so the slots of a lane are ranked once."""
        ranked: dict[tuple[LaneKey, tuple[int, ...]], tuple[RankKey, tuple[str, ...]]] = {}
        wait_s = self._context.rules.affinity_wait_s
        turn = self._turns(seen)
        jobs = []
        for job_id, candidate in seen.items():
            lane, by = candidate.lane, takers[job_id]
            known = ranked.get((lane, by))
            if known is None:
                ranks = {
                    str(slot.poll_id): self._rank(candidate, slot)
                    for number in by
                    for slot in groups[number]
                    if slot.worker_id in self._context.fleet.workers
                }
                if not ranks:
                    continue
                best = WaitingJob.ranked(job_id, lane.priority, ranks)
                known = ranked[lane, by] = (best.rank, best.slots)
            at = turn[job_id].start if turn else 0.0
            rank = (True, *known[0][1:5], at, candidate.sequence)
            profiles = {self._context.fleet.workers[groups[number][0].worker_id].profile for number in by}
            share, limit = _share(candidate), self._context.clock.monotonic() - wait_s
            if self._overtaking.is_overdue(profiles, lane.priority, share, candidate.sequence, limit):
                # Among overdue jobs only age counts, or cold workflows would always lose to warm ones.
                rank = (False, False, 0, 0, 0.0, at, candidate.sequence)
            jobs.append(WaitingJob(job_id, lane.priority, rank, known[1]))
        return jobs

    def _rank(self, candidate: Candidate, slot: ParkedPoll) -> RankKey:
        context, lane = self._context, candidate.lane
        fleet = context.fleet
        cls, worker = fleet.classes[lane.class_key], fleet.workers[slot.worker_id]
        stats = context.known_workflow_stats(lane.workflow_hash)
        seconds = expected_s(stats, worker.capabilities.worker_class)
        busy = worker.slots - self._parked_of[worker.worker_id] if slot.load is None else slot.load
        may_overtake = context.rules.affinity_wait_s > 0
        return rank_key(
            is_overdue=False,
            is_preferred=may_overtake and worker.worker_id in cls.preferences.workers,
            warmth=warmth(cls, lane.workflow_hash, worker.live) if may_overtake else 0,
            selectivity=fleet.selectivity(lane.class_key),
            score=score(cls, worker, busy / max(1, worker.slots), context.rules.weights, seconds),
            sequence=candidate.sequence,
        )

    def _turns(self, seen: dict[JobId, Candidate]) -> dict[JobId, TenantTurn]:
        """Empty where no tenant has a fair share, which is the usual case."""
        if not any(each.weight for each in seen.values()):
            return {}
        return tenant_turns(seen.values(), self._seconds_of)

    def _seconds_of(self, candidate: Candidate) -> float:
        stats = self._context.known_workflow_stats(candidate.lane.workflow_hash)
        return charge_s(expected_s(stats, ""), self._context.rules)

    def _note_overtaken(
        self,
        jobs: list[WaitingJob],
        lanes: dict[JobId, Candidate],
        chosen: dict[str, JobId],
        slots: dict[PollId, ParkedPoll],
    ) -> None:
        """Preference, warmth and score let a younger job pass only within the affinity wait. Selectivity
        alone may always do so, because the passed job has other workers."""
        taken = set(chosen.values())
        left = [job for job in jobs if job.job_id not in taken]
        if not left:
            return
        by_id = {job.job_id: job for job in jobs}
        for poll_id, job_id in chosen.items():
            job = by_id[job_id]
            is_favoured = job.rank[1:3] < (True, 0)
            share = _share(lanes[job_id])
            overtaken: dict[TenantId | None, int] = {}
            for other in left:
                if (
                    other.priority == job.priority
                    and other.rank[-2:] < job.rank[-2:]
                    and (is_favoured or other.rank[3] == job.rank[3])
                    and poll_id in other.slots
                ):
                    # Of the same share, every older job was passed; of another share, only those seen.
                    its = _share(lanes[other.job_id])
                    passed = job.rank[-1] if its == share else other.rank[-1] + 1
                    overtaken[its] = max(passed, overtaken.get(its, 0))
            worker = self._context.fleet.workers[slots[PollId(poll_id)].worker_id]
            for its, passed in overtaken.items():
                self._overtaking.note(
                    worker.profile, job.priority, its, passed, self._context.clock.monotonic()
                )


def _belongs(record: Job | None, dispatch: Dispatch) -> bool:
    """Whether a record read along with the lease is the one to run."""
    # A tenant database is read after the lease. The job may have gone on to another round.
    return (
        record is not None
        and record.job_id == dispatch.job_id
        and record.round == dispatch.round
        and not dispatch.has_tenant_database
    )


def _share(candidate: Candidate) -> TenantId | None:
    """The group in which age decides the order."""
    return candidate.lane.tenant if candidate.weight else None


async def _all_of(work: list[Coroutine[Any, Any, bool]]) -> list[bool]:
    if len(work) == 1:
        return [await work[0]]
    ended = await asyncio.gather(*work, return_exceptions=True)
    # Raise only after all of them have ended.
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return [each for each in ended if isinstance(each, bool)]
