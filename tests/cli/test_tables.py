"""Tables in windows of any width: nothing is lost, and no line is longer than the window."""

from __future__ import annotations

import pytest

from comfyfleet.cli.output import lines_of

HEADS = ["job", "status", "prio", "worker", "age", "error"]
ID = "01a1df4f-9c1f-77ee-86bf-157f9ac945c2"
ROWS = [
    [ID, "failed", "0", "gpu-a:8188", "3 min", "out_of_memory: the card is too small for this workflow"],
    ["01a1df4f-9c1f-77ee-86bf-157f9ac945c3", "completed", "0", "gpu-b:8188", "3 min", ""],
]
SHORT = {row[0]: row[0][-8:] for row in ROWS}


def test_in_a_pipe_a_row_is_a_line_and_nothing_is_shortened() -> None:
    lines = list(lines_of(HEADS, ROWS, None, SHORT))
    assert [line.split()[0] for line in lines] == ["job", *SHORT]
    assert lines[1].endswith(ROWS[0][-1])
    assert len(lines[0]) <= 80


def test_where_there_is_room_ids_are_whole() -> None:
    assert ID in list(lines_of(HEADS, ROWS, 140, SHORT))[1]


@pytest.mark.parametrize("width", [80, 60])
def test_in_a_usual_window_ids_are_short_and_the_last_column_wraps(width: int) -> None:
    heading, *lines = lines_of(HEADS, ROWS, width, SHORT)
    assert heading.split() == HEADS and max(map(len, lines)) <= width
    assert lines[0].startswith("9ac945c2  failed") and lines[-1].startswith("9ac945c3  completed")
    begin = heading.index("error")
    assert all(not line[:begin].strip() for line in lines[1:-1])
    assert " ".join(line[begin:].strip() for line in lines[:-1]) == ROWS[0][-1]


@pytest.mark.parametrize("width", [40, 30])
def test_in_a_narrow_one_each_row_stands_by_itself(width: int) -> None:
    lines = list(lines_of(HEADS, ROWS, width, SHORT))
    assert max(map(len, lines)) <= width
    assert lines[0] == "9ac945c2" and lines[1].split() == ["status", "failed"]
    assert "" in lines and lines[lines.index("") + 1] == "9ac945c3"


def test_many_columns_that_do_not_fit_stand_below_each_other() -> None:
    heads = [f"column {number}" for number in range(9)]
    lines = list(lines_of(heads, [["first", *("a value" for _ in range(8))]], 60, {}))
    assert lines == ["first", *(f"  column {number}  a value" for number in range(1, 9))]


def test_what_steers_a_terminal_is_shown_as_what_it_is() -> None:
    assert "\\x1b" in "".join(lines_of(["a", "b"], [["x\x1b[2J", "y\nz"]], 60, {}))


def test_where_two_columns_may_wrap_a_long_cell_makes_its_own_row_longer_and_no_other() -> None:
    rows = [
        ["port", "3001", "default"],
        ["weights", "a long text " * 8, "a place that takes long to tell " * 2],
    ]
    lines = list(lines_of(["setting", "value", "from"], rows, 60, {}, 2))
    assert lines[:2] == [
        "setting  value                      from",
        "port     3001                       default",
    ]
    assert len(lines) == 6 and all(len(line) <= 60 for line in lines)
    (first, *_) = lines_of(["setting", "value", "from"], rows, 30, {}, 2)
    assert first == "port", "there each row stands by itself"
