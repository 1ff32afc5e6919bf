"""What a sender does wrong on its connection is one quiet line in the log: nobody here can do anything about it.

uvicorn tells of it with a traceback, as of a defect: of text that is no UTF-8, of frames that come after the end, of a
sender that is gone while it is being answered. Everything else is logged as before.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from websockets.exceptions import InvalidState

_LOG = logging.getLogger(__name__)


class UvicornLogger(logging.LoggerAdapter[logging.Logger]):
    """In place of the logger of a connection."""

    @property
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: object, **more: Any) -> None:
        # All that uvicorn warns of on a connection is what came over it: whoever sends that a thousand times a second
        # must not fill our log.
        _LOG.info(msg, *args, **more)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        self.error(msg, *args, exc_info=exc_info, **more)

    def error(self, msg: object, *args: object, exc_info: Any = None, **more: Any) -> None:
        error = sys.exc_info()[1] if exc_info is True else exc_info
        if isinstance(error, Exception) and is_senders_fault(error):
            tell(error)
        else:
            super().error(msg, *args, exc_info=exc_info, **more)


def is_senders_fault(error: Exception) -> bool:
    match error:
        case UnicodeDecodeError():
            # By uvicorn itself, which tells of it where it was raised. From deeper down it would be our own.
            return error.__traceback__ is not None and error.__traceback__.tb_next is None
        case RuntimeError():
            # What uvloop says of a connection that was lost in the middle of a write.
            return "the handler is closed" in str(error)
    return isinstance(error, InvalidState)


def tell(error: Exception) -> None:
    # Not the error's own text: it may hold what was sent.
    _LOG.info("a connection was given up: its sender is gone or breaks the rules (%s)", type(error).__name__)
