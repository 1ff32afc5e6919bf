"""A job by the beginning or the end of its id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import graph

from comfyfleet.cli.command import short_ids


@pytest.fixture(scope="module")
def hub() -> Iterator[Address]:
    with hub_with_a_worker() as address:
        yield address


@pytest.fixture
def run(
    hub: Address, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    return runner(capfd, monkeypatch, hub, str(tmp_path))


@pytest.fixture
def waiting(run: Run, tmp_path: Path) -> Iterator[list[str]]:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    run("queue", "pause")
    yield run("submit", path, "--count", 3).output.split()
    run("queue", "resume")


def test_the_end_of_an_id_is_enough_for_every_command(run: Run, waiting: list[str]) -> None:
    job_id = waiting[0]
    part = short_ids(waiting)[job_id]
    assert run("job", "show", part, "--json").json["id"] == job_id
    assert run("job", "explain", part, "--json").json["job_id"] == job_id
    assert run("job", "priority", part, 7).output == f"{job_id} has priority 7\n"
    assert run("job", "pause", part).output == f"{job_id} paused\n"
    assert run("job", "resume", part.upper()).output == f"{job_id} queued\n"
    assert run("job", "cancel", part).output == f"{job_id} cancelled\n"
    assert run("job", "watch", f"…{part}").code == 1
    assert run("job", "retry", part).output == f"{job_id} queued\n"


def test_so_is_the_beginning_where_it_means_one_job(run: Run, waiting: list[str]) -> None:
    assert run("job", "show", waiting[1][:-2], "--json").json["id"] == waiting[1]


def test_what_may_mean_several_is_refused_and_they_are_named(run: Run, waiting: list[str]) -> None:
    shared = waiting[0][:6]
    ended = run("job", "cancel", waiting[0], shared)
    assert ended.code == 2
    assert f"'{shared}' matches" in ended.errors and "Give more of the id" in ended.errors
    assert waiting[2] in ended.errors and "queued" in ended.errors
    assert run("job", "show", waiting[0], "--json").json["status"] == "queued", "nothing was cancelled"


def test_what_no_job_has_is_the_hubs_to_refuse(run: Run, waiting: list[str]) -> None:
    for part in ("ffffffff", "nobody's", "a"):
        ended = run("job", "show", part)
        assert (ended.code, part in ended.errors) == (3, True)


def test_ids_that_end_alike_are_shown_longer() -> None:
    one, two = "01a1df4f-9c1f-77ee-86bf-157f9ac945c2", "01a1df4f-9c1f-77ee-86bf-15709ac945c2"
    assert short_ids([one]) == {one: "9ac945c2"}
    assert short_ids([one, two]) == {one: "f9ac945c2", two: "09ac945c2"}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("queued", 3),
        ("waiting", 3),
        ("pending", 3),
        ("QUEUED", 3),
        ("running", 0),
        ("active", 0),
        ("canceled", 0),
    ],
)
def test_a_status_may_be_said_in_any_of_the_hubs_words(
    run: Run, waiting: list[str], said: str, found: int
) -> None:
    ended = run("jobs", "--status", said, "--json")
    assert ended.code == 0, ended.errors
    listed = {job["id"] for job in ended.json["jobs"]}
    assert len(listed & set(waiting)) == found


def test_a_status_that_is_none_is_refused_with_those_that_are(run: Run) -> None:
    ended = run("jobs", "--status", "lost")
    assert ended.code == 2
    assert "running" in ended.errors and "queued" in ended.errors and "waiting" in ended.errors
