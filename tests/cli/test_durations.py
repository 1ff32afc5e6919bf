"""Lengths of time on the command line: units, a number of hours, and dates where a date makes sense."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click
import pytest
from click.testing import CliRunner

from comfyfleet.cli.credits import usage_command
from comfyfleet.cli.options import DurationOrDateParam, DurationParam


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30m", 1800),
        ("12h", 43200),
        ("1d", 86400),
        ("2w", 1209600),
        ("90s", 90),
        ("24", 86400),
        ("1.5H", 5400),
    ],
)
def test_a_length_of_time_has_a_unit_or_is_in_hours(text: str, seconds: float) -> None:
    assert DurationParam().convert(text, None, None) == seconds
    assert DurationOrDateParam().convert(text, None, None) == seconds


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "0", "0h", "1y", "1h30m", "nan", "inf", "9" * 400, "2026-05-01"]
)
def test_what_is_no_length_of_time_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(click.BadParameter, match="Use 30m, 12h, 7d or a number of hours"):
        DurationParam().convert(text, None, None)


def test_zero_is_a_length_of_time_where_it_means_all() -> None:
    assert DurationParam(may_be_zero=True).convert("0", None, None) == 0


@pytest.mark.parametrize("text", ["2026-05-01", "2026-05-01T00:00:00"])
def test_a_date_is_read_where_one_makes_sense(text: str) -> None:
    assert DurationOrDateParam().convert(text, None, None) == datetime(2026, 5, 1)


@pytest.mark.parametrize(
    ("arguments", "days"),
    [([], 30), (["--since", "7d"], 7), (["--days", "7"], 7), (["--since", "2026-05-01"], 9)],
)
def test_usage_counts_back_from_until(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], days: float
) -> None:
    asked: list[dict[str, Any]] = []

    class Client:
        def usage(self, **query: Any) -> None:
            asked.append(query)

    monkeypatch.setattr("comfyfleet.cli.credits.report", lambda _, work, __: work(Client()))
    ended = CliRunner().invoke(usage_command, ["--until", "2026-05-10", *arguments])
    assert ended.exit_code == 0, ended.output
    assert asked[0]["until"] - asked[0]["since"] == days * 86400
