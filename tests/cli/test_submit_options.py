"""What `comfyfleet submit` can ask for: the tenant, needs, wishes, times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest
from click.testing import CliRunner
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import graph

from comfyfleet.cli import submit
from comfyfleet.cli.submit import NEEDS, WHEN, WISHES, submit_options
from comfyfleet.model.access import Role
from comfyfleet.wire.bodies import SubmitBody


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


EVERYTHING = {
    "--tenant": "borg",
    "--include-output": "9",
    "--priority": "7",
    "--urgency": "high",
    "--not-before": "2030-01-02T03:04",
    "--deadline": "2030-01-02T04:04+01:00",
    "--on-deadline": "flag",
    "--max-attempts": "5",
    "--retry-delay": "1.5",
    "--timeout": "3600",
    "--start-timeout": "60",
    "--stall-timeout": "90",
    "--vram": "24",
    "--gpus": "2",
    "--gpu-model": "4090",
    "--ram": "64",
    "--cores": "8",
    "--threads": "16",
    "--model": "dream.safetensors",
    "--node-class": "KSampler",
    "--quality": "fine",
    "--service": "comfyui",
    "--provider": "local",
    "--environment": "self_hosted",
    "--region": "eu",
    "--compliance": "gdpr",
    "--isolation": "loose",
    "--max-cost-tier": "standard",
    "--max-processing": "120",
    "--worker": "gpu-a",
    "--exclude-worker": "gpu-z",
    "--prefer-worker": "gpu-b",
    "--prefer-model": "small.safetensors",
    "--prefer-quality": "fast",
    "--prefer-region": "us",
    "--prefer-cost-tier": "economy",
}


def test_everything_that_a_submission_may_ask_for_has_a_flag(run: Run, workflow: Path, hub: Address) -> None:
    ended = run("submit", workflow, *(word for flag in EVERYTHING.items() for word in flag))
    assert ended.code == 0, ended.errors
    first = ended.output.strip()
    asked = _payload(hub, first)
    expected = {
        "tenant": "borg",
        "include_outputs": ["9"],
        "priority": 7,
        "urgency": "high",
        "not_before": 1893553440.0,
        "deadline": 1893553440.0,
        "on_deadline": "flag",
        "max_attempts": 5,
        "retry_delay_s": 1.5,
        "timeouts": {"total_s": 3600, "start_s": 60, "stall_s": 90},
        "provider": "local",
        "requirements": {
            "hardware": {
                "gpu_memory_gb": 24,
                "gpu_count": 2,
                "gpu_model": "4090",
                "ram_gb": 64,
                "cpu_cores": 8,
                "cpu_threads": 16,
            },
            "models": ["dream.safetensors"],
            "node_classes": ["KSampler"],
            "quality": "fine",
            "environment": "self_hosted",
            "location": {"region": "eu", "compliance": ["gdpr"]},
            "isolation": "loose",
            "max_cost_tier": "standard",
            "max_processing_s": 120,
            "workers": ["gpu-a"],
            "exclude_workers": ["gpu-z"],
        },
        "preferences": {
            "workers": ["gpu-b"],
            "models": ["small.safetensors"],
            "quality": "fast",
            "region": "us",
            "cost_tier": "economy",
        },
    }
    assert {name: asked.get(name) for name in expected} == expected
    second = run("submit", workflow, "--after", first, "--tenant", "borg").output.strip()
    assert _payload(hub, second)["after"] == [first]
    run("job", "cancel", second, first)


def test_no_part_of_a_submission_is_without_a_flag() -> None:
    def names(body: type[msgspec.Struct]) -> set[str]:
        return {field.name for field in msgspec.structs.fields(body)}

    shown = CliRunner().invoke(submit.submit_command, ["--help"]).output
    assert all(flag in shown for flag in (*EVERYTHING, "--after"))
    elsewhere = {
        "payload", "workflow", "prompt", "inputs", "reference", "metadata", "webhook", "require_workable",
        "requirements", "preferences", "timeouts", "after",
    }  # fmt: skip
    asked = submit_options({param.name or "": () for param in submit.submit_command.params})
    assert asked == {}, "what is not given is not sent"
    every = submit_options({param.name or "": "x" for param in submit.submit_command.params})
    assert names(SubmitBody) - elsewhere <= every.keys()
    needs, wishes = every["requirements"], every["preferences"]
    lacking = {name for name in names(type(needs)) if getattr(needs, name) is None}
    assert lacking == {"needs_files"}, "files that are given imply it"
    assert not {name for name in names(type(wishes)) if getattr(wishes, name) is None}


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--deadline", "tomorrow", "2026-11-16T21:30"),
        ("--vram", "much", "--vram"),
        ("--urgency", "x", "critical"),
    ],
)
def test_what_cannot_be_read_of_a_need_is_told(
    run: Run, workflow: Path, flag: str, value: str, said: str
) -> None:
    ended = run("submit", workflow, flag, value)
    assert ended.code == 2 and said in ended.errors


def test_the_help_of_submit_has_its_many_options_in_groups() -> None:
    lines = CliRunner().invoke(submit.submit_command, ["--help"]).output.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options:", f"{WHEN}:", f"{NEEDS}:", f"{WISHES}:", "Examples:"]


def _payload(hub: Address, job_id: str) -> dict[str, Any]:
    request = Request(f"{hub.url}/api/jobs/{job_id}/payload")
    request.add_header("authorization", f"Bearer {hub.keys[Role.ADMIN]}")
    with urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
