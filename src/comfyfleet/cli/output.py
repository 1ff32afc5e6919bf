"""What goes to a terminal or into a log: text of others without the characters that would steer it.

A failure message or a worker's name may hold escape sequences, carriage returns or marks that turn the direction of
writing. Every command prints by `echo` and every log line is made by `LineFormatter`; both show such characters as
what they are. Imports nothing heavy, as every command imports it.

Tables for a terminal of any width, and for pipes.

In a terminal a table fits: first the ids in its first column are shortened, then its last column wraps, or so many of
the last ones as are said to, and where that does not suffice each row stands by itself, a line for each cell. In a pipe
nothing is shortened, wrapped or cut off.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import click

# Control characters but for tab and line feed; separators of lines; marks that turn the direction of writing.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def escaped(text: str, *, is_line: bool = False) -> str:
    """The same text, as it is where nothing in it steers. `is_line`: a line feed would begin another one, and is shown
    too. What is JSON stays JSON: its strings have no control characters below 128, and the others are escaped alike."""
    text = _STEERING.sub(_shown, text)
    return text.replace("\n", "\\n") if is_line else text


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


def echo(message: object = "", *, err: bool = False, nl: bool = True) -> None:
    """`click.echo`, for text that others may have written."""
    text = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
    click.echo(escaped(text), err=err, nl=nl)


class LineFormatter(logging.Formatter):
    """One line for each message, whatever is in it; a traceback follows it, indented."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = self._struck_out(record.getMessage())
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = [escaped(self.formatMessage(record) + self._about(), is_line=True)]
        for more in (record.exc_info and self.formatException(record.exc_info), record.stack_info):
            if more:
                lines += [f"  {line}" for line in escaped(self._struck_out(more)).split("\n")]
        return "\n".join(lines)

    def _struck_out(self, text: str) -> str:
        """For whoever knows of secrets."""
        return text

    def _about(self) -> str:
        """For whoever knows what the line is about."""
        return ""


_GAP = 2
_LAST = 12
"""Columns that the last cell needs to be readable when it wraps."""


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    empty: str,
    short: Mapping[str, str] | None = None,
    wraps: int = 1,
) -> None:
    """`short`: what may stand for a first cell where there is no room for all of it. `wraps`: how many of the last
    columns may wrap."""
    if not rows:
        echo(empty)
        return
    for line in lines_of(headings, rows, _width(), short or {}, wraps):
        echo(line)


def _width() -> int | None:
    """None: as wide as it is. Whoever says COLUMNS means it, in a pipe too."""
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said):
        return int(said)
    if not sys.stdout.isatty():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def lines_of(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    short: Mapping[str, str],
    wraps: int = 1,
) -> Iterator[str]:
    cells = [[escaped(cell, is_line=True) for cell in row] for row in rows]
    if width is not None and _sum(_widths([headings, *cells])) > width:
        cells = [[short.get(first, first), *others] for first, *others in cells]
        widths = _widths([headings, *cells])
        wrapped = _shared(widths[-wraps:], width - sum(widths[:-wraps]) - _GAP * (len(widths) - 1))
        for heading, wanted, given in zip(headings[-wraps:], widths[-wraps:], wrapped, strict=True):
            if given < min(wanted, max(_LAST, len(heading))):
                yield from _blocks(headings, cells, width)
                return
        widths[-wraps:] = wrapped
    else:
        widths = _widths([headings, *cells])
    for row in [headings, *cells]:
        yield from _row(row, widths)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _sum(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _shared(widths: Sequence[int], room: int) -> list[int]:
    """The room in equal parts; what one does not need the others get."""
    given = [0] * len(widths)
    for left, (wanted, index) in zip(
        range(len(widths), 0, -1), sorted((width, index) for index, width in enumerate(widths)), strict=True
    ):
        given[index] = min(wanted, room // left)
        room -= given[index]
    return given


def _row(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    columns = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for line in zip_longest(*columns, fillvalue=""):
        parts = (cell.ljust(width + _GAP) for cell, width in zip(line, widths, strict=True))
        yield "".join(parts).rstrip()


def _blocks(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    names = max(len(heading) for heading in headings[1:]) + _GAP
    for number, (first, *others) in enumerate(rows):
        if number:
            yield ""
        yield first
        for heading, cell in zip(headings[1:], others, strict=True):
            begin = f"  {heading.ljust(names)}"
            for line in _wrapped(cell, max(_LAST, width - len(begin))) if cell else ():
                yield begin + line
                begin = " " * len(begin)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""] if len(text) > width else [text]
