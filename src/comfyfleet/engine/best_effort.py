"""Work that follows a write: the change stands and has been published, so a failure here is logged and nothing more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from comfyfleet.model.errors import Fault

_LOG = logging.getLogger(__name__)


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Neither the caller's answer nor the next step depends on the block. `what` completes "could not ..."."""
    try:
        yield
    except Fault as fault:
        _LOG.warning("could not %s: %s", what, fault)
    except Exception:
        _LOG.exception("could not %s", what)
