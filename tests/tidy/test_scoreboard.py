"""The committed scoreboard is whole, agrees with itself, and the docs show it. Nothing is timed here."""

from __future__ import annotations

import re

import msgspec
import pytest
from bench.__main__ import GOALS
from bench._measure import Entry, is_met
from bench._report import PAGE, RESULTS, row

ENTRIES = msgspec.json.decode(RESULTS.read_bytes(), type=list[Entry])


def test_every_goal_that_can_be_measured_has_an_entry() -> None:
    assert {re.sub(r"[a-z]$", "", entry.goal) for entry in ENTRIES} == set(GOALS)


def test_no_goal_is_listed_twice() -> None:
    assert len({entry.goal for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.goal)
def test_an_entry_holds_exactly_if_its_value_is_within_its_bound(entry: Entry) -> None:
    assert entry.holds is is_met(entry.value, entry.bound)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.goal)
def test_an_entry_names_the_command_that_measures_it(entry: Entry) -> None:
    found = re.fullmatch(r"python -m bench --goal (\d+)", entry.command)
    assert found is not None and found.group(1) in GOALS
    assert entry.goal.startswith(found.group(1))
    assert entry.name and entry.unit


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.goal)
def test_the_docs_show_the_figure_of_every_entry_and_say_what_it_is(entry: Entry) -> None:
    page = PAGE.read_text()
    assert row(entry) in page.splitlines()
    assert f"**Goal {re.sub('[a-z]$', '', entry.goal)}:" in page
