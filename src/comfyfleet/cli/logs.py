"""Logs on standard error: lines for people, or an object a line for machines."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told).decode()


def set_up(level: str, format_: str) -> None:
    """In place of what was set up before; debugging, once asked for, stays."""
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)
    if format_ == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    is_debugging = root.level == logging.DEBUG
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if is_debugging else level.upper())
    logging.getLogger("asyncio").setLevel(logging.INFO)
