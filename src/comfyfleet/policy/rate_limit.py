"""The rate limit of submits: a token bucket that refills evenly and holds the tokens of one minute."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class TokenBucket(msgspec.Struct, frozen=True, gc=False):
    """The tokens that were left at a time."""

    left: float
    at: float


class TokenDraw(NamedTuple):
    bucket: TokenBucket
    turns: int
    wait_s: float
    """How long until the next token, if there is none."""


def draw(bucket: TokenBucket | None, per_minute: int, wanted: int, now: float) -> TokenDraw:
    """Take at most `wanted` tokens. An unknown bucket is full."""
    left = float(per_minute)
    if bucket is not None:
        # A clock that goes back adds no tokens.
        left = min(left, bucket.left + max(0.0, now - bucket.at) * per_minute / 60)
        now = max(now, bucket.at)
    turns = min(wanted, int(left))
    wait_s = 0.0 if turns else (1.0 - left) * 60 / per_minute if per_minute else 60.0
    return TokenDraw(TokenBucket(left - turns, now), turns, wait_s)
