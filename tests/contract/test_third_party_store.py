"""The contract as it is published: the example of the docs runs as it stands, and who breaks a rule is caught."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "stores.md"
BROKEN = (
    "ShortensLeases",
    "BelievesAnyToken",
    "LeasesWhilePaused",
    "CountsFactsFromZero",
    "ForgetsPolls",
    "PurgesWhatNobodySettled",
)
# Plug-ins that are slow to start, and no part of it.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis")
# To find the shortest such day takes a minute, and is no part of what is asked here. The first that is found is the
# last that is played.
WITHOUT_SHRINKING = """
from hypothesis import Phase, settings
settings.register_profile("finding", phases=[Phase.generate], derandomize=True, max_examples=1000)
settings.load_profile("finding")
"""


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A project of somebody else, with the files the docs name."""
    found = re.findall(r"```(?:python|ini)\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = [name for name, _ in found]
    assert names == ["test_my_store.py", "pytest.ini"], names
    for name, text in found:
        (tmp_path / name).write_text(text)
    shutil.copy(HERE / "_somebodys_store.py", tmp_path / "my_store.py")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *WITHOUT, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=150)


def test_a_store_of_somebody_else_passes_with_the_lines_of_the_docs(example: Path) -> None:
    ended = run(example)
    assert ended.returncode == 0, ended.stdout
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None and int(passed[1]) > 50


def test_a_store_that_breaks_one_rule_is_caught_and_told_by_which(example: Path) -> None:
    text = (example / "test_my_store.py").read_text()
    (example / "test_my_store.py").unlink()
    for name in BROKEN:
        (example / f"test_{name.lower()}.py").write_text(text.replace("MyStore", name))
    ended = run(example, "-rf", "--tb=short", "-k", "not same_day")
    assert ended.returncode == 1, ended.stdout
    failed = Counter(re.findall(r"^FAILED \S+::Test(\w+)::", ended.stdout, re.MULTILINE))
    assert set(failed) == set(BROKEN)
    assert (
        "FAILED test_shortensleases.py::TestShortensLeases::test_a_heartbeat_extends_and_never_shortens"
        in (ended.stdout)
    )
    assert re.search(r"^E +AssertionError: assert 1000005.0 == 1000060.0$", ended.stdout, re.MULTILINE), (
        "it says by which values"
    )


@pytest.mark.parametrize(
    "name", [pytest.param("LeasesWhilePaused", marks=pytest.mark.slow), "CountsFactsFromZero"]
)
def test_a_random_day_beside_the_memory_store_finds_it_too(example: Path, name: str) -> None:
    path = example / "test_my_store.py"
    path.write_text(path.read_text().replace("MyStore", name))
    (example / "conftest.py").write_text(WITHOUT_SHRINKING)
    ended = run(example, "-k", "same_day")
    assert ended.returncode == 1
    assert "1 failed" in ended.stdout
