"""What ComfyFleet promises, checked from outside while faults happen.

The checker sees every answer of the store, in order, and what callers and agents got. It keeps its own books and
compares: no job is lost, none completes twice, a result is made from the job's own payload, a lease that is over
changes nothing, and nobody waits while later jobs pass for longer than the bound.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import msgspec

from comfyfleet.model.block import Pair
from comfyfleet.model.calls import Completion
from comfyfleet.model.dispatch import AttemptOutcome, Dispatch, HeldBy, LeaseRef, Phase, Write, WriteResult
from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.ports import Clock, Store

_ENCODE = msgspec.json.Encoder(order="sorted").encode
_EXTRA_PLACES = 4
_SLACK_S = 90.0
"""Slow calls of the store, and a scheduled look that a lost wake-up delays."""


def payload_digest(workflow: Any) -> str:
    return hashlib.sha256(_ENCODE(workflow)).hexdigest()


class _Waiting(msgspec.Struct):
    dispatch: Dispatch
    since_s: float
    place: int


class PromiseChecker:
    def __init__(self, store: Store, clock: Clock, longest_s: float) -> None:
        """`longest_s`: the longest run, with the load of its models."""
        self._store, self._clock, self._longest_s = store, clock, longest_s
        self.violations: list[str] = []
        self.jumps_s = 0.0
        """By how much clocks were set so far, in total."""
        self.allowance_s = 0.0
        """What clocks that were set and engines that were down add to the bound on waiting."""
        self._leases: dict[JobId, LeaseRef] = {}
        self._waiting: dict[JobId, _Waiting] = {}
        self._completed: Counter[tuple[JobId, int]] = Counter()
        self._phases: dict[JobId, tuple[int, Phase]] = {}
        self._accepted: dict[JobId, set[str]] = {}
        self._payloads: dict[JobId, str] = {}
        self._cancelled: set[JobId] = set()

    # what callers and agents tell

    def submitted(self, job_id: JobId, workflow: Any) -> None:
        """A caller was told that this job is in the queue."""
        self._payloads[job_id] = payload_digest(workflow)

    def cancelled(self, job_id: JobId) -> None:
        self._cancelled.add(job_id)

    def reported(self, call: Completion) -> None:
        """An agent was told that its completion counts."""
        accepted = self._accepted.setdefault(call.ref.job_id, set())
        accepted.add(call.ref.attempt_id)
        if len(accepted) > 1:
            self._violated(f"job {call.ref.job_id}: two attempts were told that they completed it")

    def leased_payload(self, job_id: JobId, workflow: Any) -> None:
        known = self._payloads.get(job_id)
        if known is not None and known != payload_digest(workflow):
            self._violated(f"job {job_id}: the lease carries the payload of another job (mixed)")

    # what the store did

    def saw(self, name: str, arguments: tuple[Any, ...], answer: Any) -> None:
        if not isinstance(answer, WriteResult):
            return
        match name:
            case "enqueue":
                if answer.facts:
                    self._enter(answer.dispatch)
            case "lease":
                self._saw_lease(answer.dispatch)
            case "write":
                self._saw_write(arguments[0], answer.dispatch)
        self._saw_phase(answer.dispatch)

    def _saw_lease(self, dispatch: Dispatch) -> None:
        job_id, lease = dispatch.job_id, dispatch.lease
        assert lease is not None
        if job_id in self._leases:
            self._violated(f"job {job_id}: leased again while lease {self._leases[job_id].number} holds")
        self._leases[job_id] = dispatch.lease_ref()
        self._check_order(dispatch)
        self._waiting.pop(job_id, None)

    def _saw_write(self, write: Write, after: Dispatch) -> None:
        current = self._leases.get(after.job_id)
        if isinstance(write.guard, HeldBy) and write.guard.ref != current:
            number = "none" if current is None else current.number
            self._violated(
                f"job {after.job_id}: a write of lease {write.guard.ref.number} was accepted; in force is {number}"
            )
        if after.lease is None:
            self._leases.pop(after.job_id, None)
        if after.stands_in_lane:
            self._enter(after)
        else:
            self._waiting.pop(after.job_id, None)
        if write.attempt_end is not None and write.attempt_end.outcome is AttemptOutcome.COMPLETED:
            self._completed[after.job_id, after.round] += 1
            if self._completed[after.job_id, after.round] > 1:
                self._violated(f"job {after.job_id}: completed twice in round {after.round}")

    def _saw_phase(self, dispatch: Dispatch) -> None:
        before = self._phases.get(dispatch.job_id)
        if before is not None and before[1].is_final and before != (dispatch.round, dispatch.phase):
            is_retried = dispatch.round > before[0]
            if not is_retried:
                self._violated(
                    f"job {dispatch.job_id}: {dispatch.phase.value} after it was {before[1].value}"
                )
        self._phases[dispatch.job_id] = (dispatch.round, dispatch.phase)

    def _enter(self, dispatch: Dispatch) -> None:
        known = self._waiting.get(dispatch.job_id)
        if known is not None:
            known.dispatch = dispatch
        elif dispatch.stands_in_lane:
            place = sum(other.dispatch.priority >= dispatch.priority for other in self._waiting.values())
            self._waiting[dispatch.job_id] = _Waiting(dispatch, self._clock.monotonic(), place)

    def _check_order(self, leased: Dispatch) -> None:
        """Later jobs may pass while the servers keep their models, but not for ever. Every server here can run every
        job, so whoever waits could have had this lease."""
        assert leased.lease is not None
        now_s = self._clock.monotonic()
        for job_id, other in self._waiting.items():
            waits = other.dispatch
            is_earlier = waits.sequence < leased.sequence and waits.priority == leased.priority
            if not is_earlier or waits.tenant != leased.tenant or waits.attempts:
                continue
            bound_s = (other.place + _EXTRA_PLACES) * self._longest_s + _SLACK_S + self.allowance_s
            late_s = now_s - other.since_s - bound_s
            if late_s > 0 and not self._is_blocked(waits, leased.lease.worker_id):
                self._violated(
                    f"job {job_id}: passed by a later job {late_s:.1f} s after the bound of {bound_s:.0f} s"
                )

    def _is_blocked(self, dispatch: Dispatch, worker_id: WorkerId) -> bool:
        """Any block counts, also one that has just ended: clocks jump."""
        # A look into the books of a store of this process, because a call could not be answered at once.
        state = getattr(self._store, "_state", None)
        return state is not None and any(
            state.blocks.get(Pair(worker_id, target)) is not None for target in dispatch.block_targets
        )

    # the end

    async def check_end(self) -> None:
        """When nothing fails any more and time enough has passed: what became of every job."""
        for job_id, digest in self._payloads.items():
            job, dispatch = await self._store.records.get(job_id), await self._store.load(job_id)
            if job is None or dispatch is None:
                self._violated(f"job {job_id}: lost: it was accepted and the store has it no more")
                continue
            await self._check_history(job_id)
            is_cancelled = job_id in self._cancelled and dispatch.phase is Phase.CANCELLED
            if dispatch.phase is not Phase.COMPLETED and not is_cancelled:
                why = "" if job.failure is None else f": {job.failure.kind.value}"
                self._violated(f"job {job_id}: lost: it is {dispatch.phase.value} at the end{why}")
            elif dispatch.phase is Phase.COMPLETED:
                self._check_result(job, digest)

    def _check_result(self, job: Job, digest: str) -> None:
        if payload_digest(job.payload.workflow) != digest:
            self._violated(f"job {job.job_id}: its record holds the payload of another job (mixed)")
        made_of = [] if job.result is None else [each.get("digest") for each in job.result.outputs.values()]
        if made_of != [[digest]]:
            self._violated(f"job {job.job_id}: its result was not made from its payload (mixed)")

    async def _check_history(self, job_id: JobId) -> None:
        facts = await self._store.facts(job_id)
        if [fact.number for fact in facts] != list(range(1, len(facts) + 1)):
            self._violated(f"job {job_id}: its facts are not numbered without gaps")
        if sum(fact.kind is FactKind.COMPLETED for fact in facts) > 1:
            self._violated(f"job {job_id}: completed twice, say its facts")
        attempts = await self._store.attempts(job_id)
        if sum(attempt.outcome is AttemptOutcome.COMPLETED for attempt in attempts) > 1:
            self._violated(f"job {job_id}: two attempts completed")

    def _violated(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)
