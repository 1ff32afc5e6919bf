"""Picks the idle slots that a matching pass compares.

Of slots that are equal in all that ranks depend on, a pass needs no more than jobs wait. So one job for a thousand
equal slots costs little more than one job for a few."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.pass_ranks import ParkedPoll
from comfyfleet.model.dispatch import LaneKey
from comfyfleet.model.ids import PollId, ProfileKey, WorkerId
from comfyfleet.model.worker import Capabilities, LiveState, WorkerRecord
from comfyfleet.policy.scheduling import SlotKind, WaitReason

_MAX_DIFFERENT = 64
"""So many different capabilities of a worker class are told apart. A worker beyond them is equal to nobody."""
_MAX_NUMBERS = 10_000


class _Known(NamedTuple):
    """What a worker was when its number was worked out, by identity."""

    capabilities: Capabilities
    live: LiveState
    kind: SlotKind
    profile: ProfileKey
    busy: int
    number: int


class SlotSample:
    def __init__(self, context: EngineContext, parked: Mapping[WorkerId, int]) -> None:
        """`parked`: how many polls of each worker are parked."""
        self._context = context
        self._parked = parked
        self._different: dict[str, list[Capabilities]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._made = 0
        """A number is never given twice: idle slots keep theirs."""
        self._known: dict[WorkerId, _Known] = {}
        self._mates: dict[int, list[ParkedPoll]] = {}
        """What the last `groups` left out, by number."""

    def of(self, slots: Iterable[ParkedPoll], jobs: int, kept: Collection[WorkerId]) -> list[ParkedPoll]:
        """At most `jobs` slots that are alike, and all those of the workers in `kept`."""
        picked, _ = self._split(slots, jobs, kept)
        return picked

    def groups(
        self, groups: list[list[ParkedPoll]], jobs: int, kept: Collection[WorkerId]
    ) -> list[list[ParkedPoll]]:
        """The same for each group. Slots that are alike are in one group."""
        self._mates = {}
        found = []
        for group in groups:
            if len(group) > jobs:
                group, rest = self._split(group, jobs, kept)
                self._mates |= rest
            found.append(group)
        return found

    def tell_mates(self, slots: Iterable[ParkedPoll], left: dict[PollId, dict[LaneKey, WaitReason]]) -> None:
        """A slot that was left out leaves to others what its equals do."""
        if not left or not self._mates:
            return
        workers = self._context.fleet.workers
        for slot in slots:
            lanes, worker = left.get(slot.poll_id), workers.get(slot.worker_id)
            if lanes is not None and worker is not None:
                for mate in self._mates.pop(self._number(worker, slot), ()):
                    left[mate.poll_id] = lanes

    def _split(
        self, slots: Iterable[ParkedPoll], jobs: int, kept: Collection[WorkerId]
    ) -> tuple[list[ParkedPoll], dict[int, list[ParkedPoll]]]:
        if len(self._numbers) > _MAX_NUMBERS or len(self._known) > 2 * len(self._context.fleet.workers) + 64:
            self._known.clear()
            self._numbers.clear()
        workers, counts = self._context.fleet.workers, dict[int, int]()
        picked, rest = list[ParkedPoll](), dict[int, list[ParkedPoll]]()
        for slot in slots:
            worker = workers.get(slot.worker_id)
            if worker is None or slot.worker_id in kept:
                picked.append(slot)
                continue
            number = slot.alike[1] if slot.alike and slot.alike[0] is worker else self._number(worker, slot)
            count = counts.get(number, 0)
            if count < jobs:
                counts[number] = count + 1
                picked.append(slot)
            else:
                rest.setdefault(number, []).append(slot)
        return picked, rest

    def _number(self, worker: WorkerRecord, slot: ParkedPoll) -> int:
        """The same for slots that are alike."""
        worker_id, live = worker.worker_id, worker.live
        kind = self._context.outlook.kind_of(worker)
        busy = worker.slots - self._parked.get(worker_id, 0) if slot.load is None else slot.load
        known = self._known.get(worker_id)
        if (
            known is not None
            and known.capabilities is worker.capabilities
            and known.live is live
            and known.kind is kind
            and known.busy == busy
            and known.profile == worker.profile
        ):
            self._note(worker, slot, known.number)
            return known.number
        likeness = (
            self._same_capabilities(worker, kind.worker_class),
            worker.profile,
            worker.slots,
            busy,
            kind.loaded,
            live.loaded_models,
            live.last_workflow,
            live.free_vram_gb,
        )
        number = self._numbers.setdefault(likeness, self._made)
        self._made += number == self._made
        self._known[worker_id] = _Known(worker.capabilities, live, kind, worker.profile, busy, number)
        self._note(worker, slot, number)
        return number

    @staticmethod
    def _note(worker: WorkerRecord, slot: ParkedPoll, number: int) -> None:
        if worker.slots == 1:
            # Nothing else runs there, so the number holds as long as the record does.
            slot.alike = (worker, number)

    def _same_capabilities(self, worker: WorkerRecord, worker_class: str) -> Hashable:
        different = self._different.setdefault(worker_class, [])
        for number, each in enumerate(different):
            if each == worker.capabilities:
                return worker_class, number
        if len(different) >= _MAX_DIFFERENT:
            return worker.worker_id
        different.append(worker.capabilities)
        return worker_class, len(different) - 1
