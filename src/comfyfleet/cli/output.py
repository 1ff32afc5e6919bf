"""Everything that commands print: text, JSON and tables.

Failure messages and worker names come from others and may hold escape sequences, carriage returns or marks that change
the direction of writing. Every command prints with `echo`, and `LineFormatter` makes every log line. Both show such
characters as escapes. Every command imports this module, so it imports nothing heavy.

In a terminal, a table fits the width: first the ids in the first column are shortened, then the last columns wrap, and
at last each row becomes a block with one line for each cell. In a pipe nothing is shortened or wrapped.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TextIO

import click

# Control characters except tab and line feed; line separators; marks that change the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escaped(text: str, *, is_line: bool = False) -> str:
    """The text with its control characters shown as escapes. `is_line`: line feeds too. JSON stays valid JSON: its
    strings hold no raw control characters below 128, and JSON escapes the others in the same way."""
    text = _CONTROL.sub(_shown, text)
    return text.replace("\n", "\\n") if is_line else text


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


def echo(message: object = "", *, err: bool = False, nl: bool = True, wraps: bool | None = None) -> None:
    """`click.echo` with control characters escaped. `wraps`: break long lines between words in a terminal, by default
    those of standard error.

    A program that works in an event loop goes on when nobody reads its output any more: Ctrl-C ends the reader of a
    pipe too, and the program still has jobs to finish. Any other command ends."""
    text = escaped(message.decode(errors="replace") if isinstance(message, bytes) else str(message))
    stream = sys.stderr if err else sys.stdout
    if (err if wraps is None else wraps) and stream.isatty() and "\n" not in text and text[:1] != " ":
        # An indented line is a command to copy.
        columns = os.get_terminal_size(stream.fileno()).columns or len(text)
        text = textwrap.fill(
            text, max(_MIN_WRAPPED_WIDTH, columns), break_long_words=False, break_on_hyphens=False
        )
    try:
        click.echo(text, err=err, nl=nl)
    except BrokenPipeError:
        if not _is_in_event_loop():
            raise
        discard(stream)


def discard(stream: TextIO) -> None:
    """What this stream gets from now on, and what it has not yet written, is lost without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _is_in_event_loop() -> bool:
    # Where nobody has imported asyncio, no event loop runs; most commands that only print do not need it.
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio is not None and asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


class LineFormatter(logging.Formatter):
    """Writes each message on one line, with an indented traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = self._without_secrets(record.getMessage())
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = [escaped(self.formatMessage(record) + self._about(), is_line=True)]
        for more in (record.exc_info and self.formatException(record.exc_info), record.stack_info):
            if more:
                lines += [f"  {line}" for line in escaped(self._without_secrets(more)).split("\n")]
        return "\n".join(lines)

    def _without_secrets(self, text: str) -> str:
        """Removes secrets; a subclass knows them."""
        return text

    def _about(self) -> str:
        """The job, worker and trace of the line; a subclass knows them."""
        return ""


def print_json(value: Any) -> None:
    """One object or list, indented. Unset fields are null."""
    import msgspec

    echo(msgspec.json.format(msgspec.json.encode(plain(value))).decode())


def plain(value: Any) -> Any:
    """The value as dicts, lists and scalars, with every field that the wire format would omit."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__
        kind = {} if tag.tag_field is None else {tag.tag_field: tag.tag}
        return kind | {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return msgspec.to_builtins(value)


def cell(value: object) -> str:
    """A value as people read it: a dash for nothing, yes or no, a list with commas."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ", ".join(map(str, value))
        case _:
            return str(value)


def print_pairs(pairs: Mapping[str, object] | Sequence[tuple[str, object]], indent: str = "") -> None:
    """One name and value on each line, the values below each other."""
    rows = list(pairs.items()) if isinstance(pairs, Mapping) else pairs
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        echo(f"{indent}{name:<{width}}  {cell(value)}")


def ago(at: float | None, now: float) -> str:
    """The time since `at`, in one unit."""
    if at is None:
        return "–"
    seconds = max(0.0, now - at)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


_GAP = 2
_MIN_WRAPPED_WIDTH = 12
"""Columns that a wrapped cell needs to stay readable."""


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    empty: str,
    short: Mapping[str, str] | None = None,
    wraps: int = 1,
) -> None:
    """The one printer of tables. `short`: shorter texts for first cells in a narrow terminal. `wraps`: how many of the
    last columns may wrap."""
    if not rows:
        echo(empty)
        return
    cells = [[cell(value) for value in row] for row in rows]
    for line in lines_of(headings, cells, _width(), short or {}, wraps):
        echo(line)


def _width() -> int | None:
    """The width to fit. None: no limit. COLUMNS counts in a pipe too."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return int(columns)
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
    cells = [[escaped(text, is_line=True) for text in row] for row in rows]
    if width is not None and _sum(_widths([headings, *cells])) > width:
        cells = [[short.get(first, first), *others] for first, *others in cells]
        widths = _widths([headings, *cells])
        wrapped = _shared(widths[-wraps:], width - sum(widths[:-wraps]) - _GAP * (len(widths) - 1))
        for heading, wanted, given in zip(headings[-wraps:], widths[-wraps:], wrapped, strict=True):
            if given < min(wanted, max(_MIN_WRAPPED_WIDTH, len(heading))):
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
    """Shares the room equally; what one column does not need goes to the others."""
    given = [0] * len(widths)
    for left, (wanted, index) in zip(
        range(len(widths), 0, -1), sorted((width, index) for index, width in enumerate(widths)), strict=True
    ):
        given[index] = min(wanted, room // left)
        room -= given[index]
    return given


def _row(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    columns = [_wrapped(text, width) for text, width in zip(row, widths, strict=True)]
    for line in zip_longest(*columns, fillvalue=""):
        parts = (text.ljust(width + _GAP) for text, width in zip(line, widths, strict=True))
        yield "".join(parts).rstrip()


def _blocks(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    names = max(len(heading) for heading in headings[1:]) + _GAP
    for number, (first, *others) in enumerate(rows):
        if number:
            yield ""
        yield first
        for heading, text in zip(headings[1:], others, strict=True):
            begin = f"  {heading.ljust(names)}"
            for line in _wrapped(text, max(_MIN_WRAPPED_WIDTH, width - len(begin))) if text else ():
                yield begin + line
                begin = " " * len(begin)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""] if len(text) > width else [text]
