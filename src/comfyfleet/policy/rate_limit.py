"""How often a tenant may submit: turns that come evenly, as many as a minute brings at once after a quiet one."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class TokenBucket(msgspec.Struct, frozen=True, gc=False):
    """The turns that were left at a time."""

    left: float
    at: float


class TokenDraw(NamedTuple):
    bucket: TokenBucket
    turns: int
    wait_s: float
    """How long until there is one, where there was none."""


def draw(bucket: TokenBucket | None, per_minute: int, wanted: int, now: float) -> TokenDraw:
    """At most so many as are wanted; a bucket that nobody knows is full."""
    left = float(per_minute)
    if bucket is not None:
        # A clock that went back fills nothing.
        left = min(left, bucket.left + max(0.0, now - bucket.at) * per_minute / 60)
        now = max(now, bucket.at)
    turns = min(wanted, int(left))
    wait_s = 0.0 if turns else (1.0 - left) * 60 / per_minute if per_minute else 60.0
    return TokenDraw(TokenBucket(left - turns, now), turns, wait_s)
