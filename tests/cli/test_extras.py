"""An installation without extras: a command that needs one says which, in a sentence; all others work."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from tests.acceptance._process import ROOT, run_program

from comfyfleet.cli.exit_codes import PACKAGES, missing_package
from comfyfleet.cli.main import _COMMANDS

BARE = Path(__file__).with_name("_bare.py")
WORKFLOW = str(ROOT / "examples" / "workflows" / "text_to_image.json")
NOWHERE = "127.0.0.1:9"


def run_bare(tmp_path: Path, *lines: list[str]) -> list[tuple[int, str]]:
    """One process for all of them: to start one takes longer than what it does."""
    env = {"PYTHONPATH": str(ROOT), "COMFYFLEET_DATA": str(tmp_path / "data")}
    ran = run_program(sys.executable, BARE, cwd=tmp_path, env=env, given=json.dumps(lines))
    assert ran.returncode == 0, ran.stderr
    return [(code, told) for code, told in json.loads(ran.stdout)]


def test_a_command_whose_packages_are_missing_names_the_extra_to_install(tmp_path: Path) -> None:
    wanted = {
        ("up",): "hub",
        ("up", "--fake", "1"): "hub,fake",
        ("hub",): "hub",
        ("demo", "--once"): "hub,fake",
        ("fake-comfyui", "--port", "0"): "fake",
        ("worker", "--hub", f"http://{NOWHERE}", "--fake", "1"): "fake",
        ("worker", "--store", f"redis://{NOWHERE}", "--server", NOWHERE): "redis",
        ("worker", "--store", f"postgresql://{NOWHERE}/x", "--server", NOWHERE): "postgres",
        ("run", "--store", f"redis://{NOWHERE}", WORKFLOW): "redis",
        ("run", "--store", f"postgresql://{NOWHERE}/x", WORKFLOW): "postgres",
        ("store", "check", f"redis://{NOWHERE}"): "redis",
    }
    for (line, extra), (code, told) in zip(
        wanted.items(), run_bare(tmp_path, *map(list, wanted)), strict=True
    ):
        assert code in (1, 3), (line, told)
        assert told.startswith("Error: ") and told.count("\n") == 1, (line, told)
        assert "not installed" in told, (line, told)
        # From a package registry, or from the source that the reader has at hand.
        assert f"pip install 'comfyfleet[{extra}]', or in a checkout pip install '.[{extra}]'" in told, (
            line,
            told,
        )
        assert "defect" not in told and "Traceback" not in told, (line, told)


def test_what_needs_no_extra_works_without_one(tmp_path: Path) -> None:
    helps = [[name, "--help"] for name in _COMMANDS]
    others = [["hash", WORKFLOW], ["config", "show"], ["completion", "bash"]]
    for line, (code, told) in zip(helps + others, run_bare(tmp_path, *helps, *others), strict=True):
        assert (code, told) == (0, ""), line


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert PACKAGES.keys() <= project["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("starlette.types", "hub"),
        ("PIL", "fake"),
        ("cryptography.exceptions", "encryption"),
        ("nowhere", None),
    ],
)
def test_a_missing_module_is_told_by_the_extra_that_brings_it(module: str, extra: str | None) -> None:
    told = missing_package(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert told is None if extra is None else f"comfyfleet[{extra}]" in (told or "")
