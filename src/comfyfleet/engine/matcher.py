"""Matches waiting jobs with parked polls. Each parked poll is an idle slot.

After a pass, a slot without a job found none that it may take. So later passes look only at what changed: a
new slot, or a new job for the profiles that may take it. Policy ranks and assigns; the store grants the
lease, and the matcher looks again if it refuses."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

from comfyfleet.engine.context import EngineContext, stop
from comfyfleet.engine.matching_window import MatchingWindow
from comfyfleet.engine.pass_ranks import LeaseGrant, ParkedPoll, Plan
from comfyfleet.model.dispatch import Candidate, Dispatch, LaneKey, LeaseOffer, WriteResult
from comfyfleet.model.ids import ClassKey, JobId, PollId, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.policy.fair_share import due_now
from comfyfleet.policy.scheduling import WaitReason
from comfyfleet.ports import Timer
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

_RELEARN_EVERY_S = 0.05  # all classes are read each time, and thousands may come in a row
_MANY_SLOTS = 32
"""Beyond so many idle slots, an arriving job is compared with some of those that are equal."""
_TENANT_PATIENCE_S = 0.1  # so long a round waits for the databases of tenants


class Matcher:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._parked: dict[PollId, ParkedPoll] = {}
        self._parked_of: Counter[WorkerId] = Counter()
        self._looking: dict[PollId, ParkedPoll] = {}
        self._arrived = 0
        """Jobs that arrived since the last pass began."""
        self._served_by_park: set[ParkedPoll] = set()
        """Slots that their own poll serves. A pass skips them, or it would lease a second job for them."""
        self._slow_leases: dict[ParkedPoll, asyncio.Task[bool]] = {}
        """Slots whose lease waits for a tenant database. A pass skips them."""
        self._running: asyncio.Task[None] | None = None
        self._window = MatchingWindow(context, self._parked_of)
        self._holding: dict[PollId, tuple[ParkedPoll, dict[LaneKey, WaitReason]]] = {}
        """Slots that leave jobs to others, and the reasons."""
        self._look_again: tuple[float, Timer] | None = None
        """When to look at these slots again."""
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
        self._context.outlook.polled(slot.worker_id)
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
        was_holding = self._holding.pop(slot.poll_id, None) is not None
        self._parked_of[slot.worker_id] -= 1
        if not self._parked_of[slot.worker_id]:
            del self._parked_of[slot.worker_id]
        if was_holding and not self._holding and len(self._parked) > _MANY_SLOTS:
            # Its equals, which were not looked at, hold from now on.
            self.everything_changed()

    def _send_away(self, slot: ParkedPoll) -> None:
        self.unpark(slot)
        if not slot.answer.done():
            slot.answer.set_result(None)

    def cancel_polls(self, worker_id: WorkerId) -> None:
        """Answers the worker's parked polls with no job."""
        for slot in [slot for slot in self._parked.values() if slot.worker_id == worker_id]:
            self._send_away(slot)
        self.others_changed()

    # waking

    def job_arrived(self, dispatch: Dispatch) -> None:
        """Looks for a slot, unless the job is delayed, paused, held or has ended."""
        if not self._parked or not dispatch.stands_in_lane:
            return
        fleet = self._context.fleet
        profiles, workers = fleet.profiles_for(dispatch.class_key), fleet.workers
        slots: Iterable[ParkedPoll] = (
            slot
            for slot in self._parked.values()
            if (worker := workers.get(slot.worker_id)) is not None and worker.profile in profiles
        )
        self._arrived += 1
        if len(self._parked) > _MANY_SLOTS and dispatch.class_key in fleet.classes:
            # All slots have been looked at with the jobs that waited before.
            slots = self._window.sample(slots, self._arrived, dispatch.class_key)
        self._look(slots)

    def worker_freed(self, worker_id: WorkerId) -> None:
        """After a block, quarantine or pause of the worker began or ended."""
        self._look(slot for slot in self._parked.values() if slot.worker_id == worker_id)
        self.others_changed()

    def everything_changed(self) -> None:
        self._look(self._parked.values())

    def others_changed(self) -> None:
        """After a change at a busy worker: what was left to it may be for others now."""
        if self._holding:
            self._look([slot for slot, _ in self._holding.values()])

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
        self._arrived = 0
        if not self._served_by_park and not self._slow_leases:
            looking, self._looking = self._looking, {}
            return list(looking.values())
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
        self._holding.clear()
        again = None if self._look_again is None else self._look_again[1]
        await stop(self._timer, again, self._relearning, self._running, *self._slow_leases.values())

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
            plan = await self._window.plan(waiting, self._context.clock.now())
            self._hold(waiting, plan)
            if plan is None or not plan.chosen:
                return
            due = self._due(plan)
            # Oldest first, so that the head of a lane leaves first.
            pairs = sorted(due.items(), key=lambda pair: plan.seen[pair[1]].sequence)
            leased = await self._lease_all(
                [(waiting[PollId(poll_id)], plan.seen[job_id]) for poll_id, job_id in pairs]
            )
            if all(leased) and len(due) == len(plan.chosen) and not plan.is_partial:
                return
            again = {pair for pair, is_leased in zip(pairs, leased, strict=True) if not is_leased}
            if again and again <= refused:
                # Offered and refused twice. The next pass looks again.
                return
            refused |= again

    def _hold(self, slots: dict[PollId, ParkedPoll], plan: Plan | None) -> None:
        """Remembers which slots leave jobs to others, and looks at them again in time."""
        left = {} if plan is None else plan.left
        for poll_id, slot in slots.items():
            if poll_id in left and poll_id in self._parked:
                self._holding[poll_id] = (slot, left[poll_id])
            else:
                self._holding.pop(poll_id, None)
        if plan is None or not left or self._is_closed:
            return
        if self._look_again is not None:
            if self._look_again[0] <= plan.look_at:
                return
            self._look_again[1].cancel()
        self._look_again = (plan.look_at, self._context.clock.call_at(plan.look_at, self._on_look_again))

    def _on_look_again(self) -> None:
        self._look_again = None
        self.others_changed()

    def left_to_others(self, lane: LaneKey) -> WaitReason | None:
        """Why the jobs of a lane wait although a slot is idle here: the shortest such wait."""
        reasons = [its[lane] for _, its in self._holding.values() if lane in its]
        return min(reasons, key=lambda why: why.free_in_s, default=None)

    def has_idle_slot(self, class_key: ClassKey) -> bool:
        """Whether an idle slot here may take jobs of this class."""
        fleet = self._context.fleet
        profiles, workers = fleet.profiles_for(class_key), fleet.workers
        return any(
            (worker := workers.get(worker_id)) is not None and worker.profile in profiles
            for worker_id in self._parked_of
        )

    def _due(self, plan: Plan) -> dict[str, JobId]:
        """What to lease at once: everything, unless fair shares apply and there are several slots."""
        if len(plan.chosen) == 1 or not (turns := plan.turns(self._context)):
            return plan.chosen
        return due_now(plan.chosen, plan.seen, turns, self._context.rules.quantum_s)

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
        slot.offer = offer = context.offer(worker, slot.poll_id, candidate.lane)
        written, record = await self._leased(candidate.job_id, offer)
        if written is None:
            # The reason may be a block that this engine did not know.
            for block in await context.store.blocks(worker.worker_id):
                context.fleet.cache_block(block)
            # Or the worker has registered again at another engine.
            await context.fleet.recheck_worker(worker)
            return False
        self.unpark(slot)
        run = context.outlook.leased(written.dispatch, offer.run_s, offer.load_s)
        context.publish(written)
        if run.loads:
            # Nobody should count on what this worker had loaded.
            self.others_changed()
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


def _belongs(record: Job | None, dispatch: Dispatch) -> bool:
    """Whether a record read along with the lease is the one to run."""
    # A tenant database is read after the lease. The job may have gone on to another round.
    return (
        record is not None
        and record.job_id == dispatch.job_id
        and record.round == dispatch.round
        and not dispatch.has_tenant_database
    )


async def _all_of(work: list[Coroutine[Any, Any, bool]]) -> list[bool]:
    if len(work) == 1:
        return [await work[0]]
    ended = await asyncio.gather(*work, return_exceptions=True)
    # Raise only after all of them have ended.
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return [each for each in ended if isinstance(each, bool)]
