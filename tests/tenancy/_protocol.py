"""The crash-safe protocol between a tenant's database (T) and the central store (C), as a machine small enough to be
explored whole.

Each step below is one transaction in one of the two, or something that may happen between two: a process dies, a relay
or a worker comes late, a lease runs out, a caller cancels, something is purged. The names S1 … T2 are those of
`docs/ledger.md`. A `System` says how much there is of everything, and which guards are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Step = tuple[str, "World"]
Item = tuple[int, str]
Held = tuple[int, int]

IDLE: Item = (0, "")
NOTHING: Held = (0, 0)
# Failed and cancelled are one here: nothing in the protocol tells them apart.
TERMINAL = ("completed", "failed")
ABSENT = ("none", "gone")

# What a caller does, or leaves. Nothing may depend on it to come to rest.
CALLERS = ("S1", "cancel")
STUCK = "never comes to rest"


class Round(NamedTuple):
    """One round of the one job."""

    # in T
    hold: str = "none"  # held, consumed, refunded
    settlements: int = 0
    outbox: str = "none"  # unsent, sent, closed
    staged: frozenset[int] = frozenset()
    """Leases whose worker left its result here before it reported."""
    result: int = 0
    """The lease whose result the job has."""
    # in C
    dispatch: str = "none"  # queued, leased, one of TERMINAL, dropped, gone
    number: int = 0
    settle: str = "none"  # consume, refund, done: a dispatch that has ended is the entry of C's outbox
    # what nobody stores, for the invariants
    is_running: bool = False
    is_cancelled: bool = False
    decided: str = ""


class World(NamedTuple):
    rounds: tuple[Round, ...]
    relays: tuple[Item, ...]
    """From T to C: what each has read or inserted."""
    settlers: tuple[Item, ...]
    """From C to T: what each has read or applied."""
    workers: tuple[Held, ...]
    """The lease each believes in."""
    looking: Held = NOTHING
    """The hub is between L1 and L2."""
    losses: int = 0
    is_stale: bool = False

    def at(self, number: int) -> Round:
        return self.rounds[number - 1]

    def with_round(self, number: int, /, **changes: object) -> World:
        changed = self.rounds[number - 1]._replace(**changes)  # type: ignore[arg-type]
        return self._replace(rounds=(*self.rounds[: number - 1], changed, *self.rounds[number:]))


class System(NamedTuple):
    rounds: int = 1
    attempts: int = 2
    relays: int = 2
    settlers: int = 2
    workers: int = 2
    is_direct: bool = False
    """Workers lease for themselves: nobody takes L2."""
    has_reconciler: bool = False
    losses: int = 0
    """How often C may fail over and lose its newest write."""
    removed: frozenset[str] = frozenset()

    def without(self, *guards: str) -> System:
        return self._replace(removed=self.removed | set(guards))

    def start(self) -> World:
        rounds = (Round(),) * self.rounds
        return World(
            rounds,
            (IDLE,) * self.relays,
            (IDLE,) * self.settlers,
            (NOTHING,) * self.workers,
            losses=self.losses,
        )

    def steps(self, world: World) -> Iterator[Step]:
        for number in range(1, self.rounds + 1):
            yield from self._submit(world, number)
            yield from self._lease(world, number)
            yield from self._sweep(world, number)
            yield from self._cancel(world, number)
            yield from self._purge(world, number)
            if self.has_reconciler:
                yield from self._reconcile(world, number)
            if world.losses:
                yield from self._lose(world, number)
        yield from self._look(world)
        yield from self._relay(world)
        yield from self._settle(world)
        yield from self._work(world)

    # S1, and S2 where it wrongly comes first

    def _submit(self, world: World, number: int) -> Iterator[Step]:
        mine = world.at(number)
        if mine.hold != "none" or (number > 1 and world.at(number - 1).hold != "refunded"):
            return
        name = f"S1 round {number}"
        if "tenant first" in self.removed:
            if mine.dispatch == "none":
                yield f"S2 before S1 round {number}", world.with_round(number, dispatch="queued")
            else:
                yield name, world.with_round(number, hold="held", outbox="sent")
        elif "outbox dispatch" in self.removed:
            opened = world.with_round(number, hold="held", outbox="sent")
            yield name, opened._replace(relays=put(opened.relays, IDLE, (number, "read")))
        else:
            yield name, world.with_round(number, hold="held", outbox="unsent")

    # S2, S3

    def _relay(self, world: World) -> Iterator[Step]:
        for item in dict.fromkeys(world.relays):
            number, state = item

            def becomes(after: Item, item: Item = item) -> tuple[Item, ...]:
                return put(world.relays, item, after)

            if item == IDLE:
                for each in range(1, self.rounds + 1):
                    if world.at(each).outbox == "unsent":
                        yield f"relay reads {each}", world._replace(relays=becomes((each, "read")))
                continue
            yield f"relay of {number} dies", world._replace(relays=becomes(IDLE))
            if state == "read":
                after = world._replace(relays=becomes((number, "inserted")))
                if world.at(number).dispatch in ABSENT:
                    yield f"S2 {number}", after.with_round(number, dispatch="queued")
                else:
                    yield f"S2 {number}, which is known", after
            else:
                after = world._replace(relays=becomes(IDLE))
                if world.at(number).outbox == "unsent":
                    after = after.with_round(number, outbox="sent")
                yield f"S3 {number}", after

    # L1, L2

    def _lease(self, world: World, number: int) -> Iterator[Step]:
        mine = world.at(number)
        if mine.dispatch != "queued" or mine.number >= self.attempts:
            return
        held = (number, mine.number + 1)
        leased = world.with_round(
            number, dispatch="leased", number=mine.number + 1, is_running=self.is_direct
        )
        if self.is_direct:
            if NOTHING in world.workers:
                yield f"L1 {number} by a worker", leased._replace(workers=put(world.workers, NOTHING, held))
        elif world.looking == NOTHING:
            yield f"L1 {number}", leased._replace(looking=held)

    def _look(self, world: World) -> Iterator[Step]:
        number, lease = world.looking
        if not number:
            return
        rest = world._replace(looking=NOTHING)
        yield f"the hub dies before L2 {number}", rest
        mine = world.at(number)
        is_current = mine.dispatch == "leased" and mine.number == lease
        if mine.hold == "held" or "lease-time check" in self.removed:
            if NOTHING in world.workers:
                handed = rest._replace(workers=put(world.workers, NOTHING, (number, lease)))
                yield f"L2 {number}", handed.with_round(number, is_running=True) if is_current else handed
        elif is_current:
            yield f"L2 {number} drops the lease", rest.with_round(number, dispatch="dropped")

    # K, and what ends in the same shape

    def _commit(self, world: World, number: int, phase: str) -> World:
        mine, kind = world.at(number), "consume" if phase == "completed" else "refund"
        ended = world.with_round(
            number,
            dispatch=phase,
            is_running=False,
            is_cancelled=False,
            decided=mine.decided or phase,
            settle=kind,
        )
        if "outbox settle" in self.removed:
            # Told from memory, if at all.
            ended = ended.with_round(number, settle="none")
            ended = ended._replace(settlers=put(ended.settlers, IDLE, (number, kind)))
        return ended

    def _again(self, world: World, number: int) -> World:
        """Attempts left: back to the queue. None left: failed."""
        if world.at(number).number < self.attempts:
            return world.with_round(number, dispatch="queued", is_running=False)
        return self._commit(world, number, "failed")

    def _work(self, world: World) -> Iterator[Step]:
        for held in dict.fromkeys(world.workers):
            number, lease = held
            if not number:
                continue
            mine = world.at(number)
            yield f"a worker forgets {number}", world._replace(workers=put(world.workers, held, NOTHING))
            # Whoever lost its lease does not know it yet: it counts for nothing.
            is_staged = lease in mine.staged or mine.hold != "held" or "staging" in self.removed
            if not is_staged:
                staged = world.with_round(number, staged=mine.staged | {lease})
                yield f"a result of {number} is staged", staged
            if mine.dispatch != "leased" or (mine.number != lease and "fencing" not in self.removed):
                continue
            after = world._replace(is_stale=mine.number != lease)
            if not is_staged:
                pass
            elif "commit point" in self.removed:
                if mine.hold == "held":
                    yield f"T1 before K {number}", settled(after, number, "consume", self)
                yield (
                    f"K {number} completed",
                    self._commit(after, number, "completed").with_round(number, settle="done"),
                )
            else:
                yield f"K {number} completed", self._commit(after, number, "completed")
            yield f"a worker fails {number}", self._again(after, number)
            if mine.is_cancelled:
                yield f"a worker confirms the cancel of {number}", self._commit(after, number, "failed")

    def _sweep(self, world: World, number: int) -> Iterator[Step]:
        mine = world.at(number)
        if mine.dispatch == "leased":
            if mine.is_cancelled:
                yield f"the lease of {number} is revoked", self._commit(world, number, "failed")
            else:
                yield f"the lease of {number} expires", self._again(world, number)
        elif mine.dispatch == "queued":
            yield f"the deadline of {number} passes", self._commit(world, number, "failed")

    def _cancel(self, world: World, number: int) -> Iterator[Step]:
        mine = world.at(number)
        if mine.hold != "held" or mine.is_cancelled:
            return
        asked = world.with_round(number, is_cancelled=True)
        name = f"cancel {number}"
        # Before S2 there is nothing to cancel: a relay brings it within a second.
        if mine.dispatch == "queued":
            yield name, self._commit(asked, number, "failed")
        elif mine.dispatch == "leased":
            yield name, asked

    # T1, T2

    def _settle(self, world: World) -> Iterator[Step]:
        for item in dict.fromkeys(world.settlers):
            number, state = item

            def becomes(after: Item, item: Item = item) -> tuple[Item, ...]:
                return put(world.settlers, item, after)

            if item == IDLE:
                for each in range(1, self.rounds + 1):
                    if (kind := world.at(each).settle) in ("consume", "refund"):
                        yield f"relay reads {kind} of {each}", world._replace(settlers=becomes((each, kind)))
                continue
            yield f"relay of {state} {number} dies", world._replace(settlers=becomes(IDLE))
            if state == "applied":
                after = world._replace(settlers=becomes(IDLE))
                if world.at(number).settle != "none":
                    after = after.with_round(number, settle="done")
                yield f"T2 {number}", after
            else:
                after = world._replace(settlers=becomes((number, "applied")))
                target = number
                if "rounds" in self.removed:
                    target = max(each for each in range(1, self.rounds + 1) if world.at(each).hold != "none")
                yield f"T1 {state} {number}", settled(after, target, state, self)

    # retention

    def _purge(self, world: World, number: int) -> Iterator[Step]:
        mine = world.at(number)
        if mine.dispatch not in (*TERMINAL, "dropped"):
            return
        is_settled = mine.settle == "done" or mine.dispatch == "dropped" or "confirmation" in self.removed
        # A relay gives up what it read longer ago than an end is kept after it was settled.
        is_quiet = (number, "read") not in world.relays or "relay's life" in self.removed
        if (is_settled and is_quiet) or "tombstone" in self.removed:
            yield f"purge {number}", world.with_round(number, dispatch="gone", settle="none")

    # what a crash left, or a failover took

    def _reconcile(self, world: World, number: int) -> Iterator[Step]:
        mine = world.at(number)
        if mine.hold == "held" and mine.outbox == "sent":
            # C was looked at before, so what it said may be old by now: it is not asked here.
            yield f"reconciler sends {number} again", world.with_round(number, outbox="unsent")
        if mine.hold == "held" and mine.dispatch in TERMINAL and mine.settle in ("none", "done"):
            kind = "consume" if mine.dispatch == "completed" else "refund"
            yield f"reconciler settles {number} again", world.with_round(number, settle=kind)
        if mine.hold in ("consumed", "refunded") and mine.dispatch == "queued":
            yield f"reconciler drops {number}", world.with_round(number, dispatch="dropped")

    def _lose(self, world: World, number: int) -> Iterator[Step]:
        mine = world.at(number)
        left = world._replace(losses=world.losses - 1)
        if mine.dispatch == "queued" and mine.number == 0:
            yield f"C loses S2 {number}", left.with_round(number, dispatch="none")
        is_carried = any(each == number for each, _ in world.settlers)
        if mine.dispatch in TERMINAL and mine.hold == "held" and not is_carried:
            # Nobody has read it yet. Leases of the time before are over: the store's epoch is another.
            before = left.with_round(number, dispatch="queued", settle="none", decided="")
            yield f"C loses K {number}", before
        if mine.settle == "done" and mine.decided:
            kind = "consume" if mine.decided == "completed" else "refund"
            yield f"C loses T2 {number}", left.with_round(number, settle=kind)


def settled(world: World, number: int, kind: str, system: System) -> World:
    """T1: job, hold and the outbox entry in one transaction, once."""
    mine = world.at(number)
    if mine.hold != "held" and ("unique settlement" not in system.removed or mine.hold == "none"):
        return world
    return world.with_round(
        number,
        hold="consumed" if kind == "consume" else "refunded",
        settlements=mine.settlements + 1,
        result=mine.number if kind == "consume" and mine.number in mine.staged else mine.result,
        staged=frozenset(),
        outbox=mine.outbox if "closing" in system.removed else "closed",
    )


def put(items: tuple[object, ...], before: object, after: object) -> tuple:  # type: ignore[type-arg]
    """Whoever is alike is one: sorted, so that their order makes no difference. Nobody free: it is lost."""
    if before not in items:
        return items
    changed = list(items)
    changed[changed.index(before)] = after
    return tuple(sorted(changed))


def broken(world: World) -> str | None:
    """The invariant that does not hold, if any."""
    if world.is_stale:
        return "a report under an old lease changed the round"
    for mine in world.rounds:
        if mine.settlements > 1:
            return "settled twice"
        if mine.is_running and mine.hold != "held":
            return f"runs while its hold is {mine.hold}"
        if mine.hold == "consumed" and mine.decided != "completed":
            return "consumed and not completed"
        if mine.hold == "consumed" and not mine.result:
            return "consumed, and its result is lost"
        if mine.hold == "refunded" and mine.decided == "completed":
            return "completed and refunded"
    return None


def is_at_rest(world: World) -> bool:
    return all(
        mine.hold != "held" and mine.outbox in ("none", "closed") and mine.settle in ("none", "done")
        for mine in world.rounds
    )


class Verdict(NamedTuple):
    states: int
    problem: str | None = None
    trace: tuple[str, ...] = ()


def explore(system: System) -> Verdict:
    """Every state there is, the nearest first; so a trace is as short as can be.

    Safe: no invariant is broken anywhere. Live: from everywhere there is a way to rest, whatever callers do or leave.
    """
    start = system.start()
    # Worlds by their number, in the order in which they were found; hashing one is what takes the time.
    numbers, worlds = {start: 0}, [start]
    came: list[tuple[int, str]] = [(0, "")]
    back: list[list[int]] = [[]]
    for here, world in enumerate(worlds):
        if (problem := broken(world)) is not None:
            return Verdict(len(worlds), problem, _trace(came, here))
        for name, after in system.steps(world):
            there = numbers.setdefault(after, len(worlds))
            if there == len(worlds):
                worlds.append(after)
                came.append((here, name))
                back.append([])
            if not name.startswith(CALLERS):
                back[there].append(here)
    resting = bytearray(is_at_rest(world) for world in worlds)
    open_ends = [number for number, rests in enumerate(resting) if rests]
    while open_ends:
        for before in back[open_ends.pop()]:
            if not resting[before]:
                resting[before] = True
                open_ends.append(before)
    stuck = resting.find(0)
    return Verdict(len(worlds)) if stuck < 0 else Verdict(len(worlds), STUCK, _trace(came, stuck))


def _trace(came: list[tuple[int, str]], here: int) -> tuple[str, ...]:
    names = []
    while here:
        here, name = came[here]
        names.append(name)
    return tuple(reversed(names))
