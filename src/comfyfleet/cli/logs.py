"""Logs on standard error: lines for people, or an object a line for machines, each with what it is about.

Whoever logs says what happened; request, trace, job, attempt and worker come from `tracing.py`. Keys and passwords are
struck out here once more, whoever let them slip in.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import msgspec

from comfyfleet import tracing
from comfyfleet.cli.printing import LineFormatter, escaped

_SECRETS = (
    (re.compile(r"\b(cf[a-z]_)[\w-]{4,}"), r"\1…"),
    (re.compile(r"(?i)\b(bearer|basic) [\w.~+/=-]+"), r"\1 …"),
    (re.compile(r"(?i)([?&](?:token|key|signature)=)[^&\s\"']+"), r"\1…"),
    (re.compile(r"(\w://)[^/@\s\"']+@"), r"\1…@"),
    (re.compile(r"""(["']?token["']?\s*[:=]\s*["'])[^"']+"""), r"\1…"),
)
_TALKATIVE = ("asyncio", "uvicorn", "websockets", "aiohttp", "multipart")
"""Below warnings these tell of sockets and frames, with all that is in them."""


def struck_out(text: str) -> str:
    for form, instead in _SECRETS:
        text = form.sub(instead, text)
    return text


class TextFormatter(LineFormatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def _struck_out(self, text: str) -> str:
        return struck_out(text)

    def _about(self) -> str:
        about = " ".join(f"{name}={value}" for name, value in tracing.fields().items())
        return f" [{about}]" if about else ""


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": struck_out(record.getMessage()),
            **tracing.fields(),
        }
        if record.exc_info:
            told["traceback"] = struck_out(self.formatException(record.exc_info))
        return escaped(msgspec.json.encode(told).decode(), is_line=True)


def set_up(level: str, format_: str) -> None:
    """In place of what was set up before; debugging, once asked for, stays."""
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format_ == "json" else TextFormatter())
    is_debugging = root.level == logging.DEBUG
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if is_debugging else level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
