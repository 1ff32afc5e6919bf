"""The committed scoreboard is whole, agrees with itself, and the docs show it. Nothing is timed here."""

from __future__ import annotations

import re

import msgspec
import pytest
from bench.__main__ import GOALS
from bench._measure import Entry, is_met
from bench._report import PAGE, RESULTS, row

ENTRIES = msgspec.json.decode(RESULTS.read_bytes(), type=list[Entry])


IMAGES = PAGE.parent / "images"


def named(entry: Entry) -> str:
    return f"{entry.goal} {entry.store}"


def test_every_goal_is_measured_on_each_of_its_stores() -> None:
    asked = {(goal, store) for goal, (stores, _) in GOALS.items() for store in stores}
    assert {(entry.goal_name, entry.store) for entry in ENTRIES} == asked


def test_no_goal_is_listed_twice_for_a_store() -> None:
    assert len({(entry.goal, entry.store) for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=named)
def test_an_entry_holds_exactly_if_its_value_is_within_its_bound(entry: Entry) -> None:
    assert entry.holds is is_met(entry.value, entry.bound)


@pytest.mark.parametrize("entry", ENTRIES, ids=named)
def test_an_entry_names_the_command_that_measures_it(entry: Entry) -> None:
    found = re.fullmatch(r"python -m bench --goal (A?\d+) --store (\w+)( --all-peers)?", entry.command)
    assert found is not None and found.group(1) in GOALS
    assert (found.group(1), found.group(2)) == (entry.goal_name, entry.store)
    assert entry.name and entry.unit


@pytest.mark.parametrize("entry", ENTRIES, ids=named)
def test_the_docs_show_the_figure_of_every_entry_and_say_what_it_is(entry: Entry) -> None:
    page = PAGE.read_text()
    assert row(entry) in page.splitlines()
    assert f"**Goal {entry.goal_name}:" in page


def test_the_docs_say_why_for_every_goal_that_is_missed() -> None:
    _, _, missed = PAGE.read_text().partition("## Where a goal is missed")
    assert missed, "the page has a place for goals that are missed"
    without = [
        named(entry) for entry in ENTRIES if entry.holds is False and f"**{named(entry)}**" not in missed
    ]
    assert without == [], "write what the profile shows and what it would take"


def test_the_pictures_are_shown_and_drawn_as_text() -> None:
    """A picture whose letters are outlines cannot be searched, and is ten times as large."""
    shown = set(re.findall(r"\(images/(bench-[a-z]+\.svg)\)", PAGE.read_text()))
    drawn = {path.name for path in IMAGES.glob("bench-*.svg")}
    assert shown == drawn and drawn
    for name in drawn:
        assert "<text" in (IMAGES / name).read_text()
