"""The table of moves: what it has happens, what it does not have raises."""

from __future__ import annotations

import pytest

from comfyfleet.model.dispatch import Change, Dispatch, Lease, Phase, Readiness
from comfyfleet.model.ids import ClassKey, JobId, LeaseToken, PollId, WorkerId, WorkflowHash
from comfyfleet.policy.lifecycle import (
    MOVES,
    IllegalTransition,
    Transition,
    cancelled,
    completed,
    diagram,
    failed,
    paused,
    readiness_at,
    target,
)

LEGAL = {
    ("queued", Transition.LEASE): "leased",
    ("queued", Transition.CANCEL): "cancelled",
    ("queued", Transition.END): "failed",
    ("leased", Transition.COMPLETE): "completed",
    ("leased", Transition.REQUEUE): "queued",
    ("leased", Transition.RELEASE): "queued",
    ("leased", Transition.GIVE_UP): "failed",
    ("leased", Transition.END): "failed",
    ("leased", Transition.CANCEL): "cancelled",
    ("failed", Transition.RETRY): "queued",
    ("cancelled", Transition.RETRY): "queued",
}
LEASE = Lease(WorkerId("a"), 1, 1, LeaseToken("t"), PollId("p"), 0.0, 60.0)


def job(phase: Phase, wake_at: float | None = None) -> Dispatch:
    lease = LEASE if phase is Phase.LEASED else None
    return Dispatch(
        JobId("j"), ClassKey("c"), WorkflowHash("h"), 0, phase=phase, lease=lease, wake_at=wake_at
    )


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("move", list(Transition))
def test_a_move_is_taken_from_the_phases_the_table_names_and_from_no_other(
    phase: Phase, move: Transition
) -> None:
    goal = LEGAL.get((phase.value, move))
    if goal is None:
        with pytest.raises(IllegalTransition, match=phase.value):
            target(phase, move)
    else:
        assert target(phase, move) is Phase(goal)


def test_a_completed_job_moves_nowhere() -> None:
    assert not [move for (source, move) in MOVES if source is Phase.COMPLETED]


@pytest.mark.parametrize("phase", [Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED])
def test_a_final_job_cannot_be_ended_again(phase: Phase) -> None:
    for end in (cancelled, lambda dispatch: failed(dispatch, Transition.END)):
        with pytest.raises(IllegalTransition):
            end(job(phase))
    with pytest.raises(IllegalTransition):
        completed(phase)


@pytest.mark.parametrize(
    "change",
    [completed(), failed(job(Phase.LEASED), Transition.GIVE_UP), cancelled(job(Phase.LEASED))],
)
def test_a_move_that_ends_a_lease_clears_it_and_waits_for_nothing_more(change: Change) -> None:
    after = change.apply(job(Phase.LEASED, wake_at=5.0))
    assert after.lease is None
    assert after.due_at is None
    assert after.phase.is_final


def test_only_a_waiting_job_can_be_paused() -> None:
    assert paused(job(Phase.QUEUED)).apply(job(Phase.QUEUED)).standing is Readiness.PAUSED
    with pytest.raises(AssertionError):
        paused(job(Phase.LEASED))


def test_a_delay_ends_at_exactly_its_time() -> None:
    assert readiness_at(10.0, 9.999) is Readiness.DELAYED
    assert readiness_at(10.0, 10.0) is Readiness.IN_LANE
    assert readiness_at(None, 0.0) is Readiness.IN_LANE


def test_the_diagram_shows_every_move() -> None:
    drawn = diagram()
    for (source, move), goal in MOVES.items():
        lines = [line for line in drawn.splitlines() if f"{source.value} --> {goal.value}:" in line]
        assert len(lines) == 1
        assert move.value in lines[0]
