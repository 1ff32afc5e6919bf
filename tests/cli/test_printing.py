"""Text of others steers no terminal and forges no line of a log."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest

from comfyfleet.cli import output
from comfyfleet.cli.output import LineFormatter, echo, escaped, print_json, print_table
from comfyfleet.cli.process import JsonFormatter, TextFormatter

EVIL = "bad\x1b]0;owned\x07\r\x9b2J\u202egnp.exe\x7f"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]")
FORGED = "x\n2026-01-01 00:00:00 INFO comfyfleet.hub: job 7 completed"


def test_what_steers_a_terminal_is_shown_as_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    echo(EVIL)
    echo(EVIL.encode(), err=True)
    print_table(["name"], [[EVIL], [FORGED]], empty="")
    told = capsys.readouterr()
    assert not STEERING.search(told.out + told.err)
    assert r"bad\x1b]0;owned\x07\x0d\u009b2J\u202egnp.exe\u007f" in told.out
    assert len(told.out.splitlines()) == 4, "a name is one line of a table"


def test_ordinary_text_is_printed_as_it_is() -> None:
    text = "größe\tnaïve 絵 🎨\nnext line"
    assert escaped(text) == text


def test_json_stays_json_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"message": EVIL})
    told = capsys.readouterr().out
    assert not STEERING.search(told)
    assert json.loads(told) == {"message": EVIL}


def _logged(formatter: logging.Formatter, message: str, *, fails: bool = False) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log = logging.Logger("comfyfleet.test")
    log.addHandler(handler)
    try:
        if fails:
            raise ValueError(message)
        log.warning("it said: %s", message)
    except ValueError:
        log.exception("it failed")
    return stream.getvalue()


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter(), LineFormatter("%(message)s")])
@pytest.mark.parametrize("message", [EVIL, FORGED], ids=["evil", "forged"])
def test_a_log_line_is_one_line_whatever_is_in_it(formatter: logging.Formatter, message: str) -> None:
    told = _logged(formatter, message)
    assert told.count("\n") == 1 and not STEERING.search(told)


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter(), LineFormatter("%(message)s")])
def test_no_line_of_a_traceback_looks_like_one_of_the_log(formatter: logging.Formatter) -> None:
    told = _logged(formatter, FORGED + EVIL, fails=True)
    first, *rest = told.splitlines()
    assert "it failed" in first and not STEERING.search(told)
    assert all(line.startswith("  ") for line in rest)


def test_work_goes_on_when_nobody_reads_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other commands end, so that `comfyfleet jobs | head` does."""
    readers_end, writers_end = os.pipe()
    os.close(readers_end)

    async def work() -> str:
        echo("lost")
        echo("lost too")
        return "done"

    # Line buffering is off, as for a pipe: what was not written must not fail later, when Python exits.
    with os.fdopen(writers_end, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(BrokenPipeError):
            echo("lost")
        assert asyncio.run(work()) == "done"


def test_every_command_prints_by_the_one_function() -> None:
    """Or by a console of rich, to which what others wrote is handed escaped."""
    form = re.compile(r"click\.s?echo\(|(?<![.\w])(?<!def )print\(")
    folder = Path(output.__file__).parent
    direct = {path.name for path in folder.rglob("*.py") if form.search(path.read_text())}
    assert direct == {"output.py"}
