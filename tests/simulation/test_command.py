"""`comfyfleet simulate` as people call it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli._hub import hub_with_a_worker

from comfyfleet.client.client import FleetClient
from comfyfleet.model.access import Role

CLI = (sys.executable, "-m", "comfyfleet.cli.main", "simulate")


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80", **environment},
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def table() -> str:
    ended = call("--jobs", "40")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_table_fits_eighty_columns(table: str) -> None:
    lines = table.splitlines()
    assert lines[0] == "40 jobs on 4 servers, seed 0"
    assert lines[1].split() == [
        "policy",
        "all",
        "done",
        "mean",
        "p95",
        "p99",
        "max",
        "wait",
        "loads",
        "useful",
    ]
    assert max(map(len, lines[1:8])) <= 80
    policies = [line.split()[0] for line in lines[2:8]]
    assert policies == [
        "first-come",
        "shortest-queue",
        "least-loaded",
        "selectivity",
        "overtaking",
        "comfyfleet",
    ]


def test_a_seed_repeats_everything_in_every_process(table: str) -> None:
    assert call("--jobs", "40", PYTHONHASHSEED="1").stdout == table
    assert call("--jobs", "40", PYTHONHASHSEED="2").stdout == table
    assert call("--jobs", "40", "--seed", "1").stdout != table


def test_the_help_fits_eighty_columns_and_has_examples() -> None:
    shown = call("--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "comfyfleet simulate --from-hub --add-worker 2x24GB" in shown


def test_more_workers_are_a_row_of_their_own(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    ended = call(
        "--jobs", "30", "--policy", "comfyfleet", "--add-worker", "2x24GB", "--json", "--html", str(page)
    )
    now, then = json.loads(ended.stdout)
    assert then["policy"] == "comfyfleet, 2 more"
    assert then["measured"]["mean_s"] < now["measured"]["mean_s"]
    assert page.read_text().startswith("<!doctype html>")


def test_faults_are_counted_and_a_seed_can_be_played_alone() -> None:
    ended = call("--faults", "2", "--steps", "60", "--seed", "5")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("2 seeds, 120 steps, ")
    assert ended.stdout.endswith("0 violations\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--load", "lots"), "neither batch nor a number above 0"),
        (("--add-worker", "big"), "'big' is not a worker: write 24GB"),
        (("--policy", "fastest"), "'fastest' is not one of"),
        (("--faults", "1", "--jobs", "5"), "--faults does not go together with --jobs"),
        (("--from-hub", "--load", "1"), "--from-hub does not go together with --load"),
        (("nowhere.toml",), "nowhere.toml"),
    ],
)
def test_wrong_input_is_named(arguments: tuple[str, ...], words: str) -> None:
    ended = call(*arguments)
    assert ended.returncode == 2
    assert words in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_what_if_questions_about_the_jobs_of_a_hub() -> None:
    graph = {"1": {"class_type": "KSampler", "inputs": {"seed": 1}}}
    with hub_with_a_worker() as address:
        key = address.keys[Role.ADMIN]

        async def submit() -> None:
            async with FleetClient(address.url, key=key) as client:
                for _ in range(4):
                    submitted = await client.submit(graph)
                    await client.wait(submitted.id, 30)

        asyncio.run(submit())
        ended = call(
            *("--from-hub", "--hub", address.url, "--key", key, "--policy", "comfyfleet"),
            *("--patience", "0", "--patience", "2", "--add-worker", "24GB"),
        )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "4 jobs of the last 24 hours on 1 servers of the hub"
    for label in (
        "recorded",
        "comfyfleet, patience 0",
        "comfyfleet, patience 2",
        "comfyfleet, patience 0, 1 more",
    ):
        assert any(line.startswith(label) for line in lines), ended.stdout


def test_a_hub_that_is_away_is_named() -> None:
    ended = call("--from-hub", "--hub", "http://127.0.0.1:1")
    assert ended.returncode == 4
    assert "http://127.0.0.1:1" in ended.stderr


def test_ctrl_c_ends_it_without_a_word() -> None:
    process = subprocess.Popen(
        [*CLI, "--jobs", "2000000", "--load", "0.9", "--policy", "comfyfleet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        # Two million jobs take minutes; whatever it does when the signal comes, it ends.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(4)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
