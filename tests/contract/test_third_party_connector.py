"""The contract of connectors as it is published: the example of the guide keeps it, who breaks a rule is caught."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests._connector_example import EXAMPLE, PAGE, install_example

from comfyfleet.worker.connectors.registry import GROUP, ConnectorRegistry

HERE = Path(__file__).parent
# Plug-ins that are slow to start, and no part of it.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis")
# A test of a broken connector may hang: then a short limit fails it.
BROKEN_TEST = """
import _broken_connectors as broken
import test_textmill as example

PLUGIN = broken.plugin_with(broken.{name})


class Scene(example.TextMillScene):
    payload_format = PLUGIN.payload
    patience_s = 3.0

    def connect(self):
        settings = {{"key": self.secret, "request_s": 1.0, "poll_s": 0.01, "gone_s": 1.0}}
        return PLUGIN.connect(self.proxy.url, settings)


class Test{name}(example.TestTextMill):
    @example.pytest.fixture
    def make_scene(self):
        return Scene


class Test{name}Plugin(example.TestTextMillPlugin):
    plugin = PLUGIN
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    return install_example(tmp_path / "site")


def run(folder: Path, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *WITHOUT, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_the_example_keeps_the_contract(tmp_path: Path, installed: Path) -> None:
    shutil.copy(EXAMPLE / "pyproject.toml", tmp_path)
    shutil.copy(EXAMPLE / "tests" / "test_textmill.py", tmp_path)
    ended = run(tmp_path, installed, "-rs", "-W", "error", "test_textmill.py")
    assert ended.returncode == 0, ended.stdout
    found = re.search(r"(\d+) passed, (\d+) skipped", ended.stdout)
    assert found is not None and int(found[1]) > 50, ended.stdout
    # What TextMill cannot have is told with the reason.
    assert "this service cannot have it: out_of_credits: it costs nothing" in ended.stdout


def test_a_connector_that_breaks_one_rule_is_caught_and_told_by_which(
    tmp_path: Path, installed: Path
) -> None:
    shutil.copy(EXAMPLE / "pyproject.toml", tmp_path)
    shutil.copy(EXAMPLE / "tests" / "test_textmill.py", tmp_path)
    shutil.copy(HERE / "_broken_connectors.py", tmp_path)
    caught_by = _caught_by()
    assert len(caught_by) >= 21
    chosen = []
    for name, test in caught_by.items():
        (tmp_path / f"test_{name.lower()}.py").write_text(BROKEN_TEST.format(name=name))
        is_format = name in ("HashesTheText", "HashesNothing", "NamesNoField")
        chosen.append(f"test_{name.lower()}.py::Test{name}{'Plugin' if is_format else ''}::{test}")
    ended = run(tmp_path, installed, "-rA", "--tb=short", *chosen)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    failed = set(re.findall(r"^FAILED (\S+)", ended.stdout, re.MULTILINE))
    assert failed == set(chosen), ended.stdout


def test_an_installed_package_is_found_by_its_entry_point(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    registry = ConnectorRegistry(installed=entry_points(group=GROUP))
    try:
        plugin = registry.plugin("textmill")
        assert registry.payload_formats()["textmill"] is plugin.payload
        assert registry.connect("textmill", "http://127.0.0.1:9").service_name == "textmill"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "textmill"]:
            del sys.modules[name]


def test_the_guide_shows_the_example_as_it_is() -> None:
    sources = [ast.parse(path.read_text()) for path in EXAMPLE.rglob("*.py")]
    known = {ast.dump(node) for source in sources for node in ast.walk(source) if isinstance(node, ast.stmt)}
    page = PAGE.read_text()
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(shown) >= 9
    for block in shown:
        for node in ast.parse(textwrap.dedent(block)).body:
            # A class may be shown in parts.
            for each in node.body if isinstance(node, ast.ClassDef) else [node]:
                assert ast.dump(each) in known, ast.unparse(each)
    (entry_point,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert entry_point in (EXAMPLE / "pyproject.toml").read_text()


def _caught_by() -> dict[str, str]:
    """Read and not imported: the module needs the example."""
    tree = ast.parse((HERE / "_broken_connectors.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    )
    return {
        key.id: value.value
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str)
    }
