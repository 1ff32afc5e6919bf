"""A worker that is blocked or whose server cannot be reached is seen where people look: `workers`, `top`, `blocks`,
`submit --watch`, `job explain`; and a block is lifted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import graph

from comfyfleet.cli import watch
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Connector
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.simulated import SimulatedConnector, fails

BROKEN = Failure(FailureKind.UNKNOWN, "the sampler broke")
REFUSED = "offline: connection refused. Is ComfyUI running there"


def failing_once() -> SimulatedConnector:
    return SimulatedConnector(behaviour=fails(BROKEN, times=1))


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    return path


@pytest.fixture
def fleet() -> Iterator[Address]:
    rules = Rules(cooldown_s=600, retry_base_s=0.02, retry_cap_s=0.05)
    servers: dict[str, Connector] = {"gpu": failing_once(), "away": ComfyUI("http://127.0.0.1:9")}
    with hub_with_a_worker(rules=rules, connectors=servers) as address:
        yield address


@pytest.fixture
def run(
    fleet: Address, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    return runner(capfd, monkeypatch, fleet, str(tmp_path))


def test_what_keeps_workers_from_work_is_seen_and_a_block_is_lifted(run: Run, workflow: Path) -> None:
    assert f"\naway: {REFUSED}" in run("workers").output
    job_id = run("submit", workflow).output.strip()
    deadline = time.monotonic() + 60
    while not (blocks := run("blocks", "--json").json):
        assert time.monotonic() < deadline, "the worker was not blocked"
    (block,) = blocks
    assert (block["worker_id"], block["reason"]) == ("gpu", "failures")

    note = r"\ngpu: blocked for 1 workflow, for another \d+ s \(comfyfleet blocks\)"
    for look in (("workers",), ("top", "--once")):
        shown = run(*look).output
        assert re.search(note, shown), shown
        assert f"\naway: {REFUSED}" in shown
    listed = {each["id"]: each for each in run("workers", "--json").json}
    assert listed["gpu"]["blocked_workflows"] == 1 and listed["gpu"]["blocked_until"] is not None
    assert listed["away"]["status"] == "offline" and "connection refused" in listed["away"]["offline_reason"]
    assert "blocked for 1 workflow" in run("workers", "show", "gpu").output

    explained = run("job", "explain", job_id).output
    assert "gpu: is blocked for this workflow for another" in explained
    assert f"away: is {REFUSED}" in explained

    lifted = run("blocks", "lift", "gpu", block["target"], "--json")
    assert lifted.json == {"worker_id": "gpu", "target": block["target"], "lifted": True}
    assert run("job", "watch", job_id).code == 0
    assert run("blocks").output == "Nothing is blocked.\n"
    assert "blocked" not in run("workers").output


def test_who_watches_is_told_of_a_block_and_of_what_is_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workflow: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "_POLL_S", 0.05)
    rules = Rules(cooldown_s=2, retry_base_s=0.02, retry_cap_s=0.05)
    with hub_with_a_worker(rules=rules, connectors={"gpu": failing_once()}) as address:
        run = runner(capfd, monkeypatch, address, str(tmp_path))
        ended = run("submit", workflow, "--watch", "--out", tmp_path / "out")
    assert ended.code == 0, ended.errors
    lines = ended.errors.splitlines()
    assert "failed on gpu, blocked there for 2 s, waiting for another server: the sampler broke" in lines
    waits = [line for line in lines if line.startswith("waits: ")]
    # Once, although the seconds that are left are others each time.
    assert len(waits) == 1, lines
    assert "the nearest, gpu, is blocked for this workflow for another" in waits[0]


def test_who_watches_is_told_of_a_server_that_cannot_be_reached(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workflow: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "_POLL_S", 0.05)
    with hub_with_a_worker(connectors={"away": ComfyUI("http://127.0.0.1:9")}) as address:
        run = runner(capfd, monkeypatch, address, str(tmp_path))
        ended = run("submit", workflow, "--watch", "--timeout", "1", "--out", tmp_path / "out")
    assert ended.code == 1
    assert f"away is {REFUSED}" in ended.errors.splitlines()[0]
    assert f"waits: no worker can take it now; the nearest, away, is {REFUSED}" in ended.errors
    # And in the end of the job.
    assert f"away, is {REFUSED}" in ended.errors.splitlines()[-1]
