"""How long the end of a dispatch whose record lies apart is kept, whatever the retention says."""

from __future__ import annotations

from comfyfleet.model.dispatch import TOMBSTONE_S, Dispatch


def last_to_go(before: float, now: float) -> float:
    """What is apart may go if it was settled before this, which is when it was last written."""
    return min(before, now - TOMBSTONE_S)


def may_go(dispatch: Dispatch, ended_at: float, before: float, now: float) -> bool:
    if dispatch.is_apart:
        return dispatch.settled_at is not None and ended_at < last_to_go(before, now)
    return ended_at < before
