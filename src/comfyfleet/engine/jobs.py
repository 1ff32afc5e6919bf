"""The callers' side of an engine: submit, cancel, retry, pause, priority. Load, ask policy, write, publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from comfyfleet.engine.context import Context
from comfyfleet.engine.definitions import NodeDesk
from comfyfleet.engine.dependencies import Dependencies, held
from comfyfleet.engine.inputs import Inputs
from comfyfleet.engine.reading import Reader
from comfyfleet.engine.rounds import Rounds
from comfyfleet.model.calls import CancelAnswer, JobView, Submitted
from comfyfleet.model.conversion import is_editor_workflow
from comfyfleet.model.dispatch import (
    AtRevision,
    Change,
    Dispatch,
    Phase,
    Standing,
    Write,
    Written,
)
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import JobId, TenantId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.lesson import Lesson
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.workflow import GraphNeeds, check_workflow, read_needs
from comfyfleet.policy.admission import check_dependencies, check_priority, check_room, check_submission
from comfyfleet.policy.feasibility import misses, nearest_miss
from comfyfleet.policy.inputs import as_asked, check_inputs
from comfyfleet.policy.learning import with_memory, without_slow
from comfyfleet.policy.lifecycle import (
    MOVES,
    IllegalMove,
    Move,
    cancelled,
    paused,
    standing_at,
    target,
)
from comfyfleet.policy.priority import effective_priority
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.timing import wake_at
from comfyfleet.ports import Counts

_QUEUED = (FactDraft(FactKind.QUEUED),)


class Place(NamedTuple):
    """The class a job stands in, and the one it moves to when it has waited long enough."""

    cls: RequirementClass
    later: RequirementClass | None
    relax_at: float | None

    @property
    def classes(self) -> tuple[RequirementClass, ...]:
        return (self.cls,) if self.later is None else (self.cls, self.later)


def _class_of(submission: Submission, graph: GraphNeeds, lesson: Lesson | None) -> RequirementClass:
    """What the caller declares, plus what the graph shows, plus which workers are known to be too slow."""
    declared = submission.requirements
    needs = msgspec.structs.replace(
        declared,
        models=tuple(sorted(graph.models.union(declared.models))),
        node_classes=tuple(sorted(graph.node_classes.union(declared.node_classes))),
        needs_files=declared.needs_files or bool(submission.inputs),
    )
    return RequirementClass(without_slow(needs, lesson), submission.preferences, submission.tenant)


def _check_room(counts: Counts, size: int, rules: Rules) -> None:
    check_room(counts.waiting + counts.delayed + counts.paused, counts.payload_bytes, size, rules)


class JobDesk:
    def __init__(
        self,
        context: Context,
        rounds: Rounds,
        tell_worker: Callable[[Dispatch], Awaitable[None]],
        dependencies: Dependencies,
        inputs: Inputs,
        nodes: NodeDesk,
    ) -> None:
        self._context = context
        self._rounds = rounds
        self._tell_worker = tell_worker
        self._dependencies = dependencies
        self._inputs = inputs
        self._nodes = nodes
        self._reader = Reader(context.rules.max_nodes)

    # submit

    async def submit(self, submission: Submission, *, is_own: bool = False) -> Submitted:
        """`is_own`: the graph was decoded from JSON, and nobody else has it."""
        context, rules = self._context, self._context.rules
        check_submission(submission, rules)
        workflow = submission.workflow
        if is_editor_workflow(workflow):
            workflow = await self._nodes.convert(workflow)
        reading = self._reader.read(workflow, is_own=is_own)
        submission = msgspec.structs.replace(submission, workflow=reading.graph)
        if submission.inputs or submission.after:
            check_inputs(submission, check_workflow(reading.graph, max_nodes=rules.max_nodes), rules)
            submission = await self._inputs.named(submission)
            check_dependencies(submission, rules)
        if submission.reference is not None:
            known = await context.store.records.by_reference(submission.tenant, submission.reference)
            if known is not None:
                return self._repeat(known, submission)
        is_held = bool(submission.after) and await self._dependencies.check(
            submission.after, submission.tenant
        )
        if submission.inputs and not is_held:
            submission = await self._inputs.filled(submission)
        counts, now, lesson = await self._asked(reading.workflow_hash)
        size = submission.payload_bytes()
        _check_room(counts, size, rules)
        workflow_hash = reading.workflow_hash
        seeds = {node_id: context.chance.seed() for node_id in reading.drawing}
        cls = _class_of(submission, reading.needs, lesson)
        unworkable = self._unworkable(cls)
        if unworkable and context.store.is_shared:
            # A worker of another engine may be new to this one.
            await context.fleet.sync(context.clock.now())
            unworkable = self._unworkable(cls)
        if unworkable and submission.require_workable:
            raise Refusal(
                RefusalCode.UNWORKABLE,
                "no live worker can run this; the nearest: " + "; ".join(unworkable),
                missing=unworkable,
            )
        place = self._place(cls, lesson, max(now, submission.not_before or now))
        dispatch = self._dispatch(submission, size, place, workflow_hash, now, is_held)
        await context.announce(submission, dispatch.job_id, dispatch.round)
        if is_held:
            await self._dependencies.announce(submission.after, dispatch.job_id)
        await self._inputs.use((each.file for each in submission.inputs), dispatch.job_id)
        job = Job(
            dispatch.job_id,
            submission.tenant,
            workflow_hash,
            now,
            submission,
            reference=submission.reference,
            seeds=seeds or None,
        )
        written = await self._enqueue(dispatch, job, place)
        if written.dispatch.job_id != dispatch.job_id:
            # Somebody else submitted under the same reference in between.
            known = await context.store.records.get(written.dispatch.job_id)
            assert known is not None, "the store answered with it"
            return self._repeat(known, submission)
        context.publish(written)
        if written.dispatch.stands_in_lane:
            self._rounds.job_arrived(written.dispatch.class_key)
        if is_held:
            # What it waits for may have ended before it was written, when nobody could be told.
            await self._dependencies.look(dispatch.job_id)
        return Submitted(
            dispatch.job_id, Phase.QUEUED, workflow_hash, seeds=seeds or None, unworkable=unworkable
        )

    async def _asked(self, workflow_hash: WorkflowHash) -> tuple[Counts, float, Lesson | None]:
        """What a submit is judged by."""
        context, store = self._context, self._context.store
        if store.is_shared:
            # At once: each is a way to another process and back.
            return await asyncio.gather(store.counts(), store.now(), context.lesson(workflow_hash))
        return await store.counts(), await store.now(), await context.lesson(workflow_hash)

    @staticmethod
    def _repeat(known: Job, submission: Submission) -> Submitted:
        # What was attached to a completed job is not kept.
        kept = known.payload
        if not kept.attachments:
            submission = msgspec.structs.replace(submission, attachments=())
        if as_asked(kept) != as_asked(submission):
            raise Refusal(
                RefusalCode.DUPLICATE_DIFFERS,
                f"a different job was submitted as {submission.reference!r} before; choose another id",
                job_id=known.job_id,
            )
        return Submitted(known.job_id, known.phase, known.workflow_hash, seeds=known.seeds, is_repeat=True)

    def _place(self, cls: RequirementClass, lesson: Lesson | None, start: float) -> Place:
        """Where a job stands first: with the bigger cards it is known to need, with those it prefers, or anywhere."""
        fleet, rules = self._context.fleet, self._context.rules
        needs = with_memory(cls.requirements, lesson, fleet.capabilities())
        if needs is not cls.requirements:
            bigger = msgspec.structs.replace(cls, requirements=needs)
            if fleet.is_workable(bigger):
                return Place(bigger, cls, start + rules.bigger_card_wait_s)
        wanted, allowed = cls.preferences.workers, cls.requirements.workers
        if wanted and rules.affinity_wait_s > 0:
            only = tuple(worker for worker in wanted if allowed is None or worker in allowed)
            needs = msgspec.structs.replace(cls.requirements, workers=only)
            held = msgspec.structs.replace(cls, requirements=needs)
            if fleet.is_workable(held):
                return Place(held, cls, start + rules.affinity_wait_s)
        return Place(cls, None, None)

    def _dispatch(
        self,
        submission: Submission,
        size: int,
        place: Place,
        workflow_hash: WorkflowHash,
        now: float,
        is_held: bool,
    ) -> Dispatch:
        fleet, rules = self._context.fleet, self._context.rules
        base = effective_priority(submission.priority, submission.tier, submission.urgency, None, now, rules)
        total_s = submission.timeouts.total_s
        dispatch = Dispatch(
            job_id=self._context.chance.job_id(now),
            class_key=fleet.key_of(place.cls),
            workflow_hash=workflow_hash,
            priority=effective_priority(base, 0, "normal", submission.deadline, now, rules),
            base_priority=base,
            tenant=submission.tenant,
            standing=standing_at(submission.not_before, now, is_held),
            queued_at=now,
            not_before=submission.not_before,
            max_attempts=submission.max_attempts or rules.max_attempts,
            deadline_at=submission.deadline,
            fails_at_deadline=submission.on_deadline == "fail",
            expires_at=None if total_s is None else now + total_s,
            relaxed_class=None if place.later is None else fleet.key_of(place.later),
            relax_at=place.relax_at,
            payload_bytes=size,
        )
        if is_held:
            dispatch = held(dispatch)
        return msgspec.structs.replace(dispatch, wake_at=wake_at(dispatch, now, rules))

    async def _enqueue(self, dispatch: Dispatch, job: Job, place: Place) -> Written:
        fleet = self._context.fleet
        for cls in place.classes:
            if fleet.key_of(cls) not in fleet.classes:
                await fleet.ensure_class(cls, unless_known=True)
        store, rules = self._context.store, self._context.rules
        while True:
            if not store.is_shared:
                # Once more: others may have come while this one waited on its way. From here to the write none does.
                _check_room(await store.counts(), dispatch.payload_bytes, rules)
            written = await store.enqueue(dispatch, job, _QUEUED)
            if written is not None:
                return written
            # The store has dropped a class that was idle for long.
            for cls in place.classes:
                await fleet.ensure_class(cls)

    def _unworkable(self, cls: RequirementClass) -> tuple[str, ...]:
        """What the worker that misses least still lacks, by name; empty when somebody can run it."""
        fleet = self._context.fleet
        key = fleet.key_of(cls)
        if key in fleet.classes:
            if fleet.selectivity(key):
                return ()
        elif fleet.is_workable(cls):
            return ()
        lacking = {
            worker.worker_id: misses(cls, worker.worker_id, worker.capabilities)
            for worker in fleet.workers.values()
            if not worker.is_offline
        }
        nearest = nearest_miss(lacking, self._context.rules.weights)
        if nearest is None:
            return ("no worker is connected",)
        return tuple(f"{nearest} {miss.reason}" for miss in lacking[nearest])

    # look

    async def get(self, job_id: JobId) -> JobView:
        dispatch = await self._load(job_id)
        job = await self._context.store.records.get(job_id)
        assert job is not None, "a dispatch without a record is never leased nor shown"
        return JobView(job, dispatch, tuple(await self._context.store.attempts(job_id)))

    async def by_reference(self, reference: str, tenant: TenantId) -> JobId | None:
        job = await self._context.store.records.by_reference(tenant, reference)
        return None if job is None else job.job_id

    # change

    async def cancel(self, job_id: JobId) -> CancelAnswer:
        """A waiting job is cancelled at once. For a running one the request is the truth, and its worker is told."""
        context = self._context

        def decide(dispatch: Dispatch, now: float) -> Write | None:
            if dispatch.phase.is_final or dispatch.cancel_requested_at is not None:
                return None
            if dispatch.phase is Phase.LEASED:
                # Not a phase: the lease runs on until its holder confirms, or until the grace is over.
                asked = msgspec.structs.replace(dispatch, cancel_requested_at=now)
                change = Change(cancel_requested_at=now, wake_at=wake_at(asked, now, context.rules))
                return _write(dispatch, change, FactDraft(FactKind.CANCEL_REQUESTED))
            return _write(
                dispatch,
                cancelled(dispatch),
                FactDraft(FactKind.CANCELLED),
                job={"phase": Phase.CANCELLED, "completed_at": now},
            )

        dispatch, written = await self._change(job_id, decide)
        if written is not None and dispatch.phase is Phase.LEASED:
            await self._tell_worker(dispatch)
        return CancelAnswer(dispatch.phase, dispatch.cancel_requested_at is not None)

    async def retry(self, job_id: JobId) -> Submitted:
        """By hand: a failed or cancelled job gets a new round, with fresh counters and its old place in line."""
        rules, fleet = self._context.rules, self._context.fleet
        view = await self.get(job_id)
        submission, workflow_hash = view.job.payload, view.dispatch.workflow_hash
        lesson = await self._context.lesson(workflow_hash)
        cls = _class_of(submission, read_needs(submission.workflow), lesson)
        place = self._place(cls, lesson, await self._context.store.now())
        is_legal = (view.dispatch.phase, Move.RETRY) in MOVES
        # One that was let go before has what it waited for, though that may be gone by now.
        is_held = view.dispatch.is_held and is_legal
        if is_legal:
            await self._context.announce(submission, job_id, view.dispatch.round + 1)
        if is_held:
            await self._dependencies.announce(submission.after, job_id)
        await self._inputs.use((each.file for each in submission.inputs), job_id)

        def decide(dispatch: Dispatch, now: float) -> Write:
            try:
                phase = target(dispatch.phase, Move.RETRY)
            except IllegalMove as illegal:
                raise Refusal(RefusalCode.WRONG_PHASE, str(illegal), phase=dispatch.phase.value) from illegal
            # The limits of the first round are over with it: a deadline that passed would end the new one at once.
            change = Change(
                phase=phase,
                standing=standing_at(None, now, is_held),
                is_held=is_held,
                class_key=fleet.key_of(place.cls),
                relaxed_class=None if place.later is None else fleet.key_of(place.later),
                relax_at=None if is_held else place.relax_at,
                round=dispatch.round + 1,
                charged=0,
                worker_faults=0,
                releases=0,
                failed_on=(),
                expired_on=(),
                cancel_requested_at=None,
                not_before=None,
                deadline_at=None,
                expires_at=None,
                priority=effective_priority(dispatch.base_priority, 0, "normal", None, now, rules),
                wake_at=now + rules.held_look_s if is_held else place.relax_at,
            )
            return _write(
                dispatch,
                change,
                FactDraft(FactKind.QUEUED, {"round": dispatch.round + 1}),
                job={
                    "phase": Phase.QUEUED,
                    "round": dispatch.round + 1,
                    "failure": None,
                    "completed_at": None,
                    "started_at": None,
                    "worker_id": None,
                    "prompt_id": None,
                    "is_late": False,
                },
            )

        dispatch, _ = await self._change(job_id, decide, needed=place.classes)
        if is_held:
            await self._dependencies.look(job_id)
        return Submitted(job_id, dispatch.phase, workflow_hash)

    async def pause(self, job_id: JobId) -> None:
        def decide(dispatch: Dispatch, _: float) -> Write | None:
            self._must_wait(dispatch, "pause")
            if dispatch.standing is Standing.PAUSED:
                return None
            return _write(dispatch, paused(dispatch), FactDraft(FactKind.PAUSED))

        await self._change(job_id, decide)

    async def resume(self, job_id: JobId) -> None:
        rules = self._context.rules

        def decide(dispatch: Dispatch, now: float) -> Write | None:
            self._must_wait(dispatch, "resume")
            if dispatch.standing is not Standing.PAUSED:
                return None
            standing = standing_at(dispatch.not_before, now, dispatch.is_held)
            placed = msgspec.structs.replace(dispatch, standing=standing)
            change = Change(standing=standing, wake_at=wake_at(placed, now, rules))
            return _write(dispatch, change, FactDraft(FactKind.RESUMED))

        await self._change(job_id, decide)

    async def set_priority(self, job_id: JobId, priority: int) -> None:
        rules = self._context.rules
        check_priority(priority)
        asked = (await self.get(job_id)).job.payload

        def decide(dispatch: Dispatch, now: float) -> Write:
            self._must_wait(dispatch, "change the priority of")
            base = effective_priority(priority, asked.tier, asked.urgency, None, now, rules)
            raised = effective_priority(base, 0, "normal", dispatch.deadline_at, now, rules)
            changed = msgspec.structs.replace(dispatch, base_priority=base, priority=raised)
            change = Change(base_priority=base, priority=raised, wake_at=wake_at(changed, now, rules))
            return _write(
                dispatch,
                change,
                FactDraft(FactKind.PRIORITY_CHANGED, {"priority": priority}),
                job={"priority": priority},
            )

        await self._change(job_id, decide)

    @staticmethod
    def _must_wait(dispatch: Dispatch, verb: str) -> None:
        if dispatch.phase is not Phase.QUEUED:
            raise Refusal(
                RefusalCode.WRONG_PHASE,
                f"cannot {verb} a job that is {dispatch.phase.value}: only a waiting one",
                phase=dispatch.phase.value,
            )

    async def _load(self, job_id: JobId) -> Dispatch:
        dispatch = await self._context.store.load(job_id)
        if dispatch is None:
            raise Refusal(RefusalCode.NOT_FOUND, f"there is no job {job_id!r} (any more)")
        return dispatch

    async def _change(
        self,
        job_id: JobId,
        decide: Callable[[Dispatch, float], Write | None],
        needed: tuple[RequirementClass, ...] = (),
    ) -> tuple[Dispatch, Written | None]:
        """Load, decide, write; again when somebody was faster. None from `decide`: nothing is to be done."""
        while True:
            for cls in needed:
                await self._context.fleet.ensure_class(cls)
            dispatch = await self._load(job_id)
            write = decide(dispatch, await self._context.store.now())
            if write is None:
                return dispatch, None
            written = await self._context.store.write(write)
            if written is not None:
                self._context.publish(written)
                if written.dispatch.stands_in_lane:
                    self._rounds.job_arrived(written.dispatch.class_key)
                return written.dispatch, written


def _write(
    dispatch: Dispatch, change: Change, fact: FactDraft, job: dict[str, object] | None = None
) -> Write:
    return Write(dispatch.job_id, AtRevision(dispatch.revision), change, facts=(fact,), job=job)
