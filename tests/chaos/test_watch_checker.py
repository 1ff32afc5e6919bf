"""The checker of watchers finds what it is there to find: logs made by hand, each with one thing wrong."""

from __future__ import annotations

import pytest
from chaos.logs import Line
from chaos.watch_checker import Watched, check_watchers

WHOLE = ((1, "queued"), (2, "leased"), (3, "completed"))


def heard(who: str, *story: tuple[int, str], job: str = "job") -> list[Line]:
    return [Line(10.0 + number, who, "fact", job=job, number=number, value=kind) for number, kind in story]


def told(*kinds: str) -> list[Line]:
    return [Line(20.0 + at, "socket.0", "told", job="job", value=kind) for at, kind in enumerate(kinds)]


def check(*groups: list[Line], sockets: int = 0) -> Watched:
    lines = [
        Line(1.0, "caller.0", "acknowledged", reference="r", job="job"),
        Line(5.0, "conductor", "killing", role="hub", value="hub.0"),
        Line(15.0, "gpu-a", "began", job="job", execution="job/1/1/1"),
        *(line for group in groups for line in group),
    ]
    return check_watchers(lines, streams=2, sockets=sockets, workers=["gpu-a"])


def test_two_who_heard_all_of_it_missed_nothing() -> None:
    found = check(heard("a.0", *WHOLE), heard("b.0", *WHOLE), told("job_completed"), sockets=1)
    assert found == Watched(streams=2, facts=6, back=1)


@pytest.mark.parametrize(
    ("story", "words"),
    [
        ((WHOLE[0], WHOLE[2]), "differently"),
        ((WHOLE[0], WHOLE[0], *WHOLE[1:]), "once and in order"),
        ((WHOLE[1], WHOLE[0], WHOLE[2]), "once and in order"),
        (WHOLE[:2], "once and in order"),
        ((*WHOLE, (4, "completed")), "once and in order"),
        ((), "and not by 2"),
    ],
)
def test_a_story_that_is_not_the_whole_one_is_found(story: tuple[tuple[int, str], ...], words: str) -> None:
    found = check(heard("a.0", *WHOLE), heard("b.0", *story))
    assert found.missed > 0
    assert any(words in line for line in found.wrong), found.wrong


def test_two_who_missed_the_same_change_are_found() -> None:
    found = check(heard("a.0", WHOLE[0], WHOLE[2]), heard("b.0", WHOLE[0], WHOLE[2]))
    assert found.missed == 2


@pytest.mark.parametrize("kinds", [(), ("job_completed", "job_completed"), ("error",)])
def test_an_end_that_was_not_told_once_over_the_websocket_is_found(kinds: tuple[str, ...]) -> None:
    found = check(heard("a.0", *WHOLE), heard("b.0", *WHOLE), told(*kinds), sockets=1)
    assert found.missed == 1


def test_a_worker_that_did_nothing_after_the_last_kill_is_found() -> None:
    late = [Line(30.0, "conductor", "killing", role="hub", value="hub.1")]
    found = check(heard("a.0", *WHOLE), heard("b.0", *WHOLE), late)
    assert found.back == 0
    assert found.wrong == ("did not come back after the last kill: gpu-a",)
