"""The state machine of a job: one table of transitions. `diagram()` prints it for the docs.

A transition that is not in the table raises `IllegalTransition` and changes nothing. A transition that ends a lease
clears it, so that no report of the old holder can match.
"""

from __future__ import annotations

from enum import StrEnum

from comfyfleet.model.dispatch import Change, Dispatch, Phase, Readiness


class Transition(StrEnum):
    LEASE = "lease"
    COMPLETE = "complete"
    REQUEUE = "fail or expire, attempts left"
    GIVE_UP = "fail or expire, none left"
    RELEASE = "release"
    CANCEL = "cancel"
    END = "a limit is reached, or it cannot run"
    RETRY = "retry by hand (next round)"


MOVES: dict[tuple[Phase, Transition], Phase] = {
    (Phase.QUEUED, Transition.LEASE): Phase.LEASED,
    (Phase.QUEUED, Transition.CANCEL): Phase.CANCELLED,
    (Phase.QUEUED, Transition.END): Phase.FAILED,
    (Phase.LEASED, Transition.COMPLETE): Phase.COMPLETED,
    (Phase.LEASED, Transition.REQUEUE): Phase.QUEUED,
    (Phase.LEASED, Transition.RELEASE): Phase.QUEUED,
    (Phase.LEASED, Transition.GIVE_UP): Phase.FAILED,
    (Phase.LEASED, Transition.END): Phase.FAILED,
    (Phase.LEASED, Transition.CANCEL): Phase.CANCELLED,
    (Phase.FAILED, Transition.RETRY): Phase.QUEUED,
    (Phase.CANCELLED, Transition.RETRY): Phase.QUEUED,
}


class IllegalTransition(Exception):
    """The table does not have this transition. This is a bug, or a race that a guard must catch before."""


def target(phase: Phase, move: Transition) -> Phase:
    try:
        return MOVES[phase, move]
    except KeyError:
        raise IllegalTransition(f"a {phase.value} job cannot {move.value}") from None


def completed(dispatch_phase: Phase = Phase.LEASED) -> Change:
    return Change(phase=target(dispatch_phase, Transition.COMPLETE), lease=None, wake_at=None)


def failed(dispatch: Dispatch, move: Transition) -> Change:
    assert move in (Transition.GIVE_UP, Transition.END), "only these two transitions end in failure"
    return Change(phase=target(dispatch.phase, move), lease=None, wake_at=None)


def cancelled(dispatch: Dispatch) -> Change:
    return Change(phase=target(dispatch.phase, Transition.CANCEL), lease=None, wake_at=None)


def paused(dispatch: Dispatch) -> Change:
    assert dispatch.phase is Phase.QUEUED, "only a waiting job can be paused"
    return Change(standing=Readiness.PAUSED)


def readiness_at(not_before: float | None, now: float, awaits_jobs: bool = False) -> Readiness:
    is_early = not_before is not None and not_before > now
    return Readiness.DELAYED if awaits_jobs or is_early else Readiness.IN_LANE


def diagram() -> str:
    """The table as Mermaid, in the order of the table."""
    lines = ["stateDiagram-v2", "    [*] --> queued: submit"]
    merged: dict[tuple[Phase, Phase], list[str]] = {}
    for (source, move), goal in MOVES.items():
        merged.setdefault((source, goal), []).append(move.value)
    for (source, goal), moves in merged.items():
        lines.append(f"    {source.value} --> {goal.value}: {'; '.join(moves)}")
    lines.extend(f"    {phase.value} --> [*]" for phase in Phase if phase.is_final)
    return "\n".join(lines)
