"""What a machine cannot do is said at the end, in one process or several, and a list that grows fails where it must."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]

TESTS = """
import pytest

def test_that_passes():
    pass

def test_that_needs_a_card():
    pytest.skip("no card\\nin this machine")

@pytest.mark.xfail(reason="a known defect")
def test_that_fails_as_expected():
    raise AssertionError

@pytest.fixture
def server():
    pytest.skip("no server")

@pytest.mark.parametrize("number", [1, 2])
def test_with_a_server(server, number):
    pass
"""
MODULE = 'import pytest\npytest.skip("no such library", allow_module_level=True)\n'
SKIPPED = [
    "tests/test_few.py::test_that_fails_as_expected  # expected to fail: a known defect",
    "tests/test_few.py::test_that_needs_a_card  # no card in this machine",
    "tests/test_few.py::test_with_a_server[1]  # no server",
    "tests/test_few.py::test_with_a_server[2]  # no server",
    "tests/test_module.py  # no such library",
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "keep_out").mkdir(parents=True)
    for name in ("conftest.py", "_skips.py", "_home.py", "keep_out/sitecustomize.py"):
        shutil.copy(HERE / name, tmp_path / "tests" / name)
    (tmp_path / "tests" / "test_few.py").write_text(TESTS)
    (tmp_path / "tests" / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib\npythonpath = .\nasyncio_mode = auto\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    return tmp_path


def run(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:schemathesis", *options]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_every_skipped_test_is_told_once_with_its_reason(project: Path, options: tuple[str, ...]) -> None:
    ended = run(project, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (project / "build" / "skipped.txt").read_text().splitlines() == SKIPPED
    told = ended.stdout.splitlines()
    start = next(number for number, line in enumerate(told) if "what this machine cannot do" in line)
    assert told[start + 1 : start + 6] == SKIPPED


def test_a_skip_that_is_not_allowed_fails_the_run_that_asks_for_it(project: Path) -> None:
    allowed = project / "tests" / "skipped.txt"
    allowed.write_text("# why\n" + "\n".join(SKIPPED[:4]) + "\n")
    ended = run(project, "--no-new-skips", "-n", "2")
    assert ended.returncode == 1
    assert "not in tests/skipped.txt, so the run fails: tests/test_module.py" in ended.stdout
    allowed.write_text("\n".join([*SKIPPED, "tests/test_other.py::test_of_another_machine"]) + "\n")
    assert run(project, "--no-new-skips").returncode == 0


def test_a_run_without_skips_says_nothing_of_them(project: Path) -> None:
    (project / "tests" / "test_module.py").unlink()
    ended = run(project, "--no-new-skips", "-k", "passes")
    assert ended.returncode == 0
    assert "what this machine cannot do" not in ended.stdout
    assert (project / "build" / "skipped.txt").read_text() == ""


def test_what_may_be_skipped_names_tests_that_exist() -> None:
    lines = (HERE / "skipped.txt").read_text().splitlines()
    for line in lines:
        if not line.startswith("#"):
            path, name = line.partition("  #")[0].split("::")[:2]
            content, name = (HERE.parent / path).read_text(), name.partition("[")[0]
            # The tests of a class may be those of a contract.
            assert f"def {name}(" in content or f"class {name}(" in content, line
