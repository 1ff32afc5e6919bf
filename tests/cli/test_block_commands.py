"""`blocks` and `blocks lift` against a real hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli._hub import hub_with_a_worker, runner


def test_blocks_are_listed_and_lifted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with hub_with_a_worker(tmp_path) as hub:
        run = runner(capfd, monkeypatch, hub, str(tmp_path))
        assert run("blocks").output == "Nothing is blocked.\n"
        assert run("blocks", "list", "--json").json == []
        ended = run("blocks", "lift", "*", "0123@acme")
        assert (ended.code, ended.errors) == (3, "Error: worker '*' has no block on '0123@acme'\n")
