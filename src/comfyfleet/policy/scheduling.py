"""Who runs what where models are expensive to change: the promise, the price, and what is left to others. Pure.

A worker keeps the models of its last run. It should take jobs that need them, and change models only where that beats
waiting for a worker that has them. No job starts later than first come, first served would have started it, plus
`patience` loads of its models (`start_by`). `assignment.py` orders the pairs; the engine knows the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import floor, inf, log
from typing import NamedTuple, Protocol

from comfyfleet.model.ids import WorkerId, WorkflowHash
from comfyfleet.policy.demand import ModelSet, Share
from comfyfleet.policy.feasibility import model_aliases

NO_MODELS: ModelSet = frozenset()
EPSILON_S = 1e-9
_COST_STEP = log(1.1)


class Estimates(Protocol):
    """What is known about times, in seconds. Each has a value before anything is learned."""

    def run_s(self, workflow_hash: WorkflowHash, worker_class: str, /) -> float:
        """The duration of a run whose models are loaded."""

    def load_s(self, models: ModelSet, worker_class: str, /) -> float:
        """The time to load these models. 0 for none."""

    def gap_s(self, models: ModelSet, /) -> float:
        """The mean time between requests for the models. Infinite: not known."""


# --- the promise -------------------------------------------------------------------------------------------------


def pace(
    slots: Mapping[str, int], shares: Sequence[Share], estimates: Estimates, overhead_s: float = 0.0
) -> float:
    """The seconds in which first come, first served moves the queue on by one job. Infinite: no slot is there.

    `slots`: the live slots of each worker class. Each works at its own pace, and loads models whenever the job that it
    takes needs others than the one before. `overhead_s`: what a lease takes beside its run.
    """
    rate = 0.0
    for worker_class, count in slots.items():
        seconds = sum(
            share.requested * estimates.run_s(share.kind.workflow_hash, worker_class)
            + share.cold * estimates.load_s(share.kind.models, worker_class)
            for share in shares
        )
        if not shares:
            seconds = estimates.run_s(WorkflowHash(""), worker_class)
        rate += count / max(seconds + overhead_s, EPSILON_S)
    return 1 / rate if rate else inf


def fifo_starts(waiting: Sequence[tuple[float, int]], pace_s: float) -> list[float]:
    """When first come, first served would start each job at the latest, from when it was queued and its place then.
    The jobs are in their order, and nobody starts later than those behind him."""
    earliest, starts = inf, []
    for queued_at, place in reversed(waiting):
        # Also without a live slot a job that found nobody before it is not late because of others.
        earliest = min(earliest, queued_at + (place * pace_s if place else 0.0))
        starts.append(earliest)
    return starts[::-1]


def start_by(fifo_start: float, patience: float, load_s: float) -> float:
    """The moment from which a job goes before all others of its priority."""
    return fifo_start + patience * load_s


def is_behind(turn: float, others: float, patience: float, load_s: float) -> bool:
    """Whether a tenant with a fair share is so far behind another one that its job goes first: others may get service
    worth `patience` loads more, so that workers keep their models. `turn` and `others` are virtual times."""
    return others - turn > EPSILON_S and others - turn >= patience * load_s


# --- models ------------------------------------------------------------------------------------------------------


def missing(needed: ModelSet, loaded: ModelSet) -> ModelSet:
    """The needed models that are not loaded. A loaded file counts with and without its folder."""
    rest = needed - loaded
    if rest and loaded and (aliases := model_aliases(loaded)):
        rest -= aliases
    return rest


def displaced(needed: ModelSet, loaded: ModelSet) -> ModelSet:
    """What has to go so that the needed models can be loaded. ComfyUI keeps what its last prompt used, so everything
    else goes."""
    if not missing(needed, loaded):
        return NO_MODELS
    return frozenset(
        name
        for name in loaded - needed
        if not any(alias in needed for alias in model_aliases(frozenset((name,))))
    )


# --- what a change costs -----------------------------------------------------------------------------------------


class SlotKind(NamedTuple):
    """Slots of one kind are equal for all times."""

    worker_class: str
    loaded: ModelSet
    goes: ModelSet | None = None
    """What goes when something else is loaded. None: everything."""

    @property
    def in_danger(self) -> ModelSet:
        return self.loaded if self.goes is None else self.goes


class BusySlot(NamedTuple):
    """A slot that somebody else's job occupies, or that looks for itself at another engine."""

    worker_id: WorkerId
    kind: SlotKind
    left_s: float
    """How long until it is expected to be free."""


class Backlog(NamedTuple):
    """The jobs of one priority that need the same models, as far as a pass sees them."""

    models: ModelSet
    workflow_hash: WorkflowHash
    """That of the oldest job."""
    waiting: int
    start_by: float
    """That of the oldest job."""


class Offer(NamedTuple):
    """What it takes to run the first job of a backlog on an idle slot."""

    load_s: float
    price_s: float
    """Its load, and the load of what it displaces as far as that is likely to be needed again. 0: nothing to load."""
    run_s: float
    displaces: bool
    """Loaded models have to go. Otherwise the slot has nothing to lose."""

    @property
    def is_warm(self) -> bool:
        return not self.load_s

    @property
    def cost_s(self) -> float:
        return self.price_s + self.run_s


def left_s(expected_end: float, now: float) -> float:
    """What has overrun by some time is expected to take as long again, so nobody counts for long on a worker that
    hangs."""
    return abs(expected_end - now)


def reload_chance(own_gap_s: float, its_gap_s: float) -> float:
    """How likely the displaced models are asked for before the new ones are again."""
    if own_gap_s == its_gap_s:
        return 0.5
    if its_gap_s == inf:
        return 0.0
    return 1.0 if own_gap_s == inf else own_gap_s / (own_gap_s + its_gap_s)


def offer_of(
    models: ModelSet, workflow_hash: WorkflowHash, kind: SlotKind, copies: int, estimates: Estimates
) -> Offer:
    """`copies`: how many live workers have loaded what goes from this one."""
    run_s, lacking = estimates.run_s(workflow_hash, kind.worker_class), missing(models, kind.loaded)
    if not lacking:
        return Offer(0.0, 0.0, run_s, False)
    load_s = price_s = estimates.load_s(lacking, kind.worker_class)
    gone = displaced(models, kind.in_danger)
    if gone:
        chance = reload_chance(estimates.gap_s(models), estimates.gap_s(kind.in_danger))
        price_s += estimates.load_s(gone, kind.worker_class) * chance / max(1, copies)
    return Offer(load_s, price_s, run_s, bool(gone))


def cost_step(cost_s: float) -> int:
    """Costs that differ by less than a tenth count as equal, so that other reasons decide between their slots."""
    return floor(log(max(cost_s, 1e-3)) / _COST_STEP)


# --- what is left to others --------------------------------------------------------------------------------------


class Rival(NamedTuple):
    """A busy slot that may run jobs of a backlog later."""

    slot: BusySlot
    run_s: float
    load_s: float
    """0: it has the models loaded."""

    @property
    def free_for_next_s(self) -> float:
        """When it could have run one job."""
        return self.slot.left_s + self.load_s + self.run_s


def rivals_of(
    backlog: Backlog,
    busy: Mapping[SlotKind, Sequence[BusySlot]],
    may_take: Callable[[BusySlot], bool],
    wanted: Collection[ModelSet],
    estimates: Estimates,
) -> tuple[list[Rival], list[Rival]]:
    """The busy slots that have the models loaded; and those that will have nothing of their own to go on with, because
    no backlog (`wanted`) needs what they have loaded."""
    warm: list[Rival] = []
    loose: list[Rival] = []
    is_mixed = len({kind.worker_class for kind in busy}) > 1
    for kind, slots in busy.items():
        lacking = missing(backlog.models, kind.loaded)
        if lacking and (not is_mixed or any(not missing(models, kind.loaded) for models in wanted)):
            continue
        run_s = estimates.run_s(backlog.workflow_hash, kind.worker_class)
        load_s = estimates.load_s(lacking, kind.worker_class)
        found = loose if lacking else warm
        found.extend(Rival(slot, run_s, load_s) for slot in slots if may_take(slot))
    return warm, loose


def reached(limit_s: float, warm: Iterable[Rival], enough: int) -> int:
    """How many jobs of a backlog others will have finished within this time, counted up to `enough`."""
    count = 0
    for rival in warm:
        within_s = limit_s - rival.slot.left_s
        if within_s > 0:
            count += floor(within_s / max(rival.run_s, EPSILON_S) + EPSILON_S)
            if count >= enough:
                return count
    return count


def faster(offer: Offer, loose: Iterable[Rival]) -> Iterator[Rival]:
    """Busy slots of better cards that will be done with the job sooner, although they have to load its models too.
    Each is good for one job."""
    for rival in loose:
        is_better = rival.load_s + rival.run_s < offer.load_s + offer.run_s - EPSILON_S
        if is_better and rival.free_for_next_s < offer.cost_s:
            yield rival


def is_left_to_others(
    offer: Offer, backlog: Backlog, warm: Sequence[Rival], loose: Sequence[Rival], now: float
) -> bool:
    """Whether others will have all jobs of the backlog done before the slot could have done one. Never where the oldest
    job is due, or where nothing has to go: there is nothing to lose, and the new copy will serve others."""
    if not offer.displaces or backlog.start_by <= now + EPSILON_S:
        return False
    count = reached(offer.cost_s, warm, backlog.waiting)
    if count < backlog.waiting:
        count += sum(1 for _ in faster(offer, loose))
    return count >= backlog.waiting


class WaitReason(NamedTuple):
    """Why a job waits although a slot is idle: another worker will be done with it sooner."""

    worker_id: WorkerId
    """The worker that it is left to: the first of them to be free."""
    free_in_s: float
    load_s: float
    """The time to load its models on the idle slot instead."""
    start_by: float
    """From then on it takes any slot."""


def wait_reason(
    offer: Offer, backlog: Backlog, warm: Sequence[Rival], loose: Sequence[Rival], now: float
) -> WaitReason | None:
    """None: the job is not left to others."""
    if not is_left_to_others(offer, backlog, warm, loose, now):
        return None
    rival = min((*warm, *faster(offer, loose)), key=lambda each: each.free_for_next_s)
    return WaitReason(rival.slot.worker_id, rival.slot.left_s, offer.load_s, backlog.start_by)


def look_again_at(left: Iterable[Backlog], now: float, round_s: float) -> float:
    """When to look again at slots that leave these backlogs to others, if nothing changes before."""
    return min((now + round_s, *(each.start_by for each in left)))
