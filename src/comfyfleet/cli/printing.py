"""What goes to a terminal or into a log: text of others without the characters that would steer it.

A failure message or a worker's name may hold escape sequences, carriage returns or marks that turn the direction of
writing. Every command prints by `echo` and every log line is made by `LineFormatter`; both show such characters as
what they are. Imports nothing heavy, as every command imports it.
"""

from __future__ import annotations

import logging
import re

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
