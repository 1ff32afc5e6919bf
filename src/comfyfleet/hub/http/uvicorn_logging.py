"""Logs a client's protocol error as one INFO line, because an operator can do nothing about it.

uvicorn logs it with a traceback, like a defect: invalid UTF-8, frames after the close, a client that left
during its answer. Everything else is logged as before.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from websockets.exceptions import InvalidState

_LOG = logging.getLogger(__name__)


class UvicornLogger(logging.LoggerAdapter[logging.Logger]):
    """Replaces the logger of a connection."""

    @property
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: object, **more: Any) -> None:
        # Each warning concerns data from the client, which must not be able to fill the log.
        _LOG.info(msg, *args, **more)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        self.error(msg, *args, exc_info=exc_info, **more)

    def error(self, msg: object, *args: object, exc_info: Any = None, **more: Any) -> None:
        error = sys.exc_info()[1] if exc_info is True else exc_info
        if isinstance(error, Exception) and is_senders_fault(error):
            log_client_error(error)
        else:
            super().error(msg, *args, exc_info=exc_info, **more)


def is_senders_fault(error: Exception) -> bool:
    match error:
        case UnicodeDecodeError():
            # Raised by uvicorn itself, where it logs. From deeper down it would be our own error.
            return error.__traceback__ is not None and error.__traceback__.tb_next is None
        case RuntimeError():
            # uvloop raises this for a connection that was lost during a write.
            return "the handler is closed" in str(error)
    return isinstance(error, InvalidState)


def log_client_error(error: Exception) -> None:
    # The error's own text may contain data that the client sent.
    _LOG.info("connection closed: the client left or violated the protocol (%s)", type(error).__name__)
