"""`make test` gives one commit one result, and `.ci/run` leaves nothing out."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def commands(target: str) -> list[str]:
    """What make would run for it."""
    # What a make that runs these tests was told is not told to this one.
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "PROFILE"))
    }
    command = ["make", "--dry-run", "--always-make", target]
    listing = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return [line for line in listing.stdout.splitlines() if "pytest" in line]


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield node


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def test_every_test_is_run_by_make_test_or_by_what_make_test_all_adds() -> None:
    (test,) = commands("test")
    first, added = commands("test-all")
    assert first == test
    assert '-m "not slow"' in test and "--hypothesis-profile" not in test
    assert '-m "slow or hypothesis" --hypothesis-profile=full' in added
    run = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make (.*)$", run, re.MULTILINE) == [
        "test test-all check OPTIONS=--no-new-skips PROFILE=verdict"
    ]


def test_make_test_plays_the_same_examples_each_time_and_test_all_more_and_new_ones() -> None:
    fixed, full, verdict = map(settings.get_profile, ("fixed", "full", "verdict"))
    assert (verdict.derandomize, verdict.max_examples) == (True, full.max_examples)
    assert (fixed.derandomize, full.derandomize) == (True, False)
    assert fixed.max_examples < full.max_examples
    assert "PYTHONHASHSEED=0" in commands("test")[0], "the order of a set is chance too"


def test_the_profile_has_a_say_in_how_many_examples_are_played() -> None:
    plain = [
        place(path, node)
        for path in TESTS
        for node in calls(path)
        for keyword in node.keywords
        if keyword.arg == "max_examples" and path.name != "conftest.py"
        if not (isinstance(keyword.value, ast.Call) and ast.unparse(keyword.value.func) == "examples")
    ]
    assert plain == []


def test_chance_in_tests_has_a_seed() -> None:
    """An object of `random.Random` with a seed; never the module's own functions, which others use too."""
    unseeded = [
        place(path, node)
        for path in TESTS
        if re.search(r"^import random$", path.read_text(), re.MULTILINE)
        for node in calls(path)
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "random"
        if node.func.attr not in ("Random", "seed") or not node.args
    ]
    assert unseeded == []
