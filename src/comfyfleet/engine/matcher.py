"""Parked polls are idle slots. Whenever something changes, a round gives waiting jobs to the slots it concerns.

A slot that a round left empty-handed found nothing it may take, so later only what has changed needs a look: a new slot
looks for itself, a new job is offered to the slots of the profiles that may take it. Policy ranks and assigns; the
store's lease has the last word, and a job it reports as taken is simply looked for again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.overtake_tracker import OvertakeTracker
from comfyfleet.model.dispatch import Candidate, Dispatch, LaneKey, LeaseOffer, WriteResult
from comfyfleet.model.ids import ClassKey, JobId, PollId, ProfileKey, TenantId, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.policy.assignment import RankKey, WaitingJob, assign, rank_key, score, warmth
from comfyfleet.policy.failover import SmartFailover
from comfyfleet.policy.fair_share import TenantTurn, charge_s, due_now, turns
from comfyfleet.policy.workflow_stats import expected_s
from comfyfleet.ports import Peek, Timer
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

_RELEARN_EVERY_S = 0.05  # all classes are read each time, and thousands may come in a row
_TENANT_PATIENCE_S = 0.1  # so long a round waits for the databases of tenants


class LeaseGrant(NamedTuple):
    """A lease and, where it was read with the lease, the record of the leased job: one value, never two."""

    dispatch: Dispatch
    record: Job | None


class ParkedPoll:
    """One parked poll."""

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
        """Slots that their own poll is serving: no round serves them meanwhile, since two servers of one slot would
        lease two jobs for it."""
        self._behind: dict[ParkedPoll, asyncio.Task[bool]] = {}
        """Slots whose lease waits for a tenant's database: no round serves them meanwhile."""
        self._running: asyncio.Task[None] | None = None
        # A strategy with an opinion of its own has one for each worker, equal in all else or not.
        self._asks_for_each = type(context.strategy).should_skip is not SmartFailover.should_skip
        self._overtaking = OvertakeTracker()
        self._timer: Timer | None = None
        self._is_outdated = False
        """Another engine has put a class into the table since it was read here."""
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
            # The same poll asked again: whoever waits for the first answer has hung up.
            self._send_away(older)
        self._parked[slot.poll_id] = self._looking[slot.poll_id] = slot
        self._parked_of[slot.worker_id] += 1
        if self._running is None:
            # The usual case: nobody else is looking, so the slot is served without a detour through a task.
            del self._looking[slot.poll_id]
            self._served_by_park.add(slot)
            try:
                await self._serve([slot])
            finally:
                self._served_by_park.discard(slot)
                # Whatever arrived meanwhile for this slot waits in `_looking`.
                self._start()
        if not slot.answer.done():
            self._arm()

    async def looked_for(self, slot: ParkedPoll) -> None:
        """Until the slot has its answer, or nobody is looking for one."""
        while not slot.answer.done() and (looking := self._behind.get(slot) or self._running) is not None:
            await asyncio.wait((looking, slot.answer), return_when=asyncio.FIRST_COMPLETED)

    def leave(self, slot: ParkedPoll) -> None:
        if self._parked.get(slot.poll_id) is not slot:
            return
        del self._parked[slot.poll_id]
        self._looking.pop(slot.poll_id, None)
        self._parked_of[slot.worker_id] -= 1
        if not self._parked_of[slot.worker_id]:
            del self._parked_of[slot.worker_id]

    def _send_away(self, slot: ParkedPoll) -> None:
        self.leave(slot)
        if not slot.answer.done():
            slot.answer.set_result(None)

    def dismiss(self, worker_id: WorkerId) -> None:
        """The worker takes nothing now: its parked polls are answered with nothing."""
        for slot in [slot for slot in self._parked.values() if slot.worker_id == worker_id]:
            self._send_away(slot)

    # waking

    def job_arrived(self, class_key: ClassKey) -> None:
        if not self._parked:
            return
        profiles, workers = self._context.fleet.profiles_for(class_key), self._context.fleet.workers
        self._look(
            slot
            for slot in self._parked.values()
            if (worker := workers.get(slot.worker_id)) is not None and worker.profile in profiles
        )

    def worker_freed(self, worker_id: WorkerId) -> None:
        """A block ended, a quarantine, a pause: its slots may find what they could not have before."""
        self._look(slot for slot in self._parked.values() if slot.worker_id == worker_id)

    def everything_changed(self) -> None:
        self._look(self._parked.values())

    def look_again(self) -> None:
        """Another engine has changed a worker: what is known of it is read again first."""
        self._context.fleet.is_fresh_since = float("-inf")
        self.everything_changed()

    def relearn(self) -> None:
        """Another engine has put a class into the table, and workers that were equal may have parted for it."""
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
        if self._running is None and not self._is_closed and self._is_anybody_looking():
            self._running = in_background(self._run(), name="round")

    async def _run(self) -> None:
        try:
            while slots := self._take_looking():
                await self._serve(slots)
        except Exception:
            log_failure(_LOG, "a round failed; the next one, within a second, tries again")
        finally:
            self._running = None
            self._start()

    def _is_anybody_looking(self) -> bool:
        return any(not self._is_served(slot) for slot in self._looking.values())

    def _is_served(self, slot: ParkedPoll) -> bool:
        return slot in self._served_by_park or slot in self._behind

    def _take_looking(self) -> list[ParkedPoll]:
        """Those that a round serves next. A slot that its own poll is serving stays until that is over."""
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
        for timer in (self._timer, self._relearning):
            if timer is not None:
                timer.cancel()
        for slot in list(self._parked.values()):
            if not slot.answer.done():
                slot.answer.set_result(None)
        self._parked.clear()
        self._parked_of.clear()
        self._looking.clear()
        tasks = [*self._behind.values(), *([] if self._running is None else [self._running])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # serving

    async def _serve(self, slots: list[ParkedPoll]) -> None:
        """Until every slot has a job or has seen that there is none."""
        now = self._context.clock.now()
        if self._context.store.is_shared:
            # What this engine knows of the others' workers and classes is at most so old.
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
                and slot not in self._behind
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
            # Oldest first: of one lane, the head is always the one that leaves. At once: a store writes them as one.
            pairs = sorted(due.items(), key=lambda pair: lanes[pair[1]].sequence)
            leased = await self._lease_all(
                [(waiting[PollId(poll_id)], lanes[job_id]) for poll_id, job_id in pairs]
            )
            if all(leased) and len(due) == len(chosen):
                return
            again = {pair for pair, is_leased in zip(pairs, leased, strict=True) if not is_leased}
            if again and again <= refused:
                # Shown again and refused again, for whatever reason: the next round looks, a moment from now.
                return
            refused |= again

    def _due(self, chosen: dict[str, JobId], seen: dict[JobId, Candidate]) -> dict[str, JobId]:
        """What may be leased at once. One slot is, and so is everything where nobody is charged."""
        if len(chosen) == 1 or not (turn := self._turns(seen)):
            return chosen
        return due_now(chosen, seen, turn, self._context.rules.quantum_s)

    async def _lease_all(self, pairs: list[tuple[ParkedPoll, Candidate]]) -> list[bool]:
        """False: to be looked for again."""
        if not self._context.reaches_tenants:
            return await _all_of([self._lease(slot, candidate) for slot, candidate in pairs])
        # Each is looked up in its tenant's database: one that is slow keeps nobody else waiting.
        tasks = [asyncio.create_task(self._lease(slot, candidate), name="lease") for slot, candidate in pairs]
        try:
            await asyncio.wait(tasks, timeout=_TENANT_PATIENCE_S)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        for (slot, _), task in zip(pairs, tasks, strict=True):
            if not task.done():
                self._behind[slot] = task
                task.add_done_callback(partial(self._came, slot))
        return [not task.done() or task.result() for task in tasks]

    def _came(self, slot: ParkedPoll, task: asyncio.Task[bool]) -> None:
        del self._behind[slot]
        if not task.cancelled() and (error := task.exception()) is not None:
            log_failure(_LOG, "a lease failed; the next round, within a second, tries again", error=error)
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
            # If a block was the reason that this engine had not heard of, the next look must see it.
            for block in await context.store.blocks(worker.worker_id):
                context.fleet.note_block(block)
            # Or the worker has registered anew, at another engine.
            await context.fleet.look_at(worker)
            return False
        self.leave(slot)
        context.publish(written)
        if slot.answer.done():
            # The poll went away while its job was being fetched: the job goes back to its place at once.
            await context.give_back(written.dispatch)
        else:
            slot.answer.set_result(LeaseGrant(written.dispatch, record))
        return True

    async def _leased(self, job_id: JobId, offer: LeaseOffer) -> tuple[WriteResult | None, Job | None]:
        """The lease, with the record of its job if that was read with it and is still the one to run."""
        store = self._context.store
        if not store.is_shared:
            return await store.lease(job_id, offer), None
        # At once, as each is a way to another process and back: whoever gets the lease needs the record next.
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
        """Every job that some slot may take, with its rank at each. Slots that see the same ask once."""
        fleet = self._context.fleet
        alike: dict[tuple[ProfileKey, WorkerId | None], list[ParkedPoll]] = defaultdict(list)
        for slot in slots.values():
            profile = fleet.workers[slot.worker_id].profile
            has_tenant_database = self._asks_for_each or slot.worker_id in fleet.with_blocks
            alike[profile, slot.worker_id if has_tenant_database else None].append(slot)
        groups = list(alike.values())
        seen: dict[JobId, Candidate] = {}
        takers: dict[JobId, tuple[int, ...]] = {}
        for number, ((profile, _), group) in enumerate(alike.items()):
            for candidate in await self._peek(profile, group[0].worker_id, len(slots), now):
                seen[candidate.job_id] = candidate
                takers[candidate.job_id] = (*takers.get(candidate.job_id, ()), number)
        if any(candidate.lane.class_key not in fleet.classes for candidate in seen.values()):
            # Another engine's class; what it is must be known before it can be ranked.
            await fleet.sync()
            known = {job_id: each for job_id, each in seen.items() if each.lane.class_key in fleet.classes}
            return self._ranked(known, takers, groups), known
        return self._ranked(seen, takers, groups), seen

    async def _peek(
        self, profile: ProfileKey, worker_id: WorkerId, slots: int, now: float
    ) -> list[Candidate]:
        """What the store shows, less what the failover strategy refuses; what was refused is not shown again."""
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
        """Jobs of one lane differ in age alone, so a lane's slots are ranked once."""
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
                # Among those that waited long enough age alone counts, or the cold would go on losing to the warm.
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
        """None where nobody is charged, as most often."""
        if not any(each.weight for each in seen.values()):
            return {}
        return turns(seen.values(), self._seconds_of)

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
        """Preference, warmth and score may let a younger job pass, but not for longer than the affinity wait.

        Selectivity alone may do so for ever: whoever is passed then has other workers.
        """
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
                    # All that are older and of the same share were passed; of another share, those that were seen.
                    its = _share(lanes[other.job_id])
                    passed = job.rank[-1] if its == share else other.rank[-1] + 1
                    overtaken[its] = max(passed, overtaken.get(its, 0))
            worker = self._context.fleet.workers[slots[PollId(poll_id)].worker_id]
            for its, passed in overtaken.items():
                self._overtaking.note(
                    worker.profile, job.priority, its, passed, self._context.clock.monotonic()
                )


def _belongs(record: Job | None, dispatch: Dispatch) -> bool:
    """Whether a record that was read while the lease was granted is the one to run under that lease."""
    # What lies apart is looked at with the lease, and read after it. The job may have gone on to another round.
    return (
        record is not None
        and record.job_id == dispatch.job_id
        and record.round == dispatch.round
        and not dispatch.has_tenant_database
    )


def _share(candidate: Candidate) -> TenantId | None:
    """Among whom it is a matter of age who comes first."""
    return candidate.lane.tenant if candidate.weight else None


async def _all_of(work: list[Coroutine[Any, Any, bool]]) -> list[bool]:
    if len(work) == 1:
        return [await work[0]]
    ended = await asyncio.gather(*work, return_exceptions=True)
    # Only now, when nothing is under way any more.
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return [each for each in ended if isinstance(each, bool)]
