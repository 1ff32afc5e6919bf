"""What this machine cannot do, said at the end of a run: one line for each test that was skipped or failed as expected.

The list is written to `build/skipped.txt`. Those that may be on it stand in `tests/skipped.txt`; with `--no-new-skips`,
as `.ci/run` asks for, any other makes the run fail. `conftest.py` hands this to pytest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LIST = Path("build") / "skipped.txt"
ALLOWED = Path("tests") / "skipped.txt"
# What a connector's service cannot have, its scene declares: listed at the end of a run, and allowed.
DECLARED = "this service cannot have it: "


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-new-skips",
        action="store_true",
        help=f"Fail if a test is skipped that is not listed in {ALLOWED}.",
    )


def register(config: pytest.Config) -> None:
    # Where tests run in several processes, the one that tells of all of them keeps the list.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(config), "comfyfleet-skips")


class Skips:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped:
            return
        reason = getattr(report, "wasxfail", None)
        if reason is not None:
            reason = f"expected to fail: {reason}"
        elif isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        self._found[report.nodeid] = " ".join((reason or "no reason given").split())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = self._config.rootpath / LIST
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in self._lines(sorted(self._found))))
        if self._new() and self._config.getoption("--no-new-skips") and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._found:
            return
        terminalreporter.section("what this machine cannot do")
        for line in self._lines(sorted(self._found)):
            terminalreporter.line(line)
        if self._config.getoption("--no-new-skips"):
            for nodeid in self._new():
                terminalreporter.line(f"not in {ALLOWED}, so the run fails: {nodeid}", red=True)

    def _lines(self, nodeids: list[str]) -> list[str]:
        return [f"{nodeid}  # {self._found[nodeid]}" for nodeid in nodeids]

    def _new(self) -> list[str]:
        path = self._config.rootpath / ALLOWED
        lines = path.read_text().splitlines() if path.is_file() else []
        allowed = {line.partition("  #")[0].strip() for line in lines if not line.startswith("#")}
        declared = {nodeid for nodeid, reason in self._found.items() if reason.startswith(DECLARED)}
        return sorted(self._found.keys() - allowed - declared)
