"""Quotes, expected starts and missing workers on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import graph


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with hub_with_a_worker(tmp_path_factory.mktemp("files")) as address:
        yield address


@pytest.fixture
def run(
    hub: Address, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    return runner(capfd, monkeypatch, hub, str(tmp_path))


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    return path


def test_a_quote_is_shown_and_nothing_is_submitted(run: Run, workflow: Path) -> None:
    for _ in range(5):
        assert run("submit", workflow, "--watch").code == 0
    before = run("queue", "show").output
    ended = run("submit", workflow, "--quote")
    assert ended.code == 0, ended.errors
    assert re.search(r"start +in about 0\.\d s\n", ended.output), ended.output
    assert re.search(r"run .* to .*, from \d+ runs", ended.output), ended.output
    (quote,) = run("submit", workflow, "--quote", "--json").json
    assert quote["runs"] >= 5 and quote["estimate"]["starts_at"] > 0
    assert run("queue", "show").output == before
    assert run("submit", workflow, "--quote", "--watch").code == 2


def test_a_waiting_job_and_the_missing_workers_are_told_with_their_times(run: Run, workflow: Path) -> None:
    assert run("queue", "pause").code == 0
    job_id = run("submit", workflow).output.strip()
    try:
        assert run("queue", "capacity").output.startswith("jobs that need")
        found = run("queue", "capacity", "--within", "60", "--json").json
        assert (found["waiting"], found["within_s"]) == (1, 60)
        assert "expected" not in run("job", "show", job_id).output, "nobody knows while the queue is paused"
        paused = run("job", "pause", job_id)
        assert paused.code == 0
        assert run("queue", "resume").code == 0
        assert "expected" not in run("job", "show", job_id).output
    finally:
        run("job", "cancel", job_id)
        run("queue", "resume")
    assert run("queue", "capacity").output == "No job waits.\n"
