"""What a command says where a user may be surprised: an empty list, an unknown tenant, an option without its value."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli._hub import hub_with_a_worker, runner

from comfyfleet.cli.main import main


def test_an_empty_list_says_whether_a_filter_is_the_reason(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with hub_with_a_worker(tmp_path) as hub:
        run = runner(capfd, monkeypatch, hub, str(tmp_path))
        assert run("jobs").output == "There are no jobs.\n"
        assert run("jobs", "--order", "oldest").output == "There are no jobs.\n"
        for words in (("--status", "failed"), ("--since", "1h"), ("--unrunnable",), ("--metadata", "a=b")):
            assert run("jobs", *words).output == "No job matches.\n", words


def test_a_key_for_a_tenant_of_a_hub_without_tenants_comes_with_a_warning(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with hub_with_a_worker(tmp_path) as hub:
        made = runner(capfd, monkeypatch, hub, str(tmp_path))("key", "create", "tenant", "--tenant", "acem")
    assert (made.code, made.output[:4]) == (0, "cfk_")
    assert "tenant 'acem' was not created" in made.errors
    assert "comfyfleet tenant create acem" in made.errors


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        (("up", "--fake"), "Option '--fake' requires a value: --fake [NAME=]N"),
        (("jobs", "--limit"), "Option '--limit' requires a value: --limit N"),
        (("run", "workflow.json", "-s"), "Option '-s' requires a value: -s URL"),
    ],
)
def test_an_option_without_its_value_says_which_value_it_lacks(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], lacks: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"Error: {lacks}\n" in capsys.readouterr().err
