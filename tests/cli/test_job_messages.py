"""What `submit` and `job watch` say about several jobs, a hub that stays away, and jobs that were refused or failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import graph

from comfyfleet.cli.exit_codes import end_of_failure
from comfyfleet.client.client import FleetClient
from comfyfleet.client.connection import HubAway
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import FailureKind
from comfyfleet.wire.answers import SubmittedBody
from comfyfleet.worker.connectors.comfyui.failures import invalid_nodes


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
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    return path


def test_a_hub_that_stays_away_ends_the_watching_with_the_id_of_the_job(
    run: Run, workflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> NoReturn:
        raise HubAway("cannot reach the hub.")

    monkeypatch.setattr(FleetClient, "watch", gone)
    ended = run("submit", workflow, "--watch", "--out", tmp_path / "out")
    job_id = ended.errors.split()[1]
    assert ended.code == 4 and ended.errors.startswith(f"submitted {job_id}\n")
    assert f"cannot reach the hub. But the hub has stored {job_id} and continues" in ended.errors
    assert f"`comfyfleet job watch {job_id}`" in ended.errors


def test_several_jobs_are_watched_at_once(run: Run, workflow: Path) -> None:
    job_ids = run("submit", workflow, "--count", "2").output.split()
    ended = run("job", "watch", *job_ids, job_ids[0][-8:], "--json")
    assert ended.code == 0, ended.errors
    assert [result["id"] for result in ended.json] == job_ids


def test_a_missing_input_file_is_told_with_the_option_that_gives_it() -> None:
    error = {
        "type": "custom_validation_failed",
        "message": "Custom validation failed for node",
        "details": "image - Invalid image file: ",
        "extra_info": {"input_name": "image"},
    }
    failure = invalid_nodes({"10": {"errors": [error], "class_type": "LoadImage"}})
    assert failure.kind is FailureKind.MISSING_INPUT and failure.missing == ()
    code, text = end_of_failure(failure, failure.message)
    assert code == 3 and text.endswith("Invalid image file. Give the file with --attach 10.image=FILE.")


def test_of_several_files_the_refused_one_is_named(
    run: Run, workflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def submit_many(*_: object, **__: object) -> list[SubmittedBody | Refusal]:
        return [SubmittedBody("job", "queued", "", ""), Refusal(RefusalCode.QUEUE_FULL, "the queue is full")]

    monkeypatch.setattr(FleetClient, "submit_many", submit_many)
    refused = tmp_path / "refused.json"
    refused.write_text(json.dumps(graph()))
    ended = run("submit", workflow, refused)
    assert (ended.code, ended.output) == (3, "job\n")
    assert f"refused 1 of 2 jobs: {refused}: the queue is full" in ended.errors
